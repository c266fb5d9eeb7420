"""The losses that a Mask R-CNN is trained with, for each image, in fixed shapes: nothing waits for the device.

They are torchvision's (Ren et al. 2015, He et al. 2017), with its thresholds, but for the samplers. These draw from
keys, one for each image; numbers of anchors hold in the mean alone; and RoIs are drawn from the highest-scored boxes
without NMS and from boxes near the objects.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import clip_boxes_to_image, roi_align

from maskaq.boxes import ROI_UNITS, encoded, iou, of_class, taken
from maskaq.models.detector import MaskRCNN, image_size
from maskaq.randomness import fold, uniform

_ANCHORS = (256, 128)  # sampled of an image; of these, with an object at most
_FOREGROUND, _BACKGROUND = 0.7, 0.3  # IoU of an anchor with an object: at least, below
_ROI_FOREGROUND = 0.5
_BETA = 1 / 9  # where the smooth L1 loss of boxes becomes linear
_PER_LEVEL = 64
_NEAR = 8  # boxes drawn near each object


@dataclass(frozen=True)
class Objects:
    """What is to be found in each image of a batch."""

    boxes: Tensor
    """(B, N, 4)."""
    labels: Tensor
    """(B, N) classes from 0; -1 where there is no object."""
    masks: Tensor
    """(B, N, H, W) bool."""


def detection_losses(
    model: MaskRCNN, images: Tensor, objects: Objects, keys: Tensor, rois: int = 64, positive: int = 16
) -> dict[str, Tensor]:
    """(B,) each: `objectness`, `proposal`, `class`, `box` and `mask`.

    Args:
        keys: (B,), what the sampler draws from.
        rois: boxes of an image that the heads see; `positive` of them at most have an object.
    """
    size = image_size(images)
    features = model.features(images)
    objectness, deltas = (x.float() for x in model.rpn(features))
    anchors = model.anchors(features)
    losses = _rpn_losses(objectness, deltas, anchors, objects, fold(keys, "anchors"))
    with torch.no_grad():
        top = model.top_boxes(objectness, deltas, anchors, size, _PER_LEVEL)
        near = clip_boxes_to_image(_near(objects.boxes, fold(keys, "near")), size)
        candidates = torch.cat([objects.boxes, near, top], dim=1)
        boxes, match, found, counts = _sampled(candidates, objects, fold(keys, "rois"), rois, positive)
    logits, moved = (x.float() for x in model.classify(features, boxes))
    labels = objects.labels.gather(1, match)
    classes = torch.where(found, labels + 1, 0)
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
    total = counts.sum(dim=1).clamp(min=1)
    losses["class"] = (cross_entropy * counts).sum(dim=1) / total
    wanted = _encoded(boxes, taken(objects.boxes, match), found, ROI_UNITS)
    losses["box"] = (_smooth_l1(of_class(moved, labels.clamp(min=0)), wanted) * found).sum(dim=1) / total
    losses["mask"] = _mask_loss(model, features, boxes[:, :positive], match[:, :positive], found[:, :positive], objects)
    return losses


def _rpn_losses(
    objectness: Tensor, deltas: Tensor, anchors: Tensor, objects: Objects, keys: Tensor
) -> dict[str, Tensor]:
    overlap = _overlaps(anchors.expand(len(keys), -1, -1), objects)  # (B, A, N)
    best, match = overlap.max(dim=2)
    of_object = overlap.amax(dim=1, keepdim=True)
    foreground = (best >= _FOREGROUND) | ((overlap == of_object) & (of_object > 0)).any(dim=2)
    background = (best < _BACKGROUND) & ~foreground
    draws = uniform(keys, len(anchors))
    foreground = _about(_ANCHORS[1], foreground, draws)
    background = _about(_ANCHORS[0] - foreground.sum(dim=1, keepdim=True), background, draws)
    sampled = foreground | background
    total = sampled.sum(dim=1).clamp(min=1)
    entropy = F.binary_cross_entropy_with_logits(objectness, foreground.float(), reduction="none")
    wanted = _encoded(anchors.expand_as(deltas), taken(objects.boxes, match), foreground)
    return {
        "objectness": (entropy * sampled).sum(dim=1) / total,
        "proposal": (_smooth_l1(deltas, wanted) * foreground).sum(dim=1) / total,
    }


def _sampled(
    candidates: Tensor, objects: Objects, keys: Tensor, rois: int, positive: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Boxes (B, R, 4), the `positive` with an object first, as far as there are so many.

    Of each: the object it overlaps most, whether it is this object, and whether it counts.
    """
    best, match = _overlaps(candidates, objects).max(dim=2)
    solid = ((candidates[..., 2:] - candidates[..., :2]) >= 1).all(dim=-1)
    foreground, background = (best >= _ROI_FOREGROUND) & solid, (best < _ROI_FOREGROUND) & solid
    draws = uniform(keys, candidates.shape[1])
    numbers = ((foreground, positive), (background, rois - positive))
    index = torch.cat([(among * (1 + draws)).topk(count, dim=1).indices for among, count in numbers], dim=1)
    first = torch.arange(rois, device=keys.device) < positive
    found, empty = foreground.gather(1, index) & first, background.gather(1, index) & ~first
    return taken(candidates, index), match.gather(1, index), found, found | empty


