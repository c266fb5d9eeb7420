"""Segmentation: a class for every pixel, made for random class maps, judged by the mean IoU."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from maskaq.errors import DataError
from maskaq.losses.layouts import class_maps
from maskaq.models import class_names, geometry
from maskaq.progress import Progress
from maskaq.quant.twin import frozen
from maskaq.shapes import Geometry
from maskaq.tasks.classification import kl
from maskaq.tasks.drawing import size_of_drawing, with_classes
from maskaq.tasks.metrics import IGNORED, Confusion, class_map
from maskaq.tasks.outputs import annotated, device_of, evaluating, measured, refuse_damaged, refuse_not_finite
from maskaq.tasks.task import CLASS_TERMS, LOGIT_TERMS, Batches, Column, Layout, Outputs, Task

_SURE = 0.5
"""The teacher's probability of a class from which on a pixel is taken for it."""


@dataclass(frozen=True)
class SegmentationResult:
    """Mean IoU and pixel accuracy in percent, over n images."""

    task: ClassVar[str] = "segmentation"
    miou: float
    pixel_accuracy: float
    n: int
    standard_error: float
    """Of mIoU, in points."""

    @property
    def headline(self) -> float:
        return self.miou

    def as_full(self) -> "SegmentationResult":
        return self

    def to_dict(self) -> dict[str, Any]:
        return measured(asdict(self))


class Segmentation(Task):
    """A model that gives logits for every pixel, (B, K, H, W)."""

    name = "segmentation"
    output = "logits"
    has_layouts = True
    columns: ClassVar[Mapping[str, Column]] = {
        "miou": Column("mIoU %"),
        "standard_error": Column("± s.e."),
        "pixel_accuracy": Column("pixels %"),
        "n": Column("n", "d"),
    }
    distance_name = "KL to the full-precision model, mean over the pixels"
    loss_name = "points of mIoU"
    agreement_name = "pixels with the same class as in the full-precision model"
    in_place_of: ClassVar[Mapping[str, str | None]] = (
        dict.fromkeys(CLASS_TERMS) | {"class_prior": "pixel_prior"} | dict.fromkeys(LOGIT_TERMS, "pixel_kl")
    )

    def layouts(self, keys: Tensor, geometry: Geometry) -> Layout:
        return class_maps(keys, geometry.classes, geometry.image_size)

    def relabelled(self, layout: Layout, outputs: Outputs) -> Layout:
        """Pixels that the teacher is sure of have the class that it sees."""
        sure, seen = outputs[self.output].float().softmax(dim=1).max(dim=1)
        return {**layout, "classes": torch.where(sure > _SURE, seen, layout["classes"])}

    def distance(self, expected: Outputs, found: Outputs) -> Tensor:
        return kl(expected[self.output], found[self.output]).mean(dim=(1, 2))

    def agreement(self, expected: Outputs, found: Outputs) -> Tensor:
        same = found[self.output].argmax(dim=1) == expected[self.output].argmax(dim=1)
        return same.float().mean(dim=(1, 2))

    @torch.no_grad()
    def drawn(self, model: nn.Module, images: Tensor) -> Tensor:
        with frozen(model):
            found = class_map(model(images), size_of_drawing((images.shape[2], images.shape[3])))
        return with_classes(geometry(model).pixels(images), found, class_names(model) or ())

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, batches: Batches, progress: Progress | None = None, full: Any = None
    ) -> SegmentationResult:
        """Args:
        batches: images with their annotations, of which `semantic` is the class map in the image's original size.
        """
        progress = progress or Progress()
        device = device_of(model)
        confusion = Confusion(int(model.num_classes))  # type: ignore[arg-type]
        refuse_damaged(model)
        with evaluating(model):
            for images, truths in map(annotated, batches):
                outputs = model(images.to(device))
                refuse_not_finite(outputs)
                for logits, truth in zip(outputs, truths, strict=True):
                    found = class_map(logits[None], truth["size"])[0].cpu()
                    try:
                        confusion.add(found, truth["semantic"])
                    except DataError as error:
                        raise DataError(f"{truth['name']}: {error}") from error
                progress.advance(len(images))
        if not confusion.pixels:
            raise DataError(f"no pixel of the {confusion.n} annotations counts: all are {IGNORED}")
        return SegmentationResult(confusion.miou, confusion.pixel_accuracy, confusion.n, confusion.standard_error)
