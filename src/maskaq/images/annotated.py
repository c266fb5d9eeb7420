"""Annotated images to evaluate detectors and segmenters on: what the readers of COCO, ADE20K and scenes share."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from maskaq.errors import DataError
from maskaq.images.sets import Loader, absent, read_image
from maskaq.models import data_config

Annotation = dict[str, Any]
"""What is known of an image, in its own pixels.

`size` (height, width) is that of the image as it is stored, whatever the model sees; `name` says which one it is. With
objects there are `boxes` (n, 4) float as left, top, right, bottom, `labels` (n,) int64 from 0, `masks` (n, H, W) bool
and `iscrowd` (n,) bool; with a class map there is `semantic` (H, W) int64, 255 where a pixel does not count.
"""


class AnnotatedImages(Dataset):
    """Images and their annotations, prepared for a model one by one: a subclass says how many, and reads them.

    The ratio of an image is kept: its short side becomes `short` pixels, unless its long side would then be longer
    than `longest` times that.
    """

    longest: float

    def __init__(self, model: Any, short: int | None = None) -> None:
        config = data_config(model)
        self.classes = int(model.num_classes)
        self.short = short or min(config["input_size"][1:])
        self.mean, self.std = (torch.tensor(config[key]).view(-1, 1, 1) for key in ("mean", "std"))

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> tuple[Tensor, Annotation]:
        """(3, H, W) uint8 and what is known of it."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, Annotation]:
        image, annotation = self.read(index)
        size = (image.shape[1], image.shape[2])
        pixels = resized(image, target_size(size, self.short, self.longest * self.short))
        return (pixels.float() / 255 - self.mean) / self.std, {**annotation, "size": size}


def batches(images: AnnotatedImages, workers: int = 0, batch: int = 1) -> DataLoader:
    """((B, 3, H, W), list of B annotations) for each batch; more than one at a time only where all have one size."""
    return Loader(images, batch_size=batch, num_workers=workers, collate_fn=_collated)


def _collated(samples: Sequence[tuple[Tensor, Annotation]]) -> tuple[Tensor, list[Annotation]]:
    return torch.stack([image for image, _ in samples]), [annotation for _, annotation in samples]


def target_size(size: tuple[int, int], short: int, longest: float) -> tuple[int, int]:
    """Height and width after a resize that keeps their ratio, rounded as mmcv does; at least one pixel each."""
    scale = min(short / min(size), longest / max(size))
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """(C, H, W) uint8 in another size: bilinear, without smoothing, as OpenCV does it for mmdetection."""
    if tuple(image.shape[1:]) == tuple(size):
        return image
    found = F.interpolate(image[None].float(), size, mode="bilinear", align_corners=False)[0]
    return found.round().to(torch.uint8)


def image_tensor(path: Path) -> Tensor:
    """(3, H, W) uint8."""
    return torch.from_numpy(np.array(read_image(str(path), 3))).permute(2, 0, 1).contiguous()


def existing_folder(path: str | Path, expected: str) -> Path:
    root = Path(path)
    if not os.path.isdir(root):
        raise DataError(f"{root} {absent(root)}: expected {expected}")
    return root
