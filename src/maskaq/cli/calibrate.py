"""`maskaq calibrate`."""

import argparse
from dataclasses import dataclass

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import DataOptions, Invocation

SUMMARY = "continue a run folder: calibration, refreshes, final model"
RESUMABLE = True


@dataclass(frozen=True)
class Arguments:
    folder: str
    checkpoint: str | None
    data: DataOptions
    device: str | None
    plain: bool
    keep: str | None
    """None: as in the latest command of the run."""
    no_report: bool
    workers: int
    lease: float
    part: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=converters.path, metavar="RUN", help="run folder of `synthesize` or `quantize`")
    options.add_moved_checkpoint(parser)
    options.add_device(parser)
    options.add_plain(parser)
    options.add_workers(parser)
    options.add_end(parser, keep=None)
    options.add_data(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.cli import resolve, running  # they bring torch and timm
    from maskaq.runs.opened import open_run

    opened = resolve.with_checkpoint(open_run(arguments.folder), arguments.checkpoint)
    resolve.check_names(opened.recipe)
    model = opened.load_teacher()
    if arguments.checkpoint is not None:
        opened.check_weights(model)
    request = running.Request(
        name=opened.source["name"],
        model=model,
        source=opened.source,
        recipe=opened.recipe,
        out=arguments.folder,
        seed=opened.seed,
        keep=arguments.keep or opened.keep,
        report=not arguments.no_report,
        device=arguments.device,
        plain=arguments.plain,
        data=arguments.data,
        lease=arguments.lease,
        part=arguments.part,
    )
    running.carry_out(request, invocation.console)
