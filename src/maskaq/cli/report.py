"""`maskaq report`, and the report that follows a run."""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import DataOptions, Invocation
from maskaq.errors import CheckpointError, MaskaqError

if TYPE_CHECKING:
    import torch

SUMMARY = "write an HTML report (images, attention, curves, layers), or compare several runs"
RESUMABLE = False


@dataclass(frozen=True)
class Arguments:
    folders: tuple[str, ...]
    out: str | None
    checkpoint: str | None
    device: str | None
    real: str | None
    crop_pct: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=converters.path, metavar="RUN", nargs="+", help="run folders")
    parser.add_argument(
        "-o",
        "--out",
        type=converters.new_file,
        metavar="FILE.html",
        help="the page (default: RUN/report.html; compare.html for several runs)",
    )
    options.add_moved_checkpoint(parser)
    parser.add_argument(
        "--real",
        type=converters.path,
        metavar="DIR",
        help="labelled real images, one sub-folder per class: also measures the quantities of Theorem 2",
    )
    parser.add_argument(
        "--crop-pct", type=converters.share, metavar="X", help="of these images, as in `evaluate` (default: timm's)"
    )
    parser.add_argument("--device", help="for what has to be recomputed (default: cuda where there is one)")


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.cli import console as draw  # they bring torch and timm
    from maskaq.cli import resolve
    from maskaq.cli.evaluation import EvaluationImages
    from maskaq.runs.opened import write_report

    folders = arguments.folders
    checkpoint = arguments.checkpoint
    console = invocation.console
    if checkpoint and len(folders) > 1:
        raise CheckpointError("--checkpoint is for one run: report each run alone first, then all of them together")
    runs = [resolve.opened_run(folders[0], checkpoint)] if checkpoint else folders
    real = EvaluationImages(DataOptions(arguments.real, crop_pct=arguments.crop_pct)) if arguments.real else None
    with draw.progress_for(console) as progress:
        page = write_report(*runs, out=arguments.out, device=arguments.device, progress=progress, real=real)
    console.print(f"report: {page} ({draw.size(page.stat().st_size)}), and {page.with_suffix('.md').name} beside it")


def report_of_run(folder: str, console: Console, device: "torch.device") -> None:
    """Write the report of a finished run; a missing library is a note, not a failure of the run."""
    from maskaq.cli import console as draw
    from maskaq.runs.opened import write_report

    try:
        with draw.progress_for(console) as progress:
            page = write_report(folder, device=device, progress=progress)
        console.print(f"report: {page}")
    except MaskaqError as error:
        console.print(f"no report: {error}")
