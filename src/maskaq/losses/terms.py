"""Loss terms: a function of a view, known by its name, weighed by the recipe. Both stages build their objective here.

    @synthesis_term
    def brightness(v: SynthesisView) -> Tensor:      # (B,)
        return v.images.mean(dim=(1, 2, 3)).square()

and `load_recipe("paper", "synthesis.terms.brightness=0.1")` switches it on. Each term gives one number per image, so
that images do not feel the batch they are in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq.errors import RecipeError, unknown
from maskaq.losses import attention, dense, distill, image, targets
from maskaq.randomness import fold, uniform
from maskaq.shapes import Geometry, Layer

Term = Callable[[Any], Tensor]


class LossRunner:
    """Evaluates loss functions as they are written. The fast engine replaces those it has kernels for."""

    def __call__(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return function(*arguments)

    def over_maps(self, function: Callable[[Tensor], Tensor], view: "SynthesisView") -> Tensor:
        """(B,): a function of a layer's maps, averaged over the layers."""
        return torch.stack([function(maps) for maps in view.patch_maps]).mean(dim=0)


@dataclass
class SynthesisView:
    """All that a synthesis term may see. Raw maps are (B*W, H, T, T); `layers` turn them into one form."""

    images: Tensor
    """(B, C, H, W) as optimised, not jittered."""
    labels: Tensor
    """(B,) target classes, or -1 where the task has none."""
    outputs: Mapping[str, Tensor]
    """The teacher's, of the jittered images, by name, as `Task.run` gives them."""
    layers: Sequence[Layer]
    maps: Sequence[Tensor]
    """The teacher's attention maps, one per layer. Rows may be padded: `patch_maps` are in the form of the losses."""
    attention: Sequence[Tensor] = ()
    """alpha: the teacher's attention to each patch, (B, N), one per layer."""
    student_attention: Sequence[Tensor] = ()
    student_maps: Sequence[Tensor] = ()
    """The student's attention maps, in the form of `maps`."""
    student_outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The student's, of the jittered images, where a term needs the student."""
    shares: Tensor | None = None
    """(B, C) shares of the classes, where an image is made for several."""
    masks: Mapping[tuple[int, int], Tensor] | None = None
    """m' of each patch grid: (B, N). A ViT has one grid, Swin one for each stage."""
    keys: Tensor | None = None
    """(B,) per-image random keys, constant over the steps."""
    heads: Sequence[Tensor] = ()
    """The teacher's head outputs, (B*W, H, T, D), one per layer."""
    received: Sequence[Tensor] = ()
    """The probability that each token receives in the teacher, (B*W, H, T), one per layer."""
    layout: Mapping[str, Tensor] = field(default_factory=dict)
    """What each image is made for, where that is more than a class, by name: see `Task.layouts`."""
    regions: targets.Regions | None = None
    """The parts of each image that are images of their own."""
    region: Tensor | None = None
    """(B,) the region that this step classifies."""
    region_logits: Tensor | None = None
    """The teacher's logits for that region."""
    run: LossRunner = LossRunner()

    @property
    def logits(self) -> Tensor:
        return _named(self.outputs, "logits")

    @cached_property
    def patch_maps(self) -> list[Tensor]:
        """The teacher's maps of patches only, (B, W, H, Q, K): cut out once, for all terms that read them."""
        return [layer.maps(raw) for layer, raw in zip(self.layers, self.maps, strict=True)]


