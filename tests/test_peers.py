"""The methods MaskAQ is compared with: their losses equal a plain loop, their recipes run, and none costs a promise."""

import itertools
import json
import math
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    SMALL,
    assert_same_run,
    hook,
    in_process,
    mostly_slow,
    pair,
    quantize_and_die,
    small_recipe,
    tensors,
    tiny_swin,
    tiny_vit,
)
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F

from maskaq import zoo
from maskaq.cli import main as cli
from maskaq.errors import DataError, RecipeError
from maskaq.images.augment import jitter, quarter
from maskaq.images.sets import to_bytes
from maskaq.images.synthesis import Synthesizer, synthesize
from maskaq.losses import attention, image, targets
from maskaq.losses.terms import SYNTHESIS_TERMS, SynthesisView
from maskaq.models import data_config, expose, geometry
from maskaq.randomness import image_keys
from maskaq.recipe.schema import load_recipe
from maskaq.runs.quantize import quantize
from maskaq.shapes import Layer
from maskaq.storage.runfolder import QUANTIZED

PACKED = f"{QUANTIZED}/model.safetensors"

CPU = torch.device("cpu")
PEERS = ("mimiq", "psaq-vit", "sardfq", "noise")
PADDED = partial(tiny_swin, img_size=40, window_size=4)  # windows reach over the edge of its images
BUILDS = (tiny_vit, tiny_swin)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(got: Tensor, wanted, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(got, torch.as_tensor(wanted, dtype=got.dtype), rtol=rtol, atol=1e-11)


def keys_of(n: int, seed: int = 0) -> Tensor:
    return image_keys(seed, torch.arange(n))


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def peer(name: str, *overrides: str):
    """A peer at the tests' budget: the recipe's method over it, as `quick+mimiq` does."""
    budget = [x for x in SMALL if name != "noise" or not x.startswith("synthesis.steps")]
    budget = [x for x in budget if not x.startswith("refresh")]
    return load_recipe(f"paper+{name}", *budget, *overrides)  # not its own protocol, which test_methods.py runs


# ---------------------------------------------------------------- PSAQ-ViT


def loop_patch_entropy(windows: list) -> float:
    """-H_l of one image: (W, H, Q, D) head outputs."""
    found = []
    for window in windows:
        heads, queries, channels = len(window), len(window[0]), len(window[0][0])
        rows = [[mean(window[h][q][d] for h in range(heads)) for d in range(channels)] for q in range(queries)]
        for i, j in itertools.product(range(queries), repeat=2):
            dot = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
            found.append(dot / math.hypot(*rows[i]) / math.hypot(*rows[j]))
    low, high = min(found), max(found)
    points = [low + (high - low) * i / 9 for i in range(10)]
    return -loop_density_entropy(found, points)


def loop_density_entropy(values: list[float], points: list[float]) -> float:
    h, area = 0.01, 0.0
    p = [
        1e-4 + mean(math.exp(-(((x - v) / h) ** 2) / 2) for v in values) / (h * math.sqrt(2 * math.pi)) for x in points
    ]
    for i in range(len(points) - 1):
        area += (points[i + 1] - points[i]) * (-p[i] * math.log(p[i]) - p[i + 1] * math.log(p[i + 1])) / 2
    return area


def test_patch_entropy_equals_the_loop_over_windows_and_pairs():
    outputs = draw(3, 2, 3, 4, 5)
    near(attention.patch_entropy(outputs), [loop_patch_entropy(x) for x in outputs.tolist()])


def test_density_entropy_equals_the_loop_and_has_the_gradient_of_finite_differences():
    values, points = draw(3, 7) * 0.02, torch.linspace(-0.05, 0.05, 10, dtype=torch.float64).expand(3, -1)
    wanted = [loop_density_entropy(v, points[0].tolist()) for v in values.tolist()]
    near(attention.density_entropy(values, points), wanted)
    assert gradcheck(lambda v: attention.density_entropy(v, points), values.requires_grad_(), eps=1e-7, atol=1e-4)


def test_patch_entropy_has_the_gradient_of_its_density_at_points_that_stay():
    outputs = draw(2, 2, 3, 4, 5).requires_grad_()
    (got,) = torch.autograd.grad(attention.patch_entropy(outputs).sum(), outputs)
    rows = outputs.mean(dim=2)
    rows = rows / rows.norm(dim=-1, keepdim=True)
    similarity = torch.einsum("bwqd,bwkd->bwqk", rows, rows).flatten(1)
    ends = [(x.min().item(), x.max().item()) for x in similarity]
    points = torch.tensor([[a + (b - a) * i / 9 for i in range(10)] for a, b in ends], dtype=torch.float64)
    (wanted,) = torch.autograd.grad(-attention.density_entropy(similarity, points).sum(), outputs)
    near(got, wanted, rtol=1e-6)
    assert (got.abs().sum(dim=(1, 2, 3, 4)) > 0).all()


@pytest.mark.parametrize("case", ["equal patches", "zero", "huge"])
def test_degenerate_outputs_have_a_finite_entropy_and_gradient(case):
    outputs = {"equal patches": torch.ones(2, 1, 2, 4, 3), "zero": torch.zeros(2, 1, 2, 4, 3)}.get(case)
    outputs = (1e6 * draw(2, 1, 2, 4, 3).float() if outputs is None else outputs).requires_grad_()
    value = attention.patch_entropy(outputs)
    (gradient,) = torch.autograd.grad(value.sum(), outputs)
    assert value.isfinite().all() and gradient.isfinite().all()


def loop_variation(picture: list) -> float:
    total = 0.0
    for down, across in ((1, 0), (0, 1), (1, 1), (1, -1)):
        squares = 0.0
        for channel in picture:
            for h, w in itertools.product(range(len(channel)), range(len(channel[0]))):
                if h + down < len(channel) and 0 <= w + across < len(channel[0]):
                    squares += (channel[h + down][w + across] - channel[h][w]) ** 2
        total += math.sqrt(squares)
    return total


def test_the_variation_target_equals_the_loop_over_four_directions_of_a_batch_of_32_alike():
    images, target = draw(3, 2, 4, 5), torch.tensor([2500.0, 0.0, 30.0], dtype=torch.float64)
    wanted = []
    for picture, t in zip(images.tolist(), target.tolist(), strict=True):
        wanted.append(abs(math.sqrt(32) * loop_variation(picture) - t * math.sqrt(2 * 4 * 5 / (3 * 224 * 224))))
    near(image.total_variation_target(images, target), wanted)
    assert gradcheck(lambda x: image.total_variation_target(x, target), images.requires_grad_())


# ---------------------------------------------------------------- SARDFQ


def loop_prior_difference(received: list, prior: list) -> float:
    """sum over heads of the mean over all patches, the prior scaled to the attention of each window: (W, H, Q)."""
    total = 0.0
    for h in range(len(received[0])):
        squares = []
        for a, g in zip(received, prior, strict=True):
            scale = sum(a[h]) / sum(g[h])
            squares += [(x - scale * y) ** 2 for x, y in zip(a[h], g[h], strict=True)]
        total += mean(squares)
    return total


def test_the_attention_prior_equals_the_loop_over_windows_heads_and_patches():
    received, prior = draw(3, 2, 3, 4).softmax(dim=-1), draw(3, 2, 3, 4, seed=1).exp()
    wanted = [loop_prior_difference(a, g) for a, g in zip(received.tolist(), prior.tolist(), strict=True)]
    near(attention.prior_difference(received, prior), wanted)
    total = received.sum(dim=3, keepdim=True)

    def softly(scores: Tensor) -> Tensor:  # of constant sum, as attention is
        return attention.prior_difference(scores.softmax(dim=-1) * total, prior)

    assert gradcheck(softly, draw(3, 2, 3, 4).requires_grad_())


def test_a_prior_of_the_attention_itself_at_any_scale_is_no_loss():
    received = draw(2, 1, 3, 9).softmax(dim=-1)
    near(attention.prior_difference(received, 7 * received), [0, 0])


def test_mixtures_equal_the_loop_over_components():
    keys, heads = keys_of(2), 3
    positions = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(0))
    got = targets.mixtures(keys, heads, positions)
    assert got.shape == (2, 2, heads, 4)
    draws = {name: targets.fold(keys, name) for name in ("centre", "spread", "angle", "components")}
    centre, spread = (targets.uniform(draws[name], heads, 5, 2).tolist() for name in ("centre", "spread"))
    angle = targets.uniform(draws["angle"], heads, 5).tolist()
    count = targets.uniform(draws["components"], heads).tolist()
    for b, w, h, q in itertools.product(range(2), range(2), range(heads), range(4)):
        total = 1e-6
        for k in range(1 + int(5 * count[b][h])):
            turn = math.pi * angle[b][h][k]
            axes = torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
            scales = 0.05 + 0.2 * torch.tensor(spread[b][h][k])
            covariance = axes.T @ torch.diag(scales**2) @ axes
            offset = positions[w, q] - torch.tensor(centre[b][h][k])
            distance = offset @ torch.linalg.inv(covariance) @ offset
            total += math.exp(-0.5 * distance.item()) / math.sqrt(torch.linalg.det(covariance).item())
        assert got[b, w, h, q].item() == pytest.approx(total, rel=1e-3)


