"""Losses of segmenters and detectors: towards a layout in synthesis, between teacher and student in calibration.

Each gives (B,), one number for an image, from tensors of fixed shapes: what a detector samples at random in training
is weighed here, so that nothing depends on the batch and a step can be captured.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq.boxes import ROI_UNITS, encoded, iou, of_class, taken
from maskaq.losses.distill import relative_error
from maskaq.losses.layouts import in_ellipse

_ANCHOR_IS_OBJECT, _ANCHOR_IS_NOT = 0.7, 0.3
_ROI_IS_OBJECT = 0.5


def pixel_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of logits (B, K, H, W) and a class map (B, H, W), mean over the pixels."""
    return F.cross_entropy(logits, classes, reduction="none").mean(dim=(1, 2))


def proposal_loss(objectness: Tensor, deltas: Tensor, anchors: Tensor, objects: Tensor, present: Tensor) -> Tensor:
    """The loss of region proposals (Ren et al. 2015): is there an object at each anchor, and where is its box?

    An anchor is an object's if it overlaps it by 0.7, or most of all anchors; it is background below 0.3. Objects and
    background count the same, as in an even sample of both.

    Args:
        objectness, deltas, anchors: (B, A), (B, A, 4), (B, A, 4)
        objects, present: (B, N, 4), (B, N)
    """
    overlap = iou(anchors, objects) * present[:, None]  # (B, A, N)
    best, which = overlap.max(dim=2)
    of_object = overlap.amax(dim=1, keepdim=True)  # (B, 1, N)
    is_object = (best >= _ANCHOR_IS_OBJECT) | ((overlap >= of_object - 1e-6) & (of_object > 0)).any(dim=2)
    is_not = (best < _ANCHOR_IS_NOT) & ~is_object
    found = _weighted_mean(F.softplus(-objectness), is_object.float())
    missed = _weighted_mean(F.softplus(objectness), is_not.float())
    wanted = encoded(anchors, taken(objects, which))
    moved = F.smooth_l1_loss(deltas, wanted, reduction="none", beta=1 / 9).sum(dim=2)
    return 0.5 * (found + missed) + _weighted_mean(moved, is_object.float())


def roi_loss(
    class_logits: Tensor,
    box_deltas: Tensor,
    mask_logits: Tensor,
    boxes: Tensor,
    objects: Tensor,
    labels: Tensor,
    present: Tensor,
) -> Tensor:
    """The losses of Mask R-CNN's heads (He et al. 2017) on given boxes: class, box and mask.

    A box shows the object that it overlaps by 0.5 or more, else background; objects and background count the same. The
    mask of an object is the ellipse in its box.

    Args:
        class_logits, box_deltas, mask_logits: (B, R, K + 1) background first, (B, R, K, 4), (B, R, K, M, M)
        boxes: (B, R, 4)
        objects, labels, present: (B, N, 4), (B, N), (B, N)
    """
    best, which = (iou(boxes, objects) * present[:, None]).max(dim=2)  # (B, R)
    shows = (best >= _ROI_IS_OBJECT).float()
    label = labels.gather(1, which)  # (B, R)
    target = torch.where(shows > 0, label + 1, 0)
    errors = F.cross_entropy(class_logits.flatten(0, 1), target.flatten(), reduction="none").view_as(best)
    classes = 0.5 * (_weighted_mean(errors, shows) + _weighted_mean(errors, 1 - shows))
    matched = taken(objects, which)  # (B, R, 4)
    own = of_class(box_deltas, label)
    wanted = encoded(boxes, matched, ROI_UNITS)
    moved = _weighted_mean(F.smooth_l1_loss(own, wanted, reduction="none").sum(dim=2), shows)
    drawn = of_class(mask_logits, label)  # (B, R, M, M)
    filled = in_ellipse(_places_in(boxes, drawn.shape[-1]), matched[:, :, None, None])
    masks = F.binary_cross_entropy_with_logits(drawn, filled, reduction="none").mean(dim=(2, 3))
    return classes + moved + _weighted_mean(masks, shows)


def pixel_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of logits (B, K, H, W), mean over the pixels."""
    log_p, log_q = teacher.log_softmax(dim=1), student.log_softmax(dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1).mean(dim=(1, 2))


def map_error(teacher: Tensor, student: Tensor) -> Tensor:
    """Relative squared error of a feature map (B, C, H, W), every place measured by its own variance."""
    return relative_error(teacher.flatten(2).mT, student.flatten(2).mT)


def proposal_gap(objectness: Tensor, deltas: Tensor, objectness_q: Tensor, deltas_q: Tensor) -> Tensor:
    """How far the student's proposals (B, A), (B, A, 4) are from the teacher's.

    Anchors count by how likely the teacher finds an object there: nearly all are plain background.
    """
    p = objectness.sigmoid()
    gap = _weighted_mean(binary_kl(objectness, objectness_q), p + 0.02)
    return gap + _weighted_mean(F.smooth_l1_loss(deltas_q, deltas, reduction="none", beta=1 / 9).sum(dim=2), p)


def roi_gap(
    class_logits: Tensor,
    box_deltas: Tensor,
    mask_logits: Tensor,
    class_logits_q: Tensor,
    box_deltas_q: Tensor,
    mask_logits_q: Tensor,
) -> Tensor:
    """How far the student's heads are from the teacher's on the same boxes: KL of classes, boxes, KL of masks.

    Boxes and masks are compared for the class that the teacher sees, as far as it sees an object at all.
    """
    log_p, log_q = class_logits.log_softmax(dim=2), class_logits_q.log_softmax(dim=2)
    classes = (log_p.exp() * (log_p - log_q)).sum(dim=2).mean(dim=1)
    label = class_logits[..., 1:].argmax(dim=2)
    is_object = 1 - log_p[..., 0].exp()
    moved = F.smooth_l1_loss(of_class(box_deltas_q, label), of_class(box_deltas, label), reduction="none").sum(dim=2)
    masks = binary_kl(of_class(mask_logits, label), of_class(mask_logits_q, label)).mean(dim=(2, 3))
    return classes + _weighted_mean(moved + masks, is_object)


def binary_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL of the probabilities that two logits stand for, element by element."""
    p = teacher.sigmoid()
    return p * (F.logsigmoid(teacher) - F.logsigmoid(student)) + (1 - p) * (
        F.logsigmoid(-teacher) - F.logsigmoid(-student)
    )


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """(B, N) -> (B,): 0 where all weights are."""
    return (values * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-6)


def _places_in(boxes: Tensor, cells: int) -> Tensor:
    """(..., 4) -> (..., cells, cells, 2): column and row of the centre of every cell of a grid over each box."""
    steps = (torch.arange(cells, device=boxes.device) + 0.5) / cells
    x = boxes[..., 0, None] + (boxes[..., 2] - boxes[..., 0])[..., None] * steps  # (..., cells)
    y = boxes[..., 1, None] + (boxes[..., 3] - boxes[..., 1])[..., None] * steps
    return torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., :, None]), dim=-1)
