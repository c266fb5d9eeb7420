"""`maskaq push`."""

import argparse
from dataclasses import dataclass

from maskaq.cli import converters
from maskaq.cli.arguments import Invocation

SUMMARY = "upload a quantized model with its card to the Hugging Face Hub"
RESUMABLE = False


@dataclass(frozen=True)
class Arguments:
    folder: str
    repository: str
    private: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=converters.path, metavar="RUN", help="run folder or saved model")
    parser.add_argument("repository", metavar="USER/REPO", help="repository on the Hub; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create the repository as private")


def run(arguments: Arguments, invocation: Invocation) -> None:
    from pathlib import Path

    from maskaq.artifact.saved import is_pretrained, push
    from maskaq.storage.runfolder import QUANTIZED

    folder = Path(arguments.folder)
    folder = folder if is_pretrained(folder) else folder / QUANTIZED
    address = push(folder, arguments.repository, private=arguments.private)
    invocation.console.print(f'uploaded: {address}\nload it with maskaq.from_pretrained("{arguments.repository}")')
