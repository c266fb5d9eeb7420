"""`maskaq bench-runtime`."""

import argparse
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import DataOptions, Invocation
from maskaq.errors import DataError, DeviceError, ModelError

if TYPE_CHECKING:
    from maskaq.artifact.export.runtimes import Products, Speed

SUMMARY = "measure exported files (.onnx, .xml, .pte) on this CPU against float32, or against other tools' quantizers"
RESUMABLE = False
_CALIBRATED_ON = 128  # images given to other tools
_VERIFIED_ON = 8
_MOST_THREADS = 8  # per core, for a sensible measurement


@dataclass(frozen=True)
class Arguments:
    files: tuple[str, ...]
    batch: tuple[int, ...]
    threads: int
    repeats: int
    peers: bool
    real: str | None
    json: str | None
    data: DataOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        type=converters.path,
        metavar="FILE",
        nargs="+",
        help="files that `maskaq export` wrote for one model at any bits; with --peers one run folder",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="compare the run's model with the 8-bit models of ONNX Runtime's, NNCF's and torchao's quantizers, as far "
        "as they are installed, calibrated on the run's synthetic images",
    )
    parser.add_argument(
        "--real",
        type=converters.path,
        metavar="DIR",
        help="with --peers, as a reference: a folder of real images that they are calibrated on too",
    )
    positive = converters.positive
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 32], help="images at once (default: 1 32)")
    parser.add_argument("--threads", type=positive, default=2, help="threads of each runtime (default: 2)")
    parser.add_argument("--repeats", type=positive, default=10, help="interleaved measurements of each (default: 10)")
    options.add_json(parser, "figures")
    options.add_data(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.artifact.export import runtimes  # they import torch, timm and the libraries of the formats
    from maskaq.artifact.export.onnx import export_float
    from maskaq.cli import console as draw
    from maskaq.cli.evaluation import evaluation_images
    from maskaq.models.load import rebuild

    if arguments.real and not arguments.peers:
        raise DataError("--real is for --peers, whose quantizers it feeds; to evaluate on real images: --data")
    if arguments.peers:
        _run_peers(arguments, invocation)
        return
    names, threads, repeats = arguments.files, arguments.threads, arguments.repeats
    architecture = _shared_architecture(names)
    _check_threads(threads)
    model: Any = rebuild(architecture)
    model.num_classes = runtimes.metadata_of(names[0]).get("classes", model.num_classes)  # 0: it gives features
    batches = evaluation_images(arguments.data)
    loader = batches(model) if batches else None
    with tempfile.TemporaryDirectory() as folder, draw.progress_for(invocation.console) as progress:
        float32 = export_float(model, Path(folder) / "float32.onnx")
        at = ", ".join(map(str, arguments.batch))
        progress.note(f"{len(names) + 1} files, {repeats} repeats at batch {at}")
        paths = {"float32": float32} | {file: Path(file) for file in names}
        speeds = list(runtimes.bench_files(paths, batches=arguments.batch, threads=threads, repeats=repeats))
    counts = {file: count for file in names if (count := runtimes.products(file)) is not None}
    models = ((file, runtimes.runnable(file, threads)) for file in names)
    _show(arguments, invocation, speeds, models, loader, counts)


def _show(
    arguments: Arguments,
    invocation: Invocation,
    speeds: Sequence["Speed"],
    models: Iterable[tuple[str, Any]],
    loader: Any,
    counts: Mapping[str, "Products"] | None = None,
) -> None:
    """Print speeds, kinds of products and, with evaluation images, accuracies of the models; write them to --json."""
    import torch

    from maskaq.artifact.export import runtimes
    from maskaq.cli import console as draw
    from maskaq.cli.evaluation import Accuracy, evaluate
    from maskaq.cli.figures import write_figures
    from maskaq.runs.opened import metrics

    console = invocation.console
    console.print(draw.speed_table(speeds, f"the CPU, threads: {arguments.threads}"))
    for file, count in (counts or {}).items():
        console.print(f"{file}: {count} ({runtimes.runtime_of(file)})")
    accuracy: Accuracy = {}
    if loader:
        accuracy = {name: evaluate(model, loader) for name, model in models}
        console.print(draw.accuracy_table(accuracy, f"on {arguments.data.data}"))
    if arguments.json:
        figures: dict[str, Any] = {"speeds": [speed.to_dict() for speed in speeds]}
        if counts is not None:
            figures["products"] = {file: asdict(count) for file, count in counts.items()}
        figures |= metrics(accuracy, str(arguments.data.data)) if accuracy else {}
        write_figures(arguments.json, figures, invocation, torch.device("cpu"))


def _check_threads(threads: int) -> None:
    if threads > _MOST_THREADS * (os.cpu_count() or 1):
        raise DeviceError(f"--threads {threads}: expected about as many as there are cores, {os.cpu_count()}")


def _run_peers(arguments: Arguments, invocation: Invocation) -> None:
    """The run's model in ONNX Runtime and OpenVINO, beside other tools' versions of the same full-precision model."""
    from maskaq.artifact.export import export, runtimes
    from maskaq.artifact.export.onnx import export_float
    from maskaq.artifact.export.peers import available, make_peers
    from maskaq.cli import console as draw
    from maskaq.cli.evaluation import evaluation_images
    from maskaq.images.sets import folder_tensor, to_pixels
    from maskaq.models import geometry
    from maskaq.runs.opened import open_run
    from maskaq.storage.runfolder import is_run

    threads = arguments.threads
    _check_threads(threads)
    if len(arguments.files) != 1 or not is_run(arguments.files[0]):
        raise ModelError("--peers expects one run folder: its full-precision model and images are needed")
    opened = open_run(arguments.files[0])
    plain: Any = opened.load_teacher()
    opened.check_weights(plain)
    ours: Any = opened.calibrated()
    batches = evaluation_images(arguments.data)
    loader = batches(plain) if batches else None
    spec = geometry(ours)
    sets = {"": spec.normalise(to_pixels(opened.images().images[:_CALIBRATED_ON]))}
    if arguments.real:
        sets["real images"] = folder_tensor(arguments.real, plain, _CALIBRATED_ON, arguments.data.crop_pct)
    with tempfile.TemporaryDirectory() as folder, draw.progress_for(invocation.console) as progress:
        place = Path(folder)
        files = {"float32": export_float(plain, place / "float32.onnx")}
        own = f"maskaq {opened.recipe.quantization.bits}"
        images = sets[""][:_VERIFIED_ON]
        for format, suffix in (("onnx", ".onnx"), ("openvino", ".xml")):
            if format == "onnx" or "NNCF" in available():
                export(ours, place / f"maskaq{suffix}", format, images)
                files[f"{own}, {format}"] = place / f"maskaq{suffix}"
        candidates = [runtimes.candidate_of(name, file) for name, file in files.items()]
        for calibrated_on, images in sets.items():
            progress.note(f"other tools on {len(images)} {calibrated_on or 'synthetic images'}")
            candidates += make_peers(plain, files["float32"], images, place, calibrated_on)
        candidates.sort(key=lambda candidate: candidate.runtime != "onnxruntime")  # the first stays the first
        options = {"batches": arguments.batch, "threads": threads, "repeats": arguments.repeats}
        speeds = list(runtimes.bench(candidates, (spec.channels, *spec.image_size), **options))  # type: ignore[arg-type]
        models = ((c.name, runtimes.RunModel(c.load(threads), plain.num_classes)) for c in candidates)
        _show(arguments, invocation, speeds, models, loader)


def _shared_architecture(files: Sequence[str]) -> dict[str, Any]:
    """Architecture of the model that all files were exported from."""
    from maskaq.artifact.export.runtimes import metadata_of

    for file in files:
        if Path(file).is_dir():
            raise DataError(
                f"{file} is a folder: expected a file of `maskaq export`, such as {Path(file, 'model.onnx')}"
            )
    first, *others = files
    notes = metadata_of(first)
    if "architecture" not in notes:
        raise ModelError(f"{first} does not say which model it is: expected a file of `maskaq export`")
    for file in others:
        other = metadata_of(file)
        if other.get("architecture") != notes["architecture"]:
            named = " and ".join(f"{f} ({n.get('model')})" for f, n in ((first, notes), (file, other)))
            raise ModelError(f"{named} are of two models, whose speeds cannot be compared: measure each by itself")
    return notes["architecture"]
