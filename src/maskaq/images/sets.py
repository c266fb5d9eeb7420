"""Images in memory and on disk: the synthetic set, image files, and a labelled folder to evaluate on."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from maskaq.errors import DataError, ModelError, unknown
from maskaq.models import data_config
from maskaq.tasks import task_of

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_LEAST_CROP = 0.01
"""Of a smaller share, the whole image would not fit in memory."""
_MOST_READERS = 32
"""Per core: more processes stall the machine."""


@dataclass(frozen=True)
class SyntheticSet:
    """Synthetic images as 8-bit pixels, like real ones; calibration uses what is stored."""

    images: Tensor
    """(n, C, H, W) uint8."""
    labels: Tensor
    """(n,) int64."""
    indices: Tensor
    """(n,) int64: the number of each image in its run, from which all its randomness comes."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Any) -> "SyntheticSet":
        return SyntheticSet(self.images[which], self.labels[which], self.indices[which])

    def to(self, device: torch.device | str) -> "SyntheticSet":
        return SyntheticSet(self.images.to(device), self.labels.to(device), self.indices.to(device))

    def tensors(self) -> dict[str, Tensor]:
        return {"images": self.images.cpu(), "labels": self.labels.cpu(), "indices": self.indices.cpu()}

    @staticmethod
    def concatenate(sets: Iterable["SyntheticSet"]) -> "SyntheticSet":
        parts = list(sets)
        return SyntheticSet(*(torch.cat([getattr(p, f) for p in parts]) for f in ("images", "labels", "indices")))


@dataclass(frozen=True)
class Trajectory:
    """Snapshots of an image during its optimisation."""

    number: int
    images: Tensor
    """(snapshots, C, H, W) uint8."""
    steps: list[int]
    """Number of steps before each snapshot."""


def to_pixels(images: Tensor) -> Tensor:
    """uint8 -> float in [0, 1]."""
    return images.float() / 255


def to_bytes(pixels: Tensor) -> Tensor:
    """float in [0, 1] -> uint8."""
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def image_folder(
    path: str | Path,
    model: Any,
    *,
    class_index: str | Path | None = None,
    crop_pct: float | None = None,
    interpolation: str | None = None,
    batch: int = 64,
    workers: int = 0,
) -> DataLoader:
    """Batches of (images, labels) from a folder with one sub-folder per class, in timm's own transform for the model.

    Without `class_index` the sorted sub-folders are classes 0, 1, 2, ..., and there must be as many as the model has
    classes. With it, a JSON file maps the name of each sub-folder to its class, so that a subset of the classes will
    do. For a model without a classifier there may be any number of sub-folders, or none: then images have the label -1.
    """
    _check_path("path", path)
    if class_index is not None:
        _check_path("class_index", class_index)
    _check_preparation(crop_pct, interpolation)
    _check_count("batch", batch, 1, sys.maxsize)
    _check_count("workers", workers, 0, _MOST_READERS * (os.cpu_count() or 1))
    root = Path(path)
    has_classes = task_of(model).name == "classification"
    expected = "expected a folder with one sub-folder of images per class"
    if not has_classes:
        expected = "expected a folder of images, or of one sub-folder of images per class"
        if class_index is not None:
            raise DataError(f"--class-index {class_index} is for classifiers: this model has no classes")
    if not os.path.isdir(root):
        raise DataError(f"image folder {root} {absent(root)}; {expected}")
    config = data_config(model)
    if crop_pct is not None:
        config["crop_pct"] = crop_pct
    if interpolation is not None:
        config["interpolation"] = interpolation
    transform = create_transform(**config, is_training=False)
    loader = partial(read_image, channels=config["input_size"][0])
    if not has_classes:
        files = _images_in(root)
        flat = [file for file in files if file.parent == root]
        if not files:
            raise DataError(f"{root} has no image files: {expected}")
        if 0 < len(flat) < len(files):
            raise DataError(f"{root} has {len(flat)} images beside sub-folders of images: {expected}")
        if flat:
            return Loader(_Unlabelled(files, transform, loader), batch_size=batch, num_workers=workers)
    try:
        dataset = ImageFolder(str(root), transform=transform, loader=loader, allow_empty=not has_classes)
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"{root} is not an image folder: {expected}, and {str(error).rstrip('.')}") from error
    if has_classes:
        count = getattr(model, "num_classes", None)
        if count is None:
            raise ModelError(
                f"this {type(model).__name__} has no num_classes: set it, or pass a model of maskaq.expose"
            )
        dataset.target_transform = _class_map(dataset.classes, int(count), root, class_index).__getitem__
    return Loader(dataset, batch_size=batch, num_workers=workers)


