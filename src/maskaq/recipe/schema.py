"""The recipe: every setting of a run, its default, its meaning and its limits, each in one place.

A recipe is a small TOML file of overrides over the defaults here; it may start from another (`extends = "paper"`).
The table `alone` of a recipe applies only if the recipe is used on its own.
`a+b` applies b on top of a, and both on top of what they extend: `quick+mimiq` is `paper`, then `quick`, then `mimiq`.
So a budget and a method can be combined. `images:DIR`, as the last one, is a folder of real images.
Unknown keys, wrong types and impossible values are errors that name the key and what is allowed.
"""

import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from maskaq.errors import RecipeError, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def setting(default: Any, doc: str, *, low: float | None = None, high: float | None = None, choices: Any = None) -> Any:
    """A dataclass field with its documentation and limits; `maskaq list keys` prints them."""
    metadata = {"doc": doc, "low": low, "high": high, "choices": choices}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


STAGES = ("relu", "reparametrize", "search", "evolve", "reconstruct", "interleave", "calibrate", "correct")
"""The stages of calibration, in the order in which they run: see `maskaq.calibrate`."""

RANGES = ("minmax", "percentile", "mse", "relative", "best_percentile", "lsq")
"""How a first range is found: see `maskaq.quant.ranges`."""

ROTATIONS = ("heads", "residual", "hidden")
"""What can be rotated before it is quantized: see `maskaq.quant.rotation`."""

TARGETS = ("cpu", "openvino", "symmetric")
"""What grids are made for: see `Quantization.target`."""

_IMAGES = "images:"
_ALONE = "alone"
"""The table of a recipe that applies only if the recipe is used on its own: a method's own budget and protocol."""
_DEEPEST = 32  # levels of `extends`
_TOO_DEEP = "expected settings in one or two tables, got values nested too deeply"
_MOST_IMAGES = 10_000_000  # this and the next are upper bounds that catch typos
_MOST_STEPS = 1_000_000
# Beyond these, values overflow float32 or nothing is left to learn: an error message instead of Inf.
_LARGEST_LR = 1_000
_LARGEST_WEIGHT = 1_000_000_000
_LARGEST_CHANGE = 100

_RENAMED_VALUES = {"synthesis.start": {"leaves": "dead_leaves"}}
"""Dotted key -> old value -> new value. Recipes and run folders with the old value still work."""

_REMOVED = dict.fromkeys(("calibration.average", "calibration.float_weights", "calibration.terms.class_feature"), 0)
"""Dotted key of a removed setting -> the value that switched it off, which older recipes may still contain."""


@dataclass(frozen=True)
class Bits:
    """Bit widths of weights and activations, written `w4a8`; or mixed, `mixed:3.5` or `mixed:3.5a8`."""

    weight: int
    activation: int
    average: float | None = None
    """Mixed precision: the average width of all weights, which is chosen layer by layer."""

    @classmethod
    def parse(cls, text: str) -> "Bits":
        words = text.strip().lower()
        if match := re.fullmatch(r"w([2-8])a([2-8])", words):
            return cls(int(match[1]), int(match[2]))
        if match := re.fullmatch(r"mixed:(\d+(?:\.\d+)?)(?:a([2-8]))?", words):
            average = float(match[1])
            if 2 <= average <= 8:
                return cls(round(average), int(match[2] or round(average)), average)
        raise RecipeError(
            f"quantization.bits {text!r}: expected wXaY with X and Y from 2 to 8, for example w4a4 or w4a8, or mixed:X "
            "with X from 2 to 8, for example mixed:3.5 or mixed:3.5a8"
        )


class _Table:
    """Base class of the tables of a recipe: checks every setting, whether it comes from a file or from Python."""

    _path: ClassVar[str] = ""

    def __init_subclass__(cls, path: str) -> None:
        cls._path = path

    def __post_init__(self) -> None:
        cls: Any = type(self)
        hints = _type_hints(cls)
        spec: Any
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            checked = _check(value, hints[spec.name], spec, _join(self._path, spec.name))
            object.__setattr__(self, spec.name, checked)  # frozen for everyone else


