"""Random layouts: what the images of a detector or a segmenter are made for, in place of a class.

A layout is drawn from an image's key alone, and never from real annotations. It is a mapping of tensors (B, ...) of
fixed shapes, so that a captured step can hold it.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq.boxes import centre_and_side
from maskaq.randomness import fold, normal, uniform

MOST_REGIONS = 5
"""Classes in the map of one image, at most; at least 2."""
_WAVES = 4  # a class map has this many random values across, in between it is smooth
MOST_OBJECTS = 8
"""Objects in one image, at most; at least 1."""
_SMALLEST, _LARGEST = 0.15, 0.6  # sides of an object, shares of the image's
NEAR, ANYWHERE = 8, 8
"""Boxes that RoI heads see besides the objects' own: near an object, and anywhere in the image."""


def class_maps(keys: Tensor, classes: int, size: tuple[int, int]) -> dict[str, Tensor]:
    """Smooth random maps: `classes` (B, H, W) int64, and `foreground` (B, H, W), all but the commonest class.

    2 to 5 classes of an image each have a smooth random field; a pixel has the class whose field is highest.
    """
    count = 2 + (uniform(fold(keys, "regions")) * (MOST_REGIONS - 1)).long()  # (B,)
    chosen = uniform(fold(keys, "classes"), classes).argsort(dim=1, stable=True)[:, :MOST_REGIONS]  # (B, R)
    fields = normal(fold(keys, "fields"), chosen.shape[1], _WAVES, _WAVES)
    fields = F.interpolate(fields, size=size, mode="bicubic", align_corners=True)
    there = torch.arange(chosen.shape[1], device=keys.device) < count[:, None]  # (B, R)
    region = fields.masked_fill(~there[:, :, None, None], -torch.inf).argmax(dim=1)  # (B, H, W)
    found = chosen.gather(1, region.flatten(1)).view_as(region)
    areas = F.one_hot(region.flatten(1), chosen.shape[1]).sum(dim=1)  # (B, R)
    commonest = areas.argmax(dim=1)
    return {"classes": found, "foreground": (region != commonest[:, None, None]).float()}


def objects(keys: Tensor, classes: int, size: tuple[int, int]) -> dict[str, Tensor]:
    """1 to 8 random objects: `objects` (B, 8, 4) boxes, `labels` (B, 8), `present` (B, 8) of 0 and 1.

    `boxes` (B, 24, 4) are what RoI heads are asked about: the objects' own boxes, boxes near them, boxes anywhere.
    `foreground` (B, H, W) is the ellipses that fill the objects' boxes: an object's mask is its ellipse.
    """
    extent = torch.tensor([size[1], size[0]], device=keys.device, dtype=torch.float32)
    found = _random_boxes(fold(keys, "objects"), MOST_OBJECTS) * extent.repeat(2)
    count = 1 + (uniform(fold(keys, "count")) * MOST_OBJECTS).long()
    present = (torch.arange(MOST_OBJECTS, device=keys.device) < count[:, None]).float()
    labels = (uniform(fold(keys, "labels"), MOST_OBJECTS) * classes).long()
    centre, side = centre_and_side(found)
    moved = centre + 0.3 * side * (2 * uniform(fold(keys, "moved"), NEAR, 2) - 1)
    half = 0.5 * side * (0.8 + 0.4 * uniform(fold(keys, "resized"), NEAR, 2))
    near = torch.cat([moved - half, moved + half], dim=-1).clamp(min=0).minimum(extent.repeat(2))
    anywhere = _random_boxes(fold(keys, "anywhere"), ANYWHERE) * extent.repeat(2)
    layout = {"objects": found, "labels": labels, "present": present}
    layout["boxes"] = torch.cat([found, near, anywhere], dim=1)
    return layout | {"foreground": ellipses(found, present, size)}


def ellipses(boxes: Tensor, present: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, H, W) of 0 and 1: the union of the ellipses in the boxes (B, N, 4) that are present."""
    down, across = (torch.arange(side, device=boxes.device) + 0.5 for side in size)
    places = torch.stack(torch.meshgrid(across, down, indexing="xy"), dim=-1)  # (H, W, 2): column, row
    inside = in_ellipse(places[None, None], boxes[:, :, None, None])  # (B, N, H, W)
    return (inside * present[:, :, None, None]).amax(dim=1)


def in_ellipse(places: Tensor, boxes: Tensor) -> Tensor:
    """1 for places (..., 2), column and row, inside the ellipse that fills a box (..., 4); else 0."""
    centre, side = centre_and_side(boxes)
    return (((places - centre) / (0.5 * side).clamp(min=1e-6)).square().sum(dim=-1) <= 1).float()


def _random_boxes(keys: Tensor, count: int) -> Tensor:
    """(B, count, 4) boxes inside the unit square, with sides drawn evenly on a log scale."""
    orders = math.log(_LARGEST / _SMALLEST)
    side = _SMALLEST * torch.exp(orders * uniform(fold(keys, "side"), count, 2))  # a power is rounded by its place
    corner = uniform(fold(keys, "corner"), count, 2) * (1 - side)
    return torch.cat([corner, corner + side], dim=-1)
