"""The paper to the letter: its settings are the recipe `paper`, and each literal reading is a setting that runs."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import mostly_slow, pair, small_recipe, tensors, tiny_swin, tiny_vit
from test_peers import PACKED, PADDED, Seen
from torch import Tensor
from torch.autograd import gradcheck

from maskaq.calibrate.calibrator import Calibrator
from maskaq.images.synthesis import Synthesizer
from maskaq.losses import attention
from maskaq.losses.terms import SYNTHESIS_TERMS, SynthesisView
from maskaq.models import expose
from maskaq.quant.plan import build_plan
from maskaq.quant.quantizers import make_quantizer
from maskaq.quant.site import Site
from maskaq.recipe.schema import load_recipe
from maskaq.runs.quantize import quantize

METHOD = (Path(__file__).parents[1] / "docs/METHOD.md").read_text()


def test_every_number_of_the_papers_section_3_1_is_in_the_recipe_paper():
    """Its paragraphs "Quantization" and "Implementation Details", sentence by sentence."""
    recipe = load_recipe("paper")
    synthesis, calibration = recipe.synthesis, recipe.calibration
    # "the Adam optimizer is adopted with a learning rate of 0.1, momentum coefficients of beta_1=0.9 and beta_2=0.999,
    # and a batch size of 32"
    assert (synthesis.lr, synthesis.beta1, synthesis.beta2, synthesis.batch) == (0.1, 0.9, 0.999, 32)
    # "We produce 10,000 synthetic samples and optimize each batch for 2,000 steps with alpha=1.0 and beta=2.5e-5"
    assert (synthesis.images, synthesis.steps) == (10_000, 2_000)
    assert (synthesis.terms["head_similarity"], synthesis.terms["total_variation"]) == (1.0, 2.5e-5)
    # "initialized from Gaussian noise" (its Sec. 2.1.1), and the one-hot loss without a weight
    assert (synthesis.start, synthesis.terms["class_prior"]) == ("noise", 1.0)
    # "the SGD optimizer is employed with Nesterove momentum of 0.9, a learning rate of 1e-3 and a batch size of 16; Q
    # is calibrated for 200 epochs in total"
    assert (calibration.optimizer, calibration.momentum, calibration.lr) == ("sgd", 0.9, 1e-3)
    sgd = Calibrator(*pair(recipe), recipe).optimizer
    assert all(
        (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.9, True, 0) for group in sgd.param_groups
    )
    assert (calibration.batch, calibration.epochs, calibration.stages) == (16, 200, ("calibrate",))
    # "lambda_fb and lambda_align in Eq. 15, the weight w, are set as 1.0, 0.1 and 2"
    assert (synthesis.terms["similarity_entropy"], synthesis.terms["attention_alignment"]) == (1.0, 0.1)
    assert calibration.mask_weight == 2
    # "we dynamically anneal k in Eq. 11 over training, reducing it from 50% to 10% of N"
    assert (synthesis.mask.start, synthesis.mask.end) == (0.5, 0.1)
    # "k_min and p_drop in Eq. 13 are set as 1 and 0.3"
    assert (synthesis.mask.keep_at_least, synthesis.mask.drop) == (1, 0.3)
    # "for both sample synthesis and network calibration processes, we employ data augmentations from SimCLR": its
    # defaults (Chen et al. 2020, appendix A) in calibration; in synthesis the release's; SimCLR's are a reading below
    assert synthesis.views == "jitter"
    augment = calibration.augment
    assert (augment.crop, augment.flip, augment.grey, augment.blur) == ((0.08, 1.0), 0.5, 0.2, 0.5)
    jitter = (augment.brightness, augment.contrast, augment.saturation, augment.hue, augment.jitter_prob)
    assert jitter == (0.8, 0.8, 0.8, 0.2, 0.8) and augment.cutmix == augment.mixup == 0
    # "a uniform quantization strategy ... of both weights and activations", every layer at the same bits
    assert (recipe.quantization.weight, recipe.quantization.activation) == ("minmax", "lsq")
    assert (recipe.quantization.first_last, recipe.quantization.rotate) == ("same", ())
    assert {site.bits for site in build_plan(expose(tiny_vit()), recipe.quantization)} == {4}
    # "at fixed intervals" (its Sec. 2.3.3) says no number: the release's 30 epochs, and Algorithm 1's same images
    assert (recipe.refresh.every, recipe.refresh.start, len(recipe.rounds)) == (30, "warm", 7)
    assert sum(synthesis.terms.values()) == 3.1 + 2.5e-5  # and no other term
    assert calibration.terms == {"logit_kl": 1.0, "head_structure": 10.0}  # the release's: the paper has L_Q alone


def test_the_recipe_reference_has_what_the_release_does_otherwise_and_nothing_else():
    paper, reference = load_recipe("paper"), load_recipe("reference")
    terms = paper.synthesis.terms | {"head_similarity": 0.0, "total_variation": 0.0, "attention_alignment": 0.0}
    terms |= {"head_similarity_squared": 1.0, "attention_alignment_mean": 0.1}
    terms |= {"total_variation_norm": 2.5e-5 * math.sqrt(16)}  # a norm over its batch of 16
    grids = {"weight": "minmax_full", "activation": "lsq_free", "activation_range": "minmax"}
    assert reference == replace(
        paper,
        quantization=replace(paper.quantization, **grids),
        synthesis=replace(paper.synthesis, terms=terms),
        calibration=replace(paper.calibration, augment=replace(paper.calibration.augment, blur=1.0)),
        refresh=replace(paper.refresh, start="cold"),
    )


# ---------------------------------------------------------------- literal readings

READINGS = {
    "L_align over layers' mean": ("attention_alignment=0", "attention_alignment_mean=0.1"),
    "L_align on N x N maps": ("attention_alignment=0", "attention_alignment_maps=0.1"),
    "L_fb as a histogram": ("similarity_entropy=0", "similarity_histogram=1"),
    "A after the softmax": ("synthesis.map=probs",),
    "SimCLR in synthesis": ("synthesis.views=simclr",),
    "L_Q alone": ("calibration.terms.logit_kl=0", "calibration.terms.head_structure=1"),
    "zero points' gradient": ("quantization.activation=lsq_free",),
    "largest weights' gradient": ("quantization.weight=minmax_full",),
}
READINGS = {
    name: [word if "." in word.split("=")[0] else f"synthesis.terms.{word}" for word in words]
    for name, words in READINGS.items()
}


@pytest.mark.parametrize("overrides", mostly_slow(READINGS, "L_align on N x N maps"))
def test_every_literal_reading_is_a_setting_that_runs_and_changes_the_model(tmp_path, overrides):
    assert f"`{' '.join(overrides)}`" in METHOD
    small = ("synthesis.images=4", "calibration.epochs=2", "refresh.every=0")
    models = []
    for name, more in (("whole", ()), ("literal", overrides)):
        result = quantize(tiny_vit(), small_recipe(*small, *more), tmp_path / name, report=False, keep="last")
        *_, checkpoint = sorted((tmp_path / name / "checkpoints").glob("*.safetensors"))  # with unrounded zero points
        models.append(tensors(tmp_path / name / PACKED) | tensors(checkpoint) | {"images": result.images.images})
    shared = models[0].keys() & models[1].keys()
    assert any(not torch.equal(models[0][key], models[1][key]) for key in shared)


def seen_by(build, *overrides: str) -> SynthesisView:
    """What the first step of a tiny model sees."""
    recipe = small_recipe(*overrides)
    make = Synthesizer(*pair(recipe, build), recipe)

    class Spy:
        needs = make.objective.needs

        def __call__(self, v: SynthesisView):
            raise Seen(v)

    make.objective = Spy()  # type: ignore[assignment]
    with pytest.raises(Seen) as seen:
        make(torch.arange(2))
    found: SynthesisView = seen.value.args[0]
    return found


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin, PADDED])
def test_alignment_on_whole_maps_equals_the_loop_over_queries_and_masked_keys(build):
    v = seen_by(build, "synthesis.terms.attention_alignment_maps=1")
    wanted = [0.0, 0.0]
    for layer, p, q in zip(v.layers, v.maps, v.student_maps, strict=True):
        mask, (p, q) = v.masks[layer.grid], (layer.maps(x) for x in (p, q))
        windows, tokens = p.shape[1], p.shape[-1]
        place = list(range(mask.shape[1])) if layer.raster is None else layer.raster.tolist()
        for b, n in itertools.product(range(2), range(mask.shape[1])):
            if mask[b, n]:
                w, key = divmod(place[n], tokens)
                assert w < windows
                gaps = (p[b, w, :, :, key].mean(dim=0) - q[b, w, :, :, key].mean(dim=0)).abs()
                wanted[b] += gaps.sum().item() / mask[b].sum().item()
    got = SYNTHESIS_TERMS["attention_alignment_maps"].function(v)
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(got.sum(), v.images)[0].abs().sum() > 0


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_the_releases_alignment_is_the_papers_over_the_number_of_layers(build):
    v = seen_by(build)
    paper, mean = (SYNTHESIS_TERMS[name].function(v) for name in ("attention_alignment", "attention_alignment_mean"))
    torch.testing.assert_close(mean, paper / len(v.layers))


def loop_histogram_entropy(windows: list) -> float:
    """H(p) of one image: (W, H, Q, K) maps; shares of each similarity to its two nearest of 64 centres."""
    counts = [0.0] * 64
    for window in windows:
        heads, queries = len(window), len(window[0])
        rows = [[sum(window[h][q][k] for h in range(heads)) / heads for k in range(queries)] for q in range(queries)]
        for i, j in itertools.permutations(range(queries), 2):
            cosine = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
            place = (cosine / math.hypot(*rows[i]) / math.hypot(*rows[j]) + 1) / 2 * 63
            low = min(int(place), 62)
            counts[low] += low + 1 - place
            counts[low + 1] += place - low
    total = sum(counts)
    return -sum(c / total * math.log(c / total) for c in counts if c > 0)


def test_the_histogram_entropy_equals_the_loop_and_has_the_gradient_of_finite_differences():
    maps = torch.randn(3, 2, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = [-loop_histogram_entropy(x) for x in maps.tolist()]
    torch.testing.assert_close(attention.similarity_histogram(maps), torch.tensor(wanted, dtype=torch.float64))
    assert gradcheck(attention.similarity_histogram, maps.requires_grad_(), eps=1e-7, atol=1e-4)


def test_equal_patches_and_a_single_one_have_a_finite_histogram():
    for maps in (torch.ones(2, 1, 2, 4, 4), torch.zeros(2, 1, 2, 4, 4), torch.ones(2, 3, 2, 1, 1)):
        value = attention.similarity_histogram(maps.requires_grad_())
        (gradient,) = torch.autograd.grad(value.sum(), maps)
        assert value.isfinite().all() and gradient.isfinite().all()
        assert (value <= 0).all() and (value > -0.7).all()


def test_views_of_simclr_move_the_images_and_stay_pixels():
    recipe = small_recipe("synthesis.views=simclr", "synthesis.images=4")
    make = Synthesizer(*pair(recipe), recipe)
    still = Synthesizer(*pair(recipe), small_recipe("synthesis.views=simclr", "synthesis.lr=0"))
    moved, start = make(torch.arange(4)).images.int(), still(torch.arange(4)).images.int()
    assert ((moved - start).abs().flatten(1).amax(dim=1) > 0).all()


# ---------------------------------------------------------------- weights on a tie, zero points


def weight_quantizer(name: str, bits: int):
    return make_quantizer(name, Site("w", "weight", bits, True, 64, name))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_device_can_disagree_on_the_codes_of_minmax_full(bits):
    weights = torch.randn(64, 33, generator=torch.Generator().manual_seed(1))
    quantizer = weight_quantizer("minmax_full", bits)
    quantizer.set_range(weights, "minmax")
    codes = quantizer.codes(weights)
    low, high = quantizer.low, quantizer.high
    for steps in (weights / quantizer.scale[:, None], weights * (1 / quantizer.scale[:, None])):  # two roundings
        assert torch.equal(steps.round().clamp(low, high).int(), codes)
    largest = weights.abs().argmax(dim=1, keepdim=True)
    outer = torch.where(weights.gather(1, largest) < 0, low, high)
    assert torch.equal(codes.gather(1, largest).long(), outer.long())
    tied = weight_quantizer("minmax", bits)
    tied.set_range(weights, "minmax")
    assert ((weights.abs().amax(dim=1) / tied.scale) - (2**bits - 1) / 2).abs().max() < 1e-4  # what it mends


def test_every_weight_of_minmax_full_has_a_gradient_and_the_forward_pass_is_its_codes():
    for name, all_have in (("minmax", False), ("minmax_full", True)):
        weights = torch.randn(64, 33, generator=torch.Generator().manual_seed(1)).abs().requires_grad_()
        quantizer = weight_quantizer(name, 4)
        with torch.no_grad():
            quantizer.set_range(weights, "minmax")
        values = quantizer(weights)
        values.sum().backward()
        assert bool((weights.grad == 1).all()) == all_have
        assert torch.equal(values.detach(), quantizer.dequantize(quantizer.codes(weights.detach())))


def test_the_zero_point_of_lsq_free_has_its_whole_gradient_and_the_scale_the_same():
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3
    gradients = []
    for name in ("lsq", "lsq_free"):
        quantizer = make_quantizer(name, Site("x", "activation", 4, True, quantizer=name))
        quantizer.set_range(x / 3, "minmax")  # some values are outside
        (quantizer(x) * x).sum().backward()
        gradients.append((quantizer.scale.grad.clone(), quantizer.zero_point.grad.clone()))
    (scale, zero), (scale_free, zero_free) = gradients
    torch.testing.assert_close(scale, scale_free)
    torch.testing.assert_close(zero_free, zero * math.sqrt(500 * 15))
    assert zero_free.abs() > 0


def test_the_informative_region_holds_the_mask_even_where_the_mask_is_larger():
    recipe = small_recipe("synthesis.mask.region=0.1", "synthesis.mask.start=1", "synthesis.mask.end=1")
    make = Synthesizer(*pair(recipe), recipe)
    attention_rows: list[Tensor] = [torch.rand(2, 16) for _ in range(2)]
    region, mask, thinned = make.last_masks(attention_rows, torch.arange(2), 0)
    assert torch.equal(region[4, 4], mask[4, 4]) and mask[4, 4].sum() == 32 and (thinned[4, 4] <= mask[4, 4]).all()
