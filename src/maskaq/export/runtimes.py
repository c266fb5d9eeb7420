"""How fast exported ONNX files run on this CPU: interleaved in one process, beside float32 and other runtimes."""

import importlib.util
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskaq.export.onnx import INPUT, OUTPUT, metadata_of
from maskaq.export.verify import onnx, onnxruntime, session

FLOAT_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulNBits")
INTEGER_PRODUCTS = ("MatMulIntegerToFloat", "QLinearMatMul", "MatMulInteger", "QGemm")
_IMAGES = 16
"""At least so many pass in one measurement: below, the clock and the scheduler show."""

Run = Callable[[np.ndarray], object]


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


class OnnxModel(nn.Module):
    """An ONNX file as a module, for `maskaq.evaluate`."""

    def __init__(self, file: str | Path, threads: int = 0) -> None:
        super().__init__()
        self.session = session(file, threads=threads)
        self.place = nn.Parameter(torch.zeros(()), requires_grad=False)  # says: float32, on the CPU

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run([OUTPUT], {INPUT: images.numpy()})[0])


def bench_files(
    files: Mapping[str, str | Path], *, batches: Sequence[int] = (1, 32), threads: int = 2, repeats: int = 10
) -> Iterator[Speed]:
    """Speeds of named ONNX files in ONNX Runtime and, where it is installed, OpenVINO; ratios are to the first.

    Both runtimes are told the number of threads: left to itself, ONNX Runtime pins its workers to cores, where each
    waits for whatever else the scheduler puts there, and all others wait for it.
    """
    size = metadata_of(next(iter(files.values())))["input_size"]
    runs: dict[tuple[str, str], Run] = {
        (name, "onnxruntime"): _onnxruntime(file, threads) for name, file in files.items()
    }
    if importlib.util.find_spec("openvino"):
        runs |= {(name, "openvino"): _openvino(file, threads) for name, file in files.items()}
    for batch in batches:
        images = np.random.default_rng(0).standard_normal((batch, *size)).astype(np.float32)
        times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for repeat in range(-1, repeats):  # the first is for memory and caches
            for key, run in runs.items():
                seconds = _seconds(run, images, -(-_IMAGES // batch))
                if repeat >= 0:
                    times[key].append(1e3 * seconds / batch)
        first = next(iter(times.values()))
        for (name, runtime), taken in times.items():
            ratios = [a / b for a, b in zip(first, taken, strict=True)]
            yield Speed(
                file=name,
                runtime=runtime,
                batch=batch,
                megabytes=Path(files[name]).stat().st_size / 1e6,
                milliseconds=statistics.median(taken),
                fastest=min(taken),
                slowest=max(taken),
                ratio=statistics.median(ratios),
                ratio_low=min(ratios),
                ratio_high=max(ratios),
            )


def operators(file: str | Path) -> Counter[str]:
    """How many of each operator ONNX Runtime is left with once it has optimised the graph."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = f"{folder}/optimised.onnx"
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)


def products(file: str | Path) -> tuple[int, int]:
    """Matrix products that ONNX Runtime computes in integers, and in float."""
    found = operators(file)
    return sum(found[name] for name in INTEGER_PRODUCTS), sum(found[name] for name in FLOAT_PRODUCTS)


def _seconds(run: Run, images: np.ndarray, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        run(images)
    return (time.perf_counter() - began) / times


def _onnxruntime(file: str | Path, threads: int) -> Run:
    runner = session(file, threads=threads)
    return lambda images: runner.run([OUTPUT], {INPUT: images})


def _openvino(file: str | Path, threads: int) -> Run:
    import openvino

    core = openvino.Core()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # it would take bfloat16 where the CPU has it
    }
    request = core.compile_model(core.read_model(str(file)), "CPU", settings).create_infer_request()
    return lambda images: request.infer({0: images}, share_inputs=True)
