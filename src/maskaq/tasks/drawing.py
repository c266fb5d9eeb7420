"""What a model finds in an image, drawn on it: class maps in colour, boxes and masks."""

import colorsys
from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

_STRENGTH = 0.5  # of a colour over the image


def colour(number: int) -> tuple[int, int, int]:
    """A colour for a class: neighbours on the list differ as much as they can."""
    hue = (number * 0.618034) % 1.0
    red, green, blue = (round(255 * x) for x in colorsys.hsv_to_rgb(hue, 0.85, 0.95))
    return red, green, blue


def with_classes(pixels: Tensor, classes: Tensor) -> Tensor:
    """(B, 3, H, W) in [0, 1] under the colours of class maps (B, H, W), as uint8."""
    table = torch.tensor([colour(number) for number in range(int(classes.max()) + 1)], device=pixels.device)
    over = table[classes].permute(0, 3, 1, 2)
    mixed = (1 - _STRENGTH) * 255 * pixels.clamp(0, 1) + _STRENGTH * over
    return mixed.round().to(torch.uint8).cpu()


def with_objects(pixels: Tensor, found: Sequence[dict[str, Tensor]], least: float) -> Tensor:
    """(B, 3, H, W) in [0, 1] with the boxes and masks of objects of at least this score, as uint8."""
    images = (255 * pixels.clamp(0, 1)).round().to(torch.uint8).cpu()
    drawn = []
    for image, objects in zip(images, found, strict=True):
        sure = (objects["scores"] >= least).cpu()
        colours = [colour(label) for label in objects["labels"].cpu()[sure].tolist()]
        if colours:
            image = draw_segmentation_masks(image, objects["masks"].cpu()[sure], alpha=_STRENGTH, colors=colours)
            image = draw_bounding_boxes(image, objects["boxes"].cpu()[sure], colors=colours)
        drawn.append(image)
    return torch.stack(drawn)
