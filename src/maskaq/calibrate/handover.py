"""Decide which student a run saves: the calibrated one, unless it is measurably worse than before calibration.

A recipe that does not fit a model can make it worse. So both are compared with the teacher on images that calibration
did not see. They are dead leaves, which cost nothing to make, and show a model edges, textures and colours.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskaq import randomness
from maskaq.images.dead_leaves import dead_leaves
from maskaq.models import geometry
from maskaq.progress import Progress
from maskaq.quant.twin import frozen
from maskaq.recipe.schema import Recipe
from maskaq.storage.files import misfit
from maskaq.tasks import Task, task_of

KEEP = ("better", "last")
"""What a run hands over: the better of both, or the student of the last epoch whatever the comparison says."""

WHICH = {
    "start": "So the model from before calibration is saved; the same command with --keep last (in Python keep='last') "
    "saves the calibrated one",
    "end": "It is saved all the same, as --keep last asks",
}
"""Messages for a student that calibration made worse."""

_FEWEST, _MOST = 8, 64  # images
_SHARE = 0.01  # of a run's forward passes
_BATCH = 32


@dataclass(frozen=True)
class Handover:
    """Result of comparing the student before and after calibration, and which of them was kept."""

    start: float
    """Mean distance of Q to P on the held-out images, before calibration: the task says which."""
    end: float
    """The same after it."""
    noise: float
    """Standard error of the difference, over the images."""
    images: int
    kept: str
    """`end` or `start`."""
    seconds: float
    distance: str = "KL to the full-precision model"

    @property
    def end_is_worse(self) -> bool:
        return is_worse(self.start, self.end, self.noise)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        figures = f"{self.distance} {self.start:.4g} before and {self.end:.4g} after"
        where = f"on {self.images} synthetic images that it did not see"
        return f"calibration made the model {'worse' if self.end_is_worse else 'better'} {where}: {figures}"


def is_kept(recorded: Any, keep: str | None) -> bool:
    """Whether the handover recorded in a saved model satisfies `keep`; None accepts any."""
    form = {"start": float, "end": float, "noise": float, "kept": str}
    if (
        not isinstance(recorded, dict)
        or misfit(recorded, form)
        or None in (recorded["start"], recorded["end"], recorded["noise"])
    ):
        return True  # nothing that could be compared is recorded
    if keep == "last":
        return bool(recorded["kept"] != "start")
    return (
        keep is None or recorded["kept"] != "end" or not is_worse(recorded["start"], recorded["end"], recorded["noise"])
    )


def compare(
    teacher: nn.Module,
    start: nn.Module,
    end: nn.Module,
    recipe: Recipe,
    *,
    seed: int,
    keep: str = "better",
    progress: Progress | None = None,
) -> Handover:
    """Compare the student before and after calibration with the teacher."""
    began = time.monotonic()
    progress = progress or Progress()
    count = held_out_count(recipe)
    progress.stage("compare before and after", 3 * count)
    images = held_out_images(teacher, count, seed)
    task = task_of(teacher)
    before, after = _distances(task, teacher, (start, end), images, progress)
    noise = float((after - before).std() / math.sqrt(count))
    worse = is_worse(before.mean().item(), after.mean().item(), noise)
    kept = "start" if worse and keep == "better" else "end"
    seconds = time.monotonic() - began
    return Handover(before.mean().item(), after.mean().item(), noise, count, kept, seconds, task.distance_name)


def is_worse(start: float, end: float, noise: float) -> bool:
    """Whether calibration made the model worse beyond the noise of so few images. NaN is worse too."""
    return not end - start <= 2 * noise


def held_out_count(recipe: Recipe) -> int:
    """Number of held-out images, at about 1 % of the cost of the run.

    A synthesis step costs about six forward passes per image, an epoch of calibration four.
    """
    steps = sum(recipe.steps_in_round(round_index) for round_index in range(len(recipe.rounds)))
    passes = recipe.synthesis.images * (6 * steps + 4 * recipe.epochs)
    return max(_FEWEST, min(_MOST, round(_SHARE * passes / 3)))  # each is seen by three models


def held_out_images(teacher: nn.Module, count: int, seed: int, purpose: str = "held out") -> Tensor:
    """Normalised dead leaves, drawn so that no run with this seed starts from them."""
    device = next(teacher.parameters()).device
    spec = geometry(teacher).to(device)
    keys = randomness.fold(randomness.image_keys(seed, torch.arange(count, device=device)), purpose)
    return spec.normalise(dead_leaves(keys, spec.channels, *spec.image_size))


@torch.no_grad()
def _distances(
    task: Task, teacher: nn.Module, students: Sequence[nn.Module], images: Tensor, progress: Progress
) -> list[Tensor]:
    """(n,) of each student. Only the outputs of one batch are kept: those of dense tasks are large."""
    found: list[list[Tensor]] = [[] for _ in students]
    with ExitStack() as stack:
        for model in (teacher, *students):
            stack.enter_context(frozen(model))
        for part in images.split(_batch(images)):
            expected = task.run(teacher, part)
            progress.advance(len(part))
            for student, distances in zip(students, found, strict=True):
                distances.append(task.distance(expected, task.run(student, part, expected)))
                progress.advance(len(part))
    return [torch.cat(distances) for distances in found]


def _batch(images: Tensor) -> int:
    """Images at once: fewer if they are large."""
    return max(1, _BATCH * 224**2 // max(224**2, math.prod(images.shape[2:])))
