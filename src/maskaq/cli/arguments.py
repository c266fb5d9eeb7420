"""Options that several commands share, and the conversion of parsed options to a command's typed arguments.

Imports no torch, so that help and command-line errors appear without delay.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

from rich.console import Console

from maskaq.cli import converters

DEMO_DATA = "cifar10-demo"
SCENES_DATA = "scenes"

_Arguments = TypeVar("_Arguments")


@dataclass(frozen=True)
class Invocation:
    """How a command was called, and where it prints."""

    words: Sequence[str]
    console: Console

    @property
    def command_line(self) -> str:
        """The command for a shell."""
        return shlex.join(["maskaq", *self.words])


@dataclass(frozen=True)
class ModelOptions:
    """The model, and what its name and weights do not determine."""

    model: str
    checkpoint: str | None = None
    model_arg: Sequence[str] = ()
    img_size: int | tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    task: str | None = None


@dataclass(frozen=True)
class RecipeOptions:
    """The settings of a run; None for the command's default."""

    recipe: str | None = None
    bits: str | None = None
    set: Sequence[str] = ()


@dataclass(frozen=True)
class DataOptions:
    """Evaluation images and how they are read; there are none if `data` is None."""

    data: str | None = None
    class_index: str | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    readers: int = 0


def typed(kind: type[_Arguments], parsed: argparse.Namespace) -> _Arguments:
    """The arguments of a command from argparse's namespace: each field by its name, a group by its own fields."""
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if isinstance(field.type, type) and is_dataclass(field.type):
            values[field.name] = typed(field.type, parsed)
        elif hasattr(parsed, field.name) or field.default is MISSING:  # else this command has no such option
            value = getattr(parsed, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="timm name, hf:FOLDER or hf:USER/REPO of transformers, or an embedded model"
    )
    parser.add_argument(
        "--checkpoint",
        type=converters.path,
        metavar="FILE",
        help="weights (.safetensors, .pth, .bin); default: timm's own, online",
    )
    add_timm(parser)


def add_named_model(parser: argparse.ArgumentParser) -> None:
    """The model as an option, where the first argument is something else."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="a model as in `quantize`")
    parser.add_argument("--checkpoint", type=converters.path, metavar="FILE", help="its weights (default: timm's own)")
    add_timm(parser)


def add_timm(parser: argparse.ArgumentParser) -> None:
    """Options of a model that its name and weights do not determine."""
    add_shape(parser)
    _add_preparation(parser)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """What the architecture of a model depends on besides its name."""
    _add_pairs(parser, "--model-arg", "argument for timm, e.g. num_classes=10")
    parser.add_argument(
        "--img-size",
        type=converters.image_size,
        metavar="N|HxW",
        help="image size (default: from the weights, else from the name)",
    )


def _add_preparation(parser: argparse.ArgumentParser) -> None:
    for key, example in (("mean", "0.485,0.456,0.406"), ("std", "0.229,0.224,0.225")):
        parser.add_argument(
            f"--{key}",
            type=converters.numbers,
            metavar="X[,X,...]",
            help=f"of normalised images with pixels from 0 to 1: one number or one per channel, e.g. {example} "
            "(default: timm's for the name)",
        )
    parser.add_argument(
        "--task",
        choices=("classification", "features", "segmentation", "detection"),
        help="task of the model (default: from its pretrained config; features for an image tower)",
    )


def add_moved_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=converters.path, metavar="FILE", help="the model's weights, if they were moved"
    )


def add_recipe(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--bits", help="bits of weights and activations, wXaY, 2 to 8 each (default: the recipe's, w4a4)"
    )
    parser.add_argument(
        "--recipe",
        help=f"shipped name or .toml file (default: {default}; see `maskaq list recipes`); A+B, such as quick+mimiq, "
        "applies B on top of A",
    )
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    _add_pairs(parser, "--set", "override a recipe key (`maskaq list keys`)")


def _add_pairs(parser: argparse.ArgumentParser, option: str, words: str) -> None:
    parser.add_argument(option, metavar="KEY=VALUE", nargs="+", action="extend", default=[], help=words)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")


def add_plain(parser: argparse.ArgumentParser) -> None:
    words = "use the reference engine: eager, float32, without fused kernels; for comparison and debugging"
    parser.add_argument("--plain", action="store_true", help=words)


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=converters.positive,
        default=1,
        metavar="N",
        help="processes on this machine, one per GPU (default: 1; for several machines see docs/SCALING.md)",
    )
    parser.add_argument(
        "--part",
        type=converters.positive,
        metavar="IMAGES",
        help="images that a worker makes together (default: what is fastest on one GPU, up to 256); smaller "
        "parts keep more GPUs busy",
    )
    add_lease(parser)


def add_lease(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lease",
        type=converters.seconds,
        default=60.0,
        metavar="SECONDS",
        help="seconds after which other workers take over the images of this one if it dies (default: 60)",
    )


def add_end(parser: argparse.ArgumentParser, keep: str | None = "better") -> None:
    """What happens when calibration is done."""
    parser.add_argument(
        "--keep",
        choices=("better", "last"),
        default=keep,
        help="better: save the model from before calibration if calibration made it worse on held-out synthetic "
        f"images; last: always save that of the last epoch (default: {keep or 'as in the latest command of the run'})",
    )
    parser.add_argument("--no-report", action="store_true", help="skip the report and its measurements")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", type=converters.new_file, metavar="FILE", help=f"write the {what} as JSON too")


def add_data(parser: argparse.ArgumentParser, required: bool = False, old_name: bool = False) -> None:
    group = parser.add_argument_group("evaluation images")
    group.add_argument(
        "--data",
        type=converters.path,
        metavar="DIR",
        required=required,
        help=f"one sub-folder of images per class, or {DEMO_DATA} for the packaged 1,000; for a detector a folder like "
        f"COCO's, for a segmenter one like ADE20K's, or {SCENES_DATA} for 500 procedural scenes "
        f"({SCENES_DATA}:N for N of them)",
    )
    group.add_argument(
        "--class-index",
        type=converters.path,
        metavar="FILE",
        help="JSON, sub-folder name -> class, for a subset of the classes",
    )
    group.add_argument(
        "--crop-pct",
        type=converters.share,
        metavar="X",
        help="share of the resized image that the centre crop keeps (default: timm's)",
    )
    group.add_argument(
        "--interpolation", choices=("bilinear", "bicubic", "nearest"), help="for resizing (default: timm's)"
    )
    names = ("--readers", "--workers") if old_name else ("--readers",)  # --workers is what 0.2.0 called it
    group.add_argument(
        *names, type=converters.count, default=0, metavar="N", help="processes that read images (default: 0)"
    )
