"""A stage of a run: something that fits the student to the teacher on images, epoch by epoch."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from maskaq.engine import PLAIN, Engine
from maskaq.errors import CalibrationError
from maskaq.images.sets import SyntheticSet
from maskaq.images.stored import range_images
from maskaq.models import geometry
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe

_T = TypeVar("_T")


class Stage(Protocol):
    """Protocol of a stage: `Calibrator` fits all layers at once, end to end, `Reconstructor` block after block.

    Epochs are numbered through all stages of a run (`Recipe.stages`). An epoch depends on the student, the state and
    its number alone: a run can stop after any and go on later.
    """

    name: str
    """What it does, for progress and events."""
    progress: Progress
    parallel: bool
    """Whether several ranks share an epoch; otherwise the leader does it and the others copy its student."""

    def epoch(self, data: SyntheticSet, epoch: int) -> dict[str, float]:
        """One pass over the images; gives the mean of each loss term."""

    def state_dict(self) -> dict[str, Any]:
        """All state besides the student that the next epoch needs, such as the optimiser's."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def diverged(self, what: str) -> CalibrationError:
        """The error for a student that is no longer finite, with what to do about it."""


class GradientFree:
    """Base class of stages without gradients: no state, and epochs on the images that set the ranges."""

    name: str
    parallel = False

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        recipe: Recipe,
        *,
        seed: int = 0,
        progress: Progress | None = None,
        engine: Engine = PLAIN,
    ) -> None:
        self.teacher = teacher
        self.student = student
        self.recipe = recipe
        self.scheme = recipe.quantization
        self.seed = seed
        self.progress = progress or Progress()
        self.geometry = geometry(teacher)
        self._left = 0  # of an epoch's progress, which is counted in images

    def epoch(self, data: SyntheticSet, epoch: int) -> dict[str, float]:
        self._left = len(data)
        found = self.fit(range_images(self.teacher, data, self.recipe), epoch)
        self.progress.advance(self._left)
        return found

    def each(self, parts: Sequence[_T]) -> Iterator[_T]:
        """The parts of an epoch's work, one after another: progress advances with each."""
        for number, part in enumerate(parts):
            yield part
            share = self._left // (len(parts) - number)
            self._left -= share
            self.progress.advance(share)

    def fit(self, images: Tensor, epoch: int) -> dict[str, float]:
        """Change the student; the figures that the event log records."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"stateless": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no state to restore."""

    def diverged(self, what: str) -> CalibrationError:
        return CalibrationError(f"{what}; leave {self.name} out of calibration.stages, in a new run folder")
