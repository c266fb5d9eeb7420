"""`maskaq export`."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import DataOptions, Invocation

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from maskaq.artifact.export.verify import Verification

SUMMARY = "write a finished run's model for other runtimes, and verify the file"
RESUMABLE = False
_VERIFIED_ON = 16  # synthetic images that an exported file is compared on


@dataclass(frozen=True)
class Arguments:
    folder: str
    format: str
    output: str | None
    data: DataOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=converters.path, metavar="RUN_OR_MODEL", help="run folder, or a saved model's folder"
    )
    parser.add_argument(
        "--format",
        choices=("onnx", "openvino", "pt2"),
        default="onnx",
        help="onnx: standard operators, integer products; openvino: the same as FILE.xml and FILE.bin; "
        "pt2: torch.export.load (default: onnx)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=converters.path,
        metavar="FILE",
        help="default: model.onnx, .xml or .pt2 in the run folder",
    )
    options.add_data(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.artifact import export as formats  # they bring torch and timm
    from maskaq.cli.evaluation import evaluation_images
    from maskaq.cli.resolve import deployed_model

    console, format = invocation.console, arguments.format
    path = Path(arguments.folder)
    file = formats.check_target(arguments.output or path / f"model{formats.SUFFIXES[format]}", format)
    model, images = deployed_model(path, _VERIFIED_ON)
    batches = evaluation_images(arguments.data)
    loader = batches(model) if batches else None  # a wrong folder fails early
    found = formats.export(model, file, format, images, _metadata(model.maskaq_config))
    if found is None:
        console.print(f"{file}   ({file.stat().st_size / 1e6:.2f} MB)")
        console.print(f"verified on {len(images)} images: the same logits, bit for bit")
        return
    _show_verification(file, format, found, console)
    if loader:
        _show_accuracy(arguments, model, file, loader, console)


def _metadata(saved: dict[str, Any]) -> dict[str, Any]:
    """Metadata for the exported file."""
    from maskaq.artifact.card import bits_of

    return {
        "bits": bits_of(saved),
        "model": saved["timm"]["name"],
        "architecture": saved["timm"],
        "recipe": saved["made"].get("recipe"),
        "data_free": saved["made"].get("data_free"),
    }


def _show_verification(file: Path, format: str, found: "Verification", console: Console) -> None:
    from maskaq.artifact.export import runtimes
    from maskaq.cli.console import verification

    beside = " and .bin" if format == "openvino" else ""
    console.print(f"{file}{beside}   ({runtimes.bytes_of(file) / 1e6:.2f} MB)")
    for line in verification(found, runtimes.runtime_of(file), runtimes.products(file)):
        console.print(line)


def _show_accuracy(arguments: Arguments, model: Any, file: Path, loader: "DataLoader", console: Console) -> None:
    """Show the accuracy of the model and of the exported file."""
    from maskaq.artifact.card import caveat_of
    from maskaq.artifact.export import runtimes
    from maskaq.cli.console import accuracy_table
    from maskaq.cli.evaluation import Accuracy, evaluate, title

    table: Accuracy = {"maskaq": evaluate(model, loader), file.name: evaluate(runtimes.runnable(file), loader)}
    caveat = caveat_of(model.maskaq_config)
    console.print(accuracy_table(table, title(arguments.folder, arguments.data.data, caveat)))