def test_mixtures_have_one_to_five_components_and_differ_between_heads_and_images():
    count = (targets.uniform(targets.fold(keys_of(300), "components"), 4) * 5).floor() + 1
    assert sorted(count.unique().tolist()) == [1, 2, 3, 4, 5]
    layer = Layer("a", "b", grid=(6, 6))
    got = targets.mixtures(keys_of(3), 2, layer.window_positions(36, CPU)).flatten(0, 2)
    assert len({tuple(x.tolist()) for x in got}) == 6 and (got > 0).all()


def test_positions_of_shifted_windows_are_those_of_their_raster_patches():
    raster = torch.tensor([6, 0, 1, 4, 7, 2, 3, 5])  # any order will do
    layer = Layer("a", "b", grid=(2, 4), windows=2, raster=raster)
    got = layer.window_positions(4, CPU).flatten(0, 1)
    plain = Layer("a", "b", grid=(2, 4)).window_positions(8, CPU)[0]
    assert plain[0].tolist() == [0.25, 0.125] and plain[7].tolist() == [0.75, 0.875]
    assert torch.equal(got[raster], plain)


def test_what_lies_beyond_the_edge_of_an_image_gets_only_a_trace_of_a_mixture():
    layer = Layer("a", "b", grid=(2, 3), windows=2, raster=torch.tensor([0, 1, 4, 2, 3, 6]))  # 5 and 7 are padding
    got = targets.mixtures(keys_of(3), 2, layer.window_positions(4, CPU)).transpose(1, 2).flatten(2)  # (B, H, W*Q)
    torch.testing.assert_close(got[..., [5, 7]], torch.full((3, 2, 2), 1e-6))
    assert (got[..., layer.raster] > 1e-6).any()


