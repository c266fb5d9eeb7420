"""Log grids of the softmax and behind GELU, and ranges of single heads: maths, student, saved model, exported files."""

import itertools
import json
from importlib.util import find_spec

import pytest
import torch
from helpers import (
    SWIN,
    SWIN_ARGS,
    VIT,
    VIT_ARGS,
    assert_same,
    mostly_slow,
    packed,
    pair,
    small_recipe,
    tiny_swin,
    tiny_vit,
)

import maskaq
from maskaq.artifact.export import export
from maskaq.artifact.export.targets import check_grids
from maskaq.cli.main import main
from maskaq.errors import ExportError, ModelError, RecipeError
from maskaq.images.stored import noise
from maskaq.models import expose
from maskaq.quant import grid, ranges
from maskaq.quant.deployed import FixedGrid, LogGrid
from maskaq.quant.plan import QuantPlan, build_plan, plan_of
from maskaq.quant.quantizers import QUANTIZERS, Log, make_quantizer, quantizer
from maskaq.quant.rotation import teacher_of
from maskaq.quant.site import Site
from maskaq.quant.twin import deploy, quantizers
from maskaq.recipe.schema import Quantization, Rule, load_recipe
from maskaq.runs import opened
from maskaq.runs.quantize import quantize
from maskaq.storage.runfolder import QUANTIZED

LOG = ('quantization.rule={match="*.av.a", quantizer="log"}',)
HEAD = tuple(f'quantization.rule={{match="*.{product}.*", granularity="head"}}' for product in ("qk", "av"))
GELU = ('quantization.rule={match="*.fc2.input", quantizer="log"}',)
KINDS = {"log": LOG, "gelu": GELU, "head": HEAD, "both": LOG + HEAD}
MODELS = {"vit": (tiny_vit, VIT, VIT_ARGS), "swin": (tiny_swin, SWIN, SWIN_ARGS)}


def site(bits=3, heads=None, signed=False, **more):
    return Site("blocks.0.attn.av.a", "activation", bits, signed, quantizer="log", heads=heads, **more)


def behind_gelu(bits=3, quantizer="log"):
    return Site("blocks.0.mlp.fc2.input", "activation", bits, True, quantizer=quantizer)


def gelu_outputs(*shape, seed=0):
    return torch.nn.functional.gelu(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2)


def probabilities(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 3).softmax(-1)


# ---- the log grid


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("octaves", [1.0, 3.5, 8.0])
def test_levels_are_integers_from_0_to_255_in_equal_ratios(bits, octaves):
    levels = grid.log_levels(bits, octaves).tolist()
    assert len(levels) == 2**bits and levels[0] == 0 and levels[-1] == 255
    assert all(level == int(level) for level in levels) and levels == sorted(set(levels))
    ratio = 2 ** (octaves / (2**bits - 2))
    for below, above in itertools.pairwise(levels[1:]):
        # Rounded to integers, or next to each other where the ratio asks for less.
        assert above - below == 1 or abs(above - below * ratio) <= (1 + ratio) / 2 + 1e-9 or bits == 8


def test_levels_of_8_bits_are_all_integers():
    assert torch.equal(grid.log_levels(8, 8.0), torch.arange(256.0))
    x = torch.rand(1000)
    step = torch.tensor(1 / 255)
    assert torch.equal(grid.log_fake_quantize(x, step, grid.log_levels(8, 8.0)), grid.fake_quantize(x, step, 0, 0, 255))


def test_every_value_gets_the_nearest_level_of_its_8_bit_value():
    levels, scale = grid.log_levels(3, 6.0), torch.tensor(0.003)
    x = torch.rand(5000) * 1.2
    steps = (x / scale).round().clamp(max=255)
    distance = (steps[:, None] - levels).abs()
    codes = grid.log_quantize(x, scale, levels)
    assert torch.equal(distance.gather(1, codes[:, None].long())[:, 0], distance.amin(dim=1))
    assert torch.equal(grid.log_dequantize(codes, scale, levels), grid.log_fake_quantize(x, scale, levels))
    assert torch.equal(grid.level_table(levels)[steps.long()] * scale, grid.log_fake_quantize(x, scale, levels))
    assert int(codes.min()) == 0 and int(codes.max()) == 7


