"""Detection: boxes, classes and masks of objects, made for random objects, judged by COCO's average precision."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from maskaq.losses import dense, layouts
from maskaq.models import geometry
from maskaq.progress import Progress
from maskaq.quant.twin import frozen
from maskaq.shapes import Geometry
from maskaq.tasks.drawing import size_of_drawing, with_objects
from maskaq.tasks.metrics import Instances
from maskaq.tasks.outputs import annotated, device_of, evaluating, measured, refuse_damaged
from maskaq.tasks.task import CLASS_TERMS, LOGIT_TERMS, Batches, Column, Layout, Outputs, Task

_REACHED = 0.2
"""The teacher's probability of an object's class below which the object is given up."""
_SHOWN = 0.5
"""The least score of objects that are drawn."""


@dataclass(frozen=True)
class DetectionResult:
    """COCO's average precision of boxes and masks in percent, over n images."""

    task: ClassVar[str] = "detection"
    ap_box: float
    ap_mask: float
    ap50_box: float
    n: int
    standard_error: float
    """Of the boxes' AP, in points."""

    @property
    def headline(self) -> float:
        return self.ap_box

    def as_full(self) -> "DetectionResult":
        return self

    def to_dict(self) -> dict[str, Any]:
        return measured(asdict(self))


class Detection(Task):
    """A `maskaq.models.detector.MaskRCNN`."""

    name = "detection"
    output = "class_logits"
    has_layouts = True
    columns: ClassVar[Mapping[str, Column]] = {
        "ap_box": Column("AP box %"),
        "standard_error": Column("± s.e."),
        "ap_mask": Column("AP mask %"),
        "ap50_box": Column("AP50 box %"),
        "n": Column("n", "d"),
    }
    distance_name = "distance of proposals and heads to the full-precision model"
    loss_name = "points of AP"
    agreement_name = "boxes with the same class as in the full-precision model"
    in_place_of: ClassVar[Mapping[str, str | None]] = (
        dict.fromkeys(CLASS_TERMS) | {"class_prior": "object_prior"} | dict.fromkeys(LOGIT_TERMS, "detection_gap")
    )

    def terms(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The pyramid is matched like blocks."""
        found = super().terms(weights)
        return {"pyramid_error": found["block_error"], **found} if "block_error" in found else found

    def layouts(self, keys: Tensor, geometry: Geometry) -> Layout:
        return layouts.objects(keys, geometry.classes, geometry.image_size)

    def relabelled(self, layout: Layout, outputs: Outputs) -> Layout:
        """Without the objects that the teacher does not see by now."""
        count = layout["objects"].shape[1]
        own = outputs["class_logits"][:, :count].float().softmax(dim=2)  # of the objects' own boxes, which come first
        seen = (own.gather(2, layout["labels"][..., None] + 1).squeeze(2) > _REACHED) * layout["present"]
        present = torch.where(seen.any(dim=1, keepdim=True), seen, layout["present"])  # never none at all
        size = (layout["foreground"].shape[1], layout["foreground"].shape[2])
        return {**layout, "present": present, "foreground": layouts.ellipses(layout["objects"], present, size)}

    def run(self, model: Any, images: Tensor, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """All models of a comparison look at the same boxes: those of the layout, or those the teacher proposes."""
        outputs = model(images, None if given is None else given["boxes"])
        pyramid = [outputs[name] for name in outputs if name.startswith("pyramid_")]
        return outputs | {"anchors": model.anchors(pyramid).expand(len(images), -1, -1)}

    def distance(self, expected: Outputs, found: Outputs) -> Tensor:
        p, q = ({name: x.double() for name, x in outputs.items()} for outputs in (expected, found))
        proposals = dense.proposal_gap(*(x[name] for x in (p, q) for name in ("objectness", "deltas")))
        names = ("class_logits", "box_deltas", "mask_logits")
        return proposals + dense.roi_gap(*(x[name] for x in (p, q) for name in names))

    def agreement(self, expected: Outputs, found: Outputs) -> Tensor:
        """Of the boxes that show an object to the teacher, or of all where none does."""
        p, q = (outputs[self.output].argmax(dim=2) for outputs in (expected, found))
        counts = torch.where((p > 0).any(dim=1, keepdim=True), p > 0, True).float()
        return ((p == q) * counts).sum(dim=1) / counts.sum(dim=1)

    @torch.no_grad()
    def drawn(self, model: Any, images: Tensor) -> Tensor:
        size = size_of_drawing((images.shape[2], images.shape[3]))
        with frozen(model):
            found = model.detect(images, sizes=[size] * len(images))
        return with_objects(geometry(model).pixels(images), found, size, _SHOWN)

    @torch.no_grad()
    def evaluate(
        self, model: Any, batches: Batches, progress: Progress | None = None, full: Any = None
    ) -> DetectionResult:
        """Args:
        batches: images with their annotations: `boxes`, `labels` and `masks` in the image's original `size`.
        """
        progress = progress or Progress()
        device = device_of(model)
        instances = Instances(int(model.num_classes))
        refuse_damaged(model)
        with evaluating(model):
            for images, truths in map(annotated, batches):
                sizes = [truth["size"] for truth in truths]
                for found, truth in zip(model.detect(images.to(device), sizes=sizes), truths, strict=True):
                    instances.add({name: x.cpu() for name, x in found.items()}, truth, truth["size"])
                progress.advance(len(images))
        boxes, masks = instances.precision("boxes"), instances.precision("masks")
        return DetectionResult(boxes.ap, masks.ap, boxes.ap50, instances.n, boxes.standard_error)
