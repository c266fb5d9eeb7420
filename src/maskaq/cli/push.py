"""`maskaq push`."""

import argparse
from dataclasses import dataclass

from maskaq.cli import converters
from maskaq.cli.arguments import Invocation

SUMMARY = "upload a quantized model with its card to the Hugging Face hub"
RESUMABLE = False


@dataclass(frozen=True)
class Arguments:
    folder: str
    repository: str
    private: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=converters.path, metavar="RUN", help="run folder or saved model")
    parser.add_argument("repository", metavar="USER/REPO", help="where it goes; made if it is not there")
    parser.add_argument("--private", action="store_true", help="a new repository is private")


def run(arguments: Arguments, invocation: Invocation) -> None:
    from pathlib import Path

    from maskaq.artifact.saved import is_pretrained, push
    from maskaq.storage.runfolder import QUANTIZED

    folder = Path(arguments.folder)
    folder = folder if is_pretrained(folder) else folder / QUANTIZED
    address = push(folder, arguments.repository, private=arguments.private)
    invocation.console.print(f'uploaded: {address}\nload it with maskaq.from_pretrained("{arguments.repository}")')
