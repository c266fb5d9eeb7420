"""maskaq.quant.twin and inspection: what is quantized, at which bits, and that the teacher never notices."""

import hashlib
import math
from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch
import timm
import torch
from torch import nn
from torch.nn import functional as F

from maskaq.errors import ModelError, RangeError, RecipeError
from maskaq.models import Matmul, expose, geometry
from maskaq.models.taps import taps
from maskaq.quant import grid
from maskaq.quant.inspection import inspect_model
from maskaq.quant.layers import QuantConv2d, QuantLinear, QuantMatmul, QuantWeightMixin, holding
from maskaq.quant.quantizers import LSQ, QUANTIZERS, Static, quantizer
from maskaq.quant.twin import deploy, frozen, init_ranges_, quantized_twin, quantizers
from maskaq.recipe.schema import Quantization, load_recipe
from maskaq.runs.quantize import quantize


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def plain_vit(name="vit_tiny_patch16_224", patch_size=8, **kwargs):
    size = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32, "num_classes": 10}
    return perturbed(timm.create_model(name, pretrained=False, patch_size=patch_size, **size, **kwargs))


def plain_swin(**kwargs):
    size = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "img_size": 32, "window_size": 4, "num_classes": 10}
    return perturbed(timm.create_model("swin_tiny_patch4_window7_224", pretrained=False, **{**size, **kwargs}))


distilled = partial(plain_vit, "deit_tiny_distilled_patch16_224", patch_size=16)
BUILDS = {
    "vit": plain_vit,
    "registers, LayerScale, qk_norm": partial(plain_vit, reg_tokens=2, init_values=0.5, qk_norm=True),
    "distilled": distilled,
    "swin": plain_swin,
    "swin, padded": partial(plain_swin, img_size=40),
}
every_model = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())


def pictures(model, n=2):
    facts = geometry(model)
    return torch.randn(n, facts.channels, *facts.image_size)


def pair(build=plain_vit, n=4, **settings):
    """Teacher, student with ranges, images."""
    scheme = Quantization(**{"activation_range": "minmax", **settings})
    teacher = expose(build())
    student, images = quantized_twin(teacher, scheme), pictures(teacher, n)
    init_ranges_(student, images, scheme)
    return teacher, student, images


def digest(model):
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.numpy().tobytes())
    return total.hexdigest()


# --- what is quantized -------------------------------------------------------------------------------------------


@every_model
def test_every_linear_convolution_and_product_is_quantized(build):
    teacher = expose(build())
    twin = quantized_twin(teacher, Quantization())
    kinds = {nn.Linear: QuantLinear, nn.Conv2d: QuantConv2d, Matmul: QuantMatmul}
    expected = {name: kinds[type(m)] for name, m in teacher.named_modules() if type(m) in kinds}
    assert {name: type(m) for name, m in twin.named_modules() if type(m) in kinds.values()} == expected
    assert set(expected.values()) == set(kinds.values())
    assert not [name for name, m in twin.named_modules() if type(m) in kinds]
    ranges = 2 * len(expected) - len(geometry(teacher).first)  # two operands each, but for the image
    assert len(quantizers(twin)) == ranges == len({q.site.name for q in quantizers(twin).values()})
    assert set(teacher.state_dict()) <= set(twin.state_dict())


def test_the_image_itself_is_not_quantized():
    for first_last in ("same", "8", "float"):
        twin = quantized_twin(expose(plain_vit()), Quantization(first_last=first_last))
        assert type(twin.patch_embed.proj.input_quantizer) is nn.Identity


def test_bits_follow_the_recipe_at_every_site():
    twin = quantized_twin(expose(plain_vit()), Quantization(bits="w4a8"))
    for q in quantizers(twin).values():
        assert q.site.bits == (4 if q.site.role == "weight" else 8)
        assert q.high - q.low + 1 == 2**q.site.bits
        assert (q.site.channels is not None) == (q.site.role == "weight")


