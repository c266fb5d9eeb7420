"""`maskaq demo`: `quantize` with an embedded model, its recipe and its test images."""

import argparse
from dataclasses import dataclass

from maskaq.cli import arguments as options
from maskaq.cli import converters, quantize
from maskaq.cli.arguments import DEMO_DATA, DataOptions, Invocation, ModelOptions, RecipeOptions

SUMMARY = "quantize an embedded CIFAR-10 model without data and show the accuracy that is recovered"
RESUMABLE = True


@dataclass(frozen=True)
class Arguments:
    model: str
    bits: str
    set: tuple[str, ...]
    out: str | None
    seed: int
    device: str | None
    plain: bool
    keep: str
    no_report: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=("vit", "swin"), default="vit")
    parser.add_argument("--bits", default="w3a3", help="wXaY, X and Y from 2 to 8 (default: w3a3)")
    parser.add_argument("--out", type=converters.path, metavar="DIR", help="run folder (default: runs/demo-MODEL-BITS)")
    parser.add_argument("--seed", type=int, default=0)
    options.add_set(parser)
    options.add_device(parser)
    options.add_plain(parser)
    options.add_end(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    name = f"cifar10_{arguments.model}"
    all_stages = quantize.Arguments(
        model=ModelOptions(name),
        recipe=RecipeOptions("demo", arguments.bits, arguments.set),
        data=DataOptions(DEMO_DATA),
        out=arguments.out or f"runs/demo-{name}-{arguments.bits}",
        seed=arguments.seed,
        device=arguments.device,
        plain=arguments.plain,
        keep=arguments.keep,
        no_report=arguments.no_report,
    )
    quantize.run(all_stages, invocation)