@dataclass(frozen=True, kw_only=True)
class Rule(_Table, path="quantization.rule"):
    """An exception for the sites that a pattern matches; the last rule that matches a site wins."""

    match: str = setting("", "pattern of site names, such as blocks.*.mlp.fc2.input (`maskaq inspect` prints them)")
    bits: str = setting("", "2 to 8, or float", choices=("", "2", "3", "4", "5", "6", "7", "8", "float"))
    quantizer: str = setting("", "quantizer (`maskaq list quantizers`)")
    range: str = setting("", "how the first range is found", choices=("", *RANGES))
    granularity: str = setting(
        "", "of an attention product's operand: one range per tensor or per head", choices=("", "tensor", "head")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.match:
            raise RecipeError("quantization.rule: expected match, a pattern of site names, in every rule")
        if not (self.bits or self.quantizer or self.range or self.granularity):
            raise RecipeError(f"quantization.rule {self.match!r}: expected bits, quantizer, range or granularity")


@dataclass(frozen=True, kw_only=True)
class Quantization(_Table, path="quantization"):
    bits: str = setting(
        "w4a4",
        "bit widths of weights and activations, wXaY, 2 to 8 each; mixed:X chooses the width of each layer's weights "
        "for an average of X",
    )
    weight: str = setting("minmax", "weight quantizer, one per output channel (`maskaq list quantizers`)")
    activation: str = setting("lsq", "activation quantizer, one per tensor")
    softmax: str = setting(
        "same",
        "quantizer of the attention probabilities; same: that of all activations; log: integer levels in equal ratios",
    )
    gelu: str = setting(
        "same",
        "quantizer of the outputs of GELU in MLPs, unless they are rotated; same: that of all activations; log: as for "
        "the softmax, with a zero point",
    )
    weight_range: str = setting(
        "minmax",
        "how weight ranges are found; the quantizer minmax clips the weights to this range once, at the start",
        choices=[method for method in RANGES if method != "relative"],
    )
    activation_range: str = setting(
        "mse",
        "how the first activation ranges are found; relative: mse with equal weight for every vector that enters a dot "
        "product, whatever its norm",
        choices=RANGES,
    )
    percentile: float = setting(
        0.999,
        "share of the values that the percentile range covers; 0.999 of a channel of 500 weights is all of them",
        low=0.5,
        high=1.0,
    )
    range_images: int = setting(32, "images that the first activation ranges are found on", low=1)
    range_inputs: str = setting(
        "float",
        "what ranges are found on: the activations of the float model; or quantized, those behind quantized layers, "
        "layer after layer",
        choices=("float", "quantized"),
    )
    first_last: str = setting(
        "same",
        "bits of the patch embedding's weights and of the classifier: same as all, 8, or float",
        choices=("same", "8", "float"),
    )
    scope: str = setting(
        "all",
        "what is quantized: all; or the backbone, without neck, decoder and heads (in a classifier: without its head)",
        choices=("all", "backbone"),
    )
    target: str = setting(
        "cpu",
        "what the runtime can compute: cpu: zero points anywhere; openvino: none at q, k and v, so that OpenVINO "
        "multiplies them in integers; symmetric: none at all, every code an int8 (TensorRT, ExecuTorch)",
        choices=TARGETS,
    )
    rotate: tuple[str, ...] = setting(
        (),
        "rotations before the grid, a list: inside heads, of the residual stream (both folded into the weights), of "
        "the hidden channels of MLPs (online)",
        choices=ROTATIONS,
    )
    mixed: str = setting(
        "greedy",
        "how mixed:X chooses widths: greedy, by the cost of each layer alone; evolve, then by evolution of all widths "
        "together",
        choices=("greedy", "evolve"),
    )
    mlp: str = setting(
        "same",
        "activation function of the student's MLPs: same as the model's, or relu in place of GELU, whose outputs need "
        "no zero point; the stage relu fits the MLPs to it",
        choices=("same", "relu"),
    )
    rule: tuple[Rule, ...] = setting(
        (), "exceptions, [[quantization.rule]]: match, bits, quantizer, range, granularity"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        Bits.parse(self.bits)


@dataclass(frozen=True, kw_only=True)
class Mask(_Table, path="synthesis.mask"):
    """The adaptive mask m' of Eqs. 11-13."""

    region: float = setting(
        0.5, "k_ir: share of patches in the informative region (Eq. 4), at least those in the mask", low=0.0, high=1.0
    )
    start: float = setting(0.5, "share of patches in the mask at the first step", low=0.0, high=1.0)
    end: float = setting(0.1, "share of patches in the mask at the last step", low=0.0, high=1.0)
    drop: float = setting(0.3, "p_drop: share of the masked patches dropped at random at each step", low=0.0, high=0.99)
    keep_at_least: int = setting(1, "k_min: patches kept whatever is dropped", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end > self.start:
            raise RecipeError(
                f"synthesis.mask.end {self.end} is above synthesis.mask.start {self.start}: the mask shrinks over the "
                "steps"
            )


@dataclass(frozen=True, kw_only=True)
class Generator(_Table, path="synthesis.generator"):
    """A conditional generator in place of free pixels (GDFQ and its followers)."""

    steps: int = setting(0, "training steps of the generator; 0: no generator, free pixels", low=0, high=_MOST_STEPS)
    latent: int = setting(
        100, "length of the latent vector; 0: the width of the classifier's input", low=0, high=100_000
    )
    channels: int = setting(128, "channels of its first layers; half as many in the last", low=2, high=4_096)
    batch: int = setting(16, "images per step", low=2)
    superpose: float = setting(
        0.0,
        "probability that an image is of several classes, with the average of their latent vectors",
        low=0.0,
        high=1.0,
    )
    classes: int = setting(500, "largest number of classes of such an image", low=2, high=1_000_000)


@dataclass(frozen=True, kw_only=True)
class Synthesis(_Table, path="synthesis"):
    images: int = setting(10_000, "synthetic images", low=1, high=_MOST_IMAGES)
    steps: int = setting(
        2_000, "optimiser steps for each image; 0: the start images themselves", low=0, high=_MOST_STEPS
    )
    start: str = setting(
        "noise",
        "what an image starts from: noise, or dead leaves, shapes that lie over each other (not in the paper)",
        choices=("noise", "dead_leaves"),
    )
    batch: int = setting(32, "images optimised together, and images in a stored shard", low=1)
    lr: float = setting(0.1, "Adam's learning rate on the pixels", low=0.0, high=_LARGEST_LR)
    lr_unit: str = setting(
        "input",
        "what lr measures: input, the model's normalised input, as in the paper; pixels, changes of pixels: lr is for "
        "ImageNet's std and is scaled to the model's, so that images of all models change as fast (not in the paper)",
        choices=("input", "pixels"),
    )
    lr_final: float = setting(0.01, "share of lr left at the last step of the cosine", low=0.0, high=1.0)
    beta1: float = setting(0.9, "Adam's first-moment decay", low=0.0, high=0.9999)
    beta2: float = setting(0.999, "Adam's second-moment decay", low=0.0, high=0.999999)
    map: str = setting(
        "scores",
        "the attention map A: QK^T before scale and softmax, or the probabilities",
        choices=("scores", "probs"),
    )
    views: str = setting(
        "jitter",
        "what the models see of an image at a step: jitter (roll, flip, noise, colour), or a view with the settings of "
        "calibration.augment (simclr)",
        choices=("jitter", "simclr"),
    )
    roll: float = setting(
        8 / 224, "largest random shift, share of the side; twice that in the second half", low=0.0, high=0.5
    )
    flip: float = setting(0.0, "probability of a mirror image at a step", low=0.0, high=1.0)
    zoom: float = setting(
        1.0,
        "smallest area of a random crop at the last step, from the whole image at the first: easy views, then hard",
        low=0.01,
        high=1.0,
    )
    noise: float = setting(0.5, "std of the random channel offset, annealed to 0", low=0.0, high=_LARGEST_CHANGE)
    colour: float = setting(1.0, "random channel shift in [-c, c] and scale in [exp(-c), exp(c)]", low=0.0, high=10)
    relabel: int = setting(
        100,
        "detectors and segmenters: steps between two updates of an image's layout from the teacher's predictions",
        low=1,
        high=_MOST_STEPS,
    )
    mask: Mask = field(default_factory=Mask)
    generator: Generator = field(default_factory=Generator)
    terms: dict[str, float] = setting(
        {
            "class_prior": 1.0,
            "total_variation": 2.5e-5,
            "head_similarity": 1.0,
            "similarity_entropy": 1.0,
            "attention_alignment": 0.1,
        },
        "weight of each loss term (`maskaq list terms`); 0 switches one off",
        low=-_LARGEST_WEIGHT,
        high=_LARGEST_WEIGHT,
    )
    folder: str = setting("", "NOT data-free: a folder of real images in place of synthetic ones; `images:DIR` sets it")
    max_lost: float = setting(
        0.1, "share of the images that may be lost to NaN before the run fails", low=0.0, high=1.0
    )


@dataclass(frozen=True, kw_only=True)
class Augment(_Table, path="calibration.augment"):
    """SimCLR augmentation of the calibration images, drawn for each sample."""

    crop: tuple[float, float] = setting(
        (0.08, 1.0), "area of the random crop, smallest and largest", low=0.01, high=1.0
    )
    flip: float = setting(0.5, "probability of a mirror image", low=0.0, high=1.0)
    brightness: float = setting(0.8, "brightness factor in [1-b, 1+b]", low=0.0, high=_LARGEST_CHANGE)
    contrast: float = setting(0.8, "contrast factor in [1-c, 1+c]", low=0.0, high=_LARGEST_CHANGE)
    saturation: float = setting(0.8, "saturation factor in [1-s, 1+s]", low=0.0, high=_LARGEST_CHANGE)
    hue: float = setting(0.2, "hue shift in turns", low=0.0, high=0.5)
    jitter_prob: float = setting(0.8, "probability of the four colour changes", low=0.0, high=1.0)
    grey: float = setting(0.2, "probability of a grey image", low=0.0, high=1.0)
    blur: float = setting(0.5, "probability of a Gaussian blur", low=0.0, high=1.0)
    cutmix: float = setting(0.0, "probability of a rectangle from another image (not in the paper)", low=0.0, high=1.0)
    mixup: float = setting(0.0, "largest share of another image blended in (not in the paper)", low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class Reconstruct(_Table, path="calibration.reconstruct"):
    """Block after block, through the full-precision model's later blocks (not in the paper)."""

    epochs: int = setting(
        240, "passes over the synthetic images, shared evenly among the blocks", low=1, high=_MOST_STEPS
    )
    lr: float = setting(2e-5, "AdamW's learning rate at the start of each block's cosine", low=0.0, high=_LARGEST_LR)
    range_lr: float = setting(
        10.0, "learning rate of scales and zero points, as a multiple of lr", low=0.0, high=1_000_000
    )
    block_weight: float = setting(
        2.0, "weight of the block's own error beside that of the class feature", low=0.0, high=_LARGEST_WEIGHT
    )
    error: str = setting(
        "feature",
        "what a block is fitted to: feature, the input of the classifier and the block's output; block, the output "
        "alone; hessian, the output weighted by how much each value changes the predictions",
        choices=("feature", "block", "hessian"),
    )
    rounding: str = setting(
        "straight",
        "straight: weights are trained with the straight-through estimator; adaround: learns to round each up or down",
        choices=("straight", "adaround"),
    )
    rounding_lr: float = setting(1e-3, "Adam's learning rate of adaround", low=0.0, high=_LARGEST_LR)
    rounding_weight: float = setting(
        0.01, "weight of adaround's pull to 0 or 1, after the first fifth of a block", low=0.0, high=_LARGEST_WEIGHT
    )
    drop: float = setting(
        0.0, "probability that a value of the block's activations stays in float (QDrop)", low=0.0, high=0.99
    )


@dataclass(frozen=True, kw_only=True)
class Relu(_Table, path="calibration.relu"):
    """MLPs with ReLU in place of GELU, fitted to the model's one by one in float (APHQ-ViT)."""

    images: int = setting(256, "number of synthetic images, the first ones, that the MLPs are fitted on", low=1)
    steps: int = setting(2_000, "optimiser steps for each MLP", low=1, high=_MOST_STEPS)
    lr: float = setting(4e-5, "Adam's learning rate at the start of each MLP's cosine", low=0.0, high=_LARGEST_LR)
    clip: float = setting(
        0.99,
        "quantile of the positive values at which a second pass, which counts twice, clips them",
        low=0.5,
        high=1.0,
    )


@dataclass(frozen=True, kw_only=True)
class Evolve(_Table, path="calibration.evolve"):
    """Weight scales by evolution, block by block, without gradients (Evol-Q, CLAMP-ViT)."""

    passes: int = setting(10, "passes over the blocks, the deepest first", low=1, high=_MOST_STEPS)
    cycles: int = setting(
        6, "children of a block in one pass; each replaces the worst candidate if it is better", low=1, high=_MOST_STEPS
    )
    population: int = setting(15, "number of candidates for a block", low=2, high=10_000)
    tournament: int = setting(10, "candidates drawn at random, of which the best is the parent", low=1, high=10_000)
    spread: float = setting(1e-3, "largest change of a scale", low=0.0, high=_LARGEST_LR)


@dataclass(frozen=True, kw_only=True)
class Interleave(_Table, path="calibration.interleave"):
    """A generator and the student in turn, step by step (GDFQ and its followers)."""

    epochs: int = setting(400, "epochs of the generator and the student", low=1, high=_MOST_STEPS)
    iterations: int = setting(200, "steps of the generator and of the student in an epoch", low=1, high=_MOST_STEPS)
    warm_up: int = setting(50, "number of first epochs in which only the generator is trained", low=0, high=_MOST_STEPS)


@dataclass(frozen=True, kw_only=True)
class Calibration(_Table, path="calibration"):
    stages: tuple[str, ...] = setting(
        ("calibrate",),
        "the stages that fit the student, a list: relu fits MLPs to their ReLU, reparametrize moves scales from "
        "activations to weights, search finds ranges layer by layer, evolve searches weight scales, reconstruct fits "
        "one block after another, interleave trains a generator and the student in turn, calibrate fits all blocks at "
        "once, correct adjusts biases",
        choices=STAGES,
    )
    relu: Relu = field(default_factory=Relu)
    evolve: Evolve = field(default_factory=Evolve)
    reconstruct: Reconstruct = field(default_factory=Reconstruct)
    interleave: Interleave = field(default_factory=Interleave)
    epochs: int = setting(200, "passes over the synthetic images", low=0, high=_MOST_STEPS)
    batch: int = setting(16, "images per step", low=1)
    optimizer: str = setting("sgd", "sgd uses Nesterov momentum", choices=("sgd", "adamw"))
    lr: float = setting(1e-3, "learning rate at the start of the cosine", low=0.0, high=_LARGEST_LR)
    lr_final: float = setting(0.01, "share of lr left at the last step of the cosine", low=0.0, high=1.0)
    pace: str = setting(
        "fixed",
        "fixed: lr; error: lr times the relative error of the student's blocks before the first step, at most 1, so "
        "that a student close to the teacher takes small steps; first_step: the same, halved until the first step "
        "lowers the loss of its own images (not in the paper)",
        choices=("fixed", "error", "first_step"),
    )
    momentum: float = setting(0.9, "momentum of sgd", low=0.0, high=0.9999)
    weight_decay: float = setting(0.0, "weight decay, for weights only", low=0.0, high=_LARGEST_LR)
    range_lr: float = setting(
        1.0, "learning rate of the quantizers' scales and zero points, as a multiple of lr", low=0.0, high=1_000_000
    )
    clip_grad: float = setting(0.0, "largest gradient norm; 0 switches clipping off", low=0.0, high=_LARGEST_WEIGHT)
    temperature: float = setting(5.0, "softmax temperature of the logit KL", low=0.01, high=1_000)
    mask_ratio: float = setting(0.1, "share of patches in the calibration mask m^c", low=0.0, high=1.0)
    mask_weight: float = setting(2.0, "w: weight of the patches in m^c (Eq. 16)", low=0.01, high=1_000_000)
    terms: dict[str, float] = setting(
        {"logit_kl": 1.0, "head_structure": 10.0},
        "weight of each loss term (`maskaq list terms`)",
        low=-_LARGEST_WEIGHT,
        high=_LARGEST_WEIGHT,
    )
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stages:
            raise RecipeError(f"calibration.stages: expected at least one of {', '.join(STAGES)}, got none")


@dataclass(frozen=True, kw_only=True)
class Refresh(_Table, path="refresh"):
    every: int = setting(30, "epochs between two refreshes of the images; 0: never", low=0)
    start: str = setting(
        "warm",
        "warm continues from the current images (Algorithm 1), cold from synthesis.start",
        choices=("warm", "cold"),
    )
    steps: int = setting(0, "optimiser steps of a refresh; 0: as many as synthesis.steps", low=0, high=_MOST_STEPS)
    lr: float = setting(0.0, "learning rate of a refresh; 0: synthesis.lr", low=0.0, high=_LARGEST_LR)


@dataclass(frozen=True, kw_only=True)
class Recipe(_Table, path=""):
    """All settings of a run. `load_recipe` builds one; nothing changes it afterwards."""

    quantization: Quantization = field(default_factory=Quantization)
    synthesis: Synthesis = field(default_factory=Synthesis)
    calibration: Calibration = field(default_factory=Calibration)
    refresh: Refresh = field(default_factory=Refresh)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data_free and (self.synthesis.steps or self.refresh.every):
            raise RecipeError(
                "synthesis.folder: real images are neither optimised nor refreshed, so synthesis.steps "
                f"(now {self.synthesis.steps}) and refresh.every (now {self.refresh.every}) must be 0; the recipe "
                f"images:{self.synthesis.folder} sets all three"
            )

    @property
    def bits(self) -> Bits:
        return Bits.parse(self.quantization.bits)

    @property
    def data_free(self) -> bool:
        return not self.synthesis.folder

    @property
    def caveat(self) -> str:
        """A warning to show beside every result if real images were used, else an empty string."""
        return "" if self.data_free else f"REAL images of {self.synthesis.folder}: an upper bound, NOT data-free"

    @property
    def stages(self) -> dict[str, range]:
        """Each stage with its epochs, which are numbered consecutively over all stages."""
        lengths = dict.fromkeys(STAGES, 1) | {  # stages without a setting take one pass
            "evolve": self.calibration.evolve.passes,
            "reconstruct": self.calibration.reconstruct.epochs,
            "interleave": self.calibration.interleave.epochs,
            "calibrate": self.calibration.epochs,
        }
        found, first = {}, 0
        for stage in self.calibration.stages:
            found[stage] = range(first, first + lengths[stage])
            first = found[stage].stop
        return found

    def stage_of(self, epoch: int) -> str:
        """The stage that an epoch belongs to; the last stage for epochs beyond all of them."""
        return next((stage for stage, epochs in self.stages.items() if epoch in epochs), self.calibration.stages[-1])

    @property
    def epochs(self) -> int:
        """Number of epochs of all stages."""
        return list(self.stages.values())[-1].stop

    @property
    def rounds(self) -> list[range]:
        """The epochs between two syntheses: one range for each round of Algorithm 1.

        Stages before and after `calibrate` belong to the first and the last round: only its images are refreshed.
        """
        epochs = self.epochs
        calibrate = self.stages.get("calibrate", range(epochs, epochs))
        every = self.refresh.every or len(calibrate) + 1
        starts = [0, *range(calibrate.start + every, calibrate.stop, every)]
        return [range(first, stop) for first, stop in zip(starts, [*starts[1:], epochs], strict=True)]

    def steps_in_round(self, round_index: int) -> int:
        """Optimiser steps for each image of a round."""
        return self.refresh.steps if round_index and self.refresh.steps else self.synthesis.steps

    @property
    def most_steps(self) -> int:
        """The largest number of steps of any round."""
        return max(self.steps_in_round(round_index) for round_index in range(len(self.rounds)))

    @property
    def makes_images(self) -> bool:
        """Whether images are made for their labels: optimised, or by a generator."""
        return bool(self.most_steps or self.synthesis.generator.steps)

    def lr_in_round(self, round_index: int) -> float:
        """Learning rate on the pixels in a round, at its first step."""
        return self.refresh.lr if round_index and self.refresh.lr else self.synthesis.lr


def load_recipe(source: str | Path = "quick", *overrides: str, bits: str | None = None) -> Recipe:
    """The recipe of a shipped name or a TOML file, or of several joined by +, with `key=value` overrides on top.

    >>> load_recipe("quick", "synthesis.steps=50", bits="w3a3").synthesis.steps
    50
    """
    tree: dict[str, Any] = {}
    for layer in _layers(_parts(str(source)), seen=()).values():
        _merge(tree, layer)
    try:
        for text in overrides:
            if not isinstance(text, str):
                raise RecipeError(f"overrides: expected texts such as 'synthesis.steps=500', got {text!r}")
            _merge(tree, _parse_override(text))
        if bits is not None:
            _merge(tree, {"quantization": {"bits": str(bits).strip().lower()}})
        return recipe_from_dict(tree)
    except RecursionError as error:
        raise RecipeError(f"recipe {source} with --set {' '.join(overrides)[:80]}: {_TOO_DEEP}") from error


def shipped_recipes() -> dict[str, str]:
    """Name -> text of every recipe inside the package."""
    folder = resources.files("maskaq") / "recipe"
    files = [f for f in folder.iterdir() if f.name.endswith(".toml")]
    return {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in sorted(files, key=lambda f: f.name)}


def to_dict(recipe: Recipe) -> dict[str, Any]:
    return dataclasses.asdict(recipe)


def recipe_from_dict(tree: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_dict` turned into plain values."""
    recipe: Recipe = _build(Recipe, _without_removed(tree), path="")
    return recipe


def up_to_date(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A stored recipe (`to_dict`) as this version writes it: missing settings filled in, renamed values replaced.

    Removed settings that were switched off are dropped. Other keys that this version does not know are kept.
    """
    filled: dict[str, Any] = _filled(_without_removed(tree), to_dict(Recipe()), "")
    return filled


def to_toml(recipe: Recipe) -> str:
    """The effective recipe as a TOML file that loads to the same recipe."""
    lines: list[str] = ["# The effective recipe of this run: every setting, defaults included."]
    _write_table(lines, to_dict(recipe), path="")
    return "\n".join(lines) + "\n"


def is_copy(text: str, recipe: Recipe) -> bool:
    """Whether TOML text, of this version or an earlier one, is a copy of the recipe."""
    if text == to_toml(recipe):
        return True
    try:
        return recipe_from_dict(tomllib.loads(text)) == recipe
    except (tomllib.TOMLDecodeError, RecipeError, RecursionError):
        return False


def describe_keys() -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, meaning) of every setting."""
    yield from _describe(Recipe, "")


def _parts(text: str) -> list[str]:
    """`a+b` -> a, b. A file may have a + in its name, and so may the folder after `images:`."""
    if os.path.isfile(text):
        return [text]
    names, folder = re.fullmatch(r"(.*?)(?:(?:^|\+)(images:.*))?", text, flags=re.S).groups()  # type: ignore[union-attr]
    return [*(names.split("+") if names or not folder else ()), *([folder] if folder else ())]


def _layers(names: Iterable[str], seen: tuple[str, ...], alone: bool = True) -> dict[str, dict[str, Any]]:
    """Name -> settings of the recipes to apply, in this order: first what the named ones extend, then they themselves.

    A folder of images is no budget: with one, a method is still used on its own.
    """
    below: dict[str, dict[str, Any]] = {}
    named: dict[str, dict[str, Any]] = {}
    names = list(names)
    alone = alone and sum(not name.startswith(_IMAGES) for name in names) == 1
    for name in names:
        if name in seen:
            raise RecipeError(f"recipes extend each other in a circle: {' -> '.join((*seen, name))}")
        if len(seen) == _DEEPEST:
            raise RecipeError(f"recipe {seen[0]}: expected at most {_DEEPEST} recipes that extend each other, got more")
        named[name] = tree = _read_tree(name)
        own = tree.pop(_ALONE, {})
        if not isinstance(own, Mapping):
            raise RecipeError(f"recipe {name}: {_ALONE} is a table of settings, not {own!r}")
        if alone:
            _merge(tree, own)
        base = tree.pop("extends", None)
        parts = [] if base is None else _parts(str(base))
        beside = [str(Path(name).parent / part) if part.endswith(".toml") else part for part in parts]
        below |= {key: layer for key, layer in _layers(beside, (*seen, name), alone).items() if key not in below}
    return below | {name: tree for name, tree in named.items() if name not in below}


def _read_tree(name: str) -> dict[str, Any]:
    """The settings that one recipe sets itself, without those it extends."""
    shipped = shipped_recipes()
    if name in shipped:
        text = shipped[name]
    elif name.startswith(_IMAGES):
        if not name.removeprefix(_IMAGES).strip():
            raise RecipeError(f"recipe {name!r}: expected a folder of images after {_IMAGES}")
        try:
            folder = str(Path(name.removeprefix(_IMAGES)).expanduser().resolve())
        except (OSError, ValueError, RuntimeError) as error:  # a NUL character, an unknown user's home
            raise RecipeError(f"recipe {name!r}: expected a folder of images after {_IMAGES} ({error})") from error
        return {"synthesis": {"folder": folder, "steps": 0}, "refresh": {"every": 0}}
    elif name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"cannot read recipe file {name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"recipe {name} is not valid TOML: {error}") from error
        except ValueError as error:  # a NUL character
            raise RecipeError(f"cannot read recipe file {name!r}: {error}") from error
    else:
        more = f". A recipe file of your own ends in .toml, a folder of images begins with {_IMAGES}"
        raise RecipeError(unknown("recipe", name, shipped) + more)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {name} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise RecipeError(f"recipe {name}: {_TOO_DEEP}") from error


def _parse_override(text: str) -> dict[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise RecipeError(f"--set {text!r}: expected key=value, for example synthesis.steps=500")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    tree: dict[str, Any] = parsed
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return tree


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if key == "rule":  # rules add up: the last that matches wins
            base[key] = [*base.get(key, ()), *(value if isinstance(value, (list, tuple)) else [value])]
        elif isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _build(cls: type, tree: Any, path: str) -> Any:
    where = f"[{path}]" if path else "the recipe"
    if not isinstance(tree, Mapping):
        raise RecipeError(f"{path} is a table of settings, not {tree!r}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    hints = _type_hints(cls)
    for key in tree:
        if key not in known:
            raise RecipeError(f"{where}: {unknown('key', key, known)}")
    return cls(**{key: _from_plain(value, hints[key], known[key], _join(path, key)) for key, value in tree.items()})


def _from_plain(value: Any, hint: Any, spec: Any, dotted: str) -> Any:
    """Nested tables as dataclasses, and tables of weights with the defaults of what they leave out."""
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, dotted)  # type: ignore[arg-type]
    if get_origin(hint) is dict and isinstance(value, Mapping):
        return spec.default_factory() | value
    if _is_list_of_tables(hint) and isinstance(value, list | tuple):
        return tuple(_build(get_args(hint)[0], item, dotted) for item in value)
    return value


def _check(value: Any, hint: Any, spec: Any, dotted: str) -> Any:
    """The value as the type of its field; RecipeError, with the key and what is allowed, if it does not fit."""
    limits = spec.metadata
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]
            raise RecipeError(f"{dotted}: expected a {hint.__name__}, got {value!r}")  # type: ignore[union-attr]
        return value
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{dotted}: expected a table of name = weight, got {value!r}")
        keys = {name: f"{dotted}.{name}" for name in value}
        return {name: _within(_number(value[name], key), limits, key) for name, key in keys.items()}
    if hint == tuple[str, ...]:  # a set of words, in the order of its choices; `--set` may join them by commas
        words = [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise RecipeError(f"{dotted}: expected a list out of {', '.join(limits['choices'])}, got {value!r}")
        for word in words:
            if word not in limits["choices"]:
                raise RecipeError(f"{dotted}: {unknown('value', word, limits['choices'])}")
        return tuple(choice for choice in limits["choices"] if choice in words)
    if _is_list_of_tables(hint):
        table = get_args(hint)[0]
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, table) for item in value):
            raise RecipeError(f"{dotted}: expected a list of tables, got {value!r}")
        return tuple(value)
    if get_origin(hint) is tuple:
        wanted = len(get_args(hint))
        if not isinstance(value, (list, tuple)) or len(value) != wanted:
            raise RecipeError(f"{dotted}: expected {wanted} numbers such as {list(spec.default)}, got {value!r}")
        pair = tuple(_within(_number(v, dotted), limits, dotted) for v in value)
        if list(pair) != sorted(pair):
            raise RecipeError(f"{dotted}: expected the smaller number first, got {list(pair)}")
        return pair
    if hint is float:
        return _within(_number(value, dotted), limits, dotted)
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise RecipeError(f"{dotted}: expected a whole number, got {value!r}")
        number = int(value)
        if number >= 1 << 31:
            raise RecipeError(f"{dotted}: expected a whole number below {1 << 31}, got {number}")
        return _within(number, limits, dotted)
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise RecipeError(f"{dotted}: expected a word, got {value!r}")
    word = _renamed(str(value), dotted)
    if limits["choices"] and word not in limits["choices"]:
        raise RecipeError(f"{dotted}: {unknown('value', word, limits['choices'])}")
    return word


@functools.cache
def _type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _is_list_of_tables(hint: Any) -> bool:
    return get_args(hint)[1:] == (...,) and dataclasses.is_dataclass(get_args(hint)[0])


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _renamed(value: Any, dotted: str) -> Any:
    return _RENAMED_VALUES.get(dotted, {}).get(value, value) if isinstance(value, str) else value


def _without_removed(tree: Any, path: str = "") -> Any:
    """The settings without removed ones that have the value that switched them off."""
    if not isinstance(tree, Mapping):
        return tree
    kept = {key: (value, _join(path, str(key))) for key, value in tree.items()}
    gone = {key for key, (value, dotted) in kept.items() if dotted in _REMOVED and value == _REMOVED[dotted]}
    return {key: _without_removed(*pair) for key, pair in kept.items() if key not in gone}


def _filled(value: Any, default: Any, path: str) -> Any:
    if not isinstance(value, Mapping) or not isinstance(default, Mapping):
        return _renamed(value, path)
    return {**default, **{key: _filled(item, default.get(key), _join(path, key)) for key, item in value.items()}}


def _number(value: Any, dotted: str) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise RecipeError(f"{dotted}: expected a finite number, got {value!r}")
    return float(value)


def _within(value: Any, limits: Mapping[str, Any], dotted: str) -> Any:
    low = limits["low"]
    high = limits["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        allowed = f"from {low} to {high}" if high is not None else f"at least {low}"
        raise RecipeError(f"{dotted}: expected a number {allowed}, got {value}")
    return value


def _write_table(lines: list[str], tree: Mapping[str, Any], path: str) -> None:
    tables = {k: v for k, v in tree.items() if isinstance(v, (list, tuple)) and v and isinstance(v[0], Mapping)}
    values = {k: v for k, v in tree.items() if not isinstance(v, Mapping) and k not in tables}
    if path and values:
        lines += ["", f"[{path}]"]
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in values.items()]
    for key, value in tree.items():
        if isinstance(value, Mapping):
            _write_table(lines, value, _join(path, key))
    for key, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{path}.{key}]]", *(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in row.items())]


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # JSON's escapes are TOML's
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return repr(value)


def _describe(cls: type, path: str) -> Iterator[tuple[str, str, str]]:
    hints = _type_hints(cls)
    spec: Any
    for spec in dataclasses.fields(cls):
        dotted = _join(path, spec.name)
        if dataclasses.is_dataclass(hints[spec.name]):
            yield from _describe(hints[spec.name], dotted)  # type: ignore[arg-type]
            continue
        default = spec.default_factory() if spec.default is dataclasses.MISSING else spec.default
        default = list(default) if isinstance(default, tuple) else default
        choices: Iterable[str] = spec.metadata["choices"] or ()
        doc = spec.metadata["doc"] + (f" ({' | '.join(choices)})" if choices else "")
        yield dotted, _toml_value(default) if not isinstance(default, dict) else "", doc
        if isinstance(default, dict):
            yield from ((f"{dotted}.{name}", repr(weight), "") for name, weight in default.items())
