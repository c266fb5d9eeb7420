"""`maskaq synthesize`: a run of `quantize` that stops after its first images."""

import argparse
from dataclasses import dataclass

from maskaq.cli import quantize
from maskaq.cli.arguments import DataOptions, Invocation, ModelOptions, RecipeOptions

SUMMARY = "make only the synthetic images of the first round (`quantize` or `calibrate` continues)"
RESUMABLE = True


@dataclass(frozen=True)
class Arguments:
    model: ModelOptions
    recipe: RecipeOptions
    out: str | None
    seed: int
    device: str | None
    plain: bool
    workers: int
    lease: float
    part: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    quantize.add_images_arguments(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    all_stages = quantize.Arguments(
        model=arguments.model,
        recipe=arguments.recipe,
        data=DataOptions(),
        out=arguments.out,
        seed=arguments.seed,
        device=arguments.device,
        plain=arguments.plain,
        keep="better",
        no_report=True,
        lease=arguments.lease,
        part=arguments.part,
        only_images=True,
    )
    quantize.run(all_stages, invocation)
