"""quantization.rotate: the same model in another basis, all that follows it, and what is left out."""

import copy
import inspect
import json
from functools import partial

import pytest
import timm
import torch
from helpers import (
    SWIN,
    SWIN_ARGS,
    VIT,
    VIT_ARGS,
    Ears,
    assert_same,
    assert_same_run,
    hook,
    mostly_slow,
    packed,
    rewrite_run_json,
    small_recipe,
    tiny_swin,
    tiny_vit,
)
from timm.layers import SwiGLU
from timm.models import vision_transformer as timm_vit
from torch import nn

import maskaq
from maskaq.artifact.export import export
from maskaq.artifact.saved import find_architecture
from maskaq.cli.main import main
from maskaq.errors import MaskaqError, ModelError, RecipeError
from maskaq.models import expose
from maskaq.models.structure import mlps
from maskaq.models.taps import taps
from maskaq.quant.mixed import measure_costs
from maskaq.quant.plan import QuantPlan, build_plan, plan_of
from maskaq.quant.rotation import Rotation, hadamard, mean_keeping, rotate, rotate_online_, rotated, teacher_of
from maskaq.quant.twin import deploy, init_ranges_, quantized_twin
from maskaq.recipe.schema import ROTATIONS, Quantization, load_recipe, recipe_from_dict, to_dict, to_toml
from maskaq.runs import opened as results
from maskaq.runs.quantize import noise, quantize
from maskaq.storage.runfolder import QUANTIZED, RunFolder
from maskaq.tasks import task_of

ALL = "quantization.rotate=heads,residual,hidden"


def distilled() -> nn.Module:
    return tiny_vit_of("deit_tiny_distilled_patch16_224", patch_size=16)


def tiny_vit_of(name: str, **args) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **{**VIT_ARGS, **args})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def gated() -> nn.Module:
    if "gated" not in inspect.signature(timm_vit.Attention).parameters:
        pytest.skip(f"timm {timm.__version__} has no gated attention")
    model = tiny_vit()
    for block in model.blocks:
        block.attn = timm_vit.Attention(16, num_heads=2, qkv_bias=True, gated=True)
    return model.eval()


FAMILIES = {
    "class token": tiny_vit,
    "distilled": distilled,
    "average pooling, fc_norm": partial(tiny_vit, global_pool="avg"),
    "average pooling, no fc_norm": partial(tiny_vit, global_pool="avg", fc_norm=False),
    "no class token": partial(tiny_vit, global_pool="avg", class_token=False),
    "registers": partial(tiny_vit, reg_tokens=3, no_embed_class=True),
    "LayerScale": partial(tiny_vit, init_values=0.1),
    "q/k norm": partial(tiny_vit, qk_norm=True),
    "no qkv bias": partial(tiny_vit, qkv_bias=False),
    "norm before the blocks": partial(tiny_vit, pre_norm=True),
    "norm after the patch embedding": partial(tiny_vit, embed_norm_layer="layernorm"),
    "RmsNorm": partial(tiny_vit, norm_layer="rmsnorm"),
    "no last norm": partial(tiny_vit, final_norm=False),
    "SwiGLU": partial(tiny_vit, mlp_layer=SwiGLU),
    "norms in attention and MLP": partial(tiny_vit, scale_attn_norm=True, scale_mlp_norm=True),
    "gate": gated,
    "heads of 24": partial(tiny_vit, embed_dim=48),
    "post-norm blocks": partial(tiny_vit_of, "vit_base_patch16_rpn_224"),
    "parallel blocks": partial(tiny_vit_of, "vit_small_patch16_18x2_224"),
    "Swin": tiny_swin,
    "Swin without patch norm": partial(tiny_swin, patch_norm=False),
    "Swin, padded windows": partial(tiny_swin, img_size=40),
    "Swin, merging pads": partial(tiny_swin, img_size=12, window_size=3),
}


def built(family: str) -> nn.Module:
    try:
        return expose(FAMILIES[family]())
    except TypeError as error:  # an argument that the oldest timm has not
        pytest.skip(str(error))


