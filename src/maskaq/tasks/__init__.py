"""The tasks: what models are for. A new one is a file with a `Task`, listed in `TASKS`."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from maskaq.errors import DataError, ModelError, unknown
from maskaq.models import task_name
from maskaq.progress import Progress
from maskaq.shapes import Geometry
from maskaq.tasks.classification import Classification
from maskaq.tasks.detection import Detection
from maskaq.tasks.features import Features
from maskaq.tasks.segmentation import Segmentation
from maskaq.tasks.task import Batches, Evaluation, Task

__all__ = [
    "CALIBRATED",
    "FULL_PRECISION",
    "PTQ",
    "RTN",
    "TASKS",
    "Evaluation",
    "Task",
    "evaluate",
    "lost_to_rounding",
    "recovered",
    "share_recovered",
    "task_named",
    "task_of",
]

TASKS: dict[str, Task] = {task.name: task for task in (Classification(), Features(), Segmentation(), Detection())}

FULL_PRECISION = "full precision"
RTN = "round to nearest"
PTQ = "searched ranges"
CALIBRATED = "maskaq"
"""The models that a run's table compares."""


def task_named(name: str) -> Task:
    if name not in TASKS:
        raise ModelError(unknown("task", name, TASKS))
    return TASKS[name]


def task_of(model: Any) -> Task:
    """The task of a model: exposed, of timm, or of a runtime."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a model, such as one of maskaq.load_model, got {model!r:.80}")
    found = getattr(model, "_maskaq_geometry", None)
    return task_named(found.task if isinstance(found, Geometry) else task_name(model))


def evaluate(
    model: nn.Module, batches: Batches, progress: Progress | None = None, full: Evaluation | None = None
) -> Evaluation:
    """How good a model is, full precision or quantized, over batches of (images, labels or annotations).

    Gives the result of the model's task: `EvalResult` (top1, top5), `FeatureResult` (cosine, knn), `SegmentationResult`
    or `DetectionResult`.

    Args:
        full: the evaluation of the full-precision model on the same images, which features are compared with.
    """
    task = task_of(model)
    if not isinstance(batches, Iterable):
        raise DataError(f"batches: expected pairs of images and labels, as a DataLoader gives, got {batches!r:.80}")
    return task.evaluate(model, batches, progress, full)


def lost_to_rounding(full: Evaluation, rtn: Evaluation) -> tuple[float, float]:
    """How much of the headline figure round to nearest loses, and the standard error of that."""
    return full.headline - rtn.headline, (full.standard_error**2 + rtn.standard_error**2) ** 0.5


def recovered(full: Evaluation, rtn: Evaluation, ours: Evaluation) -> float | None:
    """Share of what rounding to nearest loses that `ours` recovers.

    None where nothing measurable is lost: a share of nothing would be a random number.
    """
    _, noise = lost_to_rounding(full, rtn)
    return share_recovered(full.headline, rtn.headline, ours.headline, noise)


def share_recovered(full: float, rtn: float, ours: float, noise: float) -> float | None:
    """`recovered` from plain figures."""
    return (ours - rtn) / (full - rtn) if full - rtn > noise else None
