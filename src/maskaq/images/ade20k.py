"""ADE20K's folders: images with the class of every pixel."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets.folder import IMG_EXTENSIONS

from maskaq.errors import DataError
from maskaq.images.annotated import AnnotatedImages, Annotation, batches, existing_folder, image_tensor
from maskaq.tasks.metrics import IGNORED

EXPECTED = (
    "ADE20K's folders: images/validation with images, annotations/validation with a PNG of the same name for each"
)


def ade20k_folder(path: str | Path, model: Any, *, short: int | None = None, workers: int = 0) -> DataLoader:
    """The validation images of a folder in ADE20K's layout, one at a time, with their class maps.

    In the files 0 means that a pixel does not count, and classes start at 1: as mmsegmentation's `reduce_zero_label`
    reads them. Images are resized as it does: the short side to the model's image size, or to `short`, the long side to
    at most four times that (512 and 2048).
    """
    root = existing_folder(path, EXPECTED)
    return batches(Ade20kImages(root, model, short), workers)


class Ade20kImages(AnnotatedImages):
    """The validation images of ADE20K."""

    longest = 4.0

    def __init__(self, root: Path, model: Any, short: int | None = None) -> None:
        super().__init__(model, short)
        images, maps = root / "images" / "validation", root / "annotations" / "validation"
        for folder in (images, maps):
            if not folder.is_dir():
                raise DataError(f"{folder} does not exist: expected {EXPECTED}")
        self.files = sorted(file for file in images.iterdir() if file.suffix.lower() in IMG_EXTENSIONS)
        self.maps = maps
        if not self.files:
            raise DataError(f"{images} has no image files: expected {EXPECTED}")
        images_of = {file.stem: file for file in self.files}
        twice = next((file for file in self.files if images_of[file.stem] != file), None)
        if twice is not None:
            raise DataError(
                f"{twice} and {images_of[twice.stem].name} have one annotation: expected one image of a name"
            )
        without = next((file for file in self.files if not (maps / f"{file.stem}.png").is_file()), None)
        if without is not None:
            raise DataError(f"{without} has no annotation: expected {maps / f'{without.stem}.png'}")
        alone = next((file for file in sorted(maps.glob("*.png")) if file.stem not in images_of), None)
        if alone is not None:
            raise DataError(f"{alone} has no image: expected one of its name in {images}")

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Tensor, Annotation]:
        file = self.files[index]
        annotated = self.maps / f"{file.stem}.png"
        image, labels = image_tensor(file), _labels(annotated)
        if image.shape[1:] != labels.shape:
            drawn, seen = (" x ".join(map(str, size)) for size in (labels.shape, image.shape[1:]))
            raise DataError(f"{annotated} is {drawn} pixels (height x width), its image {file} is {seen}")
        labels = torch.where(labels == 0, IGNORED, labels - 1)
        labels = torch.where(labels == 254, IGNORED, labels)  # 255 in the file
        wrong = labels[(labels >= self.classes) & (labels != IGNORED)]
        if len(wrong):
            found, most = int(wrong[0]) + 1, self.classes
            raise DataError(f"{annotated} has the label {found}: expected 1 to {most}, the model's classes, or 0")
        return image, {"name": file.name, "semantic": labels}


def _labels(path: Path) -> Tensor:
    """(H, W) int64: the numbers in a grey or paletted PNG."""
    try:
        with Image.open(path) as image:
            if image.format != "PNG":
                raise ValueError(f"expected a PNG, found {image.format}, which may change labels")
            if image.mode not in ("L", "P"):
                raise ValueError(f"expected one number of 8 bits a pixel, found the mode {image.mode}")
            return torch.from_numpy(np.array(image)).long()
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and others for a damaged file
        raise DataError(f"cannot read the annotation {path}: {error}") from error
