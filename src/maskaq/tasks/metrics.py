"""How dense predictions are judged: mean IoU of class maps, and COCO's average precision of boxes and masks.

Both take one image at a time and keep little of it, so that a whole validation set fits into memory. Both give the
standard error that comes from which images were measured.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq import randomness
from maskaq.errors import DataError, DependencyError

IGNORED = 255
"""The label of pixels that do not count."""
RESAMPLES = 200
GROUPS = 10
MOST = 100
"""Detections of one class in an image that count, by their scores: COCO's limit."""


def class_map(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, H, W): the class of every pixel of images that were resized, in the size they had before.

    Logits (B, K, h, w) are enlarged, not their argmax: so do mmsegmentation and transformers.
    """
    return F.interpolate(logits, size, mode="bilinear", align_corners=False).argmax(dim=1)


class Confusion:
    """Pixels of class maps by true and predicted class.

    Of each image it keeps the diagonal and the two margins of its confusion matrix: all that IoU is made of. They add
    up to those of the whole data set, whose one matrix mIoU is defined by.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._counts: list[Tensor] = []  # (3, K) int64 for each image: hits, true pixels, predicted pixels

    def add(self, predicted: Tensor, truth: Tensor) -> None:
        """Count one image: class maps (H, W), where `truth` is 255 the pixel does not count.

        DataError for a class that there is not.
        """
        if predicted.shape != truth.shape:
            raise DataError(f"a prediction of {tuple(predicted.shape)} pixels for a truth of {tuple(truth.shape)}")
        counts = truth != IGNORED
        truth, predicted = truth[counts].long(), predicted[counts].long()
        for name, found in (("annotation", truth), ("prediction", predicted)):
            if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < self.classes:
                wrong = int(found.max()) if int(found.max()) >= self.classes else int(found.min())
                raise DataError(f"the {name} has class {wrong}: expected 0 to {self.classes - 1}, or {IGNORED}")
        parts = (truth[truth == predicted], truth, predicted)
        self._counts.append(torch.stack([part.bincount(minlength=self.classes) for part in parts]).cpu())

    @property
    def n(self) -> int:
        return len(self._counts)

    @property
    def pixels(self) -> int:
        """How many pixels count."""
        return int(self._stacked.sum(dim=(0, 2))[1]) if self._counts else 0

    @property
    def iou(self) -> Tensor:
        """(K,): IoU of each class in percent; NaN where a class is neither there nor predicted."""
        return _iou(self._stacked.sum(dim=0))

    @property
    def miou(self) -> float:
        """The mean over the classes that are there or predicted, in percent."""
        return float(self.iou.nanmean())

    @property
    def pixel_accuracy(self) -> float:
        """Pixels with the right class, in percent."""
        hits, true, _ = self._stacked.sum(dim=(0, 2)).tolist()
        return 100 * hits / true if true else float("nan")

    @property
    def standard_error(self) -> float:
        """Of mIoU, by the bootstrap: how much it differs among resamples of the images."""
        keys = randomness.fold(randomness.image_keys(0, torch.arange(RESAMPLES)), "bootstrap")
        drawn = (randomness.uniform(keys, self.n) * self.n).long()  # (R, n) numbers of images
        times = torch.zeros(RESAMPLES, self.n, dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones_like(drawn, dtype=torch.float64)
        )
        sums = (times @ self._stacked.flatten(1).double()).view(RESAMPLES, 3, self.classes)
        return float(_iou(sums).nanmean(dim=-1).std())

    @property
    def _stacked(self) -> Tensor:
        """(n, 3, K)."""
        if not self._counts:
            raise DataError("there are no images to evaluate on")
        return torch.stack(self._counts)


def _iou(counts: Tensor) -> Tensor:
    """(..., 3, K) hits, true and predicted pixels -> (..., K) IoU in percent."""
    hits, true, predicted = counts.double().unbind(dim=-2)
    return 100 * hits / (true + predicted - hits)  # 0 / 0 is NaN: no such class


# --- average precision -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """COCO's average precision in percent: over IoU thresholds of 0.50, 0.55, ... 0.95, and at 0.50 alone."""

    ap: float
    ap50: float
    standard_error: float
    """Of `ap`, by a jackknife that leaves out one of ten groups of images at a time."""


