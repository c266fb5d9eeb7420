"""Every method of the paper's tables is a recipe: its parts equal plain loops; it runs, is saved, loaded, exported."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from helpers import assert_same_run, mostly_slow, pair, small_recipe, tiny_swin, tiny_vit
from PIL import Image
from test_paper import seen_by
from test_peers import PADDED
from torch.autograd import gradcheck
from torch.nn import functional as F

import maskaq
from maskaq.calibrate.correct import Corrector
from maskaq.calibrate.evolve import Evolver
from maskaq.calibrate.interleave import Interleaver
from maskaq.calibrate.reconstruction import Reconstructor, Rounding
from maskaq.calibrate.rectify import Rectifier
from maskaq.calibrate.reparametrize import Reparametrizer, norm_readers
from maskaq.calibrate.search import Searcher
from maskaq.errors import MaskaqError, RecipeError
from maskaq.images.augment import zoomed
from maskaq.images.generator import GeneratedImages, GeneratorTraining
from maskaq.images.sets import SyntheticSet
from maskaq.images.synthesis import synthesize
from maskaq.losses import attention, distill
from maskaq.losses.terms import CALIBRATION_TERMS, SYNTHESIS_TERMS, CalibrationView, SynthesisView
from maskaq.models import geometry
from maskaq.models.structure import gelu_mlps
from maskaq.models.taps import taps
from maskaq.progress import Progress
from maskaq.quant.quantizers import Quantizer
from maskaq.quant.ranges import RANGES, affine
from maskaq.quant.twin import float_inputs, in_float, init_ranges_, quantizers, set_activation_ranges_
from maskaq.randomness import image_keys
from maskaq.recipe.schema import load_recipe, shipped_recipes
from maskaq.runs.quantize import noise, quantize

BUILDS = {"vit": tiny_vit, "swin": tiny_swin}

METHODS = (
    *("psaq-vit-v2", "lsq", "repq-vit", "adalog", "dfq-vit", "clamp-vit", "brecq", "aphq-vit", "genq"),
    *("gdfq", "qimera", "adadfq", "mimiq", "psaq-vit", "sardfq"),
)

TINY = (
    *("quantization.range_images=4", "synthesis.images=4", "synthesis.batch=4", "calibration.batch=4"),
    *("calibration.reconstruct.epochs=4", "calibration.evolve.passes=1", "calibration.evolve.cycles=2"),
    *("calibration.evolve.population=3", "calibration.evolve.tournament=2", "calibration.interleave.epochs=2"),
    *("calibration.interleave.iterations=2", "calibration.interleave.warm_up=1", "calibration.relu.steps=2"),
)


def tiny(name: str, *overrides: str):
    """A recipe at a tiny budget: what it does, but hardly ever."""
    recipe = load_recipe(name)
    less = ["synthesis.steps=2"] if recipe.synthesis.steps else []
    less += ["synthesis.generator.steps=3", "synthesis.generator.channels=4"] * bool(recipe.synthesis.generator.steps)
    less += ["calibration.epochs=2"] if recipe.calibration.epochs else []
    less += ["refresh.every=1", "refresh.steps=1"] if len(recipe.rounds) > 1 else []
    return load_recipe(name, *TINY, *less, *overrides)


# ---------------------------------------------------------------- recipes


def test_the_table_alone_holds_only_where_a_recipe_is_not_laid_over_another(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "paper"\n[synthesis]\nsteps = 7\n[alone.synthesis]\nimages = 3\nsteps = 9\n')
    assert (load_recipe(file).synthesis.images, load_recipe(file).synthesis.steps) == (3, 9)
    both = load_recipe(f"quick+{file}")
    assert (both.synthesis.images, both.synthesis.steps) == (load_recipe("quick").synthesis.images, 7)
    real = load_recipe(f"{file}+images:{tmp_path}")  # a folder of images is no budget
    assert real.synthesis.images == 3 and not real.data_free
    child = tmp_path / "child.toml"
    child.write_text('extends = "mine.toml"\n[synthesis]\nlr = 0.5\n')
    assert load_recipe(child).synthesis.images == 3
    assert load_recipe(f"quick+{child}").synthesis.images == load_recipe("quick").synthesis.images
    file.write_text("alone = 3\n")
    with pytest.raises(RecipeError, match="alone is a table of settings, not 3"):
        load_recipe(file)


IMAGE_METHODS = ("psaq-vit-v2", "dfq-vit", "clamp-vit", "gdfq", "qimera", "adadfq", "mimiq", "psaq-vit", "sardfq")


@pytest.mark.parametrize("name", IMAGE_METHODS)
def test_over_a_budget_a_method_of_images_leaves_quantizers_and_calibration_alone(name):
    both, base = load_recipe(f"quick+{name}"), load_recipe("quick", *["calibration.mask_weight=1"] * (name == "mimiq"))
    assert both.quantization == base.quantization and both.calibration == base.calibration
    assert both.synthesis.images == base.synthesis.images
    assert both.synthesis != base.synthesis


PUBLISHED = {
    # ImageNet top-1 of DeiT-T, from the MaskAQ paper's Table 1 or the method's own sources
    "mimiq": "19.55 (w3a3, in the MaskAQ paper); 52.03 (w4a4); 63.40 (w5a5); 69.86 (w4a8)",
    "gdfq": "25.96 (w4a4); 44.76 (w5a5); 65.82 (w4a8)",
    "qimera": "15.18 (w4a4); 33.13 (w5a5); 61.90 (w4a8)",
    "adadfq": "19.57 (w4a4); 53.85 (w5a5); 67.71 (w4a8)",
    "psaq-vit": "19.61 (w4a4); 53.36 (w5a5); 66.16 (w4a8); 65.57 (w4a8); 71.56 (w8a8)",
    "psaq-vit-v2": "22.82 (w4a4); 55.18 (w5a5); 68.23 (w4a8)",
    "clamp-vit": "0.15 (w4a4); 5.42 (w5a5); 65.71 (w4a8)",
    "sardfq": "52.06 (w4a4)",
    "repq-vit": "57.43 (w4a4); 70.76 (w6a6)",
    "adalog": "31.56 (w3a3); 63.52 (w4a4); 71.38 (w6a6); 48.78 (w3a3); 67.14 (w4a4)",
    "aphq-vit": "55.42 (w3a3); 66.66 (w4a4)",
    "dfq-vit": "+4.29 points",
    "genq": "ViT-B 67.50 and DeiT-B 76.10",
    "brecq": "no published figures on ViTs",
    "lsq": "no published figures on ViTs",
}


@pytest.mark.parametrize("name", METHODS)
def test_every_header_says_what_is_reproduced_and_gives_the_published_figures(name):
    header = " ".join(shipped_recipes()[name].split("\nextends")[0].replace("\n# ", " ").split())
    assert "maskaq quantize" in header and "eproduced" in header
    assert any(word in header for word in ("Differs", "Guessed", "Left out", "Not reproduced", "as in `gdfq`"))
    for figure in PUBLISHED[name].split("; "):
        assert figure in header, figure


def test_a_step_of_sardfqs_reconstruction_has_all_of_its_images():
    recipe = load_recipe("sardfq")
    assert recipe.calibration.batch == recipe.synthesis.images == 32  # so that 1,200 epochs are 100 steps of 12 blocks


# ---------------------------------------------------------------- terms


def test_the_output_gap_is_minus_the_mean_absolute_difference_and_moves_the_images():
    for build in BUILDS.values():
        v = seen_by(build, "synthesis.terms.output_gap=1")
        p, q = v.outputs["logits"], v.student_outputs["logits"]
        wanted = [-sum(abs(a - b) for a, b in zip(p[i].tolist(), q[i].tolist(), strict=True)) / 4 for i in range(2)]
        got = SYNTHESIS_TERMS["output_gap"].function(v)
        torch.testing.assert_close(got, torch.tensor(wanted))
        assert torch.autograd.grad(got.sum(), v.images)[0].abs().sum() > 0


def loop_patch_contrast(patches: torch.Tensor, temperature: float = 0.2) -> float:
    """One image, (rows, columns, C)."""
    rows, columns, _ = patches.shape
    total = 0.0
    for i, j in itertools.product(range(rows), range(columns)):
        cosines = []
        for y, x in itertools.product(range(i - 1, i + 2), range(j - 1, j + 2)):
            if (y, x) != (i, j) and 0 <= y < rows and 0 <= x < columns:
                cosines.append(F.cosine_similarity(patches[i, j], patches[y, x], dim=0).item())
        cosines.sort(reverse=True)
        weights = [math.exp(c / temperature) for c in cosines]
        total -= math.log(sum(weights[:4]) / sum(weights))
    return total / (rows * columns)


def test_patch_contrast_equals_the_loop_over_neighbourhoods():
    patches = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = [loop_patch_contrast(x) for x in patches]
    torch.testing.assert_close(attention.patch_contrast(patches), torch.tensor(wanted, dtype=torch.float64))
    assert gradcheck(attention.patch_contrast, patches.requires_grad_())
    alone = attention.patch_contrast(torch.ones(1, 1, 1, 3, requires_grad=True))
    assert alone.item() == 0 and alone.isfinite().all()


def test_the_contrast_of_two_models_equals_the_loop_over_patches():
    p, q = (torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (0, 1))
    wanted = []
    for b in range(2):
        total = 0.0
        for i, j in itertools.product(range(3), range(4)):
            places = [(y, x) for y in range(i - 1, i + 2) for x in range(j - 1, j + 2) if 0 <= y < 3 and 0 <= x < 4]
            weights = {at: math.exp(F.cosine_similarity(q[b, i, j], p[b][at], dim=0) / 0.2) for at in places}
            total -= math.log(weights[i, j] / sum(weights.values()))
        wanted.append(total / 12)
    torch.testing.assert_close(distill.neighbour_contrast(p, q), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("build", [*BUILDS.values(), PADDED])
def test_patch_contrast_of_a_model_sees_raster_neighbours_in_every_layer(build):
    v = seen_by(build, "synthesis.terms.patch_contrast=1")
    wanted = [0.0, 0.0]
    for layer, raw in zip(v.layers, v.heads, strict=True):
        windows = raw.unflatten(0, (-1, layer.windows))  # (B, W, H, T, D)
        for b in range(2):
            tokens = [windows[b, w, :, t].flatten() for w in range(layer.windows) for t in range(windows.shape[3])]
            tokens = tokens[layer.prefix_tokens :]
            order = range(len(tokens)) if layer.raster is None else layer.raster.tolist()
            grid = torch.stack([tokens[n] for n in order]).unflatten(0, layer.grid)
            wanted[b] += loop_patch_contrast(grid.detach()) / len(v.layers)
    got = SYNTHESIS_TERMS["patch_contrast"].function(v)
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(got.sum(), v.images)[0].abs().sum() > 0


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(x - max(values)) for x in values]
    return [x / sum(powers) for x in powers]


def loop_entropy(logits: list[float]) -> float:
    return -sum(p * math.log(p) for p in softmax(logits))


def test_the_terms_of_adadfq_equal_their_loops():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    d = (p - q).tolist()
    entropies = [loop_entropy(x) for x in d]
    h = [(x - min(entropies)) / (math.log(4) - min(entropies)) for x in entropies]
    wanted = torch.tensor([max(0.1 - x, 0) + max(x - 0.8, 0) for x in h], dtype=torch.float64)
    torch.testing.assert_close(distill.entropy_margin(p, q), wanted)
    view = CalibrationView((), {"logits": p}, {"logits": q}, labels=torch.tensor([0, -1, 2]), temperature=20.0)
    value = {name: term.function for name, term in CALIBRATION_TERMS.items()}
    softened = [-loop_entropy([x / 5 for x in row]) for row in d]
    torch.testing.assert_close(value["difference_entropy"](view), torch.tensor(softened, dtype=torch.float64))
    labels = [-math.log(softmax(q[0].tolist())[0]), 0.0, -math.log(softmax(q[2].tolist())[2])]
    torch.testing.assert_close(value["label_loss"](view), torch.tensor(labels, dtype=torch.float64))
    torch.testing.assert_close(value["logit_mae"](view), (p - q).abs().mean(dim=1))
    torch.testing.assert_close(value["logit_kl_mean"](view), value["logit_kl"](view) / 4)
    for name, sign in (("difference_prior", -1), ("sum_prior", 1)):
        v = seen_by(tiny_vit, f"synthesis.terms.{name}=1")
        logits = v.outputs["logits"] + sign * v.student_outputs["logits"]
        wanted = [-math.log(softmax(logits[b].tolist())[int(v.labels[b])]) for b in range(2)]
        torch.testing.assert_close(SYNTHESIS_TERMS[name].function(v), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_soft_targets_of_generator_and_student_equal_the_loop_over_classes():
    p, q = (torch.randn(3, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (0, 1))
    shares = torch.tensor([[0.25, 0.75, 0, 0], [0, 0, 1, 0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    images, labels = torch.zeros(3, 3, 8, 8), torch.tensor([1, 2, 3])
    of_images = SynthesisView(images, labels, {"logits": p}, (), (), shares=shares)
    of_student = CalibrationView((), {"logits": p}, {"logits": q}, labels=labels, shares=shares)
    for logits, found in (
        (p, SYNTHESIS_TERMS["class_prior"].function(of_images)),
        (q, CALIBRATION_TERMS["label_loss"].function(of_student)),
    ):
        rows = zip(logits.tolist(), shares.tolist(), strict=True)
        wanted = [-sum(s * math.log(x) for s, x in zip(share, softmax(row), strict=True)) for row, share in rows]
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


def test_zooming_ends_with_smaller_crops_and_begins_with_the_whole_image():
    images = torch.rand(64, 1, 16, 16)
    keys = image_keys(0, torch.arange(64))
    torch.testing.assert_close(zoomed(images, keys, torch.tensor(1.0)), images, rtol=1e-4, atol=1e-4)
    ramp = torch.linspace(0, 1, 16).expand(64, 1, 16, 16)
    widths = zoomed(ramp, keys, torch.tensor(0.25))[:, 0, 0].diff(dim=1).mean(dim=1) * 15  # share of the ramp seen
    assert 0.4 < widths.min() < 0.6 and widths.max() > 0.85
    recipe = small_recipe("synthesis.zoom=0.2")
    still = small_recipe()
    a, b = (synthesize(*pair(r), r).images for r in (recipe, still))
    assert not torch.equal(a, b)


# ---------------------------------------------------------------- stages


def student_of(build, *overrides: str):
    """Teacher, student and images of a recipe without training."""
    recipe = load_recipe("paper", *TINY, *overrides)
    teacher, student = pair(recipe, build)
    images = noise(teacher, 4, seed=1)
    init_ranges_(student, images, recipe.quantization)
    return teacher, student, images, recipe


STATIC = ("quantization.weight=static", "quantization.activation=static", "quantization.activation_range=minmax")


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_reparametrizing_leaves_the_float_model_alone_and_gives_each_channel_its_own_codes(build):
    teacher, student, images, recipe = student_of(build, *STATIC)
    stage = Reparametrizer(teacher, student, recipe)
    (reader, *_), reason = norm_readers(teacher)
    assert not reason
    layer = student.get_submodule(reader.layers[0])
    seen = {}
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0].detach()))
    with torch.no_grad(), in_float(student):
        student(images)
        before = seen["x"].flatten(0, -2)
        stage.fit(images, 0)
        found = student(images)
        after = seen["x"].flatten(0, -2)
    handle.remove()
    torch.testing.assert_close(found, teacher(images), rtol=1e-3, atol=1e-3)
    bits = layer.input_quantizer.site.bits
    differs = 0
    for c in range(before.shape[1]):  # a range for each channel, as a plain loop
        low, high = RANGES["minmax"](before[:, c][None], bits, False, 1.0)
        scale, zero = affine(low, high, bits)
        codes = (torch.round(before[:, c] / scale) + zero).clamp(0, 15)
        mine = layer.input_quantizer.codes(after[:, c])
        differs += int((codes.int() != mine).sum())
    assert differs <= 0.001 * before.numel()  # values on the border of two codes
    assert layer.input_quantizer.scale.numel() == 1


@pytest.mark.parametrize("rules", ["[]", '[{match = "*.reduction.weight", bits = "float"}]'])
def test_reparametrizing_a_layer_without_a_bias_finds_its_input_range_as_the_recipe_says_for_activations(rules):
    rule = f"quantization.rule={rules}"
    teacher, student, images, recipe = student_of(tiny_swin, *STATIC, "quantization.weight_range=mse", rule)
    Reparametrizer(teacher, student, recipe).fit(images, 0)
    names = [name for name, _ in student.named_modules() if name.endswith("reduction")]
    for name, (inputs,) in float_inputs(student, images, names).items():
        assert student.get_submodule(name).bias is None
        low, high = RANGES["minmax"](inputs.reshape(1, -1), 4, False, 1.0)
        found = student.get_submodule(name).input_quantizer.scale
        torch.testing.assert_close(found, affine(low, high, 4)[0], rtol=1e-4, atol=0)
    assert names


@pytest.mark.parametrize("build", mostly_slow(BUILDS, "vit"))
def test_mlps_with_relu_learn_what_the_models_own_give(build):
    more = ("quantization.mlp=relu", "calibration.stages=relu", "calibration.relu.lr=0.01", "calibration.relu.steps=60")
    teacher, student, images, recipe = student_of(build, *STATIC, *more)
    data = SyntheticSet(
        torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), torch.zeros(4).long(), torch.arange(4)
    )
    figures = Rectifier(teacher, student, recipe).epoch(data, 0)
    assert figures["error"] < 0.5 * figures["error_before"]
    name = f"{gelu_mlps(teacher)[0]}.fc2.input_quantizer"
    assert not student.get_submodule(name).site.signed and gelu_mlps(student) == []
    seen = []
    student.get_submodule(name).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].min().item()))
    with torch.no_grad():
        student(images)
    assert seen[0] >= 0
    with pytest.raises(RecipeError, match="set quantization.mlp to relu"):
        quantize(build(), load_recipe("paper", "calibration.stages=relu"), "nowhere")


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_after_reparametrizing_the_other_ranges_are_those_behind_quantized_layers(build):
    teacher, student, images, recipe = student_of(build, *STATIC, "quantization.range_inputs=quantized")
    Reparametrizer(teacher, student, recipe).fit(images, 0)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    folded = [student.get_submodule(name) for reader in norm_readers(teacher)[0] for name in reader.layers]
    quantizers_of_folded = {layer.input_quantizer for layer in folded}
    set_activation_ranges_(student, images, recipe.quantization, keep=quantizers_of_folded)
    torch.testing.assert_close(student.state_dict(), before)
    set_activation_ranges_(student, images, replace(recipe.quantization, range_inputs="float"), keep=())
    changed = [q.site.name for q in quantizers(student).values() if not torch.equal(q.scale, before[scale_of(q)])]
    assert len(changed) > 10


def scale_of(quantizer: Quantizer) -> str:
    name, slot = quantizer.site.layer, quantizer.site.slot
    return f"{name}.{slot}_quantizer.scale"


@pytest.mark.parametrize("build", mostly_slow(BUILDS, "vit"))
def test_searching_never_makes_the_output_of_a_layer_worse(build):
    log = ("quantization.softmax=log", "quantization.gelu=log")
    teacher, student, images, recipe = student_of(build, *STATIC, *log)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    grid = student.get_submodule(gelu_mlps(teacher)[0]).fc2.input_quantizer
    smallest = grid.dequantize(torch.zeros(1, dtype=torch.int64))
    figures = Searcher(teacher, student, recipe).fit(images, 0)
    assert figures["error"] < figures["error_before"]
    scale, _ = grid.step(1)
    assert abs(grid.dequantize(torch.zeros(1, dtype=torch.int64)) - smallest) <= scale
    changed = [name for name, value in student.state_dict().items() if not torch.equal(value, before[name])]
    assert all(name.endswith(("scale", "zero_point", "levels")) for name in changed) and len(changed) > 10
    with torch.no_grad():
        assert student(images).isfinite().all()


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_after_correction_the_mean_of_each_channel_is_the_teachers(build):
    teacher, student, images, recipe = student_of(build)
    with torch.no_grad(), taps(teacher, "blocks") as p, taps(student, "blocks") as q:
        Corrector(teacher, student, recipe).fit(images, 0)
        teacher(images), student(images)
        for number in range(len(geometry(teacher).layers)):
            gap = (p["blocks"][number] - q["blocks"][number]).flatten(0, -2).mean(dim=0)
            assert gap.abs().max() < 1e-4, number


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_evolution_never_ends_with_a_larger_loss_and_changes_scales_only(build):
    teacher, student, images, recipe = student_of(build, *STATIC, "calibration.evolve.spread=0.02")
    stage = Evolver(teacher, student, recipe)
    with torch.no_grad():
        before = [stage._loss(images, place) for place in range(len(stage.blocks))]
        weights = {name: value.clone() for name, value in student.state_dict().items()}
        stage.fit(images, 0)
        assert stage._loss(images, 0) <= before[0] + 1e-6
    changed = [name for name, value in student.state_dict().items() if not torch.equal(value, weights[name])]
    assert changed and all(name.endswith("weight_quantizer.scale") for name in changed)


def test_stages_that_need_scales_of_their_own_refuse_weights_whose_range_follows_them():
    for name in ("clamp-vit", "brecq"):
        with pytest.raises(RecipeError, match="set quantization.weight to static or lsq"):
            quantize(tiny_vit(), tiny(name, "quantization.weight=minmax"), "nowhere")
    assert not Path("nowhere").exists()


def test_adaround_starts_at_the_weights_and_ends_on_levels_beside_them():
    _, student, _, _ = student_of(tiny_vit, *STATIC)
    layer = student.get_submodule("blocks.0.mlp.fc1")
    before, scale = layer.weight.detach().clone(), layer.weight_quantizer.scale[:, None]
    rounding = Rounding(layer)
    rounding.hold()
    inside = (before / scale > -8) & (before / scale < 7)
    torch.testing.assert_close(layer.held_weight[inside], before[inside], rtol=1e-3, atol=1e-4)
    rounding.release()
    h = [1.2 / (1 + math.exp(-a)) - 0.1 for a in rounding.alpha.flatten().tolist()]
    wanted = sum(1 - abs(2 * min(max(x, 0), 1) - 1) ** 3 for x in h)
    assert rounding.pull(torch.tensor(3.0)).item() == pytest.approx(wanted, rel=1e-3)
    with torch.no_grad():
        rounding.alpha.fill_(5.0)  # all up
    rounding.harden_()
    codes = (before / scale).floor().add(1).clamp(-8, 7)
    assert torch.equal(layer.weight_quantizer.codes(layer.weight).float(), codes)
    torch.testing.assert_close(layer.weight_quantizer(layer.weight), codes * scale)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_importance_is_never_negative_and_one_in_the_mean(build):
    teacher, student, images, recipe = student_of(build, *STATIC, "calibration.stages=reconstruct")
    stage = Reconstructor(teacher, student, recipe)
    found = stage._sensitivity(images)
    with torch.no_grad(), taps(teacher, "blocks") as seen:
        teacher(images)
        assert found.shape == (1, *seen["blocks"][0].shape[1:])
    assert found.isfinite().all() and (found >= 0).all()
    assert found.mean().item() == pytest.approx(1, rel=1e-3) and found.std() > 0.01


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_importance_of_the_last_block_equals_the_loop_over_images(build):
    teacher, student, images, recipe = student_of(build, *STATIC, "calibration.stages=reconstruct")
    stage = Reconstructor(teacher, student, recipe)
    stage.unit = len(stage.units) - 1
    with torch.no_grad(), taps(teacher, "blocks") as seen:
        expected = teacher(images)
        last = seen["blocks"][-1].clone()
    e, found = 1e-3 * last.std() * stage._signs(last), torch.zeros_like(last[:1])
    assert set(e.flatten().div(last.std()).mul(1e3).round().int().tolist()) == {-1, 1}
    for n in range(len(images)):
        gradients = []
        for sign in (1, -1):
            x = (last[n : n + 1] + sign * e).detach().requires_grad_()
            log_p, log_q = (F.log_softmax(z / 20, dim=1) for z in (expected[n : n + 1], _behind(teacher, x)))
            (log_p.exp() * (log_p - log_q)).sum().backward()
            gradients.append(x.grad)
        found += (gradients[0] - gradients[1]).abs() / len(images)
    torch.testing.assert_close(stage._sensitivity(images), found / found.mean(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_the_error_of_a_block_is_that_of_each_value_times_its_importance(build):
    teacher, student, images, recipe = student_of(
        build, *STATIC, "calibration.stages=reconstruct", "calibration.reconstruct.error=hessian"
    )
    stage = Reconstructor(teacher, student, recipe)
    stage.importance = stage._sensitivity(images)
    with torch.no_grad(), stage._running(0):
        _, found = stage._errors(images)
        stage.teacher(images), stage.student(images)
        p, q = (seen["blocks"][0].flatten(1).tolist() for seen in (stage.seen, stage.seen_student))
    weights = stage.importance.flatten().tolist()
    for error, a, b in zip(found.tolist(), p, q, strict=True):
        total = sum(h * (x - y) ** 2 for h, x, y in zip(weights, a, b, strict=True))
        assert error == pytest.approx(total / len(weights), rel=1e-3) and error > 0


def _behind(model, x: torch.Tensor) -> torch.Tensor:
    """What a tiny ViT or Swin makes of its last block's output."""
    x = model.norm(x)
    return model.head(x[:, 0]) if x.dim() == 3 else model.head.fc(x.mean(dim=(1, 2)))