def test_gradients_are_those_of_lsq():
    """Straight through inside, none above; to the scale the error inside and the largest level above."""
    levels = grid.log_levels(3, 6.0)
    x, scale = (torch.rand(4, 50, dtype=torch.float64) * 1.5).requires_grad_(), torch.tensor(0.004, requires_grad=True)
    upstream = torch.randn(4, 50, dtype=torch.float64)
    (grid.log_fake_quantize(x, scale, levels) * upstream).sum().backward()
    steps = (x / scale).detach()
    inside = steps.round() <= 255
    assert inside.any() and not inside.all()
    assert torch.equal(x.grad, upstream * inside)
    found = grid.level_table(levels)[steps.round().clamp(max=255).long()]
    expected = (upstream * torch.where(inside, found - steps, 255.0)).sum()
    assert scale.grad.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_scale_for_each_head_gets_the_gradient_of_its_head():
    x, levels = probabilities(2, 3, 5, 5), grid.log_levels(3, 5.0)
    together = torch.tensor([0.002, 0.003, 0.004]).view(3, 1, 1).requires_grad_()
    grid.log_fake_quantize(x, together, levels).square().sum().backward()
    for head in range(3):
        alone = together.detach()[head].clone().requires_grad_()
        grid.log_fake_quantize(x[:, head : head + 1], alone, levels).square().sum().backward()
        torch.testing.assert_close(together.grad[head], alone.grad)


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse"])
def test_the_first_range_has_the_least_error_of_all_spans(method):
    values = probabilities(4, 30, 30).reshape(1, -1)
    levels, (low,), (top,) = ranges.log_grid(values, 3, method, 0.999)
    assert (top == values.max()) == (method == "minmax") and low == 0

    def error(levels):
        return (grid.log_fake_quantize(values, top / 255, levels) - values).square().mean()

    assert all(error(levels) <= error(grid.log_levels(3, octaves)) for octaves in (1.0, 2.5, 4.0, 6.0, 8.0))


@pytest.mark.parametrize("bits", [3, 4])
def test_of_peaked_probabilities_it_keeps_more_than_a_uniform_grid(bits):
    x = probabilities(8, 3, 50, 50)
    errors = []
    for name in ("log", "lsq"):
        own = make_quantizer(name, site(bits))
        own.set_range(x, "mse")
        errors.append((own(x) - x).square().mean().item())
    assert errors[0] < errors[1]


def test_it_learns_its_scale_at_the_rate_of_lsq():
    """The parameter is the step that a uniform grid of the same range has, and its gradient has LSQ's factor."""
    x = probabilities(2, 3, 9, 9)
    own, other = make_quantizer("log", site()), make_quantizer("lsq", site())
    own.set_range(x, "minmax")
    other.set_range(x, "minmax")
    assert torch.equal(own.scale, other.scale)
    own(x).sum().backward()
    unit = torch.tensor(own.scale.item() * 7 / 255, requires_grad=True)
    grid.log_fake_quantize(x, unit, own.levels).sum().backward()
    assert own.scale.grad.item() == pytest.approx(unit.grad.item() * 7 / 255 / (x.numel() * 7) ** 0.5, rel=1e-4)
    assert [name for name, _ in own.named_parameters()] == ["scale"]


def test_codes_and_a_reload_give_the_forward_pass_exactly():
    x = probabilities(2, 3, 9, 9)
    own = make_quantizer("log", site(heads=3))
    own.set_range(x, "mse")
    again = make_quantizer("log", site(heads=3))
    assert not again.ready
    again.load_state_dict(own.state_dict())
    assert again.ready and torch.equal(again.dequantize(again.codes(x)), own(x))


@pytest.mark.parametrize("name", ["*.qk.a", "*.av.b", "*.mlp.fc1.weight"])
def test_operands_that_are_negative_as_often_as_positive_are_refused(name):
    with pytest.raises(RecipeError, match=r"Log cannot serve blocks\.0"):
        pair(small_recipe(f'quantization.rule={{match="{name}", quantizer="log"}}'))


