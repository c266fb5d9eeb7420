"""`maskaq bench-runtime`."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import DataOptions, Invocation
from maskaq.errors import DeviceError, ModelError

SUMMARY = "how fast exported files (.onnx, .xml) run on this CPU, beside float32"
RESUMABLE = False
_MOST_THREADS = 8  # of each core, that a measurement makes sense with


@dataclass(frozen=True)
class Arguments:
    files: tuple[str, ...]
    batch: tuple[int, ...]
    threads: int
    repeats: int
    json: str | None
    data: DataOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        type=converters.path,
        metavar="FILE",
        nargs="+",
        help="files of `maskaq export`, of one model at any bits",
    )
    positive = converters.positive
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 32], help="images at once (default: 1 32)")
    parser.add_argument("--threads", type=positive, default=2, help="threads of each runtime (default: 2)")
    parser.add_argument("--repeats", type=positive, default=10, help="interleaved measurements of each (default: 10)")
    options.add_json(parser, "figures")
    options.add_data(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    import torch  # they bring timm too, and what the formats need

    from maskaq.artifact.export import runtimes
    from maskaq.artifact.export.onnx import export_float
    from maskaq.cli import console as draw
    from maskaq.cli.evaluation import Accuracy, evaluate, evaluation_images
    from maskaq.cli.figures import write_figures
    from maskaq.models.load import rebuild
    from maskaq.runs.opened import metrics

    names = arguments.files
    threads = arguments.threads
    repeats = arguments.repeats
    console = invocation.console
    architecture = _shared_architecture(names)
    if threads > _MOST_THREADS * (os.cpu_count() or 1):
        raise DeviceError(f"--threads {threads}: expected about as many as there are cores, {os.cpu_count()}")
    model: Any = rebuild(architecture)
    model.num_classes = runtimes.metadata_of(names[0]).get("classes", model.num_classes)  # 0: it gives features
    batches = evaluation_images(arguments.data)
    loader = batches(model) if batches else None
    with tempfile.TemporaryDirectory() as folder, draw.progress_for(console) as progress:
        float32 = export_float(model, Path(folder) / "float32.onnx")
        at = ", ".join(map(str, arguments.batch))
        progress.note(f"{len(names) + 1} files, {repeats} repeats at batch {at}")
        paths = {"float32": float32} | {file: Path(file) for file in names}
        speeds = list(runtimes.bench_files(paths, batches=arguments.batch, threads=threads, repeats=repeats))
    console.print(draw.speed_table(speeds, f"the CPU, {threads} threads"))
    counts = {file: runtimes.products(file) for file in names}
    for file, count in counts.items():
        console.print(f"{file}: {count} ({runtimes.runtime_of(file)})")
    accuracy: Accuracy = {}
    if loader:
        accuracy = {file: evaluate(runtimes.runnable(file, threads), loader) for file in names}
        console.print(draw.accuracy_table(accuracy, f"on {arguments.data.data}"))
    if arguments.json:
        figures: dict[str, Any] = {
            "speeds": [speed.to_dict() for speed in speeds],
            "products": {file: asdict(count) for file, count in counts.items()},
        }
        figures |= metrics(accuracy, str(arguments.data.data)) if accuracy else {}
        write_figures(arguments.json, figures, invocation, torch.device("cpu"))


def _shared_architecture(files: Sequence[str]) -> dict[str, Any]:
    """Architecture of the model that all files were exported from."""
    from maskaq.artifact.export.runtimes import metadata_of

    first, *others = files
    notes = metadata_of(first)
    if "architecture" not in notes:
        raise ModelError(f"{first} does not say which model it is: expected a file of `maskaq export`")
    for file in others:
        other = metadata_of(file)
        if other.get("architecture") != notes["architecture"]:
            named = " and ".join(f"{f} ({n.get('model')})" for f, n in ((first, notes), (file, other)))
            raise ModelError(f"{named} are of two models: their speeds are not to be compared; measure each by itself")
    return notes["architecture"]
