"""Boxes in pixels: left, top, right, bottom in the last axis of a tensor."""

import math

import torch
from torch import Tensor

ROI_UNITS = (0.1, 0.2)
"""Units of the box deltas of RoI heads, for the centre and for the size; those of proposals are 1."""

_LEAST_SIDE = 1e-3  # pixels; of the box that deltas are relative to
_LARGEST_RATIO = math.log(1000 / 16)  # of a box to the box it is decoded from


def decoded(boxes: Tensor, deltas: Tensor, units: tuple[float, float] = (1, 1)) -> Tensor:
    """(..., 4): boxes moved and resized by deltas, whose units are given for the centre and for the size."""
    centre, side = centre_and_side(boxes)
    deltas = deltas.to(boxes.dtype)
    centre = centre + units[0] * deltas[..., :2] * side
    half = 0.5 * side * (units[1] * deltas[..., 2:]).clamp(-_LARGEST_RATIO, _LARGEST_RATIO).exp()
    return torch.cat([centre - half, centre + half], dim=-1)


def encoded(boxes: Tensor, wanted: Tensor, units: tuple[float, float] = (1, 1)) -> Tensor:
    """(..., 4): the deltas from which `decoded` computes the wanted boxes; finite for empty boxes too."""
    (centre, side), (to_centre, to_side) = centre_and_side(boxes), centre_and_side(wanted)
    side, to_side = side.clamp(min=_LEAST_SIDE), to_side.clamp(min=_LEAST_SIDE)
    return torch.cat([(to_centre - centre) / side / units[0], (to_side / side).log() / units[1]], dim=-1)


def centre_and_side(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 2) each."""
    return 0.5 * (boxes[..., :2] + boxes[..., 2:]), boxes[..., 2:] - boxes[..., :2]


def taken(boxes: Tensor, index: Tensor) -> Tensor:
    """(B, N, 4) and (B, M) -> (B, M, 4): the boxes, or deltas, of these numbers."""
    return boxes.gather(1, index[..., None].expand(-1, -1, 4))


def of_class(values: Tensor, label: Tensor) -> Tensor:
    """(B, R, K, ...) -> (B, R, ...): of each box the values of its class (B, R)."""
    rest = values.shape[3:]
    index = label[(..., *[None] * (1 + len(rest)))].expand(-1, -1, 1, *rest)
    return values.gather(2, index).squeeze(2)


def iou(boxes: Tensor, others: Tensor) -> Tensor:
    """(..., N, 4) and (..., M, 4) -> (..., N, M): intersection over union of every pair."""
    boxes, others = boxes[..., :, None, :], others[..., None, :, :]
    low, high = torch.maximum(boxes[..., :2], others[..., :2]), torch.minimum(boxes[..., 2:], others[..., 2:])
    shared = (high - low).clamp(min=0).prod(dim=-1)
    areas = ((x[..., 2:] - x[..., :2]).prod(dim=-1) for x in (boxes, others))
    return shared / (sum(areas) - shared).clamp(min=1e-6)