# ---- the same outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotated_model_computes_what_the_original_does(family):
    model = built(family)
    images = noise(model, 3, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(images)
    for names in (*((name,) for name in ROTATIONS), ROTATIONS):
        teacher = rotate(model, names)
        for turned in (teacher, rotate_online_(copy.deepcopy(teacher))):
            found = turned(images)
            assert ((found - expected).norm() / expected.norm()).item() < 1e-5
            assert not any(parameter.requires_grad for parameter in turned.parameters())
            assert rotated(turned).original_keys(turned.state_dict()).keys() == before.keys()
            assert rotated(turned).sites or rotated(turned).left_out
    assert_same(before, dict(model.state_dict()))


LEFT_OUT = {
    "q/k norm": "heads, q and k: q_norm",
    "gate": "heads, v: gate",
    "norms in attention and MLP": "heads, v: norm",
    "post-norm blocks": "residual: each block adds the output of a norm",
    "Swin, padded windows": "residual: windows are padded",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_structure_forbids_is_left_out_and_told_and_all_else_is_rotated(family):
    teacher = rotate(built(family), ROTATIONS)
    reasons, told = rotated(teacher).left_out, LEFT_OUT.get(family)
    assert [reason.startswith(told) for reason in reasons] == [True] if told else not reasons
    plan = build_plan(teacher, Quantization(rotate=ROTATIONS))
    words = (told or ":").split(":")
    for site in plan:
        layer, _, slot = site.name.rpartition(".")
        expected = ""
        if site.role == "weight" or site.name.endswith("av.a"):
            assert site.rotation == ""
            continue
        if slot == "input" and layer.endswith("fc2"):
            expected = "hidden"
        elif layer.endswith(".qk"):
            expected = "" if words[0] == "heads, q and k" else "heads"
        elif layer.endswith((".av", ".attn.proj")):
            expected = "" if words[0] == "heads, v" else "heads"
        else:
            expected = "" if words[0] == "residual" else "residual"
        assert site.rotation == expected, site.name


@pytest.mark.parametrize("size", [1, 2, 32, 64])
def test_hadamard_is_orthogonal_and_flat(size):
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))