# ---- the log grid with a zero point


def test_with_a_zero_point_a_value_gets_the_nearest_level_of_its_8_bit_value():
    levels, scale, zero = grid.log_levels(3, 4.0), torch.tensor(0.02), torch.tensor(9.0)
    x = torch.randn(2000) * 2
    codes = grid.log_quantize(x, scale, levels, zero)
    values = grid.log_fake_quantize(x, scale, levels, zero)
    for number, code, value in zip((x / scale).round().tolist(), codes.tolist(), values, strict=True):
        step = min(max(number + 9, 0), 255)
        assert abs(levels[code] - step) == min(abs(level - step) for level in levels.tolist())
        assert value == (levels[code] - 9) * scale
    assert torch.equal(grid.log_dequantize(codes, scale, levels, zero), values)
    assert torch.equal(grid.level_table(levels)[((x / scale).round() + 9).clamp(0, 255).long()], levels[codes])


def test_with_a_zero_point_and_all_levels_it_is_the_uniform_grid_with_its_gradients():
    upstream, found = torch.randn(50, 40), []
    for function in (grid.log_fake_quantize, grid.fake_quantize):
        x, scale = (gelu_outputs(50, 40) - 0.1).requires_grad_(), torch.tensor(0.01, requires_grad=True)
        zero = torch.tensor(9.0, requires_grad=True)
        is_log = function is grid.log_fake_quantize
        y = function(x, scale, grid.log_levels(8, 8.0), zero) if is_log else function(x, scale, zero, 0, 255)
        (y * upstream).sum().backward()
        found.append((y.detach(), x.grad, scale.grad, zero.grad))
    assert (found[0][1] == 0).any() and found[0][3] != 0
    torch.testing.assert_close(*found)


def test_with_a_zero_point_the_scale_gets_the_error_inside_and_the_last_level_outside():
    levels, zero = grid.log_levels(3, 4.0), 9
    x, scale = (torch.randn(200, dtype=torch.float64) * 3).requires_grad_(), torch.tensor(0.02, requires_grad=True)
    upstream = torch.randn(200, dtype=torch.float64)
    (grid.log_fake_quantize(x, scale, levels, zero) * upstream).sum().backward()
    expected = 0.0
    for step, slope in zip((x / scale).tolist(), upstream.tolist(), strict=True):
        place = round(step) + zero
        level = grid.level_table(levels)[min(max(place, 0), 255)].item()
        expected += slope * (level - zero - (step if 0 <= place <= 255 else 0.0))
    assert scale.grad.item() == pytest.approx(expected, rel=1e-5)


def test_behind_gelu_the_grid_begins_at_the_smallest_value_and_keeps_more_than_a_uniform_one():
    x, errors = gelu_outputs(64, 96), []
    for name in ("log", "lsq"):
        own = make_quantizer(name, behind_gelu(4, name))
        own.set_range(x, "mse")
        errors.append((own(x) - x).square().mean().item())
        if name == "log":
            scale, zero = own.step(1)
            assert (-zero * scale).item() == pytest.approx(x.min().item(), abs=scale.item())
            assert zero == zero.round() and 0 < zero < 255
    assert errors[0] < errors[1]


def test_the_zero_point_learns_at_the_rate_of_lsq():
    """Both have the parameters of a uniform grid of the same range, and the gradients of values below and above it."""
    x, found = gelu_outputs(40, 50), []
    for name in ("log", "lsq"):
        own = make_quantizer(name, behind_gelu(3, name))
        own.set_range(x, "minmax")
        own.zero_point.data.fill_(7 * 51 / 255)  # a zero point of both grids, with values below and above their ends
        own.scale.data.fill_(0.1)
        own(x).sum().backward()
        found.append(own.zero_point.grad)
    outside = (x > 0.1 * (7 - 1.4 + 0.02)).sum() + (x < -0.142).sum()
    assert found[0].item() == pytest.approx(-0.1 * outside.item() / (x.numel() * 7) ** 0.5, rel=0.02)
    assert [name for name, _ in own.named_parameters()] == ["scale", "zero_point"]