@dataclass
class CalibrationView:
    """All that a calibration term may see."""

    layers: Sequence[Layer]
    outputs: Mapping[str, Tensor]
    """The teacher's, by name, as `Task.run` gives them."""
    student_outputs: Mapping[str, Tensor]
    heads: Sequence[Tensor] = ()
    """The teacher's head outputs, (B*W, H, T, D), one per layer."""
    student_heads: Sequence[Tensor] = ()
    blocks: Sequence[Tensor] = ()
    student_blocks: Sequence[Tensor] = ()
    patch_weights: Sequence[Tensor] = ()
    """w_l of Eq. 16: (B, N) of each layer."""
    labels: Tensor | None = None
    """(B,) classes that the images were made for, -1 for none."""
    shares: Tensor | None = None
    """(B, C) shares of the classes, where an image is made for several."""
    temperature: float = 1.0
    run: LossRunner = LossRunner()

    @property
    def logits(self) -> Tensor:
        return _named(self.outputs, "logits")

    @property
    def student_logits(self) -> Tensor:
        return _named(self.student_outputs, "logits")


def _named(outputs: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in outputs:
        has = ", ".join(outputs) or "none"
        raise RecipeError(f"a loss term reads {name}, and this model has {has}: set its weight to 0")
    return outputs[name]


def _all_named(outputs: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    return [_named(outputs, name) for name in names]


@dataclass(frozen=True)
class TermSpec:
    name: str
    function: Term
    needs: tuple[str, ...]
    """What must be computed for it. Synthesis: "maps", "student", "student_maps", "masks", "heads", "received",
    "regions"; calibration: "heads", "blocks"."""

    @property
    def built_in(self) -> bool:
        return self.function.__module__.startswith("maskaq.")

    @property
    def doc(self) -> str:
        return (self.function.__doc__ or "").strip().split("\n")[0]


_RESERVED = {"loss", "lr", "step", "stage", "round", "shard", "epoch", "seconds", "lost", "curves", "time"}
"""Names that events.jsonl and loss curves use for something else."""

SYNTHESIS_TERMS: dict[str, TermSpec] = {}
CALIBRATION_TERMS: dict[str, TermSpec] = {}


def _register(terms: dict[str, TermSpec], function: Term | None, needs: tuple[str, ...]) -> Any:
    def add(function: Term) -> Term:
        name = function.__name__
        if name in terms or name in _RESERVED:
            raise ValueError(f"term {name!r} exists already, or is a word of a run's records: choose another name")
        terms[name] = TermSpec(name, function, needs)
        return function

    return add if function is None else add(function)


def synthesis_term(function: Term | None = None, *, needs: tuple[str, ...] = ()) -> Any:
    """Decorator: a function of a SynthesisView giving (B,) becomes a term under its own name."""
    return _register(SYNTHESIS_TERMS, function, needs)


def calibration_term(function: Term | None = None, *, needs: tuple[str, ...] = ()) -> Any:
    """Decorator: a function of a CalibrationView giving (B,) becomes a term under its own name."""
    return _register(CALIBRATION_TERMS, function, needs)


_OF_LAYERS = frozenset({"maps", "masks", "heads", "received"})


def possible(weights: Mapping[str, float], terms: Mapping[str, TermSpec], geometry: Geometry) -> dict[str, float]:
    """The terms of a recipe without those that need attention over patches, or blocks, where a model has none."""
    lacking = (_OF_LAYERS if not geometry.layers else frozenset()) | ({"blocks"} if not geometry.blocks else set())
    return {name: w for name, w in weights.items() if name not in terms or not lacking & set(terms[name].needs)}


class Objective:
    """A weighted sum of terms: call it with a view, get (B,) totals and, detached, (B,) of each part."""

    def __init__(self, terms: Mapping[str, TermSpec], weights: Mapping[str, float], section: str) -> None:
        for name in weights:
            if name not in terms:
                raise RecipeError(f"[{section}] {unknown('term', name, terms)}")
        self.section = section
        self.parts = [(terms[name], weight) for name, weight in weights.items() if weight]
        if not self.parts:
            raise RecipeError(
                f"[{section}] no term is left to optimise: all have weight 0, or none suits the model's task"
            )
        self.needs = {need for term, _ in self.parts for need in term.needs}
        self.own = [term.name for term, _ in self.parts if not term.built_in]
        """The terms that are the user's."""

    def __call__(self, view: Any) -> tuple[Tensor, dict[str, Tensor]]:
        values = {term.name: self._checked(term, term.function(view), view) for term, _ in self.parts}
        total = torch.stack([weight * values[term.name] for term, weight in self.parts]).sum(dim=0)
        return total, {name: value.detach() for name, value in values.items()}

    def weighted(self, view: Any) -> dict[str, Tensor]:
        """Weighted value of each term, with gradients: for diagnosing non-finite values."""
        return {term.name: weight * self._checked(term, term.function(view), view) for term, weight in self.parts}

    def _checked(self, term: TermSpec, value: Any, view: Any) -> Tensor:
        """A term's value, checked to be one number per image. Reads no value, which would wait for the device."""
        output = next(iter(view.outputs.values()))
        images = len(output)
        device = output.device
        if not isinstance(value, Tensor):
            found = type(value).__name__
        elif value.shape != (images,) or not value.is_floating_point() or value.device != device:
            found = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)} on {value.device}"
        else:
            return value
        wanted = f"one floating-point number per image, a tensor of shape ({images},) on {device}"
        raise RecipeError(f"{self.section}.{term.name}: expected {wanted}, got {found}")

    def check_gradient(self, total: Tensor, of: str) -> None:
        """RecipeError where no term depends on what is optimised."""
        if not total.requires_grad:
            names = ", ".join(term.name for term, _ in self.parts)
            raise RecipeError(
                f"{self.section}: expected a term that depends on {of}, got {names}, which has no gradient"
            )

    def blame(self, names: Sequence[str]) -> str:
        """Advice about user-defined terms that gave NaN or Inf; empty if a built-in term did too."""
        if not names or not set(names) <= set(self.own):
            return ""
        which = " and ".join(f"{self.section}.{name}" for name in names)
        return f"{which} gave NaN or Inf, or has such a gradient: check what it computes, or set its weight to 0"


