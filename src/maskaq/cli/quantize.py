"""`maskaq quantize`."""

import argparse
from dataclasses import dataclass

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import DataOptions, Invocation, ModelOptions, RecipeOptions

SUMMARY = "quantize a model: all stages"
RESUMABLE = True
_RECIPE = "quick"


@dataclass(frozen=True)
class Arguments:
    model: ModelOptions
    recipe: RecipeOptions
    data: DataOptions
    out: str | None
    seed: int
    device: str | None
    plain: bool
    keep: str
    no_report: bool
    workers: int = 1
    lease: float = 60.0
    part: int | None = None
    only_images: bool = False
    """For `synthesize`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_images_arguments(parser)
    options.add_end(parser)
    options.add_data(parser)


def add_images_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that determine the synthetic images."""
    options.add_model(parser)
    options.add_recipe(parser, _RECIPE)
    parser.add_argument("--out", type=converters.path, metavar="DIR", help="run folder (default: runs/MODEL-BITS)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options.add_device(parser)
    options.add_plain(parser)
    options.add_workers(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.cli import resolve, running  # they bring torch and timm

    recipe = resolve.recipe_of(arguments.recipe, _RECIPE)
    chosen = arguments.model
    model = resolve.full_precision(chosen)
    request = running.Request(
        name=chosen.model,
        model=model,
        source=resolve.source_of(chosen, model, invocation.command_line),
        recipe=recipe,
        out=arguments.out or f"runs/{chosen.model}-{recipe.quantization.bits.replace(':', '-')}",
        seed=arguments.seed,
        keep=arguments.keep,
        report=not arguments.no_report,
        device=arguments.device,
        plain=arguments.plain,
        data=arguments.data,
        only_images=arguments.only_images,
        lease=arguments.lease,
        part=arguments.part,
    )
    running.carry_out(request, invocation.console)
