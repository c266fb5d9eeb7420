"""Real images from a folder in place of synthetic ones, as an upper bound. A run with them is NOT data-free."""

import hashlib
from functools import cached_property
from pathlib import Path

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from maskaq import randomness
from maskaq.images.sets import SyntheticSet, Trajectory, image_files, read_image, to_bytes
from maskaq.models import data_config, geometry
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe


class FolderImages:
    """Images of a folder, by number, preprocessed by timm's transform for the model.

    A run uses it like a `Synthesizer`, but nothing is optimised or refreshed.

    Which file has which number depends on the seed and the names of the files.
    """

    stage = "read real images"

    def __init__(self, teacher: nn.Module, recipe: Recipe, *, seed: int = 0, progress: Progress | None = None) -> None:
        self.recipe = recipe
        self.seed = seed
        self.progress = progress or Progress()
        self.geometry = geometry(teacher)
        config = data_config(teacher)
        self.transform = create_transform(**config, is_training=False)
        self.curves: list[dict[str, float]] = []
        self.trajectory: Trajectory | None = None  # nothing is optimised
        self.blamed: str | None = None  # and nothing can become NaN

    @cached_property
    def files(self) -> list[Path]:
        """The file of each image number, listed on first use: a run that has stored its images needs no folder."""
        found = image_files(self.recipe.synthesis.folder, self.recipe.synthesis.images)
        keys = randomness.fold(randomness.image_keys(self.seed, torch.arange(len(found))), "folder")
        return [found[place] for place in keys.argsort(stable=True).tolist()]

    @cached_property
    def fingerprint(self) -> str | None:
        """Digest of the names and sizes of the folder's files, which decide the number of each image."""
        root = Path(self.recipe.synthesis.folder)
        listed = [f"{file.relative_to(root)} {file.stat().st_size}" for file in sorted(self.files)]
        return hashlib.sha256("\n".join(listed).encode(errors="surrogateescape")).hexdigest()

    def __call__(self, indices: Tensor, round_index: int = 0, start: SyntheticSet | None = None) -> SyntheticSet:
        """Images of the given numbers, without labels: -1."""
        images = torch.cat([self._read(self.files[number]) for number in indices.tolist()])
        return SyntheticSet(images, torch.full_like(indices, -1), indices)

    def shards_at_once(self, missing: int) -> int:
        return 1

    def expect(self, images: int) -> None:
        """A file gives the same image in any call."""

    def seconds_per_image_step(self) -> float | None:
        return None

    def _read(self, file: Path) -> Tensor:
        """(1, C, H, W) uint8."""
        image: Image.Image = read_image(str(file), self.geometry.channels)
        self.progress.advance(1)
        return to_bytes(self.geometry.pixels(self.transform(image)[None]))  # type: ignore[operator, index]
