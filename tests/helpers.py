"""What the tests of whole runs share: tiny models, tiny recipes, a progress that remembers, a process that can die."""

import functools
import importlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from maskaq.artifact import saved as pretrained
from maskaq.errors import MaskaqError
from maskaq.models.detector import mask_rcnn
from maskaq.models.segmenter import upernet
from maskaq.progress import Progress
from maskaq.quant.rotation import teacher_of
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.recipe.schema import Recipe, load_recipe
from maskaq.runs import quantize as run
from maskaq.storage import runfolder

torch.set_num_threads(1)  # also in the processes that import this module and not conftest

VIT = "vit_tiny_patch16_224"
VIT_ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}
SWIN = "swin_tiny_patch4_window7_224"
SWIN_ARGS = dict(embed_dim=16, depths=(2, 2), num_heads=(2, 4), img_size=32, window_size=4, num_classes=4)

DENSE_ARGS = dict(embed_dim=16, depths=(1, 2, 1, 1), num_heads=(1, 2, 4, 4), window_size=4, drop_path_rate=0.0)
DETECTOR_ARGS = dict(width=16, box_width=32, mask_width=16, mask_layers=1, finest=16, proposals=50, per_level=4)
DENSE_TERMS = ("pixel_prior", "object_prior", "pixel_kl", "detection_gap", "pyramid_error")
"""Loss terms of segmenters and detectors."""

SMALL = (
    "quantization.range_images=4",
    "synthesis.images=8",
    "synthesis.steps=3",
    "synthesis.batch=4",
    "calibration.epochs=4",
    "calibration.batch=4",
    "refresh.every=2",
    "refresh.steps=2",
)
"""Overrides that make a run of two rounds: 2 shards of 3 steps, 2 epochs of 2 steps, 2 shards of 2 steps, 2 epochs."""


def _weighty(model: nn.Module, seed: int) -> nn.Module:
    """The model with weights large enough for attention, predictions and gradients to be far from constant."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def tiny_vit(seed: int = 0, **args) -> nn.Module:
    torch.manual_seed(seed)
    return _weighty(timm.create_model(VIT, **{**VIT_ARGS, **args}), seed)


def tiny_swin(seed: int = 0, **args) -> nn.Module:
    torch.manual_seed(seed)
    return _weighty(timm.create_model(SWIN, **{**SWIN_ARGS, **args}), seed)


def tiny_upernet(seed: int = 0, size: int = 64, classes: int = 7) -> nn.Module:
    pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(seed)
    return upernet(SWIN, classes, size, width=16, **DENSE_ARGS)


def tiny_mask_rcnn(seed: int = 0, size: int = 64, classes: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return mask_rcnn(SWIN, classes, size, anchor_scale=4, **DETECTOR_ARGS, **DENSE_ARGS)


DENSE = {"segmentation": tiny_upernet, "detection": tiny_mask_rcnn}


def small_recipe(*overrides: str) -> Recipe:
    return load_recipe("paper", *SMALL, *overrides)


def pair(recipe: Recipe, build=tiny_vit) -> tuple[nn.Module, nn.Module]:
    """Teacher, and student with ranges from noise: what a run starts its first synthesis with."""
    teacher = teacher_of(build(), recipe.quantization)
    student = quantized_twin(teacher, recipe.quantization)
    init_ranges_(student, run.noise(teacher, recipe.quantization.range_images, 0), recipe.quantization)
    return teacher, student


class Ears(Progress):
    """Remembers every note, stage and advance."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.stages: list[tuple[str, int, int]] = []
        self.advances: list[tuple[int, dict[str, float]]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage(self, title: str, total: int, done: int = 0) -> None:
        self.stages.append((title, total, done))

    def advance(self, units: int = 1, **metrics: float) -> None:
        self.advances.append((units, metrics))


WEIGHTS = f"{runfolder.QUANTIZED}/model.safetensors"


def packed(student: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a saved student consists of."""
    return pretrained._stored(pretrained.as_deployed(student))


def tensors(path: str | Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Bit for bit, name by name."""
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []


def assert_same_run(a: Path, b: Path) -> None:
    """Same model, same weights behind it and same images of every round, bit for bit."""
    assert_same(tensors(a / WEIGHTS), tensors(b / WEIGHTS))
    newest = [sorted((root / "checkpoints").glob("*.safetensors"))[-1] for root in (a, b)]
    assert_same(*(tensors(path) for path in newest))
    images = [sorted(p.relative_to(root) for p in root.glob("images/*/*.safetensors")) for root in (a, b)]
    assert images[0] == images[1] and images[0]
    for name in images[0]:
        assert_same(tensors(a / name), tensors(b / name))


def content(root: Path) -> dict[str, bytes]:
    """Every file below a folder, but for the note of who holds the lock."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name != ".lock.pid")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def rewrite_run_json(root: Path, change) -> None:
    """run.json as a run would have written it with `change(text)` for its text."""
    found = json.loads(change((root / "run.json").read_text()))
    found.pop("sha256")
    (root / "run.json").write_bytes(runfolder._run_json(found))


def left_half_written(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


# ---- hooks: something happens at the n-th call of a function


def hook(setattr, where: str, n: int, act, after: bool = False) -> None:
    """From now on the n-th call of `where` ("module:Class.method") does `act`, before or after what it does."""
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    real, calls = getattr(owner, name), 0

    @functools.wraps(real)
    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == n and not after:
            act()
        result = real(*args, **kwargs)
        if calls == n and after:
            act()
        return result

    setattr(owner, name, counted)


# ---- what `make test` leaves out


def mostly_slow(cases: Mapping[str, Any] | Iterable[Any], *fast: Any) -> list[Any]:
    """The cases of a parametrised test by their names: those in `fast` run always, the others with the slow tests."""
    cases = cases if isinstance(cases, Mapping) else {str(case): case for case in cases}
    fast = tuple(map(str, fast))
    assert set(fast) <= set(cases), set(fast) - set(cases)
    marks = {name: () if name in fast else pytest.mark.slow for name in cases}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name, marks=marks[name])
        for name, case in cases.items()
    ]


# ---- processes of their own, forked from one that has imported everything and computed nothing


def in_process(target, *args) -> int | None:
    """The exit code of a new process that calls target(*args); minus the signal's number if one killed it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers", "maskaq.cli.running"])
    process = context.Process(target=target, args=args)
    process.start()
    process.join()
    return process.exitcode


def quantize_and_die(
    out: Path, recipe: Recipe, seconds: float, where: str, n: int, after: bool, build=tiny_vit
) -> None:
    """A run that is killed, as by `kill -9`, at the n-th call of `where`."""
    hook(setattr, where, n, lambda: os.kill(os.getpid(), signal.SIGKILL), after)
    run.quantize(build(), recipe, out, device="cpu", checkpoint_seconds=seconds)


def quantize_and_tell(out: Path, recipe: Recipe, message: Path) -> None:
    """A run that writes down what it is refused with."""
    try:
        run.quantize(tiny_vit(), recipe, out, device="cpu")
    except MaskaqError as error:
        message.write_text(f"{type(error).__name__}: {error}")


# ---- Triton's interpreter runs kernels on a CPU, in a process of its own: Triton reads its switch at import

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
outside = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