def test_with_a_zero_point_codes_and_a_reload_give_the_forward_pass_exactly():
    x = gelu_outputs(2, 9, 24)
    own, again = make_quantizer("log", behind_gelu()), make_quantizer("log", behind_gelu())
    own.set_range(x, "mse")
    again.load_state_dict(own.state_dict())
    assert again.ready and torch.equal(again.dequantize(again.codes(x)), own(x))


def test_the_setting_takes_the_log_grid_behind_every_gelu_that_is_not_rotated():
    plan = build_plan(expose(tiny_vit()), Quantization(gelu="log"))
    assert {s.name for s in plan if s.quantizer == "log"} == {f"blocks.{n}.mlp.fc2.input" for n in range(2)}
    scheme = Quantization(gelu="log", rotate=("hidden",))
    assert not any(s.quantizer == "log" for s in build_plan(teacher_of(tiny_vit(), scheme), scheme))
    rectified = build_plan(expose(tiny_vit()), Quantization(gelu="log", mlp="relu"))
    assert {s.signed for s in rectified if s.quantizer == "log"} == {False}


@pytest.mark.parametrize("setting", ["quantization.rotate=hidden", "quantization.target=symmetric"])
def test_rotated_values_and_targets_without_zero_points_have_no_log_grid_behind_gelu(setting):
    with pytest.raises(RecipeError, match=r"Log cannot serve blocks\.0\.mlp\.fc2\.input"):
        pair(small_recipe(setting, *GELU))


def test_tensorrt_refuses_it_with_the_setting_that_would_do():
    _, student = pair(small_recipe("quantization.target=symmetric", "quantization.mlp=relu", *GELU))
    with pytest.raises(ExportError, match=r"fc2\.grid has a logarithmic grid.*quantization\.gelu=same"):
        check_grids(deploy(student), "onnx", "tensorrt")


# ---- ranges of heads


def test_a_rule_gives_each_head_a_range_and_a_later_one_takes_it_back():
    rules = (Rule(match="*.qk.*", granularity="head"), Rule(match="*1.attn.qk.a", granularity="tensor"))
    plan = build_plan(expose(tiny_vit()), Quantization(rule=rules))
    assert plan.sites["blocks.0.attn.qk.a"].granularity == "head" and plan.sites["blocks.0.attn.qk.b"].heads == 2
    assert {plan.sites[f"blocks.{where}"].granularity for where in ("1.attn.qk.a", "0.attn.av.a")} == {"tensor"}
    rows = json.loads(json.dumps(plan.to_dict()))
    assert QuantPlan.from_dict(rows) == plan
    assert "heads" in rows["blocks.0.attn.qk.a"] and "heads" not in rows["blocks.0.attn.av.a"]


def test_heads_are_those_of_the_layer():
    plan = build_plan(expose(tiny_swin()), Quantization(rule=(Rule(match="*.qk.a", granularity="head"),)))
    assert [s.heads for s in plan if s.name.endswith("qk.a")] == [2, 2, 4, 4]


@pytest.mark.parametrize("match", ["*.fc1.weight", "head.input", "*"])
def test_granularity_is_for_products(match):
    with pytest.raises(RecipeError, match="operands of attention products"):
        build_plan(expose(tiny_vit()), Quantization(rule=(Rule(match=match, granularity="head"),)))


def test_a_wrong_granularity_is_told():
    with pytest.raises(RecipeError, match="granularity"):
        load_recipe("quick", 'quantization.rule={match="*.qk.*", granularity="channel"}')