def test_dropped_values_are_the_float_ones_and_as_many_as_asked():
    _, student, _, _ = student_of(tiny_vit)
    quantizer = student.get_submodule("blocks.0.mlp.fc2.input_quantizer")
    assert isinstance(quantizer, Quantizer)
    x = torch.randn(4000)
    plain = quantizer(x).detach()
    quantizer.drop, quantizer.drop_key = 0.25, image_keys(0, torch.arange(1))
    mixed = quantizer(x).detach()
    kept = mixed == x
    assert torch.equal(mixed[~kept], plain[~kept]) and 0.2 < kept.float().mean() < 0.3
    assert torch.equal(mixed, quantizer(x).detach())  # a function of its key


# ---------------------------------------------------------------- generators


GENERATORS = {f"{name}, {model}": (name, b) for name in ("gdfq", "qimera", "adadfq") for model, b in BUILDS.items()}


@pytest.mark.parametrize(("name", "build"), mostly_slow(GENERATORS, "qimera, vit", "adadfq, swin"))
def test_a_generators_images_are_the_same_in_any_batch_and_learn_their_objective(name, build):
    recipe = tiny(name, "synthesis.generator.steps=60", "synthesis.lr=0.01")
    source = GeneratedImages(*pair(recipe, build), recipe)
    together = source(torch.arange(4))
    again = GeneratedImages(*pair(recipe, build), recipe)
    apart = SyntheticSet.concatenate([again(torch.arange(2)), again(torch.arange(2, 4))])
    assert (together.images.int() - apart.images.int()).abs().max() <= 1
    assert together.labels.tolist() == [0, 1, 2, 3] and together.images.float().std() > 5
    assert len({tuple(x.flatten().tolist()) for x in together.images}) == 4
    weights = recipe.synthesis.terms
    losses = [sum(weights[n] * p[n] for n in p if n != "step") for p in source.curves]
    assert mean(losses[-5:]) < mean(losses[:5])