@pytest.mark.parametrize("build", [plain_vit, distilled, plain_swin], ids=["vit", "distilled", "swin"])
@pytest.mark.parametrize("first_last", ["same", "8", "float"])
def test_first_and_last_layers_get_their_own_bits(build, first_last):
    teacher = expose(build())
    twin = quantized_twin(teacher, Quantization(bits="w3a4", first_last=first_last))
    facts = geometry(teacher)
    assert len(facts.last) == (2 if build is distilled else 1)
    for name, module in twin.named_modules():
        if not isinstance(module, QuantWeightMixin):
            continue
        ends = name in facts.first + facts.last
        weight, inputs = (
            q.site.bits if not isinstance(q, nn.Identity) else None
            for q in (module.weight_quantizer, module.input_quantizer)
        )
        expected = {"same": (3, 4), "8": (8, 8), "float": (None, None)}[first_last] if ends else (3, 4)
        assert weight == expected[0] and inputs == (None if name in facts.first else expected[1])


@every_model
def test_only_softmax_outputs_are_known_to_be_non_negative(build):
    twin = quantized_twin(expose(build()), Quantization())
    attentions = len(geometry(twin).layers)
    unsigned = [path for path, q in quantizers(twin).items() if not q.site.signed]
    assert len(unsigned) == attentions and all(path.endswith(".av.a_quantizer") for path in unsigned)


@every_model
@pytest.mark.parametrize("weight", ["minmax", "lsq"])
@pytest.mark.parametrize("bits", ["w2a2", "w3a3", "w4a8"])
def test_no_tensor_in_the_model_has_more_values_than_its_bits_allow(build, weight, bits):
    _, student, images = pair(build, n=2, bits=bits, weight=weight)
    seen = {}
    for path, q in quantizers(student).items():
        q.register_forward_hook(lambda q, args, out, path=path: seen.update({path: (args[0], out)}))
    with torch.no_grad():
        student(images)
    assert seen.keys() == quantizers(student).keys()
    for path, (x, out) in seen.items():
        q = quantizers(student)[path]
        rows = out.flatten(1) if q.site.channels else out.reshape(1, -1)
        assert max(len(row.unique()) for row in rows) <= 2**q.site.bits, path
        assert torch.equal(q.dequantize(q.codes(x)), out)
        if not q.site.signed:
            assert out.min() >= 0 and q.zero_point == 0 and (q.low, q.high) == (0, 2**q.site.bits - 1)


@pytest.mark.parametrize("build", [plain_vit, plain_swin], ids=["vit", "swin"])
def test_an_eight_bit_twin_is_close_to_its_teacher_and_a_two_bit_one_is_not(build):
    errors = {}
    for bits in ("w8a8", "w4a4", "w2a2"):
        torch.manual_seed(0)
        teacher, student, images = pair(build, n=8, bits=bits, activation_range="mse")
        with torch.no_grad():
            expected = teacher(images)
            errors[bits] = ((student(images) - expected).norm() / expected.norm()).item()
    assert 0 < errors["w8a8"] < 0.03 < errors["w4a4"] < errors["w2a2"]


def test_a_twin_in_float_is_its_teacher():
    teacher, student, images = pair(bits="w8a8")
    for path in quantizers(student):
        parent, _, child = path.rpartition(".")
        setattr(student.get_submodule(parent), child, nn.Identity())
    assert torch.equal(student(images), teacher(images))


def test_a_quantized_layer_multiplies_what_its_integers_say():
    _, student, images = pair(bits="w4a4")
    layer, held = student.blocks[1].mlp.fc1, {}
    layer.register_forward_hook(lambda module, args, out: held.update(x=args[0], out=out))
    student(images)
    weight, inputs = layer.weight_quantizer, layer.input_quantizer
    expected = F.linear(
        inputs.dequantize(inputs.codes(held["x"])), weight.dequantize(weight.codes(layer.weight)), layer.bias
    )
    assert torch.equal(held["out"], expected)


def test_names_of_quantizers_come_from_the_recipe():
    teacher = expose(plain_vit())
    with pytest.raises(RecipeError, match="unknown quantizer 'lqs'"):
        quantized_twin(teacher, Quantization(weight="lqs"))
    with pytest.raises(RecipeError, match=r"MinMax cannot serve blocks\.0\.attn"):
        quantized_twin(teacher, Quantization(activation="minmax"))


