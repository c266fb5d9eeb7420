"""A stage of a run: something that fits the student to the teacher on images, epoch by epoch."""

from typing import Any, Protocol

from maskaq.errors import CalibrationError
from maskaq.images.sets import SyntheticSet
from maskaq.progress import Progress


class Stage(Protocol):
    """Protocol of a stage: `Calibrator` fits all layers at once, end to end, `Reconstructor` block after block.

    Epochs are numbered through all stages of a run (`Recipe.stages`). An epoch depends on the student, the state and
    its number alone: a run can stop after any and go on later.
    """

    name: str
    """What it does, for progress and events."""
    progress: Progress
    parallel: bool
    """Whether several processes share an epoch; else it is the work of one, whom the others follow."""

    def epoch(self, data: SyntheticSet, epoch: int) -> dict[str, float]:
        """One pass over the images; gives the mean of each loss term."""

    def state_dict(self) -> dict[str, Any]:
        """All state besides the student that the next epoch needs, such as the optimiser's."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def diverged(self, what: str) -> CalibrationError:
        """The error for a student that is no longer finite, with what to do about it."""
