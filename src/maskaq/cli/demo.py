"""`maskaq demo`: `quantize` with an embedded model, its recipe and its test images."""

import argparse
from dataclasses import dataclass

from maskaq.cli import arguments as options
from maskaq.cli import converters, quantize
from maskaq.cli.arguments import DEMO_DATA, SCENES_DATA, DataOptions, Invocation, ModelOptions, RecipeOptions
from maskaq.errors import ModelError

SUMMARY = "quantize an embedded model without data and show the accuracy that is recovered"
RESUMABLE = True


@dataclass(frozen=True)
class _Demo:
    """An embedded model and what suits it."""

    model: str
    recipe: str
    bits: str
    data: str


_SCENES = f"{SCENES_DATA}:250"  # half of them, so that evaluating four models takes minutes
_TASKS = {
    "classification": _Demo("cifar10_vit", "demo", "w3a3", DEMO_DATA),
    "segmentation": _Demo("scenes_segmenter", "demo-scenes", "w3a3", _SCENES),
    "detection": _Demo("scenes_detector", "demo-boxes", "w3a3", _SCENES),
}


@dataclass(frozen=True)
class Arguments:
    task: str
    model: str | None
    bits: str | None
    set: tuple[str, ...]
    out: str | None
    seed: int
    device: str | None
    plain: bool
    keep: str
    no_report: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", choices=tuple(_TASKS), default="classification", help="(default: classification)")
    parser.add_argument("--model", choices=("vit", "swin"), help="the classifier (default: vit)")
    usual = ", ".join(f"{demo.bits} for {task}" for task, demo in _TASKS.items())
    parser.add_argument("--bits", help=f"wXaY, X and Y from 2 to 8 (default: {usual})")
    parser.add_argument("--out", type=converters.path, metavar="DIR", help="run folder (default: runs/demo-MODEL-BITS)")
    parser.add_argument("--seed", type=int, default=0)
    options.add_set(parser)
    options.add_device(parser)
    options.add_plain(parser)
    options.add_end(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    demo = _TASKS[arguments.task]
    if arguments.model and arguments.task != "classification":
        raise ModelError(f"--model is for classification: the {arguments.task} demo has one model, {demo.model}")
    name = f"cifar10_{arguments.model}" if arguments.model else demo.model
    bits = arguments.bits or demo.bits
    all_stages = quantize.Arguments(
        model=ModelOptions(name),
        recipe=RecipeOptions(demo.recipe, bits, arguments.set),
        data=DataOptions(demo.data),
        out=arguments.out or f"runs/demo-{name}-{bits}",
        seed=arguments.seed,
        device=arguments.device,
        plain=arguments.plain,
        keep=arguments.keep,
        no_report=arguments.no_report,
    )
    quantize.run(all_stages, invocation)