def _mask_loss(
    model: MaskRCNN, features: list[Tensor], boxes: Tensor, match: Tensor, found: Tensor, objects: Objects
) -> Tensor:
    logits = model.segment(features, boxes).float()
    labels = objects.labels.gather(1, match).clamp(min=0)
    own = of_class(logits, labels)
    number = match + objects.masks.shape[1] * torch.arange(len(match), device=match.device)[:, None]
    rois = torch.cat([number.flatten()[:, None].to(boxes.dtype), boxes.flatten(0, 1)], dim=1)
    masks = objects.masks.flatten(0, 1)[:, None].to(boxes.dtype)
    wanted = (roi_align(masks, rois, own.shape[-1], sampling_ratio=0, aligned=True) >= 0.5).float().view_as(own)
    entropy = F.binary_cross_entropy_with_logits(own, wanted, reduction="none").mean(dim=(2, 3))
    return (entropy * found).sum(dim=1) / found.sum(dim=1).clamp(min=1)


def _overlaps(boxes: Tensor, objects: Objects) -> Tensor:
    """(B, R, N): IoU with each object; -1 with one that is not there."""
    return torch.where((objects.labels >= 0)[:, None], iou(boxes, objects.boxes), -1)


def _near(boxes: Tensor, keys: Tensor) -> Tensor:
    """(B, N * 8, 4): boxes moved and resized a little."""
    draws = 2 * uniform(keys, boxes.shape[1], _NEAR, 4) - 1
    side = boxes[..., 2:] - boxes[..., :2]
    return (boxes[:, :, None] + 0.2 * draws * torch.cat([side, side], dim=-1)[:, :, None]).flatten(1, 2)


def _about(count: int | Tensor, among: Tensor, draws: Tensor) -> Tensor:
    """(B, n) bool: those `among`, each with such a chance that about `count` of an image remain, or all."""
    return among & (draws * among.sum(dim=1, keepdim=True) < count)


def _encoded(boxes: Tensor, wanted: Tensor, there: Tensor, units: tuple[float, float] = (1, 1)) -> Tensor:
    """Deltas where there is an object, else 0: nothing is divided by the side of an empty box."""
    unit = (torch.arange(4, device=boxes.device) // 2).to(boxes.dtype)  # the box 0, 0, 1, 1
    boxes, wanted = (torch.where(there[..., None], x, unit) for x in (boxes, wanted))
    return encoded(boxes, wanted, units)


def _smooth_l1(deltas: Tensor, wanted: Tensor) -> Tensor:
    return F.smooth_l1_loss(deltas, wanted, beta=_BETA, reduction="none").sum(dim=-1)