@synthesis_term
def class_prior(v: SynthesisView) -> Tensor:
    """L_OH (Eq. 1): cross-entropy of the teacher's prediction and the label."""
    return _cross_entropy(v.logits, v)


def _cross_entropy(logits: Tensor, v: "SynthesisView | CalibrationView") -> Tensor:
    """With the shares of several classes where there are such, else with the label; 0 without a label."""
    if v.shares is not None:
        return _soft_cross_entropy(logits, v.shares)
    assert v.labels is not None
    return F.cross_entropy(logits, v.labels, reduction="none", ignore_index=-1)


@synthesis_term
def total_variation(v: SynthesisView) -> Tensor:
    """L_TV (Eq. 2): squared differences of neighbouring pixels."""
    return v.run(image.total_variation, v.images)


@synthesis_term
def total_variation_norm(v: SynthesisView) -> Tensor:
    """L_TV as the release computes it: L2 norms in four directions."""
    return v.run(image.total_variation_norm, v.images)


@synthesis_term(needs=("maps",))
def head_similarity(v: SynthesisView) -> Tensor:
    """L_IH (Eq. 3): the heads of a layer should attend alike, 1 - SSIM."""
    return v.run.over_maps(attention.head_similarity, v)


@synthesis_term(needs=("maps",))
def head_similarity_squared(v: SynthesisView) -> Tensor:
    """L_IH as the release computes it: 1 - SSIM^2."""
    return v.run.over_maps(attention.head_similarity_squared, v)


@synthesis_term(needs=("maps",))
def similarity_entropy(v: SynthesisView) -> Tensor:
    """L_fb (Eq. 10): minus the entropy of patch similarities; object apart from background."""
    return v.run.over_maps(attention.similarity_entropy, v)


@synthesis_term(needs=("maps",))
def similarity_histogram(v: SynthesisView) -> Tensor:
    """L_fb as a histogram (Eqs. 6-7): minus the Shannon entropy of patch similarities, sum over layers."""
    return torch.stack([v.run(attention.similarity_histogram, maps) for maps in v.patch_maps]).sum(dim=0)