@pytest.mark.parametrize("size", [1, 3, 16, 96, 192, 384])
def test_the_rotation_of_the_stream_is_orthogonal_keeps_the_mean_and_commutes_with_layer_norm(size):
    matrix = mean_keeping(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(dim=1), torch.ones(size, dtype=torch.float64))
    x = torch.randn(5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3
    norm = nn.LayerNorm(size).double()
    torch.testing.assert_close(norm(x @ matrix.T), norm(x) @ matrix.T)
    if size >= 96:
        assert matrix.abs().max() < 6 * size**-0.5  # no channel keeps its energy


def test_an_online_rotation_turns_each_block_of_channels():
    matrix = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    x = torch.randn(2, 3, 12)
    expected = torch.cat([part.double() @ matrix.T for part in x.split(4, dim=-1)], dim=-1)
    torch.testing.assert_close(Rotation(matrix)(x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_hidden_channels_are_rotated_in_the_student_alone(build):
    model, scheme = expose(build()), Quantization(rotate=("hidden",))
    teacher = teacher_of(model, scheme)
    assert_same(dict(model.state_dict()), dict(teacher.state_dict()))
    student = quantized_twin(teacher, scheme)
    online = [name for name, module in student.named_modules() if isinstance(module, Rotation)]
    assert online and online == [f"{name}.norm" for name in mlps(model)]
    assert {site.name for site in plan_of(student) if site.rotation} == {f"{name}.fc2.input" for name in mlps(model)}


def test_layers_measured_for_mixed_precision_are_those_of_the_rotated_student():
    scheme = Quantization(rotate=ROTATIONS)
    teacher = teacher_of(tiny_vit(), scheme)
    sites = [f"{name}.fc2.weight" for name in mlps(teacher)]
    costs = measure_costs(teacher, build_plan(teacher, scheme), scheme, sites, noise(teacher, 4, 0), task_of(teacher))
    for found in costs.values():
        assert found[8] < 1e-3 and found[8] < found[4] < found[2]


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_scores_are_the_same_and_head_outputs_keep_all_their_products(build):
    model = expose(build())
    turned, images = rotate(model, ROTATIONS), noise(model, 2, 0)
    with taps(model, "scores", "heads", "blocks") as seen, taps(turned, "scores", "heads", "blocks") as found:
        model(images), turned(images)
        for point in ("scores", "heads", "blocks"):
            for a, b in zip(seen[point], found[point], strict=True):
                if point != "scores":
                    assert not torch.allclose(a, b, atol=1e-2)  # another basis
                    a, b = (x.flatten(1, -2) @ x.flatten(1, -2).mT for x in (a, b))  # of all heads and tokens
                torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4 * a.abs().max().item())


def test_one_channel_far_larger_than_the_others_costs_less_after_the_rotation():
    model = tiny_vit(embed_dim=64)
    with torch.no_grad():
        for block in model.blocks:
            block.norm1.weight[9] = block.norm2.weight[5] = 10.0
    model, errors = expose(model), {}
    images = noise(model, 8, 0)
    for names in ((), ("residual",)):
        scheme = Quantization(bits="w8a4", rotate=names)
        teacher = teacher_of(model, scheme)
        student = quantized_twin(teacher, scheme)
        init_ranges_(student, images, scheme)
        errors[names] = (student(images) - teacher(images)).norm().item()
    assert errors["residual",] < 0.8 * errors[()]


# ---- the recipe


@pytest.mark.parametrize("text", ["heads,hidden", '["hidden", "heads"]', "['heads', 'hidden', 'heads']"])
def test_rotations_are_a_list_in_one_order_however_they_are_written(tmp_path, text):
    recipe = load_recipe("quick", f"quantization.rotate={text}")
    assert recipe.quantization.rotate == ("heads", "hidden")
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe
    assert recipe_from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe


def test_nothing_is_rotated_unless_asked_for():
    for name in ("best", "cpu", "demo"):
        assert load_recipe(name).quantization.rotate == ROTATIONS
    for name in ("paper", "reference", "quick", "demo-scenes", "mimiq", "psaq-vit", "sardfq", "noise", "leaves"):
        assert load_recipe(name).quantization.rotate == ()
    model = expose(tiny_vit())
    assert rotate(model, ()) is model and "rotation" not in build_plan(model, Quantization()).to_dict()["head.input"]


@pytest.mark.parametrize("text", ["head", "[1]", "5", "heads hidden", "{a=1}"])
def test_another_rotation_is_told(text):
    with pytest.raises(RecipeError, match=r"quantization\.rotate"):
        load_recipe("quick", f"quantization.rotate={text}")


def test_a_model_is_rotated_once_and_as_its_recipe_says():
    model = expose(tiny_vit())
    turned = rotate(model, ["heads"])
    assert rotate(turned, ["heads"]) is turned
    assert rotated(rotate(model, ["hidden", "heads"])).names == ("heads", "hidden")
    with pytest.raises(ModelError, match="rotated already"):
        rotate(turned, ["hidden"])
    with pytest.raises(RecipeError, match="quantization.rotate"):
        rotate(model, ["sideways"])
    for scheme, given in ((Quantization(), turned), (Quantization(rotate=("heads",)), model)):
        with pytest.raises(ModelError, match="teacher_of"):
            quantized_twin(given, scheme)


# ---- everything follows


def student_of(build, bits: str = "w4a4") -> nn.Module:
    scheme = Quantization(bits=bits, rotate=ROTATIONS)
    teacher = teacher_of(build(), scheme)
    student = quantized_twin(teacher, scheme)
    init_ranges_(student, noise(teacher, 4, 0), scheme)
    return student


SAVED = {
    "vit": (tiny_vit, VIT, VIT_ARGS),
    "swin": (tiny_swin, SWIN, SWIN_ARGS),
    "no qkv bias, norm before the blocks": (
        partial(tiny_vit, qkv_bias=False, pre_norm=True),
        VIT,
        {**VIT_ARGS, "qkv_bias": False, "pre_norm": True},
    ),
    "padded windows": (partial(tiny_swin, img_size=40), SWIN, {**SWIN_ARGS, "img_size": 40}),
}


@pytest.mark.parametrize("case", SAVED)
def test_a_rotated_model_is_saved_and_loaded_to_the_bit(tmp_path, case):
    build, name, args = SAVED[case]
    student = student_of(build)
    images = noise(student, 3, 0)
    maskaq.save_pretrained(student, tmp_path / "model", architecture={"name": name, "args": args})
    again = maskaq.from_pretrained(tmp_path / "model")
    assert torch.equal(again(images), deploy(student)(images))
    assert_same(packed(again), packed(student))
    assert plan_of(again) == plan_of(student) and rotated(again) == rotated(student)
    assert ", ".join(ROTATIONS) in (tmp_path / "model" / "README.md").read_text()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"]["rotate"] == list(ROTATIONS)
    config["quantization_config"]["rotate"] = ["heads"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(MaskaqError, match="rotate"):
        maskaq.from_pretrained(tmp_path / "model")


@pytest.mark.slow
def test_what_builds_a_rotated_model_is_found_by_the_shapes_it_had_before():
    found = find_architecture(deploy(student_of(partial(timm.create_model, VIT, img_size=32, num_classes=4))))
    assert found == {"name": VIT, "args": {"num_classes": 4, "img_size": 32}}


@pytest.mark.parametrize("case", mostly_slow(["vit", "swin", "no qkv bias, norm before the blocks"], "vit"))
def test_exported_files_compute_the_codes_of_a_rotated_model(tmp_path, case):
    model = deploy(student_of(SAVED[case][0]))
    export(model, tmp_path / "model.onnx", "onnx", noise(model, 4, 0))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vit", "swin"])
@pytest.mark.parametrize(("file_format", "suffix"), [("openvino", ".xml"), ("pt2", ".pt2")])
def test_the_other_formats_take_a_rotated_model(tmp_path, case, file_format, suffix):
    if file_format == "openvino":
        pytest.importorskip("openvino")
    model = deploy(student_of(SAVED[case][0]))
    export(model, tmp_path / f"model{suffix}", file_format, noise(model, 4, 0))


@pytest.mark.parametrize("case", mostly_slow(["vit", "swin"], "vit"))
def test_a_rotated_run_is_resumed_saved_opened_and_reported(tmp_path, case, monkeypatch):
    build, name, args = SAVED[case]
    recipe, source = small_recipe(ALL), {"name": name, "args": args}
    run = partial(quantize, build(), recipe, source=source, device="cpu", keep="last", checkpoint_seconds=0)
    result = run(tmp_path / "whole")

    class Stopped(Exception): ...

    def stop():
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        hook(patch.setattr, "maskaq.calibrate.calibrator:Calibrator.epoch", 3, stop)
        run(tmp_path / "stopped")
    run(tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")

    plan = QuantPlan.from_dict(RunFolder.read(tmp_path / "whole").plan)
    assert plan == plan_of(result.model) and {site.rotation for site in plan} == {"", *ROTATIONS}
    assert_same(packed(maskaq.from_pretrained(tmp_path / "whole" / QUANTIZED)), packed(result.model))
    monkeypatch.setattr(results, "load_model", lambda *_: build())
    opened = results.open_run(tmp_path / "whole")
    images = noise(opened.teacher(), 2, 0)
    torch.testing.assert_close(opened.teacher()(images), expose(build())(images), rtol=1e-4, atol=1e-4)
    assert_same(packed(opened.student()), packed(result.model))
    assert plan_of(opened.ptq()) == plan
    assert results.write_report(tmp_path / "whole").exists()
    monkeypatch.setattr("maskaq.runs.quantize.first_student", lambda *_: pytest.fail("began again"))
    assert_same(packed(run(tmp_path / "whole").model), packed(result.model))


def test_a_run_tells_what_it_leaves_out(tmp_path):
    ears = Ears()
    quantize(tiny_vit(qk_norm=True), small_recipe(ALL), tmp_path, device="cpu", only_images=True, progress=ears)
    assert [note for note in ears.notes if "not rotated: heads, q and k: q_norm" in note]


def test_inspect_prints_what_is_rotated_and_what_is_not(capsys):
    args = ["--model-arg", "qk_norm=true", "--set", ALL]
    assert main(["inspect", "vit_tiny_patch16_224", *args]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[1]: line for line in text.splitlines() if " blocks.3." in line}
    kinds = {"mlp.fc1": "linear (residual)", "mlp.fc2": "linear (hidden)", "attn.av": "product (heads)"}
    assert [name for name, kind in kinds.items() if kind not in rows[f"blocks.3.{name}"]] == []
    assert "(" not in rows["blocks.3.attn.qk"] and "rotated before the grid: " in text
    assert "not rotated: heads, q and k: q_norm" in text
    assert main(["inspect", "vit_tiny_patch16_224"]) == 0
    assert "rotated" not in capsys.readouterr().out


def test_a_run_and_a_plan_from_before_there_were_rotations_go_on(tmp_path):
    recipe = small_recipe()
    quantize(tiny_vit(), recipe, tmp_path, device="cpu", only_images=True)

    def older(text: str) -> str:
        found = json.loads(text)
        assert found["identity"]["recipe"]["quantization"].pop("rotate") == []
        assert all("rotation" not in row for row in found["plan"].values())
        return json.dumps(found)

    rewrite_run_json(tmp_path, older)
    quantize(tiny_vit(), recipe, tmp_path, device="cpu", report=False)
    with pytest.raises(MaskaqError, match="rotate"):
        quantize(tiny_vit(), small_recipe(ALL), tmp_path, device="cpu")


def test_layers_that_share_weights_are_rotated_each_by_itself():
    model = tiny_vit()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    model.blocks[1].norm1 = model.blocks[0].norm1
    exposed = expose(model)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(rotate(exposed, ROTATIONS)(images), exposed(images), rtol=1e-4, atol=1e-4)


def test_a_rotation_that_changes_the_outputs_is_refused(monkeypatch):
    monkeypatch.setattr("maskaq.quant.rotation._columns", lambda weight, matrix: weight)
    with pytest.raises(ModelError, match="quantization.rotate"):
        rotate(expose(tiny_vit()), ["residual"])