def test_a_soft_label_has_five_to_ten_at_its_classes_before_the_softmax():
    keys, labels = keys_of(200), torch.tensor([[3, 1, 1]]).expand(200, -1)
    present = torch.tensor([[True, True, False]]).expand(200, -1)
    got = targets.soft_labels(keys, labels, present, classes=6)
    near(got.sum(dim=1), torch.ones(200), rtol=1e-5)
    z = got.log() - got.log()[:, 4:5] + targets.normal(targets.fold(keys, "other classes"), 6)[:, 4:5]
    for c in (1, 3):
        assert z[:, c].min() > 4.99 and z[:, c].max() < 10.01 and z[:, c].std() > 1
    assert abs(z[:, [0, 2, 4, 5]].mean()) < 0.2 and z[:, [0, 2, 4, 5]].std() == pytest.approx(1, abs=0.1)


def test_regions_are_one_to_four_quarters_none_twice_and_the_first_has_the_images_label():
    labels = torch.arange(400) % 7
    found = targets.regions(keys_of(400), labels, classes=7)
    assert all(sorted(x) == [0, 1, 2, 3] for x in found.cells.tolist())
    assert torch.equal(found.labels[:, 0], labels) and found.labels.min() >= 0 and found.labels.max() == 6
    assert found.count.bincount().tolist()[1:] == pytest.approx([100] * 4, abs=30)
    assert torch.equal(found.present.sum(dim=1), found.count)


