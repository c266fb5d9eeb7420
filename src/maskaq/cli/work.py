"""`maskaq work`."""

import argparse
from dataclasses import dataclass

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import Invocation

SUMMARY = "make images for a run that another process leads, on any machine that can access its folder"
RESUMABLE = True


@dataclass(frozen=True)
class Arguments:
    folder: str
    checkpoint: str | None
    device: str | None
    plain: bool
    lease: float
    wait: float
    any_device: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=converters.path, metavar="RUN", help="run folder of `quantize` or `synthesize`")
    options.add_moved_checkpoint(parser)
    options.add_device(parser)
    options.add_plain(parser)
    options.add_lease(parser)
    parser.add_argument(
        "--wait",
        type=converters.seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for a run that has not begun, or that has neither a leader nor work (default: 60)",
    )
    parser.add_argument(
        "--any-device",
        action="store_true",
        help="work on another kind of device too; its images differ in their last bits",
    )


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.cli import console as draw  # they bring torch and timm
    from maskaq.cli import resolve
    from maskaq.runs.work import wait_for, work

    wait_for(arguments.folder, arguments.wait, invocation.console.print)
    opened = resolve.with_checkpoint(resolve.open_run(arguments.folder), arguments.checkpoint)
    resolve.check_names(opened.recipe)
    with draw.progress_for(invocation.console) as progress:
        made = work(
            opened,
            device=arguments.device,
            progress=progress,
            fast=False if arguments.plain else None,
            lease=arguments.lease,
            wait=arguments.wait,
            any_device=arguments.any_device,
        )
    invocation.console.print(f"{made} shards of images made for {arguments.folder}")