def _check_path(name: str, path: Any) -> None:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise DataError(f"{name}: expected a path, got {path!r:.80}")


def _check_preparation(crop_pct: Any, interpolation: Any) -> None:
    is_number = isinstance(crop_pct, int | float) and not isinstance(crop_pct, bool)
    if crop_pct is not None and not (is_number and _LEAST_CROP <= crop_pct <= 1):
        raise DataError(f"crop_pct: expected a number from {_LEAST_CROP} to 1, got {crop_pct!r:.80}")
    if interpolation is not None and interpolation not in _INTERPOLATIONS:
        raise DataError(unknown("interpolation", str(interpolation), _INTERPOLATIONS))


def _check_count(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise DataError(f"{name}: expected a whole number from {low} to {high}, got {value!r:.80}")


class _Unlabelled(Dataset):
    """Image files without classes: their label is -1."""

    def __init__(self, files: list[Path], transform: Any, loader: Any) -> None:
        self.files = files
        self.transform = transform
        self.loader = loader

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.loader(str(self.files[index]))), -1


def absent(root: Path) -> str:
    """Why there is no such folder."""
    return "is a file" if os.path.exists(root) else "does not exist"


def _images_in(root: Path) -> list[Path]:
    return sorted(file for file in root.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS and file.is_file())


def image_files(path: str | Path, wanted: int) -> list[Path]:
    """The image files of a folder and its sub-folders, sorted; DataError if there are fewer than wanted."""
    root = Path(path)
    if not os.path.isdir(root):
        raise DataError(f"image folder {root} {absent(root)}; expected a folder of images, or of folders of images")
    found = _images_in(root)
    if len(found) < wanted:
        problem = f"{root} has {len(found)} images, and synthesis.images asks for {wanted}"
        remedy = f"--set synthesis.images={len(found)}" if found else "expected image files"
        raise DataError(f"{problem}: {remedy}")
    return found


def folder_tensor(path: str | Path, model: Any, count: int, crop_pct: float | None = None) -> Tensor:
    """(count, C, H, W): images spread evenly over a folder's files, in timm's own transform for the model."""
    config = data_config(model) | ({} if crop_pct is None else {"crop_pct": crop_pct})
    transform: Any = create_transform(**config, is_training=False)
    files = image_files(path, count)
    chosen = files[:: len(files) // count][:count]
    return torch.stack([transform(read_image(str(file), config["input_size"][0])) for file in chosen])


def read_image(path: str, channels: int) -> Image.Image:
    """An image file as RGB, or grey for a model of one channel."""
    if channels not in (1, 3):
        raise DataError(f"the model takes {channels} channels; image files have 1 or 3")
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # Pillow would clip them to 8 bits, not scale them
                raise ValueError("more than 8 bits a channel")
            return image.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and others for a damaged file
        raise DataError(f"cannot read the image {path}: {error}; replace or remove it") from error


class Loader(DataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            yield from super().__iter__()
        except DataError as error:  # from a worker it comes with the worker's traceback in front
            raise DataError(str(error).split("DataError: ")[-1].strip()) from error


def _class_map(folders: list[str], classes: int, root: Path, class_index: str | Path | None) -> list[int]:
    """Class of each sub-folder, in sorted order."""
    if class_index is None:
        if len(folders) != classes:
            raise DataError(
                f"{root} has {len(folders)} class folders, the model {classes} classes; for a subset, give "
                '--class-index FILE, a JSON file such as {"n01440764": 0, "n01443537": 1}'
            )
        return list(range(classes))
    try:
        table = json.loads(Path(class_index).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: nested thousands of times
        raise DataError(f"cannot read the class index {class_index}: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(v, int) and not isinstance(v, bool) for v in table.values()):
        raise DataError(
            f'{class_index}: expected a JSON object of folder name to class number, like {{"n01440764": 0}}'
        )
    missing = [name for name in folders if name not in table]
    if missing:
        raise DataError(f"{class_index} has no entry for {len(missing)} folders of {root}: {', '.join(missing[:10])}")
    outside = {name: table[name] for name in folders if not 0 <= table[name] < classes}
    if outside:
        raise DataError(f"{class_index}: the model has classes 0 to {classes - 1}, but {outside}")
    return [table[name] for name in folders]


class TensorImages(Dataset):
    """Labelled 8-bit images in memory, normalised for a model."""

    def __init__(self, images: Tensor, labels: Tensor, model: nn.Module) -> None:
        config = data_config(model)
        self.images = images
        self.labels = labels
        self.mean = torch.tensor(config["mean"], dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(config["std"], dtype=torch.float32).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (to_pixels(self.images[index]) - self.mean) / self.std, int(self.labels[index])