def test_a_new_quantizer_works_end_to_end_by_its_name(monkeypatch):
    monkeypatch.setattr("maskaq.quant.quantizers.QUANTIZERS", dict(QUANTIZERS))

    @quantizer("power_of_two")
    class PowerOfTwo(Static):
        def _store(self, scale, zero_point):
            super()._store(2 ** scale.log2().ceil(), zero_point)

    teacher, student, images = pair(bits="w8a8", weight="power_of_two", activation="lsq")
    assert {type(q) for q in quantizers(student).values()} == {PowerOfTwo, LSQ}
    assert torch.equal(student.head.weight_quantizer.scale.log2().frac().abs().max(), torch.tensor(0.0))
    expected = teacher(images)
    assert (student(images) - expected).norm() / expected.norm() < 0.05
    assert "power_of_two" not in QUANTIZERS


# --- the teacher never notices -----------------------------------------------------------------------------------


@every_model
def test_the_teacher_is_unchanged_by_all_that_happens_to_the_student(build):
    teacher = expose(build())
    before, modules = digest(teacher), [type(m) for m in teacher.modules()]
    scheme = Quantization(bits="w4a4", weight="lsq")
    student, images = quantized_twin(teacher, scheme), pictures(teacher)
    init_ranges_(student, images, scheme)
    with frozen(student):
        student(images)
    first = digest(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student(images).square().sum().backward()
    optimizer.step()
    assert digest(student) != first
    assert digest(teacher) == before and [type(m) for m in teacher.modules()] == modules
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    storages = [{t.untyped_storage().data_ptr() for t in m.state_dict().values()} for m in (teacher, student)]
    assert not storages[0] & storages[1]


@every_model
def test_every_weight_and_learned_range_of_the_student_gets_a_gradient(build):
    _, student, images = pair(build, bits="w4a4", weight="lsq")
    student(images).square().sum().backward()
    missing = [name for name, p in student.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing and all(p.requires_grad for p in student.parameters())


def gradients_of_ranges(student, images):
    student.zero_grad()
    student(images).square().sum().backward()
    return {name: (q.scale.grad.clone(), q.zero_point.grad) for name, q in quantizers(student).items()}


@pytest.mark.parametrize("reload", [False, True], ids=["fresh", "reloaded"])
@pytest.mark.parametrize("build", [plain_vit, plain_swin], ids=["vit", "swin"])
def test_the_gradient_scale_reaches_every_nested_quantizer(build, reload, monkeypatch):
    teacher, student, images = pair(build, bits="w4a4", weight="lsq")
    if reload:
        state = student.state_dict()
        student = quantized_twin(teacher, Quantization(bits="w4a4", weight="lsq"))
        student.load_state_dict(state)
    sizes = {}
    for name, q in quantizers(student).items():
        q.register_forward_hook(lambda q, args, out, name=name: sizes.update({name: args[0].numel()}))
    scaled = gradients_of_ranges(student, images)
    learned_grid = grid.learned_grid
    monkeypatch.setattr(grid, "learned_grid", lambda *args: learned_grid(*args[:-1], 1.0))
    plain = gradients_of_ranges(student, images)
    for name, q in quantizers(student).items():
        factor = 1 / math.sqrt(sizes[name] / len(q.scale) * q.high)
        torch.testing.assert_close(scaled[name][0], plain[name][0] * factor, rtol=1e-3, atol=1e-7)
        if q.site.role == "activation" and q.site.signed:
            torch.testing.assert_close(scaled[name][1], plain[name][1] * factor, rtol=1e-3, atol=1e-7)


# --- ranges ------------------------------------------------------------------------------------------------------


def test_a_twin_without_ranges_refuses_to_run_and_names_the_layer():
    twin = quantized_twin(expose(plain_vit()), Quantization())
    for use in (lambda: twin(pictures(twin)), lambda: frozen(twin).__enter__()):
        with pytest.raises(RangeError, match=r"patch_embed\.proj\.weight has no range yet"):
            use()
    assert all(p.requires_grad for p in twin.parameters())


def test_ranges_come_from_float_values_of_these_images():
    """The last layer's range is the teacher's own input there: quantization before it has no say."""
    teacher = expose(plain_vit())
    images, held = pictures(teacher, 4), {}
    hook = teacher.head.register_forward_hook(lambda module, args, out: held.update(x=args[0]))
    teacher(images)
    hook.remove()
    scheme = Quantization(bits="w2a2", activation="static", activation_range="minmax")
    student = quantized_twin(teacher, scheme)
    init_ranges_(student, images, scheme)
    span = held["x"].max().clamp(min=0) - held["x"].min().clamp(max=0)
    torch.testing.assert_close(student.head.input_quantizer.scale, span[None] / 3)


@pytest.mark.parametrize("build", [plain_vit, plain_swin], ids=["vit", "swin"])
def test_ranges_behind_quantized_layers_equal_the_loop_over_sites_in_order(build):
    scheme = Quantization(bits="w3a3", activation="static", activation_range="mse", range_inputs="quantized")
    teacher = expose(build())
    student, images = quantized_twin(teacher, scheme), pictures(teacher, 4)
    init_ranges_(student, images, scheme)
    wanted = quantized_twin(teacher, scheme)
    init_ranges_(wanted, images, replace(scheme, range_inputs="float"))
    order, seen = [], {}

    def listen(name):
        def hook(module, inputs):
            if name not in seen:
                order.append(name)
            seen[name] = inputs[0]

        return hook

    sites = {name: q for name, q in quantizers(wanted).items() if q.site.role == "activation"}
    for name, q in sites.items():
        q.register_forward_pre_hook(listen(name))
    with torch.no_grad():
        wanted(images)
        for name in order:  # those before it have their last ranges
            wanted(images)
            sites[name].set_range(sites[name].sample(seen[name], 1 << 14), "mse")
    found = quantizers(student)
    assert len(order) == len(sites) > 10
    for name, q in sites.items():
        torch.testing.assert_close(found[name].scale, q.scale, msg=name)
        torch.testing.assert_close(found[name].zero_point, q.zero_point, msg=name)
    in_float = pair(build, bits="w3a3", activation="static", activation_range="mse")[1]
    assert not torch.equal(quantizers(in_float)[order[-1]].scale, sites[order[-1]].scale)


def test_ranges_do_not_change_with_what_passes_later():
    _, student, images = pair(activation="lsq")
    before = digest(student)
    with torch.no_grad():
        student(images * 50)
    assert digest(student) == before


@pytest.mark.parametrize("build", [plain_vit, plain_swin], ids=["vit", "swin"])
def test_ranges_from_one_image_and_from_more_images_than_the_batch(build):
    teacher = expose(build())
    scheme = Quantization(activation_range="minmax")
    images = pictures(teacher, 5)
    one, parts, whole = (quantized_twin(teacher, scheme) for _ in range(3))
    init_ranges_(one, images[:1], scheme)
    assert one(images).isfinite().all()
    init_ranges_(parts, images, scheme, batch=2)
    init_ranges_(whole, images, scheme, batch=5)
    torch.testing.assert_close(parts.state_dict(), whole.state_dict())


def test_ranges_can_be_set_again():
    scheme = Quantization()
    _, student, images = pair(activation_range=scheme.activation_range)
    first = digest(student)
    init_ranges_(student, images * 3, scheme)
    other = digest(student)
    init_ranges_(student, images, scheme)
    assert other != first == digest(student)


def test_minmax_weights_are_cut_to_the_range_of_the_recipe_once_and_the_teachers_never():
    teacher = expose(plain_vit())
    images, before = pictures(teacher), digest(teacher)
    scheme = Quantization(bits="w3a8", weight_range="mse")
    cut, searched = (quantized_twin(teacher, replace(scheme, weight=name)) for name in ("minmax", "static"))
    whole = quantized_twin(teacher, replace(scheme, weight_range="minmax"))
    for student in (cut, searched):
        init_ranges_(student, images, scheme)
    init_ranges_(whole, images, replace(scheme, weight_range="minmax"))
    layers = {name: m for name, m in cut.named_modules() if isinstance(m, QuantWeightMixin)}
    for name, layer in layers.items():
        layer.quantized_weight()  # its range follows
        scale, weight = searched.get_submodule(name).weight_quantizer.scale, teacher.get_submodule(name).weight
        torch.testing.assert_close(layer.weight_quantizer.scale, scale)
        bound = (scale * 7 / 2).reshape(-1, *(1,) * (weight.dim() - 1))  # of eight levels
        torch.testing.assert_close(layer.weight.detach(), weight.clamp(-bound, bound))
        assert torch.equal(whole.get_submodule(name).weight, weight)
    assert any(not torch.equal(m.weight, teacher.get_submodule(name).weight) for name, m in layers.items())
    once = digest(cut)
    init_ranges_(cut, images, scheme)
    assert digest(cut) == once and digest(teacher) == before


def test_images_or_weights_with_nan_are_named_and_nothing_stays_observing():
    teacher = expose(plain_vit())
    student = quantized_twin(teacher, Quantization())
    images = pictures(teacher)
    images[1, 0, 5, 5] = math.nan
    with pytest.raises(RangeError, match=r"blocks\.0\.attn\.\S+: values with NaN"):
        init_ranges_(student, images, Quantization())
    assert all(q.observed is None for q in quantizers(student).values())
    assert all(m.held_weight is None for m in student.modules() if isinstance(m, QuantWeightMixin))
    student = quantized_twin(teacher, Quantization())
    with torch.no_grad():
        student.blocks[1].mlp.fc2.weight[0, 0] = math.nan
    with pytest.raises(RangeError, match=r"blocks\.1\.mlp\.fc2\.weight.*NaN"):
        init_ranges_(student, pictures(teacher), Quantization())


def test_a_channel_of_zeros_trains_without_nan():
    teacher = expose(plain_vit())
    with torch.no_grad():
        teacher.head.weight.zero_()
    scheme = Quantization(weight="lsq", first_last="same")
    student, images = quantized_twin(teacher, scheme), pictures(teacher)
    init_ranges_(student, images, scheme)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        (student(images) - 1).square().sum().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in student.parameters())
    assert student.head.weight.abs().max() > 0


# --- saving ------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("weight", ["minmax", "lsq", "static"])
def test_a_saved_and_loaded_student_gives_equal_outputs_exactly(build, weight):
    teacher, student, images = pair(build, weight=weight)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
    student(images).square().sum().backward()
    optimizer.step()
    state = safetensors.torch.load(safetensors.torch.save(student.state_dict()))
    other = quantized_twin(expose(build()), Quantization(weight=weight))
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(other(images), student(images))
        assert not torch.equal(other(images), teacher(images))


def test_ranges_alone_load_into_a_fresh_twin():
    teacher, student, images = pair()
    ranges = {
        f"{path}.{key}": value for path, q in quantizers(student).items() for key, value in q.state_dict().items()
    }
    other = quantized_twin(teacher, Quantization())
    other.load_state_dict(ranges, strict=False)
    assert torch.equal(other(images), student(images))


# --- frozen ------------------------------------------------------------------------------------------------------


def weight_calls(student):
    calls = {}
    for path, q in quantizers(student).items():
        if q.site.role == "weight":
            calls[path] = 0
            q.register_forward_hook(lambda q, args, out, path=path: calls.update({path: calls[path] + 1}))
    return calls


@every_model
def test_frozen_quantizes_weights_once_and_gives_parameters_no_gradient(build):
    _, student, images = pair(build, weight="lsq")
    calls, expected = weight_calls(student), student(images)
    calls.update(dict.fromkeys(calls, 0))
    images.requires_grad_()
    with frozen(student):
        for _ in range(3):
            out = student(images)
        assert torch.equal(out, expected)
        assert not any(p.requires_grad for p in student.parameters())
        out.square().sum().backward()
    assert set(calls.values()) == {1}
    assert images.grad.isfinite().all() and images.grad.abs().max() > 0
    assert all(p.grad is None for p in student.parameters())


def test_frozen_restores_what_it_found_also_after_an_exception():
    _, student, images = pair()
    student.pos_embed.requires_grad_(False)
    before = {name: p.requires_grad for name, p in student.named_parameters()}
    state = digest(student)
    with frozen(student):
        student(images)
    with pytest.raises(RuntimeError, match="inside"), frozen(student):
        raise RuntimeError("inside")
    assert {name: p.requires_grad for name, p in student.named_parameters()} == before
    assert all(m.held_weight is None for m in student.modules() if isinstance(m, QuantWeightMixin))
    assert digest(student) == state
    calls = weight_calls(student)
    with torch.no_grad():
        student.head.weight.mul_(2)
        changed = student(images)
    assert set(calls.values()) == {1} and changed.isfinite().all()  # weights are quantized afresh again


def test_frozen_inside_frozen_still_holds_the_outer_one():
    _, student, images = pair()
    calls = weight_calls(student)
    with frozen(student):
        with frozen(student):
            student(images)
        student(images)
        assert not any(p.requires_grad for p in student.parameters())
    assert set(calls.values()) == {1} and all(p.requires_grad for p in student.parameters())


def test_a_layer_is_after_holding_a_weight_as_it_was_before():
    layer = next(m for m in pair()[1].modules() if isinstance(m, QuantWeightMixin))
    members, outer = set(vars(layer)), layer.weight.detach()
    with holding({layer: outer}):
        with holding({layer: outer * 2}):
            assert torch.equal(layer.held_weight, outer * 2)
        assert layer.held_weight is outer
    assert layer.held_weight is None and set(vars(layer)) == members


def test_held_weights_are_not_part_of_the_state():
    _, student, _ = pair()
    keys = list(student.state_dict())
    with frozen(student):
        assert list(student.state_dict()) == keys


@every_model
def test_taps_listen_to_a_student_as_to_its_teacher(build):
    teacher, student, images = pair(build, bits="w8a8")
    points = ("scores", "probs", "heads", "blocks")
    with taps(teacher, *points) as seen, taps(student, *points) as seen_student:
        teacher(images)
        student(images)
        for point in points:
            for a, b in zip(seen[point], seen_student[point], strict=True):
                assert a.shape == b.shape and not torch.equal(a, b)
                assert (a - b).norm() / a.norm() < 0.1


# --- inspection --------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("first_last", ["same", "float"])
def test_inspected_sizes_add_up_to_the_parameters(build, first_last):
    model = build()
    recipe = load_recipe("paper", f"quantization.first_last={first_last}", bits="w4a8")
    found = inspect_model(model, recipe)
    assert found.float_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert found.float_bytes / 8 < found.quantized_bytes < found.float_bytes
    assert found.quantized_bytes == sum(row.quantized_bytes for row in found.rows)


def test_an_inspected_layer_says_its_bits_and_bytes():
    rows = {row.name: row for row in inspect_model(plain_vit(), load_recipe("paper", bits="w3a8")).rows}
    qkv = rows["blocks.0.attn.qkv"]
    assert (qkv.kind, qkv.shape, qkv.weight_bits, qkv.input_bits) == ("linear", "96 x 32", "3", "8")
    assert (qkv.float_bytes, qkv.quantized_bytes) == (4 * 96 * 32, 96 * 32 * 3 // 8 + 4 * 96)
    assert rows["patch_embed.proj"].kind == "convolution" and rows["patch_embed.proj"].input_bits == "float"
    product = rows["blocks.0.attn.av"]
    assert (product.kind, product.input_bits, product.float_bytes) == ("product", "8, 8", 0)
    assert len(rows) == 2 * (4 + 2) + 2 + 1  # four linears and two products a block, two ends, and all else


def test_an_inspected_float_layer_keeps_its_size():
    recipe = load_recipe("paper", "quantization.first_last=float", bits="w4a4")
    rows = {row.name: row for row in inspect_model(distilled(), recipe).rows}
    for name in ("patch_embed.proj", "head", "head_dist"):
        assert rows[name].weight_bits == rows[name].input_bits == "float"
        assert rows[name].quantized_bytes == rows[name].float_bytes


def calibrated():
    teacher = expose(plain_vit())
    student = quantized_twin(teacher, Quantization())
    init_ranges_(student, pictures(teacher), Quantization())
    return student


@pytest.mark.parametrize("build", [calibrated, lambda: deploy(calibrated())], ids=["student", "deployed"])
def test_a_quantized_model_is_not_quantized_again(build, tmp_path):
    model, coarser = build(), load_recipe("quick", bits="w2a2")
    calls = {
        "quantized_twin": lambda: quantized_twin(model, coarser.quantization),
        "inspect_model": lambda: inspect_model(model, coarser),
        "quantize": lambda: quantize(model, coarser, tmp_path / "run", device="cpu"),
    }
    for call in calls.values():
        with pytest.raises(ModelError, match="quantized already"):
            call()
    assert not (tmp_path / "run").exists()