def test_superposed_latents_are_shares_of_several_classes():
    recipe = tiny("qimera", "synthesis.generator.superpose=0.5", "synthesis.generator.classes=3")
    training = GeneratorTraining(*pair(recipe), recipe, seed=0)
    _, labels, shares = training.draw(torch.arange(200), "test")
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(200))
    mixed = (shares > 0).sum(dim=1) > 1
    assert 70 < mixed.sum() < 130 and set((shares[mixed] > 0).sum(dim=1).tolist()) == {3}
    assert torch.equal(shares[~mixed].argmax(dim=1), labels[~mixed])
    assert torch.equal(training.model.table, pair(recipe)[0].head.weight)  # a latent vector for each class


class Counted(Progress):
    """Stage -> units done, units of all, and how often it advanced."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    def stage(self, title: str, total: int, done: int = 0) -> None:
        self.title = title
        self.seen[title] = [0, total, 0]

    def advance(self, units: int = 1, **metrics: float) -> None:
        self.seen[self.title][0] += units
        self.seen[self.title][2] += units > 0


def test_a_generators_training_is_a_stage_that_advances_with_every_step():
    recipe, progress = tiny("gdfq"), Counted()
    GeneratedImages(*pair(recipe), recipe, progress=progress)(torch.arange(4))
    assert list(progress.seen) == ["train the generator", "generate"]
    assert progress.seen["train the generator"] == [3, 3, 3] and progress.seen["generate"][:2] == [4, 4]


def test_stages_without_gradients_advance_layer_by_layer_and_end_at_all(tmp_path):
    recipe = tiny("aphq-vit", "calibration.stages=relu,reparametrize,search,evolve,correct", "synthesis.images=8")
    progress = Counted()
    quantize(tiny_vit(), recipe, tmp_path, progress=progress, report=False)
    stages = {title.split(",")[0]: found for title, found in progress.seen.items()}
    for stage, parts in (("relu", 2), ("reparametrize", 4), ("search", 8), ("evolve", 2), ("correct", 2)):
        done, total, often = stages[stage]
        assert done == total and often == min(parts, total), stage


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_generator_and_student_learn_in_turn_and_the_student_only_after_the_warm_up(build):
    recipe = tiny("gdfq", "synthesis.generator.batch=4", "calibration.lr=0.01")
    teacher, student = pair(recipe, build)
    init_ranges_(student, noise(teacher, 4, seed=1), recipe.quantization)
    stage = Interleaver(teacher, student, recipe)
    data = SyntheticSet(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4).long(), torch.arange(4))
    for epoch, learns in ((0, False), (1, True)):
        before = [{n: x.clone() for n, x in m.state_dict().items()} for m in (student, stage.generator.model)]
        stage.epoch(data, epoch)
        after = [m.state_dict() for m in (student, stage.generator.model)]
        moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(before, after, strict=True)]
        assert moved == [learns, True]


def test_a_generator_refuses_terms_of_attention_and_models_without_classes():
    with pytest.raises(RecipeError, match="no masks: set the weights"):
        quantize(tiny_vit(), tiny("gdfq", "synthesis.terms.attention_alignment=0.1"), "nowhere")
    with pytest.raises(RecipeError, match="no maps: set the weights"):
        quantize(tiny_vit(), tiny("gdfq", "synthesis.terms.head_similarity=1"), "nowhere")
    with pytest.raises(RecipeError, match="images of classes"):
        quantize(tiny_vit(num_classes=0), tiny("gdfq"), "nowhere")


# ---------------------------------------------------------------- runs

RUNS = {f"{name}, {model}": (name, build) for name in METHODS for model, build in BUILDS.items()}
SOME = ("psaq-vit-v2, vit", "repq-vit, swin", "aphq-vit, vit", "clamp-vit, vit", "adadfq, vit")


@pytest.mark.parametrize(("name", "build"), mostly_slow(RUNS, *SOME))
def test_every_method_runs_on_its_own_and_is_saved_and_loaded(tmp_path, name, build):
    result = quantize(build(), tiny(name), tmp_path / "run", report=False, source=None)
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["facts"]["data_free"] is True
    x = noise(result.model, 2, seed=0)
    loaded = maskaq.from_pretrained(tmp_path / "run/quantized", like=build())
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), result.model(x), rtol=1e-4, atol=1e-4)
        assert loaded(x).isfinite().all()


DATA_DRIVEN = ("lsq", "repq-vit", "adalog", "brecq", "aphq-vit", "genq")


@pytest.mark.parametrize("name", mostly_slow(DATA_DRIVEN, "genq"))
def test_a_data_driven_method_takes_a_folder_of_images_and_says_that_it_is_not_data_free(tmp_path, name):
    for number in range(4):
        pixels = torch.randint(0, 256, (40, 36, 3), generator=torch.Generator().manual_seed(number)).byte()
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{number}.png")
    own = load_recipe(f"{name}+images:{tmp_path}")
    assert (
        own.synthesis.images == load_recipe(name).synthesis.images and own.calibration == load_recipe(name).calibration
    )
    less = ["calibration.epochs=1"] * ("calibrate" in own.calibration.stages)
    recipe = load_recipe(f"{name}+images:{tmp_path}", *TINY, *less)
    result = quantize(tiny_vit(), recipe, tmp_path / "run", report=False)
    assert json.loads((tmp_path / "run/run.json").read_text())["facts"]["data_free"] is False
    assert result.images.labels.tolist() == [-1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["cifar10_vit", "cifar10_swin"])
def test_every_method_runs_on_the_embedded_models_and_is_exported(tmp_path, name, model):
    budgets = (name, f"demo+{name}")
    for number, budget in enumerate(budgets):
        recipe = tiny(budget, "calibration.reconstruct.epochs=8", "synthesis.images=8")
        out = tmp_path / str(number)
        result = quantize(maskaq.load_model(model), recipe, out, source={"name": model}, report=False)
        assert maskaq.from_pretrained(out / "quantized")(noise(result.model, 1, seed=0)).shape == (1, 10)
    pytest.importorskip("onnxruntime")
    from maskaq.artifact.export import export

    deployed = maskaq.from_pretrained(tmp_path / "0/quantized")
    try:
        export(deployed, tmp_path / "model.onnx", "onnx", noise(deployed, 2, seed=0))
    except MaskaqError as error:
        pytest.fail(f"{name} cannot be exported: {error}")
    assert (tmp_path / "model.onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adadfq", "aphq-vit", "clamp-vit", "adalog", "dfq-vit"])
def test_a_method_that_stops_after_any_epoch_goes_on_to_the_same_end(tmp_path, name, monkeypatch):
    recipe = tiny(name)
    quantize(tiny_vit(), recipe, tmp_path / "whole", checkpoint_seconds=0, report=False)
    from maskaq.runs import rounds

    class Stop(Exception):
        pass

    real, left = rounds._checkpoint, [0]

    def checkpoint(*args):
        real(*args)
        left[0] += 1
        raise Stop

    monkeypatch.setattr(rounds, "_checkpoint", checkpoint)
    for _ in range(recipe.epochs):
        with pytest.raises(Stop):
            quantize(tiny_vit(), recipe, tmp_path / "parts", checkpoint_seconds=0, report=False)
    monkeypatch.undo()
    quantize(tiny_vit(), recipe, tmp_path / "parts", checkpoint_seconds=0, report=False)
    assert left[0] == recipe.epochs
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
