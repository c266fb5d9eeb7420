"""Held-out scenes of shapes to evaluate the embedded detector and segmenter on."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from maskaq.errors import DataError
from maskaq.images.annotated import AnnotatedImages, Annotation, batches
from maskaq.models import data_config
from maskaq.zoo.scenes import CLASSES, Scene, scene

NAME = "scenes"
"""What `--data` calls them."""
HELD_OUT = 1_000_000
"""Their seed: no model is trained on it (examples/train_scenes.py)."""
COUNT = 500


def scene_images(model: Any, count: int = COUNT, *, workers: int = 0, batch: int = 1) -> DataLoader:
    """The first `count` held-out scenes, drawn in the model's image size."""
    return batches(SceneImages(model, count), workers, batch)


class SceneImages(AnnotatedImages):
    """Scenes of a seed that no model was trained on."""

    longest = float("inf")

    def __init__(self, model: Any, count: int = COUNT) -> None:
        super().__init__(model)
        if self.classes not in (len(CLASSES), 1 + len(CLASSES)):  # of objects, and of pixels: those of the ground too
            raise DataError(
                f"{NAME} have {len(CLASSES)} classes of objects, the model {self.classes}: give --data DIR for "
                f"{type(model).__name__}"
            )
        self.size = data_config(model)["input_size"][1:]
        self.count = count
        self._drawn: dict[int, Scene] = {}

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Tensor, Annotation]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        if index not in self._drawn:  # several models are evaluated on the same scenes
            self._drawn[index] = scene(HELD_OUT, index, self.size)
        drawn = self._drawn[index]
        return drawn.image, {
            "name": f"scene {index}",
            "boxes": drawn.boxes,
            "labels": drawn.labels,
            "masks": drawn.masks,
            "iscrowd": torch.zeros(len(drawn.labels), dtype=torch.bool),
            "semantic": drawn.semantic,
        }
