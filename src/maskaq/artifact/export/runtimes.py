"""How fast exported files run on this CPU: interleaved in one process, beside float32 and other runtimes."""

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskaq.artifact.export import onnx as onnx_files
from maskaq.artifact.export import weights_of
from maskaq.artifact.export.metadata import REMEDY
from maskaq.artifact.export.onnx import INPUT
from maskaq.artifact.export.programs import OUTPUT
from maskaq.artifact.export.verify import onnx, onnxruntime, session, tensors_of
from maskaq.errors import ExportError, MaskaqError
from maskaq.models.detector import OBJECTS, image_size, placed

FLOAT_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulNBits")
INTEGER_PRODUCTS = ("MatMulIntegerToFloat", "QLinearMatMul", "MatMulInteger", "QGemm")
_READERS = {".onnx": "onnxruntime", ".xml": "openvino", ".pte": "executorch"}
_IMAGES = 16
"""At least so many pass in one measurement: below, the clock and the scheduler show."""

_REST = 0.05
"""Seconds before a measurement: workers of the model before it spin for a while, in the hope of more work."""

Run = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Speed:
    """One file in one runtime at one batch size."""

    file: str
    runtime: str
    batch: int
    megabytes: float
    milliseconds: float
    """Per image, the median over the repeats."""
    fastest: float
    slowest: float
    ratio: float
    """Times as fast as the first row, measured in the same repeat: the median."""
    ratio_low: float
    ratio_high: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RunModel(nn.Module):
    """What computes a batch as a module, for `maskaq.evaluate`."""

    def __init__(self, run: Run, classes: int | None) -> None:
        super().__init__()
        self.run = run
        self.num_classes = classes  # tells its task

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(np.array(self.run(images.numpy())))