@pytest.mark.parametrize("size", [(8, 8), (9, 12)])
def test_a_quarter_equals_torchs_enlargement_of_it_and_its_gradient_stays_inside(size):
    images = draw(4, 3, *size).requires_grad_()
    high, wide = size[0] // 2, size[1] // 2
    got = quarter(images, torch.arange(4))
    for b, (row, column) in enumerate(itertools.product((0, size[0] - high), (0, size[1] - wide))):
        cut = images[b : b + 1, :, row : row + high, column : column + wide]
        wanted = F.interpolate(cut, size=size, mode="bilinear", align_corners=False)
        torch.testing.assert_close(got[b], wanted[0], rtol=1e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(got[b].square().sum(), images, retain_graph=True)
        inside = torch.zeros(size, dtype=torch.bool)
        inside[row : row + high, column : column + wide] = True
        assert (gradient[b, :, ~inside] == 0).all() and (gradient[b, :, inside] != 0).all()


def test_jitter_mirrors_as_often_as_asked_and_each_image_for_itself():
    images = torch.randn(400, 1, 2, 3)
    got = jitter(images, keys_of(400), roll=0, noise=0.0, colour=0.0, flip=0.25)
    mirrored = (got == images.flip(3)).flatten(1).all(dim=1)
    assert torch.equal(got[~mirrored], images[~mirrored]) and 70 <= mirrored.sum() <= 130


# ---------------------------------------------------------------- terms


class Seen(Exception):
    """Carries the view out of a step, before its gradients are taken."""


def view(build=tiny_vit, *overrides: str) -> SynthesisView:
    """What the first step of a tiny model sees, with everything that any peer's term needs."""
    terms = ("patch_entropy", "total_variation_target", "attention_prior", "soft_class_prior", "region_prior")
    recipe = small_recipe(*(f"synthesis.terms.{name}=1" for name in terms), *overrides)
    make = Synthesizer(*pair(recipe, build), recipe)
    needs = make.objective.needs

    class Spy:
        def __init__(self) -> None:
            self.needs = needs

        def __call__(self, v: SynthesisView):
            raise Seen(v)

    make.objective = Spy()  # type: ignore[assignment]
    with pytest.raises(Seen) as seen:
        make(torch.arange(3))
    found: SynthesisView = seen.value.args[0]
    return found


@pytest.mark.parametrize("build", [*BUILDS, PADDED])
def test_each_term_equals_the_sum_of_its_layers_in_a_real_model(build):
    v = view(build)
    heads = [layer.window_patches(raw) for layer, raw in zip(v.layers, v.heads, strict=True)]
    wanted = [sum(loop_patch_entropy(x[b].tolist()) for x in heads) for b in range(3)]
    torch.testing.assert_close(SYNTHESIS_TERMS["patch_entropy"].function(v), torch.tensor(wanted), rtol=1e-3, atol=1e-3)

    depth, keys, total = len(v.layers), targets.fold(v.keys, "attention prior"), [0.0] * 3
    for number in range(1, depth + 1):
        if number < depth / 2:
            continue
        layer = v.layers[number - 1]
        received = layer.window_patches(v.received[number - 1])
        prior = targets.mixtures(
            targets.fold(keys, number), received.shape[2], layer.window_positions(received.shape[3], CPU)
        )
        for b in range(3):
            total[b] += number / depth * loop_prior_difference(received[b].tolist(), prior[b].tolist())
    got = SYNTHESIS_TERMS["attention_prior"].function(v)
    torch.testing.assert_close(got, torch.tensor(total), rtol=1e-4, atol=1e-9)
    (gradient,) = torch.autograd.grad(got.sum(), v.images, retain_graph=True)
    assert (gradient.abs().sum(dim=(1, 2, 3)) > 0).all()


def test_soft_labels_carry_the_classes_of_the_regions_and_a_region_its_own():
    v = view()
    for b in range(3):
        m = int(v.regions.count[b])
        labels, there = v.regions.labels[b : b + 1], v.regions.present[b : b + 1]
        assert int(there.sum()) == m and 0 <= int(v.region[b]) < m
        wanted = targets.soft_labels(targets.fold(v.keys[b : b + 1], "soft label"), labels, there, 4)[0].tolist()
        assert sorted(wanted)[-1] > 0.5 or m > 1
        logs = v.logits[b].log_softmax(dim=0).tolist()
        loss = -sum(p * q for p, q in zip(wanted, logs, strict=True))
        assert SYNTHESIS_TERMS["soft_class_prior"].function(v)[b].item() == pytest.approx(loss, rel=1e-4)
        key = targets.fold(targets.fold(v.keys[b : b + 1], "region label"), v.region[b : b + 1])
        label = v.regions.labels[b, v.region[b]].reshape(1, 1)
        alone = targets.soft_labels(key, label, torch.ones(1, 1, dtype=torch.bool), 4)[0]
        assert int(alone.argmax()) == int(label)
        loss = -(alone * v.region_logits[b].log_softmax(dim=0)).sum().item()
        assert SYNTHESIS_TERMS["region_prior"].function(v)[b].item() == pytest.approx(loss, rel=1e-4)


def test_a_regions_loss_moves_no_pixel_outside_it():
    v = view(tiny_vit, "synthesis.roll=0", "synthesis.noise=0", "synthesis.colour=0")
    (gradient,) = torch.autograd.grad(SYNTHESIS_TERMS["region_prior"].function(v).sum(), v.images)
    for b in range(3):
        row, column = divmod(int(v.regions.cells[b, v.region[b]]), 2)
        inside = torch.zeros(32, 32, dtype=torch.bool)
        inside[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = True
        assert (gradient[b, :, ~inside] == 0).all() and gradient[b, :, inside].abs().sum() > 0


def test_without_regions_a_soft_label_is_of_the_images_class_alone():
    v = view()
    v.regions = None
    wanted = targets.soft_labels(
        targets.fold(v.keys, "soft label"), v.labels[:, None], torch.ones(3, 1, dtype=torch.bool), 4
    )
    assert torch.equal(wanted.argmax(dim=1), v.labels)
    torch.testing.assert_close(
        SYNTHESIS_TERMS["soft_class_prior"].function(v), -(wanted * v.logits.log_softmax(dim=1)).sum(dim=1)
    )


# ---------------------------------------------------------------- recipes


def test_a_budget_and_a_method_combine_from_left_to_right_over_what_both_extend():
    both, quick, alone = load_recipe("quick+mimiq"), load_recipe("quick"), load_recipe("mimiq")
    assert both.synthesis.images == quick.synthesis.images and both.calibration.epochs == quick.calibration.epochs
    assert both.calibration.terms == quick.calibration.terms and both.calibration.augment == quick.calibration.augment
    assert both.synthesis.terms == alone.synthesis.terms and both.refresh.every == 0
    assert (both.calibration.mask_weight, quick.calibration.mask_weight) == (1.0, 2.0)
    assert load_recipe("mimiq+quick").refresh.every == quick.refresh.every  # the later one wins
    assert load_recipe("quick+quick") == load_recipe("paper+quick") == quick


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_leaves_the_budget_of_images_and_calibration_alone(name):
    for budget in ("paper", "quick", "demo"):
        both, base = load_recipe(f"{budget}+{name}"), load_recipe(budget)
        assert (both.synthesis.images, both.synthesis.batch) == (base.synthesis.images, base.synthesis.batch)
        assert both.synthesis.steps == (0 if name == "noise" else base.synthesis.steps)
        assert both.quantization == base.quantization and len(both.rounds) == 1
        calibration = load_recipe(budget, *["calibration.mask_weight=1"] * (name == "mimiq")).calibration
        assert both.calibration == calibration


def test_recipes_of_ones_own_combine_and_extend_combinations(tmp_path):
    mine, budget = tmp_path / "my+own.toml", tmp_path / "budget.toml"
    budget.write_text("[synthesis]\nimages = 7\n")
    mine.write_text('extends = "budget.toml+psaq-vit"\n[synthesis]\nsteps = 3\n')
    recipe = load_recipe(mine)
    assert (recipe.synthesis.images, recipe.synthesis.steps) == (7, 3)
    assert recipe.synthesis.terms["patch_entropy"] == 1.0
    assert load_recipe(f"quick+{budget}").synthesis.images == 7
    with pytest.raises(RecipeError, match="unknown recipe 'mimic'.*Did you mean 'mimiq'"):
        load_recipe("quick+mimic")


def test_images_of_a_folder_come_last_and_take_the_rest_of_the_name(tmp_path):
    folder = tmp_path / "a+b"
    recipe = load_recipe(f"quick+images:{folder}")
    assert recipe.synthesis.folder == str(folder.resolve()) and not recipe.data_free
    assert (recipe.synthesis.steps, len(recipe.rounds)) == (0, 1) and "NOT data-free" in recipe.caveat
    assert recipe.calibration == load_recipe("quick").calibration
    assert load_recipe(f"images:{folder}").calibration == load_recipe("paper").calibration
    assert load_recipe("quick").data_free and not load_recipe("quick").caveat
    for more in ("refresh.every=3", "synthesis.steps=3"):
        with pytest.raises(RecipeError, match="neither optimised nor refreshed"):
            load_recipe(f"quick+images:{folder}", more)


# The rows of the paper's Table 2, as in docs/METHOD.md.
ABLATIONS = {
    "without L_fb": ("synthesis.terms.similarity_entropy=0",),
    "without L_align": ("synthesis.terms.attention_alignment=0",),
    "without refresh": ("refresh.every=0",),
    "without the mask in L_Q": ("calibration.mask_weight=1",),
    "without the mask in L_align": ("synthesis.mask.start=1", "synthesis.mask.end=1", "synthesis.mask.drop=0"),
}


@pytest.mark.parametrize(
    "overrides", mostly_slow({name: [*words] for name, words in ABLATIONS.items()}, "without L_align")
)
def test_every_ablation_is_a_list_of_settings_that_runs_and_changes_the_model(tmp_path, overrides):
    page = (Path(__file__).parents[1] / "docs/METHOD.md").read_text()
    assert f"`{' '.join(overrides)}`" in page
    models = []
    for name, more in (("whole", ()), ("less", overrides)):
        quantize(tiny_vit(), small_recipe(*more), tmp_path / name)
        models.append(tensors(tmp_path / name / PACKED))
    assert any(not torch.equal(models[0][key], models[1][key]) for key in models[0])


# ---------------------------------------------------------------- runs


MODELS = {"vit": tiny_vit, "swin": tiny_swin, "padded swin": PADDED}
PEER_RUNS = {f"{name}, {model}": (name, build) for name in PEERS for model, build in MODELS.items()}
SOME_PEER_RUNS = ("mimiq, vit", "psaq-vit, vit", "sardfq, vit", "noise, swin")


@pytest.mark.parametrize(("name", "build"), mostly_slow(PEER_RUNS, *SOME_PEER_RUNS))
def test_every_peer_runs_end_to_end(tmp_path, name, build):
    result = quantize(build(), peer(name), tmp_path / "run")
    assert len(result.images) == 8 and (tmp_path / "run" / PACKED).exists()
    assert json.loads((tmp_path / "run/run.json").read_text())["facts"]["data_free"] is True
    assert "- data-free" in (tmp_path / "run" / QUANTIZED / "README.md").read_text()
    assert all(x.isfinite().all() for x in tensors(tmp_path / "run" / PACKED).values() if x.is_floating_point())


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", PEERS)
def test_an_image_of_a_peer_is_the_same_whatever_batch_it_is_made_in(name, build):
    made = []
    for batch in (3, 8):
        recipe = peer(name, f"synthesis.batch={batch}")
        made.append(synthesize(*pair(recipe, build), recipe).images.int())
    assert (made[0] - made[1]).abs().max() <= 1  # of 255, as for MaskAQ


@pytest.mark.parametrize("name", ["psaq-vit", "sardfq"])
def test_the_objective_of_a_peer_falls(name):
    recipe = peer(name, "synthesis.steps=40", "synthesis.images=4")
    make = Synthesizer(*pair(recipe), recipe)
    make(torch.arange(4))
    weights = recipe.synthesis.terms
    first, *_, last = [sum(weights[n] * p[n] for n in p if n != "step") for p in make.curves]
    assert last < first


def test_noise_is_what_synthesis_starts_from_cut_to_pixels():
    recipe = peer("noise")
    make = Synthesizer(*pair(recipe), recipe)
    got = make(torch.arange(4))
    assert make.curves == [] and (make.trajectory.number, make.trajectory.steps) == (0, [0])
    moved = Synthesizer(*pair(small_recipe()), small_recipe("synthesis.lr=0"))(torch.arange(4))
    assert torch.equal(got.images, moved.images)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "n", "after"), [("write_shard", 1, True), ("event", 2, False)], ids=["shards", "event"]
)
def test_a_killed_run_of_noise_goes_on_to_the_same_weights_and_images(tmp_path, where, n, after):
    recipe = peer("noise")
    quantize(tiny_vit(), recipe, tmp_path / "straight")
    where = f"maskaq.storage.runfolder:RunFolder.{where}"
    assert in_process(quantize_and_die, tmp_path / "run", recipe, 0.0, where, n, after) == -signal.SIGKILL
    quantize(tiny_vit(), recipe, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "straight")