class Instances:
    """Detected objects and those that are there, for average precision."""

    def __init__(self, classes: int) -> None:
        self._mask = coco_tools().mask
        self.classes = classes
        self.images: list[dict[str, Any]] = []
        self._truths: list[dict[str, Any]] = []
        self._detections: list[dict[str, Any]] = []

    @property
    def n(self) -> int:
        return len(self.images)

    def add(self, found: Mapping[str, Tensor], truth: Mapping[str, Tensor], size: tuple[int, int]) -> None:
        """Count one image of this height and width.

        Args:
            found: `boxes` (n, 4) as x1, y1, x2, y2, `labels` (n,) from 0, `scores` (n,), `masks` (n, H, W) bool.
            truth: the same without scores; `iscrowd` (n,) marks regions that no detection is blamed for.
        """
        number = len(self.images)
        self.images.append({"id": number, "height": size[0], "width": size[1]})
        self._truths += self._listed(truth, number, size, 1 + len(self._truths))
        self._detections += self._listed(found, number, size, 1 + len(self._detections))

    def _listed(
        self, objects: Mapping[str, Tensor], image: int, size: tuple[int, int], first: int
    ) -> list[dict[str, Any]]:
        """Entries as COCO has them; numbered from 1, because COCO's tools take 0 for no match."""
        boxes = objects["boxes"].double().cpu()
        sides = boxes[:, 2:] - boxes[:, :2]
        crowd = objects.get("iscrowd", torch.zeros(len(boxes)))
        entries: list[dict[str, Any]] = [
            {
                "id": first + i,
                "image_id": image,
                "category_id": label,
                "bbox": [*corner, *side],
                "area": side[0] * side[1],
                "iscrowd": int(many),
            }
            for i, (label, corner, side, many) in enumerate(
                zip(objects["labels"].tolist(), boxes[:, :2].tolist(), sides.tolist(), crowd.tolist(), strict=True)
            )
        ]
        for entry, score in zip(entries, objects["scores"].tolist() if "scores" in objects else (), strict=False):
            entry["score"] = score
        if "masks" in objects and entries:
            masks = objects["masks"].to(torch.uint8).cpu()
            if tuple(masks.shape[1:]) != tuple(size):
                raise DataError(f"masks of {tuple(masks.shape[1:])} pixels for an image of {tuple(size)}")
            runs = self._mask.encode(np.asfortranarray(masks.permute(1, 2, 0).numpy()))
            for entry, run in zip(entries, runs, strict=True):
                entry["segmentation"] = run
        return entries

    def precision(self, of: str) -> Precision:
        """Of `boxes` or of `masks`. DataError where there is no object to find."""
        if not any(not entry["iscrowd"] for entry in self._truths):
            raise DataError("the evaluation images have no annotated objects: average precision is not defined")
        library = coco_tools()
        truths, detections = (self._indexed(library, entries) for entries in (self._truths, self._detections))
        matched = _matched(library, truths, detections, {"boxes": "bbox", "masks": "segm"}[of])
        whole = _accumulated(matched, range(self.n))
        groups = min(GROUPS, self.n)
        kept = [[i for i in range(self.n) if i % groups != group] for group in range(groups)] if groups > 1 else []
        without = [_mean(_accumulated(matched, images)) for images in kept]
        return Precision(100 * _mean(whole), 100 * _mean(whole[:1]), 100 * _jackknife(without))

    def _indexed(self, library: Any, entries: list[dict[str, Any]]) -> Any:
        categories = [{"id": i, "name": str(i)} for i in range(self.classes)]
        # Copies: the library writes into what it is given.
        return library.COCO(
            {"images": self.images, "categories": categories, "annotations": [dict(entry) for entry in entries]}
        )


def _matched(library: Any, truths: Any, detections: Any, kind: str) -> Any:
    """COCO's evaluation with all images matched, objects of all sizes together."""
    evaluation = library.COCOeval_faster(truths, detections, kind, separate_eval=True)
    parameters = evaluation.params
    parameters.areaRng, parameters.areaRngLbl = [[0, 1e10]], ["all"]
    parameters.maxDets = [MOST]
    evaluation.evaluate()
    return evaluation


def _accumulated(matched: Any, images: Sequence[int]) -> Any:
    """(T, R, K, 1, 1): precision at each IoU threshold, recall and class, over some of the images.

    Matches are those of one image each, so that a part of them is what an evaluation of these images alone would find.
    """
    part = copy.copy(matched)
    n = len(matched.params.imgIds)
    part._paramsEval = copy.copy(matched._paramsEval)
    part._paramsEval.imgIds = list(images)
    part._evalImgs_cpp = [matched._evalImgs_cpp[k + i] for k in range(0, len(matched._evalImgs_cpp), n) for i in images]
    part.accumulate()
    return part.eval["precision"]


def _mean(precision: Any) -> float:
    """The mean of COCO's precisions; -1 marks a class that is not there."""
    found = precision[precision > -1]
    return float(found.mean()) if found.size else float("nan")


def _jackknife(without: list[float]) -> float:
    """Standard error from what is measured without each of some groups; one without any object tells nothing."""
    left = torch.tensor(without, dtype=torch.float64)
    left = left[~left.isnan()]
    n = len(left)
    return float(((n - 1) * left.var(correction=0)).sqrt()) if n > 1 else float("nan")


def coco_tools() -> Any:
    try:
        import faster_coco_eval
    except ImportError as error:
        raise DependencyError('average precision needs faster-coco-eval: pip install "maskaq[detection]"') from error
    return faster_coco_eval
