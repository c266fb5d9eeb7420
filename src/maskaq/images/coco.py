"""COCO's folders and `instances_*.json`: images with boxes, classes and masks of their objects.

Any data set in that format will do. Everything in the annotations is checked before it is used; what is wrong is named
with its file and its entry.
"""

import json
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from maskaq.errors import DataError
from maskaq.images.annotated import AnnotatedImages, Annotation, batches, existing_folder, image_tensor
from maskaq.tasks.metrics import coco_tools

EXPECTED = "COCO's folders: annotations/instances_val2017.json, or another instances_NAME.json, and val2017/ beside it"


def coco_folder(path: str | Path, model: Any, *, short: int | None = None, workers: int = 0) -> DataLoader:
    """The images of a folder in COCO's layout, one at a time, with the annotations of their objects.

    Classes are the categories by their names where the model has the same ones, else in the order of the file; there
    are as many as the model has. Images are resized as mmdetection does it: the short side to the model's image size,
    or to `short`, the long side to at most 1333 / 800 of that.
    """
    file = _annotation_file(existing_folder(path, EXPECTED))
    return batches(CocoImages(file, _image_folder(file), model, short), workers)


class CocoImages(AnnotatedImages):
    """The images that an annotation file of COCO names."""

    longest = 1333 / 800

    def __init__(self, file: Path, folder: Path, model: Any, short: int | None = None) -> None:
        super().__init__(model, short)
        coco_tools()  # needed to draw polygons: asked for before all is read
        self.file = file
        self.folder = folder
        content = _read(file)
        self.images = [self._image(i, entry) for i, entry in enumerate(content["images"])]
        names = _unique(file, "images", self.images)
        categories = _unique(file, "categories", content["categories"])
        if len(categories) != self.classes:
            raise DataError(f"{file} has {len(categories)} categories, the model {self.classes} classes")
        self.class_of = _classes(categories, (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or [])
        _unique(file, "annotations", content["annotations"])
        self.objects: dict[int, list[dict[str, Any]]] = {number: [] for number in names}
        for place, entry in enumerate(content["annotations"]):
            self._check(place, entry, names)
            self.objects[entry["image_id"]].append(entry)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Tensor, Annotation]:
        entry = self.images[index]
        path = self.folder / entry["file_name"]
        image = image_tensor(path)
        size = (entry["height"], entry["width"])
        if tuple(image.shape[1:]) != size:
            found = f"{image.shape[1]} x {image.shape[2]}"
            raise DataError(
                f"{self.file}: image {entry['id']} is {size[0]} x {size[1]} pixels there (height x width), and "
                f"{path} is {found}"
            )
        objects = self.objects[entry["id"]]
        corners = torch.tensor([o["bbox"] for o in objects], dtype=torch.float32).reshape(-1, 4)
        masks = [torch.from_numpy(self._mask(o, size)) for o in objects]
        return image, {
            "name": entry["file_name"],
            "boxes": torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:]], dim=1),
            "labels": torch.tensor([self.class_of[o["category_id"]] for o in objects], dtype=torch.long),
            "masks": torch.stack(masks) if masks else torch.zeros(0, *size, dtype=torch.bool),
            "iscrowd": torch.tensor([bool(o.get("iscrowd", 0)) for o in objects], dtype=torch.bool),
        }

    def _image(self, place: int, entry: Any) -> dict[str, Any]:
        """An entry of `images` whose file is there."""
        where = f"{self.file}: images[{place}]"
        _demand(entry, where, id=int, file_name=str, height=int, width=int)
        if min(entry["height"], entry["width"]) < 1:
            raise DataError(f"{where} is {entry['height']} x {entry['width']} pixels: expected at least 1 x 1")
        if not os.path.isfile(self.folder / entry["file_name"]):  # False for a name that cannot be, too
            raise DataError(f"{where} names {entry['file_name']!r}, which is not in {self.folder}")
        return entry

    def _check(self, place: int, entry: Any, names: dict[int, Any]) -> None:
        """DataError for an entry of `annotations` that is no object of a known image and category."""
        where = f"{self.file}: annotations[{place}]"
        _demand(entry, where, id=int, image_id=int, category_id=int, bbox=list, segmentation=(list, dict))
        where += f" (id {entry['id']})"
        if entry["image_id"] not in names:
            raise DataError(f"{where} is of image {entry['image_id']}, which is not among the images")
        if entry["category_id"] not in self.class_of:
            raise DataError(f"{where} is of category {entry['category_id']}, which is not among the categories")
        if entry.get("iscrowd", 0) not in (0, 1):
            raise DataError(f"{where}: expected 0 or 1 for iscrowd, got {entry['iscrowd']!r}")
        if len(entry["bbox"]) != 4 or not _numbers(entry["bbox"]) or min(entry["bbox"][2:]) < 0:
            raise DataError(f"{where}: expected bbox as [left, top, width, height], got {entry['bbox']!r}")
        image = names[entry["image_id"]]
        size = (image["height"], image["width"])
        left, top, width, height = entry["bbox"]
        if _is_outside((left, left + width), (top, top + height), size):
            raise DataError(f"{where}: bbox {entry['bbox']} lies outside of its image of {size[0]} x {size[1]} pixels")
        if problem := _misdrawn(entry["segmentation"], size):
            raise DataError(f"{where}: {problem}")

    def _mask(self, entry: dict[str, Any], size: tuple[int, int]) -> Any:
        """(H, W) bool."""
        drawn = entry["segmentation"]
        if isinstance(drawn, dict):
            return _filled(_counts(drawn["counts"]), size)
        mask = coco_tools().mask
        runs = mask.merge(mask.frPyObjects([[float(x) for x in polygon] for polygon in drawn], *size))
        return mask.decode(runs).astype(bool).reshape(size)