class OnnxModel(nn.Module):
    """An ONNX file as a module, for `maskaq.evaluate`."""

    def __init__(self, file: str | Path, threads: int = 0) -> None:
        super().__init__()
        self.session = session(file, threads=threads)

    def forward(self, images: Tensor) -> Tensor:
        return tensors_of(self.session, [OUTPUT], images)[OUTPUT]

    def detect(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> list[dict[str, Tensor]]:
        """Of a detector's file, what `MaskRCNN.detect` gives."""
        return placed(tensors_of(self.session, list(OBJECTS), images), image_size(images), sizes)


RUNTIMES = {".onnx": "ONNX Runtime", ".xml": "OpenVINO", ".pte": "ExecuTorch"}
"""The runtime that a file was written for, by its suffix."""


def of_openvino(file: str | Path) -> bool:
    """Whether a file is in OpenVINO's own format."""
    return Path(file).suffix == ".xml"


def of_executorch(file: str | Path) -> bool:
    return Path(file).suffix == ".pte"


def runtime_of(file: str | Path) -> str:
    """The name of the runtime that a file was written for."""
    return RUNTIMES.get(Path(file).suffix, "ONNX Runtime")


def metadata_of(file: str | Path) -> dict[str, Any]:
    """The entries that maskaq wrote into a file."""
    if of_openvino(file):
        from maskaq.artifact.export import openvino as openvino_files

        return openvino_files.metadata_of(file)
    if of_executorch(file):
        from maskaq.artifact.export import executorch as executorch_files

        return executorch_files.metadata_of(file)
    if Path(file).suffix == ".pt2":
        from maskaq.artifact.export import pt2

        return pt2.metadata_of(file)
    return onnx_files.metadata_of(file)


def runnable(file: str | Path, threads: int = 0) -> nn.Module:
    """A file as a module, in the runtime it was written for."""
    model: nn.Module
    if of_openvino(file):
        from maskaq.artifact.export.openvino import OpenvinoModel

        model = OpenvinoModel(file, threads)
    elif of_executorch(file):
        from maskaq.artifact.export.executorch import ExecutorchModel

        model = ExecutorchModel(file, threads)
    else:
        model = OnnxModel(file, threads)
    notes = metadata_of(file)
    model.num_classes, model.pretrained_cfg = notes.get("classes"), {"task": notes.get("task")}  # type: ignore[assignment]
    return model


def bytes_of(file: str | Path) -> int:
    """Size on disk, including the separate weights file of an OpenVINO model."""
    files = [Path(file), *([weights_of(file)] if of_openvino(file) else [])]
    return sum(path.stat().st_size for path in files)


@dataclass(frozen=True)
class Candidate:
    """Something to be timed: it is loaded when the turn of its runtime comes."""

    name: str
    runtime: str
    megabytes: float
    load: Callable[[int], Run]
    """Number of threads -> what computes a batch."""


def candidate_of(name: str, file: str | Path) -> Candidate:
    """A file, to be timed in the runtime it was written for."""
    return Candidate(name, _READERS[Path(file).suffix], bytes_of(file) / 1e6, partial(runner, file))


def bench_files(
    files: Mapping[str, str | Path], *, batches: Sequence[int] = (1, 32), threads: int = 2, repeats: int = 10
) -> Iterator[Speed]:
    """Speeds of named files, each in the runtime it was written for; the first is an ONNX file.

    Beside files of OpenVINO the first is timed in OpenVINO too. Our other ONNX files are not: they are laid out for
    ONNX Runtime.
    """
    (first, reference), *_ = files.items()
    candidates = [candidate_of(name, file) for name, file in files.items()]
    if any(candidate.runtime == "openvino" for candidate in candidates):
        candidates.insert(1, Candidate(first, "openvino", bytes_of(reference) / 1e6, partial(_openvino, reference)))
    size = metadata_of(reference)["input_size"]
    yield from bench(candidates, size, batches=batches, threads=threads, repeats=repeats)


def bench(
    candidates: Sequence[Candidate],
    size: Sequence[int],
    *,
    batches: Sequence[int] = (1, 32),
    threads: int = 2,
    repeats: int = 10,
) -> Iterator[Speed]:
    """Speeds of candidates on images of this size, (C, H, W); ratios are to the first.

    Those of one runtime take turns, with the first of all as their measure. Two runtimes do not: threads of one that
    wait for work slow the other. All are told the number of threads: left to itself, ONNX Runtime pins its workers
    to cores. Measure on idle cores: beside another busy process two threads are as slow as one (docs/LOG.md).
    """
    first = candidates[0]
    reference = first.load(threads)
    for runtime in dict.fromkeys(candidate.runtime for candidate in candidates):
        group = {candidate.name: candidate for candidate in candidates if candidate.runtime == runtime}
        runs = {name: reference if c is first else c.load(threads) for name, c in group.items()}
        for batch in batches:
            images = np.random.default_rng(0).standard_normal((batch, *size)).astype(np.float32)
            for name, (taken, ratios) in _in_turn(runs, reference, images, repeats).items():
                yield Speed(
                    file=name,
                    runtime=runtime,
                    batch=batch,
                    megabytes=group[name].megabytes,
                    milliseconds=statistics.median(taken),
                    fastest=min(taken),
                    slowest=max(taken),
                    ratio=statistics.median(ratios),
                    ratio_low=min(ratios),
                    ratio_high=max(ratios),
                )


def _in_turn(
    runs: Mapping[str, Run], reference: Run, images: np.ndarray, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """For each model, milliseconds per image, and the speed-up over the reference timed just before it."""
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    for repeat in range(-1, repeats):  # the first is for memory and caches
        measure = _seconds(reference, images)
        for name, run in runs.items():
            seconds = measure if run is reference else _seconds(run, images)
            if repeat >= 0:
                taken[name][0].append(1e3 * seconds / len(images))
                taken[name][1].append(measure / seconds)
    return taken


def operators(file: str | Path) -> Counter[str]:
    """Number of each operator in the graph after ONNX Runtime has optimised it."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = f"{folder}/optimised.onnx"
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)


@dataclass(frozen=True)
class Products:
    """How a runtime computes a file's matrix products."""

    integer: int
    in_float: int
    fused: int = 0
    """Attentions that OpenVINO computes in one kernel each."""
    of_integers: int = 0
    """Of these, the attentions whose q, k and v are integers."""

    def __str__(self) -> str:
        fused = f", and {self.fused} attentions in a fused kernel each, {self.of_integers} of them of integer q, k, v"
        fused = fused if self.fused else ""
        return f"{self.integer} matrix products in integers, {self.in_float} in float{fused}"


def products(file: str | Path) -> Products | None:
    """Count the matrix products after the runtime that the file was written for has optimised the graph.

    None for ExecuTorch, which does not show its graph.
    """
    if of_executorch(file):
        return None
    if of_openvino(file):
        from maskaq.artifact.export import openvino as openvino_files

        return Products(*openvino_files.products(file))
    found = operators(file)
    return Products(sum(found[name] for name in INTEGER_PRODUCTS), sum(found[name] for name in FLOAT_PRODUCTS))


def _seconds(run: Run, images: np.ndarray) -> float:
    """Seconds of one call, with nothing else running and not straight after another model's call."""
    times = -(-_IMAGES // len(images))
    time.sleep(_REST)
    run(images)
    began = time.perf_counter()
    for _ in range(times):
        run(images)
    return (time.perf_counter() - began) / times


def runner(file: str | Path, threads: int) -> Run:
    """A file in the runtime it was written for: images as an array -> outputs as an array."""
    if of_openvino(file):
        return _openvino(file, threads)
    if of_executorch(file):
        from maskaq.artifact.export.executorch import ExecutorchModel

        model = ExecutorchModel(file, threads)
        return lambda images: model(torch.from_numpy(images)).numpy()
    with _explained(file):
        opened = session(file, threads=threads)
    return lambda images: opened.run(None, {INPUT: images})[0]


def _openvino(file: str | Path, threads: int) -> Run:
    from maskaq.artifact.export.openvino import compiled, precision_of, read

    with _explained(file):
        program = read(file)
        request = compiled(program, threads, precision_of(program)).create_infer_request()
    return lambda images: request.infer({0: images}, share_inputs=True)[0]


@contextmanager
def _explained(file: str | Path) -> Iterator[None]:
    """Turn the runtimes' own exceptions for a damaged file into ExportError."""
    try:
        yield
    except MaskaqError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise ExportError(f"{file} cannot be run: {reason}; {REMEDY}") from error