def test_the_range_of_each_head_is_that_of_its_values_alone():
    x = torch.randn(2, 3, 5, 4) * torch.tensor([0.1, 1.0, 10.0]).view(3, 1, 1)
    own = make_quantizer("lsq", site(signed=True, heads=3))
    own.set_range(x, "mse")
    for head in range(3):
        alone = make_quantizer("lsq", site(signed=True))
        alone.set_range(x[:, head], "mse")
        assert torch.equal(own(x)[:, head], alone(x[:, head]))


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
@pytest.mark.parametrize("softmax", [(), LOG])
def test_heads_with_one_range_equal_a_tensor_with_it(build, softmax):
    _, tensor = pair(small_recipe(*softmax), build)
    teacher, head = pair(small_recipe(*softmax, *HEAD), build)
    own = head.state_dict()
    head.load_state_dict({name: value.expand(own[name].shape) for name, value in tensor.state_dict().items()})
    images = noise(teacher, 3, 1)
    assert torch.equal(head(images), tensor(images))
    assert torch.equal(deploy(head)(images), deploy(tensor)(images))


# ---- both, from the student to the files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODELS)
def test_deployed_and_saved_they_give_the_students_outputs(tmp_path, family, kind):
    build, name, args = MODELS[family]
    teacher, student = pair(small_recipe("quantization.bits=w3a3", *KINDS[kind]), build)
    images = noise(teacher, 4, 1)
    model = deploy(student)
    assert torch.equal(model(images), student(images))
    maskaq.save_pretrained(student, tmp_path, architecture={"name": name, "args": args})
    saved = maskaq.from_pretrained(tmp_path)
    assert torch.equal(saved(images), student(images))
    assert_same(packed(saved), packed(student))
    assert plan_of(saved) == plan_of(student)
    grids = [module for module in saved.modules() if isinstance(module, FixedGrid)]
    assert any(isinstance(module, LogGrid) for module in grids) == (kind != "head")
    assert any(bool(module.zero_point.any()) for module in grids if isinstance(module, LogGrid)) == (kind == "gelu")
    of_heads = kind in ("head", "both")
    assert any(module.scale.shape[:1] == (2,) for module in grids) == of_heads
    card = (tmp_path / "README.md").read_text()
    assert ("logarithmic grid" in card) == (kind != "head") and ("for each head" in card) == of_heads


def test_models_of_0_3_0_load_as_their_log_grids_are_described_as_then(tmp_path):
    """The description is compared when a model is loaded."""
    for kind, value in (("log", "levels[code] * scale"), ("gelu", "(levels[code] - zero_point) * scale")):
        _, student = pair(small_recipe(*KINDS[kind]))
        maskaq.save_pretrained(student, tmp_path / kind, architecture={"name": VIT, "args": VIT_ARGS})
        scheme = json.loads((tmp_path / kind / "config.json").read_text())["quantization_config"]
        assert scheme["log_activations"]["value"] == value


def test_a_model_without_them_says_nothing_of_them(tmp_path):
    _, student = pair(small_recipe())
    maskaq.save_pretrained(student, tmp_path, architecture={"name": VIT, "args": VIT_ARGS})
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert not {"log_activations", "per_head_activations"} & scheme.keys()
    assert not any("heads" in row for row in scheme["plan"].values())


def test_a_log_grid_of_ones_own_cannot_be_deployed():
    @quantizer("other_log")
    class OtherLog(Log):
        pass

    try:
        _, student = pair(small_recipe(LOG[0].replace('"log"', '"other_log"')))
        with pytest.raises(ModelError, match="OtherLog has its own grid"):
            deploy(student)
    finally:
        del QUANTIZERS["other_log"]


def test_a_run_calibrates_resumes_and_reports(tmp_path):
    recipe, out = small_recipe(*KINDS["both"]), tmp_path / "run"
    quantize(tiny_vit(), recipe, out, device="cpu", only_images=True)
    result = quantize(tiny_vit(), recipe, out, source={"name": VIT, "args": VIT_ARGS}, device="cpu", keep="last")
    assert_same(packed(maskaq.from_pretrained(out / QUANTIZED)), packed(result.model))
    rows = json.loads((out / "report.json").read_text())
    assert "log/head" in json.dumps(rows["sizes"])
    assert opened.write_report(out).exists()


