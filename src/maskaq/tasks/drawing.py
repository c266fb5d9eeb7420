"""What a model finds in an image, drawn on it: class maps in colour, boxes and masks."""

import colorsys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

_STRENGTH = 0.5  # of a colour over the image
_SIDE = 256  # px of the longer side of a drawing
_LINE = 2  # px
GROUND = "background"
"""Name of a class that is left as it is in the image: its colour would hide most of it."""


def size_of_drawing(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the drawing of an image: boxes in a small one would be too thin to see."""
    height, width = (max(1, round(side * _SIDE / max(size))) for side in size)
    return height, width


def colour(number: int) -> tuple[int, int, int]:
    """A colour for a class: neighbours on the list differ as much as they can."""
    hue = (number * 0.618034) % 1.0
    red, green, blue = (round(255 * x) for x in colorsys.hsv_to_rgb(hue, 0.85, 0.95))
    return red, green, blue


def with_classes(pixels: Tensor, classes: Tensor, names: Sequence[str] = ()) -> Tensor:
    """(B, 3, h, w) in [0, 1] under the colours of class maps (B, H, W): (B, 3, H, W) uint8.

    Args:
        names: of the classes; `GROUND` is not coloured.
    """
    pixels = _resized(pixels, (classes.shape[1], classes.shape[2]))
    table = torch.tensor([colour(number) for number in range(int(classes.max()) + 1)], device=pixels.device)
    over = table[classes].permute(0, 3, 1, 2)
    strength = torch.full(classes.shape, _STRENGTH, device=pixels.device)
    for number, name in enumerate(names):
        if name == GROUND:
            strength = strength.masked_fill(classes == number, 0)
    mixed = torch.lerp(255 * pixels.clamp(0, 1), over.float(), strength[:, None])
    return mixed.round().to(torch.uint8).cpu()


def with_objects(pixels: Tensor, found: Sequence[dict[str, Tensor]], size: tuple[int, int], least: float) -> Tensor:
    """(B, 3, h, w) in [0, 1] with the boxes and masks of objects of at least this score: (B, 3, H, W) uint8.

    Args:
        size: H, W, that the boxes and masks are for.
    """
    images = (255 * _resized(pixels, size).clamp(0, 1)).round().to(torch.uint8).cpu()
    drawn = []
    for image, objects in zip(images, found, strict=True):
        sure = (objects["scores"] >= least).cpu()
        colours = [colour(label) for label in objects["labels"].cpu()[sure].tolist()]
        if colours:
            image = draw_segmentation_masks(image, objects["masks"].cpu()[sure], alpha=_STRENGTH, colors=colours)
            image = draw_bounding_boxes(image, objects["boxes"].cpu()[sure], colors=colours, width=_LINE)
        drawn.append(image)
    return torch.stack(drawn)


def _resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(pixels.float(), size, mode="bilinear", align_corners=False, antialias=True)
