"""Where the images of a run come from."""

from typing import Protocol

from torch import Tensor

from maskaq.images.sets import SyntheticSet, Trajectory
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe


class ImageSource(Protocol):
    """Image numbers -> images: `Synthesizer` optimises them, `FolderImages` reads real ones."""

    stage: str
    """Name of the stage, for progress and events."""
    recipe: Recipe
    progress: Progress
    curves: list[dict[str, float]]
    """Mean of each loss term at some steps of the latest batch."""
    trajectory: Trajectory | None
    """Snapshots of the first image of the latest call."""
    blamed: str | None
    """What caused images to become NaN or Inf, if known."""

    @property
    def fingerprint(self) -> str | None:
        """Digest of what the images depend on besides the student and the seed; None if nothing."""

    def __call__(self, indices: Tensor, round_index: int = 0, start: SyntheticSet | None = None) -> SyntheticSet:
        """Images of the given numbers; `start` are the same images of the round before, to continue from."""

    def shards_at_once(self, missing: int) -> int:
        """How many of the missing shards to make together."""

    def expect(self, images: int) -> None:
        """Announce the most images of a call: with buffers for that many, an image is the same in any call."""

    def seconds_per_image_step(self) -> float | None:
        """Measured seconds of one optimisation step of one image; None if there are no steps."""