# ---------------------------------------------------------------- images:DIR, the ceiling


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Ten images in two folders and two beside them, of several sizes and modes; and a file that is no image."""
    root, generator = tmp_path_factory.mktemp("photos"), torch.Generator().manual_seed(0)
    for number in range(12):
        folder = root / ("", "cats", "dogs")[0 if number > 9 else 1 + number % 2]
        folder.mkdir(exist_ok=True)
        size = (40 + number, 60, 3)
        pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).numpy()
        picture = Image.fromarray(pixels).convert("L" if number == 3 else "RGB")
        picture.save(folder / f"{number}.{'png' if number % 2 else 'JPEG'}")
    (root / "notes.txt").write_text("not an image")
    return root


def ceiling(photos: Path, *overrides: str):
    return load_recipe(f"images:{photos}", *(x for x in SMALL if "refresh" not in x and "steps" not in x), *overrides)


@pytest.mark.parametrize("build", BUILDS)
def test_real_images_calibrate_a_model_and_the_run_says_it_is_not_data_free(tmp_path, photos, build):
    model = build()
    result = quantize(model, ceiling(photos), tmp_path / "run")
    assert result.images.labels.tolist() == [-1] * 8 and result.images.indices.tolist() == list(range(8))
    facts = geometry(expose(model))
    transform = create_transform(**data_config(model), is_training=False)
    files = [file for file in photos.rglob("*") if file.suffix != ".txt" and file.is_file()]
    known = [to_bytes(facts.pixels(transform(Image.open(file).convert("RGB"))[None]))[0] for file in files]
    found = [[torch.equal(x, y) for y in known].index(True) for x in result.images.images]
    assert len(set(found)) == 8  # each is one file, in timm's transform, and none is taken twice
    saved = json.loads((tmp_path / "run/run.json").read_text())
    assert saved["facts"]["data_free"] is False
    card = (tmp_path / "run" / QUANTIZED / "README.md").read_text()
    assert "NOT data-free" in card and "- data-free" not in card
    assert saved["identity"]["recipe"]["synthesis"]["folder"] == str(photos.resolve())


@pytest.mark.slow
def test_which_images_of_a_folder_are_taken_depends_on_the_seed(tmp_path, photos):
    runs = [quantize(tiny_vit(), ceiling(photos), tmp_path / str(seed), seed=seed).images for seed in (0, 1)]
    assert not torch.equal(runs[0].images, runs[1].images)


@pytest.mark.slow
def test_a_killed_run_on_real_images_goes_on_and_needs_the_folder_no_more_once_it_has_its_images(tmp_path, photos):
    recipe = ceiling(photos)
    quantize(tiny_vit(), recipe, tmp_path / "straight")
    where = ("maskaq.storage.runfolder:RunFolder.write_shard", 1, True)
    assert in_process(quantize_and_die, tmp_path / "run", recipe, 0.0, *where) == -signal.SIGKILL
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.calibrate.calibrator:Calibrator._step", 3, interrupt)
        quantize(tiny_vit(), recipe, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskaq.images.folder.image_files", lambda *_: pytest.fail("the folder was read again"))
        quantize(tiny_vit(), recipe, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_folder_that_is_not_there_or_has_too_few_images_is_named_before_anything_is_written(tmp_path, photos):
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (tmp_path / "nowhere", "image folder .*nowhere does not exist"),
        (tmp_path / "empty", "empty has 0 images, and synthesis.images asks for 8"),
    ):
        with pytest.raises(DataError, match=message):
            quantize(tiny_vit(), ceiling(folder), tmp_path / "run")
    with pytest.raises(DataError, match="has 12 images, and synthesis.images asks for 13: --set synthesis.images=12"):
        quantize(tiny_vit(), ceiling(photos, "synthesis.images=13"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_image_is_named(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"cannot read the image .*\d\.png"):
        quantize(tiny_vit(), ceiling(tmp_path), tmp_path / "run")


@pytest.mark.slow
def test_the_command_line_marks_the_ceiling_in_plan_and_tables(tmp_path, photos, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--set", "synthesis.images=4", "synthesis.batch=4", "calibration.epochs=1", "calibration.batch=4"]
    words = ["quantize", "cifar10_vit", "--recipe", f"demo+images:{photos}", "--out", "run", "--data", "cifar10-demo"]
    images, labels = zoo.test_images()
    monkeypatch.setattr(zoo, "test_images", lambda: (images[::50], labels[::50]))
    assert cli.main([*words, *small]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"images 4 REAL images of {photos.resolve()}: an upper bound, NOT data-free" in out
    assert f"calibrated on REAL images of {photos.resolve()}: an upper bound, NOT data-free" in out
    saved = f"run/{QUANTIZED}"
    for command in (
        ["evaluate", "run", "--data", "cifar10-demo"],
        ["evaluate", saved, "--data", "cifar10-demo"],
        ["inspect", saved],
    ):
        assert cli.main(command) == 0
        assert "NOT data-free" in capsys.readouterr().out
    assert cli.main(["quantize", "cifar10_vit", "--recipe", f"demo+images:{saved}/README.md", "--out", "other"]) == 1
    assert "README.md is a file; expected a folder of images" in capsys.readouterr().err
    assert cli.main(["quantize", "cifar10_vit", "--recipe", "demo+images:nowhere", "--out", "other"]) == 1
    captured = capsys.readouterr()
    assert "nowhere does not exist" in captured.err and "calibrate" not in captured.out
    assert not (tmp_path / "other").exists()
