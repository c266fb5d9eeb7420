"""Benchmark synthesis and calibration: microseconds per image and step, set-up time, memory, and a lower bound.

It uses random weights and images: timings do not depend on their values.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from maskaq.calibrate.calibrator import Calibrator
from maskaq.engine import PLAIN, Engine
from maskaq.images.sets import SyntheticSet
from maskaq.images.stored import noise
from maskaq.images.synthesis import Synthesizer
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.recipe.schema import Recipe
from maskaq.shapes import Geometry

RELEASE = {  # the method's public release on one H200, float32, in microseconds per image (synthesis: and step)
    "deit_tiny_patch16_224": {"synthesis": 12_446, "calibration": 7_390},
    "deit_small_patch16_224": {"synthesis": 15_663, "calibration": 7_903},
    "deit_base_patch16_224": {"synthesis": 19_322, "calibration": 8_907},
}
STAGES = ("synthesis", "calibration")


@dataclass(frozen=True)
class Timing:
    """One stage of one model on one device."""

    model: str
    stage: str
    engine: str
    batch: int
    microseconds: float
    """Per image (synthesis: and step), the median over the repeats."""
    fastest: float
    slowest: float
    setup_seconds: float
    """Extra time of the first steps: compilation and capture."""
    megabytes_per_image: float | None
    """Peak GPU memory, weights and set-up included; not known on CPU."""
    gigaflop: float
    """Per image (synthesis: and step), counted on the reference engine."""
    floor_microseconds: float
    """Time of these operations at the measured rate of a large matrix product on this device."""

    @property
    def share_of_floor(self) -> float:
        return self.floor_microseconds / self.microseconds

    @property
    def times_faster_than_release(self) -> float | None:
        published = RELEASE.get(self.model, {}).get(self.stage)
        return published / self.microseconds if published else None

    def to_dict(self) -> dict[str, Any]:
        more = ("share_of_floor", "times_faster_than_release")
        return asdict(self) | {name: getattr(self, name) for name in more}


def bench(
    name: str,
    teacher: nn.Module,
    recipe: Recipe,
    engine: Engine = PLAIN,
    *,
    batch: int = 0,
    calibration_batch: int = 0,
    steps: int = 20,
    repeats: int = 5,
    stages: Sequence[str] = STAGES,
) -> Iterator[Timing]:
    """Timings of stages for an exposed model. A batch of 0 means the batch that a run of the recipe would use."""
    sizes = {"steps": steps, "repeats": repeats}
    if "synthesis" in stages:
        yield _synthesis(name, teacher, recipe, engine, batch=batch, **sizes)
    if "calibration" in stages:
        yield _calibration(name, teacher, recipe, engine, batch=calibration_batch or recipe.calibration.batch, **sizes)


def _synthesis(name: str, teacher: nn.Module, recipe: Recipe, engine: Engine, batch: int, **sizes: int) -> Timing:
    student = _student(teacher, recipe)
    batch = batch or Synthesizer(teacher, student, recipe, engine=engine).images_at_once()
    make = Synthesizer(teacher, student, _shaped(recipe, batch, sizes["steps"]), engine=engine)
    one = Synthesizer(teacher, student, _shaped(recipe, 1, 1))
    flops = _flops(lambda: one.trial(1, 1))
    case = {"model": name, "stage": "synthesis", "engine": engine.name, "batch": batch, "gigaflop": flops / 1e9}
    return _time(lambda: make.trial(batch, sizes["steps"]), make.device, case, **sizes)


def _calibration(name: str, teacher: nn.Module, recipe: Recipe, engine: Engine, batch: int, **sizes: int) -> Timing:
    fit = Calibrator(teacher, _student(teacher, recipe), _shaped(recipe, batch, 1), engine=engine)
    one = Calibrator(teacher, _student(teacher, recipe), _shaped(recipe, 1, 1))
    data = _images(fit.geometry, batch * sizes["steps"])
    flops = _flops(lambda: one.epoch(data[:1], 0))
    case = {"model": name, "stage": "calibration", "engine": engine.name, "batch": batch, "gigaflop": flops / 1e9}
    return _time(lambda: fit.epoch(data, 0), fit.device, case, **sizes)


def _shaped(recipe: Recipe, batch: int, steps: int) -> Recipe:
    return replace(
        recipe,
        synthesis=replace(recipe.synthesis, batch=batch, steps=steps),
        # With pace = "error" every repeat would measure the student's error again; a run does so once.
        calibration=replace(recipe.calibration, batch=batch, pace="fixed"),
    )


def _student(teacher: nn.Module, recipe: Recipe) -> nn.Module:
    student = quantized_twin(teacher, recipe.quantization)
    init_ranges_(student, noise(teacher, 4, seed=0), recipe.quantization)
    return student


def _images(geometry: Geometry, count: int) -> SyntheticSet:
    size = (count, geometry.channels, *geometry.image_size)
    images = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(count)
    return SyntheticSet(images, numbers % max(1, geometry.classes), numbers)


def _time(work: Callable[[], object], device: torch.device, case: dict[str, Any], steps: int, repeats: int) -> Timing:
    on_gpu = device.type == "cuda"
    batch = case["batch"]
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    first, *rest = [_seconds(work, device) for _ in range(1 + repeats)]
    per_image = [1e6 * seconds / (batch * steps) for seconds in rest]
    median = statistics.median(per_image)
    return Timing(
        **case,
        microseconds=median,
        fastest=min(per_image),
        slowest=max(per_image),
        setup_seconds=max(0.0, first - median * batch * steps / 1e6),
        megabytes_per_image=torch.cuda.max_memory_reserved(device) / batch / 1e6 if on_gpu else None,
        floor_microseconds=1e15 * case["gigaflop"] / matmul_rate(device),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _flops(work: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


@cache
def matmul_rate(device: torch.device) -> float:
    """Operations per second of a large matrix product: bfloat16 on a GPU, float32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = [_seconds(lambda: a @ b, device) for _ in range(8)]
    return 2 * size**3 / statistics.median(seconds[3:])
