"""`maskaq export`."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import SCENES_DATA, DataOptions, Invocation
from maskaq.errors import ExportError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from maskaq.artifact.export.agreement import Agreement
    from maskaq.artifact.export.verify import Verification

SUMMARY = "write a finished run's model for other runtimes, and verify the file; or its images for other tools"
RESUMABLE = False
_VERIFIED_ON = 16  # synthetic images that an exported file is compared on
_VERIFIED_PIXELS = _VERIFIED_ON * 224**2  # in all images: the codes of every layer are in memory at once


@dataclass(frozen=True)
class Arguments:
    folder: str
    format: str
    output: str | None
    target: str
    precision: str
    data: DataOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=converters.path, metavar="RUN_OR_MODEL", help="run folder, or a saved model's folder"
    )
    parser.add_argument(
        "--format",
        choices=("onnx", "openvino", "executorch", "pt2", "images"),
        default="onnx",
        help="onnx: standard operators, integer products; openvino: the same as FILE.xml and FILE.bin; executorch: "
        "FILE.pte for XNNPACK; pt2: torch.export.load; images: the synthetic images as a folder of PNGs, for the "
        "quantizers of other tools (default: onnx)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=converters.path,
        metavar="FILE",
        help="default: model.onnx, .xml, .pte or .pt2, or the folder png, in the run folder",
    )
    parser.add_argument(
        "--target",
        choices=("cpu", "qdq", "tensorrt"),
        default="cpu",
        help="with --format onnx: cpu (ONNX Runtime on CPUs and in browsers), qdq (floats between DequantizeLinear, "
        "for other readers of ONNX), or tensorrt, which needs quantization.target=symmetric (default: cpu)",
    )
    parser.add_argument(
        "--precision",
        choices=("f32", "bf16"),
        default="f32",
        help="with --format openvino: precision of what is not quantized (default: f32)",
    )
    options.add_data(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.artifact import export as formats  # they bring torch and timm
    from maskaq.artifact.export.agreement import Agreement
    from maskaq.cli.evaluation import evaluation_images
    from maskaq.cli.resolve import deployed_model
    from maskaq.tasks import task_of

    console, format = invocation.console, arguments.format
    path = Path(arguments.folder)
    if format == "images":
        _write_images(arguments, console)
        return
    formats.check_options(format, arguments.target, arguments.precision)
    file = formats.check_target(arguments.output or path / f"model{formats.SUFFIXES[format]}", format)
    model, images = deployed_model(path, _VERIFIED_ON)
    images = images[: max(1, _VERIFIED_PIXELS // images[0, 0].numel())]
    formats.check_grids(model, format, arguments.target)
    batches = evaluation_images(arguments.data)
    loader = batches(model) if batches else None  # a wrong folder fails early
    if loader and task_of(model).has_layouts and not (arguments.data.data or "").startswith(SCENES_DATA):
        raise ExportError(
            "--data: an exported detector or segmenter takes images of one size; those of a folder keep their ratio. "
            "Export without --data, and measure the saved model with `maskaq evaluate`"
        )
    layout = {"target": arguments.target, "precision": arguments.precision}
    found = formats.export(model, file, format, images, _metadata(model.maskaq_config), **layout)
    if found is None:
        console.print(f"{file}   ({file.stat().st_size / 1e6:.2f} MB)")
        console.print(f"verified on {len(images)} images: the same outputs, bit for bit")
        return
    if isinstance(found, Agreement):
        _show_agreement(file, found, console)
    else:
        _show_verification(file, format, found, console)
    if loader:
        _show_accuracy(arguments, model, file, loader, console)


def _write_images(arguments: Arguments, console: Console) -> None:
    """Write the synthetic images of a run for other tools."""
    from maskaq.artifact.export.metadata import describe
    from maskaq.images.pngs import check_folder, write_pngs
    from maskaq.models import class_names
    from maskaq.runs.opened import open_run
    from maskaq.storage.runfolder import is_run

    if arguments.target != "cpu" or arguments.precision != "f32" or arguments.data.data is not None:
        raise ExportError("--format images writes images alone: --target, --precision and --data are for models")
    folder = check_folder(arguments.output or Path(arguments.folder) / "png")
    if not is_run(arguments.folder):
        raise ExportError(f"{arguments.folder} has no images: --format images expects a run folder, with run.json")
    opened = open_run(arguments.folder)
    model: Any = opened.calibrated()
    images = opened.images()
    keys = ("version", "input_size", "mean", "std")
    notes = {key: value for key, value in describe(model).items() if key in keys} | _provenance(model.maskaq_config)
    write_pngs(images, folder, notes, class_names(model))
    console.print(f"{folder}   ({len(images)} images, manifest.json, files.txt)")


def _provenance(saved: dict[str, Any]) -> dict[str, Any]:
    """Where a model comes from."""
    made = saved["made"]
    kept = {key: made[key] for key in ("seed", "data_free", "commit") if key in made}
    weights = (made.get("model") or {}).get("weights")  # digest of the full-precision ones
    return {"model": saved["timm"]["name"], "weights": weights, "recipe": made.get("recipe")} | kept


def _metadata(saved: dict[str, Any]) -> dict[str, Any]:
    """Metadata for the exported file."""
    from maskaq.artifact.card import bits_of

    return {"bits": bits_of(saved), "architecture": saved["timm"]} | _provenance(saved)


def _show_verification(file: Path, format: str, found: "Verification", console: Console) -> None:
    from maskaq.artifact.export import runtimes
    from maskaq.cli.console import verification

    beside = " and .bin" if format == "openvino" else ""
    console.print(f"{file}{beside}   ({runtimes.bytes_of(file) / 1e6:.2f} MB)")
    for line in verification(found, runtimes.runtime_of(file), runtimes.products(file)):
        console.print(line)


def _show_agreement(file: Path, found: "Agreement", console: Console) -> None:
    console.print(f"{file}   ({file.stat().st_size / 1e6:.2f} MB)")
    same = f"{found.means} on {round(found.share * found.images)} of them"
    console.print(
        f"compared on {found.images} images: file and model {same} (correlation of outputs {found.correlation:.4f}; "
        f"with the same arithmetic in torch {found.reference:.4f})"
    )
    console.print(
        "weights are the model's codes; activations are quantized by XNNPACK itself, to 8 bits for each token"
    )


def _show_accuracy(arguments: Arguments, model: Any, file: Path, loader: "DataLoader", console: Console) -> None:
    """Show the accuracy of the model and of the exported file."""
    from maskaq.artifact.card import caveat_of
    from maskaq.artifact.export import runtimes
    from maskaq.cli.console import accuracy_table
    from maskaq.cli.evaluation import Accuracy, evaluate, title

    table: Accuracy = {"maskaq": evaluate(model, loader), file.name: evaluate(runtimes.runnable(file), loader)}
    caveat = caveat_of(model.maskaq_config)
    console.print(accuracy_table(table, title(arguments.folder, arguments.data.data, caveat)))