def test_behind_gelu_the_embedded_vit_loses_less_than_with_a_uniform_grid(tmp_path):
    images, losses = None, []
    for rule in ((), GELU):
        teacher, student = pair(small_recipe("quantization.bits=w4a4", *rule), lambda: maskaq.load_model("cifar10_vit"))
        images = noise(teacher, 6, 1) if images is None else images
        for own in quantizers(student).values():
            own.drop = 0.0 if own.site.name.endswith("fc2.input") else 1.0  # the others in float
        losses.append((student(images) - teacher(images)).square().mean().item())
        for own in quantizers(student).values():
            own.drop = 0.0
    assert losses[1] < losses[0] / 2
    maskaq.save_pretrained(student, tmp_path / "saved", architecture={"name": "cifar10_vit"})
    saved = maskaq.from_pretrained(tmp_path / "saved")
    assert torch.equal(saved(images), student(images))


def test_inspect_says_them(capsys):
    given = [word for rule in KINDS["both"] for word in ("--set", rule)]
    assert main(["inspect", "cifar10_vit", "--bits", "w3a3", *given]) == 0
    text = capsys.readouterr().out
    assert "log/head, lsq/head" in text and "lsq/head, lsq/head" in text


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="needs maskaq[onnx]")
@pytest.mark.parametrize("bits", ["w3a3", pytest.param("w8a8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", mostly_slow(list(KINDS), "log", "gelu"))
@pytest.mark.parametrize("build", [tiny_vit, pytest.param(tiny_swin, marks=pytest.mark.slow)])
def test_onnx_files_have_the_same_codes_and_multiply_integers(tmp_path, build, kind, bits):
    from maskaq.artifact.export.runtimes import products

    teacher, student = pair(small_recipe(f"quantization.bits={bits}", *KINDS[kind]), build)
    found = export(deploy(student), tmp_path / "model.onnx", "onnx", noise(teacher, 5, 1))
    assert found.turned <= 1e-4 * found.codes and found.agreement == 1
    # At 8 bits, heads with unlike zero points have no codes in common.
    assert (products(tmp_path / "model.onnx").in_float == 0) == (bits == "w3a3" or kind in ("log", "gelu"))


@pytest.mark.skipif(not find_spec("openvino") or not find_spec("onnxruntime"), reason="needs maskaq[openvino]")
@pytest.mark.slow
@pytest.mark.parametrize("bits", ["w3a3", "w8a8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_openvino_files_have_the_same_codes(tmp_path, build, kind, bits):
    teacher, student = pair(small_recipe(f"quantization.bits={bits}", *KINDS[kind]), build)
    found = export(deploy(student), tmp_path / "model.xml", "openvino", noise(teacher, 5, 1))
    assert found.turned <= 1e-4 * found.codes and found.agreement == 1


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="needs maskaq[onnx]")
@pytest.mark.parametrize("change", mostly_slow(["level", "scale of a head", "zero point"], "level"))
def test_a_file_with_another_table_scale_or_zero_point_is_refused(tmp_path, change):
    from maskaq.artifact.export.onnx import export_onnx
    from maskaq.artifact.export.verify import verify

    teacher, student = pair(small_recipe("quantization.bits=w3a3", *KINDS["both"], *GELU))
    model, wrong = deploy(student), deploy(student)
    softmax = wrong.blocks[0].attn.av.a_grid
    if change == "level":
        softmax.levels[3] += 1
    elif change == "zero point":
        wrong.blocks[0].mlp.fc2.grid.zero_point += 1
    else:
        softmax.scale[1] *= 1.1
    with pytest.raises(ExportError, match=r"blocks\.0\.(attn\.av\.a_grid|mlp\.fc2\.grid)|logits differ"):
        verify(export_onnx(wrong, tmp_path / "model.onnx"), model, noise(teacher, 5, 1))


@pytest.mark.slow
def test_a_pt2_program_has_the_same_bits(tmp_path):
    teacher, student = pair(small_recipe("quantization.bits=w3a3", *KINDS["both"]))
    export(deploy(student), tmp_path / "model.pt2", "pt2", noise(teacher, 5, 1))