@synthesis_term(needs=("student", "masks"))
def attention_alignment(v: SynthesisView) -> Tensor:
    """L_align (Eq. 14): teacher and student attend alike inside the thinned mask m', sum over layers."""
    return torch.stack(_masked_differences(v)).sum(dim=0)


@synthesis_term(needs=("student", "masks"))
def attention_alignment_mean(v: SynthesisView) -> Tensor:
    """L_align as the release computes it: the mean over layers, in place of Eq. 14's sum."""
    return torch.stack(_masked_differences(v)).mean(dim=0)


def _masked_differences(v: SynthesisView) -> list[Tensor]:
    assert v.masks is not None
    layers = zip(v.layers, v.attention, v.student_attention, strict=True)
    return [attention.masked_difference(p, q, v.masks[layer.grid]) for layer, p, q in layers]


@synthesis_term(needs=("maps", "student", "student_maps", "masks"))
def attention_alignment_maps(v: SynthesisView) -> Tensor:
    """L_align (Eq. 14) to the letter, on N x N maps: the masked keys of every query, sum over layers."""
    assert v.masks is not None
    found = []
    for layer, p, raw in zip(v.layers, v.patch_maps, v.student_maps, strict=True):
        mask = layer.in_windows(v.masks[layer.grid], p.shape[-1])
        found.append(v.run(attention.masked_map_difference, p, layer.maps(raw), mask))
    return torch.stack(found).sum(dim=0)


# ---- terms of segmenters and detectors (docs/METHOD.md, Sec. 8)

_PROPOSALS = ("objectness", "deltas")
_HEADS = ("class_logits", "box_deltas", "mask_logits")


@synthesis_term
def pixel_prior(v: SynthesisView) -> Tensor:
    """The class prior of a segmenter: cross-entropy of every pixel and a random class map."""
    return v.run(dense.pixel_loss, v.logits, *_all_named(v.layout, "classes"))


@synthesis_term
def object_prior(v: SynthesisView) -> Tensor:
    """The class prior of a detector: its training losses towards random objects."""
    objects, labels, present = _all_named(v.layout, "objects", "labels", "present")
    proposals = _all_named(v.outputs, *_PROPOSALS, "anchors")
    heads = _all_named(v.outputs, *_HEADS, "boxes")
    return v.run(dense.proposal_loss, *proposals, objects, present) + v.run(
        dense.roi_loss, *heads, objects, labels, present
    )


# ---- terms of other methods (docs/METHOD.md, Sec. 6)


@synthesis_term(needs=("heads",))
def patch_entropy(v: SynthesisView) -> Tensor:
    """PSAQ-ViT: minus the entropy of the similarities of patch outputs, by kernel density, sum over layers."""
    layers = zip(v.layers, v.heads, strict=True)
    losses = [v.run(attention.patch_entropy, layer.window_patches(raw).to(v.images.dtype)) for layer, raw in layers]
    return torch.stack(losses).sum(dim=0)


@synthesis_term
def total_variation_target(v: SynthesisView) -> Tensor:
    """PSAQ-ViT: distance of the total variation from a target, U(2500, 3000) for each image."""
    assert v.keys is not None
    target = 2500 + 500 * uniform(fold(v.keys, "variation")).to(v.images.dtype)
    return v.run(image.total_variation_target, v.images, target)


@synthesis_term(needs=("received",))
def attention_prior(v: SynthesisView) -> Tensor:
    """SARDFQ: attention of the later layers (l >= L/2, weight l/L) should be a random Gaussian mixture in each head."""
    assert v.keys is not None
    keys = fold(v.keys, "attention prior")
    depth = len(v.layers)
    losses = []
    for number, (layer, raw) in enumerate(zip(v.layers, v.received, strict=True), start=1):
        if 2 * number >= depth:
            received = layer.window_patches(raw).to(v.images.dtype)  # (B, W, H, Q)
            positions = layer.window_positions(received.shape[3], raw.device)
            prior = v.run(targets.mixtures, fold(keys, number), received.shape[2], positions)
            losses.append(number / depth * v.run(attention.prior_difference, received, prior))
    return torch.stack(losses).sum(dim=0)


