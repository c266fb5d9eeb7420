"""`maskaq status`."""

import argparse
import time
from dataclasses import dataclass

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import Invocation

SUMMARY = "show the progress of a run, its workers and the time left"
RESUMABLE = False


@dataclass(frozen=True)
class Arguments:
    folder: str
    watch: float | None
    json: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=converters.path, metavar="RUN", help="run folder, or --out of a table of runs")
    parser.add_argument(
        "--watch",
        type=converters.seconds,
        metavar="SECONDS",
        help="print the status at this interval until the run is finished",
    )
    options.add_json(parser, "status")


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.cli import console as draw  # it brings torch
    from maskaq.runs.status import status
    from maskaq.storage.files import write_json_atomic

    while True:
        found = status(arguments.folder)
        for part in draw.status_lines(found):
            invocation.console.print(part)
        if arguments.json:
            write_json_atomic(arguments.json, found.to_dict())
        if arguments.watch is None or found.stage in ("finished", "nobody works on it"):
            return
        time.sleep(arguments.watch)
        invocation.console.print()
