"""Where the images of a run come from."""

from typing import Protocol

from torch import Tensor

from maskaq.images.sets import SyntheticSet, Trajectory
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe


class ImageSource(Protocol):
    """Image numbers -> images: `Synthesizer` optimises them, `FolderImages` reads real ones."""

    stage: str
    """What it does, for progress and events."""
    recipe: Recipe
    progress: Progress
    curves: list[dict[str, float]]
    """Mean of each loss term at some steps of the latest batch."""
    trajectory: Trajectory | None
    """Of the first image of the latest call."""
    blamed: str | None
    """What made images NaN or Inf, where it is known."""

    @property
    def fingerprint(self) -> str | None:
        """What images depend on besides the student and the seed; None: nothing."""

    def __call__(self, indices: Tensor, round_index: int = 0, start: SyntheticSet | None = None) -> SyntheticSet:
        """Images of the given numbers; `start` are the same images of the round before, to continue from."""

    def shards_at_once(self, missing: int) -> int:
        """How many of the missing shards to make together."""

    def seconds_per_image_step(self) -> float | None:
        """One optimisation step of one image, timed; None where there are no steps."""