@synthesis_term
def soft_class_prior(v: SynthesisView) -> Tensor:
    """SARDFQ: cross-entropy of the teacher's prediction and a random soft label, with the classes of all regions."""
    assert v.keys is not None
    labels = v.labels[:, None] if v.regions is None else v.regions.labels
    present = torch.ones_like(labels, dtype=torch.bool) if v.regions is None else v.regions.present
    wanted = targets.soft_labels(fold(v.keys, "soft label"), labels, present, v.logits.shape[1])
    return _soft_cross_entropy(v.logits, wanted)


@synthesis_term(needs=("student",))
def output_gap(v: SynthesisView) -> Tensor:
    """PSAQ-ViT V2: minus the mean absolute difference of the outputs of teacher and student, which it widens."""
    gaps = [(p - v.student_outputs[name]).abs().flatten(1).mean(dim=1) for name, p in v.outputs.items()]
    return -torch.stack(gaps).sum(dim=0)


@synthesis_term(needs=("heads",))
def patch_contrast(v: SynthesisView) -> Tensor:
    """CLAMP-ViT: each patch resembles the most alike of its neighbours more than the others, mean over layers."""
    losses = []
    for layer, raw in zip(v.layers, v.heads, strict=True):
        patches = layer.raster_heads(raw).to(v.images.dtype)
        losses.append(v.run(attention.patch_contrast, patches.unflatten(1, layer.grid)))
    return torch.stack(losses).mean(dim=0)


@synthesis_term(needs=("student",))
def difference_prior(v: SynthesisView) -> Tensor:
    """AdaDFQ: cross-entropy of what the teacher's logits have more than the student's, and the label."""
    return _cross_entropy(v.logits - _named(v.student_outputs, "logits"), v)


@synthesis_term(needs=("student",))
def sum_prior(v: SynthesisView) -> Tensor:
    """AdaDFQ: cross-entropy of the sum of the teacher's and the student's logits, and the label."""
    return _cross_entropy(v.logits + _named(v.student_outputs, "logits"), v)


@synthesis_term(needs=("student",))
def entropy_margin(v: SynthesisView) -> Tensor:
    """AdaDFQ: how far the disagreement of teacher and student is outside a margin; it feels the batch."""
    return v.run(distill.entropy_margin, v.logits, _named(v.student_outputs, "logits"))


@synthesis_term(needs=("regions",))
def region_prior(v: SynthesisView) -> Tensor:
    """SARDFQ: cross-entropy of the teacher's prediction for a region alone, enlarged, and the region's soft label."""
    assert v.keys is not None and v.regions is not None and v.region is not None and v.region_logits is not None
    label = v.regions.labels.gather(1, v.region[:, None])  # (B, 1)
    keys = fold(fold(v.keys, "region label"), v.region)
    wanted = targets.soft_labels(keys, label, torch.ones_like(label, dtype=torch.bool), v.region_logits.shape[1])
    return _soft_cross_entropy(v.region_logits, wanted)


def _soft_cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits, wanted.to(logits.dtype), reduction="none")


@calibration_term
def logit_kl(v: CalibrationView) -> Tensor:
    """KL between the softened predictions of teacher and student."""
    return v.run(distill.logit_kl, v.logits, v.student_logits, v.temperature)


@calibration_term
def logit_kl_mean(v: CalibrationView) -> Tensor:
    """KL as GDFQ averages it, over classes too: so many times weaker than `logit_kl` as there are classes."""
    return v.run(distill.logit_kl, v.logits, v.student_logits, v.temperature) / v.logits.shape[1]