def _annotation_file(root: Path) -> Path:
    """The annotations in a folder: those of val2017, or the only ones there."""
    found = sorted([*root.glob("annotations/instances_*.json"), *root.glob("instances_*.json")])
    usual = [file for file in found if file.name == "instances_val2017.json"]
    if not found:
        raise DataError(f"{root} has no instances_*.json: expected {EXPECTED}")
    if len(usual or found) > 1:
        names = ", ".join(str(file.relative_to(root)) for file in found)
        raise DataError(f"{root} has several annotation files ({names}): expected one, or instances_val2017.json")
    return (usual or found)[0]


def _image_folder(file: Path) -> Path:
    """The folder of the images that instances_NAME.json describes: NAME beside it, or beside its folder."""
    name = file.stem.removeprefix("instances_")
    above = file.parent.parent if file.parent.name == "annotations" else file.parent
    places = [above / name, above / "images" / name, above / "images"]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise DataError(f"{file} has no images beside it: expected the folder {places[0]}")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    _demand(content, str(file), images=list, annotations=list, categories=list)
    if not content["images"]:
        raise DataError(f"{file} has no images")
    return content


def _unique(file: Path, key: str, entries: list[Any]) -> dict[int, Any]:
    """Entries by their id, in the order of the file."""
    found: dict[int, Any] = {}
    for place, entry in enumerate(entries):
        _demand(entry, f"{file}: {key}[{place}]", id=int)
        if entry["id"] in found:
            raise DataError(f"{file}: {key}[{place}] has id {entry['id']}, as another one has")
        found[entry["id"]] = entry
    return found


def _classes(categories: dict[int, Any], names: Sequence[str]) -> dict[int, int]:
    """Id of a category -> class of the model, whose names are known or not."""
    own = [str(entry.get("name")) for entry in categories.values()]
    same = len(set(own)) == len(own) and sorted(own) == sorted(names)
    return {
        number: names.index(name) if same else place
        for place, (number, name) in enumerate(zip(categories, own, strict=True))
    }


def _demand(entry: Any, where: str, **kinds: Any) -> None:
    """DataError unless an entry is an object with these keys, of these types."""
    if not isinstance(entry, dict):
        raise DataError(f"{where}: expected a JSON object with {', '.join(kinds)}, got {type(entry).__name__}")
    for key, kind in kinds.items():
        if key not in entry:
            raise DataError(f"{where} has no {key!r}")
        if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
            kinds_named = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise DataError(f"{where}: expected {kinds_named} for {key!r}, got {str(entry[key])[:80]!r}")


_LARGEST = 1e30  # finite in float32, of which NaN is not less


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < _LARGEST for v in values)


# --- masks -----------------------------------------------------------------------------------------------------


def _misdrawn(drawn: list[Any] | dict[str, Any], size: tuple[int, int]) -> str:
    """What is wrong with a segmentation of an image of this height and width; empty if nothing is."""
    if isinstance(drawn, dict):
        if drawn.get("size") != list(size):
            return f"its mask is {drawn.get('size')!r} pixels, its image {list(size)} (height, width)"
        counts = _counts(drawn.get("counts"))
        if min(counts, default=-1) < 0 or sum(counts) != size[0] * size[1]:
            return f"expected run lengths of {size[0] * size[1]} pixels in all"
        return ""
    if not drawn:
        return "its segmentation is empty"
    for place, polygon in enumerate(drawn):
        sound = isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0 and _numbers(polygon)
        if not sound:
            return f"polygon {place}: expected three or more points [x, y, x, y, ...], got {str(polygon)[:80]}"
        if _is_outside(polygon[::2], polygon[1::2], size):
            return f"polygon {place} lies outside of its image of {size[0]} x {size[1]} pixels"
    return ""


def _is_outside(x: Sequence[float], y: Sequence[float], size: tuple[int, int]) -> bool:
    """Whether a point is further from an image of this height and width than a side of it: a little is not unusual."""
    return any(min(values) < -side or max(values) > 2 * side for values, side in ((x, size[1]), (y, size[0])))


def _counts(coded: Any) -> list[int]:
    """Lengths of runs of 0 and 1 in turn, column by column: a list, or COCO's text of six bits a character.

    Five bits of a character belong to a number, lowest first; the sixth says that more follow, the fifth of the last
    one is its sign. From the third on, numbers are differences from the last but one. Empty for anything else.
    """
    if isinstance(coded, list):
        return coded if all(isinstance(n, int) and not isinstance(n, bool) for n in coded) else []
    if not isinstance(coded, str):
        return []
    counts: list[int] = []
    value = shift = 0
    for letter in coded.encode(errors="replace"):
        bits = letter - 48
        if not 0 <= bits < 64 or shift > 60:
            return []
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts if not shift else []


def _filled(counts: list[int], size: tuple[int, int]) -> Any:
    """(H, W) bool: runs of 0 and 1, column by column."""
    flat = np.zeros(size[0] * size[1], dtype=bool)
    ends = list(accumulate(counts))
    for start, end in zip(ends[::2], ends[1::2], strict=False):
        flat[start:end] = True
    return np.ascontiguousarray(flat.reshape(size[1], size[0]).T)
