"""Tiny folders in the formats of COCO and ADE20K, drawn from scenes."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

from maskaq.zoo.scenes import CLASSES, Scene, scene

SIZES = ((48, 64), (64, 40), (52, 52))


class Model(nn.Module):
    """What a reader asks of a model: its classes, its image size, its mean and std."""

    def __init__(self, num_classes: int, size: tuple[int, int] = (32, 48)) -> None:
        super().__init__()
        self.num_classes = num_classes
        record = {"input_size": (3, *size), "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
        self.pretrained_cfg = self.default_cfg = {**record, "crop_pct": 1.0, "interpolation": "bilinear"}


def scenes(sizes=SIZES) -> list[Scene]:
    return [scene(5, number, size) for number, size in enumerate(sizes)]


def polygon(mask) -> list[float]:
    """The outline of the box of a mask: a polygon whose pixels are known."""
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    left, right, top, bottom = columns[0], columns[-1] + 1, rows[0], rows[-1] + 1
    return [float(x) for x in (left, top, right, top, right, bottom, left, bottom)]


def runs(mask) -> list[int]:
    """COCO's run lengths of a mask, not compressed."""
    flat = np.concatenate([[0], np.asarray(mask, dtype=np.int8).T.ravel(), [0]])
    edges = np.flatnonzero(np.diff(flat))
    ends = np.concatenate([[0], edges, [mask.size]])
    found = np.diff(ends).tolist()
    return found if len(edges) == 0 or edges[-1] != mask.size else found[:-1]


def save_png(image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(image)).save(path)


def write_coco(root: Path, drawn: list[Scene] | None = None, name: str = "val2017", exact: bool = False) -> dict:
    """A folder in COCO's layout. Gives the annotations.

    Every other mask is written as the polygon of its box, and the last object of a scene with several is a crowd,
    unless all is to be exact.
    """
    drawn = scenes() if drawn is None else drawn
    ids = [3, 1, 17, 90, 20, 8]  # COCO's have gaps; not in order
    content = {
        "images": [],
        "annotations": [],
        "categories": [{"id": number, "name": name} for number, name in zip(ids, CLASSES, strict=True)],
    }
    for number, of in enumerate(drawn):
        file = f"{number:012}.png"
        save_png(of.image.permute(1, 2, 0), root / name / file)
        height, width = of.image.shape[1:]
        content["images"].append({"id": 100 + number, "file_name": file, "height": height, "width": width})
        for place, (mask, label, box) in enumerate(
            zip(of.masks.numpy(), of.labels.tolist(), of.boxes.tolist(), strict=True)
        ):
            counts = {"size": [height, width], "counts": runs(mask)}
            content["annotations"].append(
                {
                    "id": 1 + len(content["annotations"]),
                    "image_id": 100 + number,
                    "category_id": ids[label],
                    "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
                    "area": int(mask.sum()),
                    "iscrowd": int(not exact and place > 0 and place == len(of.labels) - 1),
                    "segmentation": [polygon(mask)] if place % 2 and not exact else counts,
                }
            )
    write_json(root, content, name)
    return content


def write_json(root: Path, content, name: str = "val2017") -> Path:
    file = root / "annotations" / f"instances_{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def write_ade20k(root: Path, drawn: list[Scene] | None = None) -> None:
    """A folder in ADE20K's layout: the ground is class 1 of the files, shapes follow; 0 would not count."""
    for number, of in enumerate(scenes() if drawn is None else drawn):
        save_png(of.image.permute(1, 2, 0), root / "images" / "validation" / f"ADE_val_{number:08}.png")
        labels = (1 + of.semantic).numpy().astype("uint8")
        save_png(labels, root / "annotations" / "validation" / f"ADE_val_{number:08}.png")