@calibration_term
def logit_mae(v: CalibrationView) -> Tensor:
    """PSAQ-ViT V2: mean absolute difference of the logits of teacher and student."""
    return (v.logits - v.student_logits).abs().mean(dim=1)


@calibration_term
def label_loss(v: CalibrationView) -> Tensor:
    """Cross-entropy of the student's prediction and the class that the image was made for; 0 where it has none."""
    return _cross_entropy(v.student_logits, v)


@calibration_term
def difference_entropy(v: CalibrationView) -> Tensor:
    """AdaDFQ: minus the entropy of what the teacher's logits have more than the student's, softened by 5."""
    return -v.run(distill.entropy, (v.logits - v.student_logits) / 5)


@calibration_term
def feature_error(v: CalibrationView) -> Tensor:
    """Relative squared error of the model's output, for models that give features (not in the paper)."""
    pairs = ((found, v.student_outputs[name]) for name, found in v.outputs.items())
    return torch.stack([v.run(distill.relative_error, teacher, student) for teacher, student in pairs]).sum(dim=0)


@calibration_term
def pixel_kl(v: CalibrationView) -> Tensor:
    """KL between the predictions of teacher and student, mean over the pixels, for segmenters (not in the paper)."""
    if v.logits.dim() != 4:
        raise RecipeError("pixel_kl reads logits of every pixel, and this model is no segmenter: set its weight to 0")
    return v.run(dense.pixel_kl, v.logits, v.student_logits)


@calibration_term
def detection_gap(v: CalibrationView) -> Tensor:
    """Proposals and RoI heads of teacher and student on the same boxes: KL, boxes and masks (not in the paper)."""
    both = v.outputs, v.student_outputs
    proposals, heads = ([x for o in both for x in _all_named(o, *names)] for names in (_PROPOSALS, _HEADS))
    return v.run(dense.proposal_gap, *proposals) + v.run(dense.roi_gap, *heads)


@calibration_term
def pyramid_error(v: CalibrationView) -> Tensor:
    """Relative squared error of the feature pyramid, mean over its levels, for detectors (not in the paper)."""
    levels = [name for name in v.outputs if name.startswith("pyramid_")] or ["pyramid_0"]
    pairs = zip(_all_named(v.outputs, *levels), _all_named(v.student_outputs, *levels), strict=True)
    return torch.stack([v.run(dense.map_error, p, q) for p, q in pairs]).mean(dim=0)


def _over_heads(function: Callable[[Tensor, Tensor, Tensor], Tensor], v: CalibrationView) -> Tensor:
    layers = zip(v.layers, v.heads, v.student_heads, v.patch_weights, strict=True)
    return torch.stack([v.run(_of_patches, function, *layer) for layer in layers]).mean(dim=0)


def _of_patches(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], layer: Layer, teacher: Tensor, student: Tensor, w: Tensor
) -> Tensor:
    """Patches are cut out in here, so that a compiler sees it too and need not copy the gradient to put them back."""
    return function(layer.patch_heads(teacher), layer.patch_heads(student), w)


@calibration_term(needs=("heads",))
def head_structure(v: CalibrationView) -> Tensor:
    """L_Q (Eq. 16), D = structural SSIM over patches for each head and channel."""
    return _over_heads(distill.head_structure, v)


@calibration_term(needs=("heads",))
def head_cosine(v: CalibrationView) -> Tensor:
    """L_Q (Eq. 16), D = 1 - cosine of each patch's head output."""
    return _over_heads(distill.head_cosine, v)


@calibration_term(needs=("heads",))
def head_mse(v: CalibrationView) -> Tensor:
    """L_Q (Eq. 16), D = relative squared error of each patch's head output."""
    return _over_heads(distill.head_mse, v)


@calibration_term(needs=("blocks",))
def block_error(v: CalibrationView) -> Tensor:
    """Relative squared error of every block's output (not in the paper)."""
    return distill.mean_relative_error(v.blocks, v.student_blocks, partial(v.run, distill.relative_error))
