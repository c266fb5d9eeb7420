"""Augmentations of image batches in which every sample draws its own parameters from its own key.

What an image becomes depends on the image and its key alone. `jitter` perturbs images under synthesis: differentiable,
and without a wait for the device, so a CUDA graph can hold it. `simclr` makes the views of contrastive learning.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskaq.randomness import fold, normal, uniform


def _between(keys: Tensor, purpose: str, low: float, high: float | Tensor, *shape: int) -> Tensor:
    """(B,) keys -> (B, *shape) floats drawn uniformly from [low, high]."""
    return low + (high - low) * uniform(fold(keys, purpose), *shape)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    """(B, ...) values of up to four axes -> the same values in the images' type, to broadcast against (B, C, H, W)."""
    return values.to(images.dtype).reshape(*values.shape, *[1] * (4 - values.ndim))


class _Roll(torch.autograd.Function):
    """Rolling back is the gradient of rolling, so no atomic scatter-add is needed and only the offsets are kept."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        height, width = images.shape[2:]
        rows = (torch.arange(height, device=images.device) - offsets[:, :1]) % height  # (B, H)
        columns = (torch.arange(width, device=images.device) - offsets[:, 1:]) % width  # (B, W)
        source = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)[:, None]  # (B, 1, H*W)
        # One gather over flat pixels with an index shared by the channels: several times faster than index per axis.
        return images.flatten(2).gather(2, source.expand(-1, images.shape[1], -1)).view(images.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (offsets,) = ctx.saved_tensors
        return roll_each(grad, -offsets), None


def roll_each(images: Tensor, offsets: Tensor) -> Tensor:
    """(B, C, H, W) images, each rolled cyclically by its (rows, columns) in the (B, 2) int64 offsets."""
    rolled: Tensor = _Roll.apply(images, offsets)
    return rolled


def roll_offsets(keys: Tensor, roll: int | Tensor) -> Tensor:
    """(B,) keys -> (B, 2) int64 offsets (rows, columns), each uniform over the integers in [-roll, roll]."""
    return _between(keys, "roll", 0, 2 * roll + 1, 2).long() - roll


def jitter(
    images: Tensor, keys: Tensor, *, roll: int | Tensor, noise: float | Tensor, colour: float, flip: float = 0.0
) -> Tensor:
    """(B, C, H, W) images, each rolled by up to `roll` pixels an axis, then recoloured; differentiable in images.

    Each is mirrored first, with probability `flip`. Each channel becomes (x + n - m) / s with n ~ noise * N(0, 1),
    m ~ U(-colour, colour) and s = exp(U(-colour, colour)). A setting of 0 turns its part off. Keys should already
    contain the step. Settings that change from step to step may be 0-dim tensors, so that nothing waits for them.
    """
    images = _sometimes(lambda x: x.flip(3), images, keys, "mirror", flip)
    if isinstance(roll, Tensor) or roll:
        images = roll_each(images, roll_offsets(keys, roll))
    if not (isinstance(noise, Tensor) or noise or colour):
        return images
    channels = images.shape[1]
    shift = noise * normal(fold(keys, "noise"), channels) - _between(keys, "mean", -colour, colour, channels)
    gain = torch.exp(-_between(keys, "scale", -colour, colour, channels))
    # Shift and scale folded into one pass over the pixels, which far outnumber these (B, C) parameters.
    return torch.addcmul(_per_image(shift * gain, images), images, _per_image(gain, images))


def quarter(images: Tensor, cells: Tensor) -> Tensor:
    """(B, C, H, W): of each image the quarter in `cells` (B,), 0 to 3 in raster order, enlarged to full size, bilinear.

    As two matrix products: their gradient needs no atomic additions, and it stays inside the quarter.
    """
    down, across = (
        _enlarging(side, half).to(images.dtype)[:, None]
        for side, half in zip(images.shape[2:], (cells // 2, cells % 2), strict=True)
    )
    return down @ images @ across.mT


def _enlarging(side: int, half: Tensor) -> Tensor:
    """(B, side, side): row i has the weights of all pixels in pixel i of the first (0) or second (1) half, enlarged."""
    size = side // 2  # the middle pixel of an odd side is in neither half
    pixels = torch.arange(side, device=half.device)
    within = ((pixels + 0.5) * size / side - 0.5).clamp(0, size - 1)
    place = (half * (side - size))[:, None] + within  # (B, side)
    return (1 - (place[:, :, None] - pixels).abs()).clamp(min=0)


def greyscale(images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, 1, H, W): the luma of ITU-R 601 for RGB, the plain mean for other channel counts."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.chunk(3, dim=1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def _blend(images: Tensor, base: Tensor, factor: Tensor) -> Tensor:
    """Images moved away from (factor > 1) or towards (factor < 1) base, in [0, 1]."""
    return torch.lerp(base.expand_as(images), images, _per_image(factor, images)).clamp(0, 1)


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """(B, C, H, W) images, each times its factor (B,), in [0, 1]."""
    return (images * _per_image(factor, images)).clamp(0, 1)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """(B, C, H, W) images, the distance of each pixel from its image's mean luma times factor (B,), in [0, 1]."""
    return _blend(images, greyscale(images).mean((2, 3), keepdim=True), factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """(B, 3, H, W) images, the distance of each pixel from its own grey times factor (B,), in [0, 1]."""
    return _blend(images, greyscale(images), factor)


def adjust_hue(images: Tensor, factor: Tensor) -> Tensor:
    """(B, 3, H, W) images with the HSV hue of each turned by factor (B,) whole turns; value and saturation stay."""
    red, green, blue = images.chunk(3, dim=1)
    high = images.amax(1, keepdim=True)
    chroma = high - images.amin(1, keepdim=True)
    divisor = torch.where(chroma > 0, chroma, 1)  # greys have no hue; with zero chroma any hue gives the grey back
    sextant = torch.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    sextant = torch.where(high == red, (green - blue) / divisor, sextant)  # hue in sixths of a turn
    # Each channel falls from `high` by up to `chroma`, as a trapezoid of the distance of the hue from its own colour.
    phase = torch.arange(5, 0, -2, device=images.device)[:, None, None]  # (3, 1, 1): 5, 3, 1 for R, G, B
    angle = (sextant + 6 * _per_image(factor, images) + phase) % 6
    return high - chroma * torch.minimum(angle, 4 - angle).clamp(0, 1)


def gaussian_blur(images: Tensor, sigma: Tensor, size: int) -> Tensor:
    """(B, C, H, W) images, each blurred by a Gaussian of its own sigma (B,), cut to an odd size, edges reflected.

    As two matrix products, down and across: a convolution with a kernel for each image is many times slower.
    """
    down, across = (_blur_matrix(side, sigma, size)[:, None].to(images.dtype) for side in images.shape[2:])
    return down @ images @ across.transpose(-2, -1)


def _blur_matrix(side: int, sigma: Tensor, size: int) -> Tensor:
    """(B, side, side): row i holds the weights of all pixels in blurred pixel i, their mirror images included."""
    reach = size // 2
    i = torch.arange(side, device=sigma.device)[:, None]
    j = torch.arange(side, device=sigma.device)
    mirrored = [(j - i, j >= 0), (j + i, j > 0), (2 * (side - 1) - i - j, j < side - 1)]  # edges are not repeated

    def gauss(distance: Tensor) -> Tensor:
        near = distance.abs() <= reach
        return torch.where(near, torch.exp(-0.5 * (distance / sigma[:, None, None]) ** 2), 0)

    total = gauss(torch.arange(-reach, reach + 1, device=sigma.device)[None]).sum(dim=2, keepdim=True)
    return sum(torch.where(valid, gauss(distance), 0) for distance, valid in mirrored) / total


def resized_crop(images: Tensor, boxes: Tensor, flip: Tensor) -> Tensor:
    """(B, C, H, W): each image's box (B, 4) of `crop_boxes`, stretched to full size and mirrored if flip (B,)."""
    top, left, height, width = boxes.to(images.dtype).unbind(1)
    zero = torch.zeros_like(top)
    across = torch.stack([torch.where(flip, -width, width), zero, 2 * left + width - 1], dim=1)
    down = torch.stack([zero, height, 2 * top + height - 1], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
    # A box is never larger than the image, so nothing shrinks and bilinear sampling needs no antialiasing.
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def crop_boxes(keys: Tensor, crop: tuple[float, float]) -> Tensor:
    """(B,) keys -> (B, 4) boxes to crop: (top, left, height, width) as fractions of the image.

    Area ~ U(crop) and log(width / height) ~ U(log 3/4, log 4/3), relative to the image's own shape and so equal to the
    stretch it undergoes; sides are clipped to the image. A crop of (1, 1) keeps the shape: the whole image.
    """
    area = _between(keys, "area", *crop)
    widest = 0.0 if min(crop) >= 1 else math.log(4 / 3)
    ratio = torch.exp(_between(keys, "ratio", -widest, widest))
    sides = torch.stack([area / ratio, area * ratio], dim=1).sqrt().clamp(max=1)  # (B, 2)
    return torch.cat([(1 - sides) * uniform(fold(keys, "corner"), 2), sides], dim=1)


def zoomed(images: Tensor, keys: Tensor, smallest: Tensor) -> Tensor:
    """(B, C, H, W): a random crop of each image with an area from `smallest`, 0-dim, to 1, enlarged to full size."""
    side = _between(keys, "zoom", 0.0, 1.0).mul(1 - smallest).add(smallest).sqrt()[:, None].expand(-1, 2)  # (B, 2)
    boxes = torch.cat([(1 - side) * uniform(fold(keys, "zoom corner"), 2), side], dim=1)
    return resized_crop(images, boxes, torch.zeros_like(keys, dtype=torch.bool))


def _sometimes(change: Callable[[Tensor], Tensor], images: Tensor, keys: Tensor, purpose: str, prob: float) -> Tensor:
    """Each image changed with probability prob, else as it was."""
    if prob <= 0:
        return images
    chosen = uniform(fold(keys, purpose)) < prob
    return torch.where(chosen[:, None, None, None], change(images), images)


def simclr(
    images: Tensor,
    keys: Tensor,
    *,
    crop: tuple[float, float],
    flip: float,
    brightness: float,
    contrast: float,
    saturation: float,
    hue: float,
    jitter_prob: float,
    grey: float,
    blur: float,
) -> Tensor:
    """(B, C, H, W) images in [0, 1] -> one random view of each, of the same shape and range (Chen et al. 2020).

    In order: a crop of an area fraction from `crop`, resized, mirrored with probability `flip`; with `jitter_prob`,
    colour jitter, always as brightness, contrast, saturation (factors U(max(0, 1 - b), 1 + b)), hue (U(-hue, hue)
    turns); greyscale with probability `grey`; Gaussian blur with probability `blur`, sigma U(0.1, 2).
    Saturation, hue and greyscale are for RGB: other channel counts go without.
    """
    rgb = images.shape[1] == 3
    size = max(3, min(images.shape[2:]) // 10 // 2 * 2 + 1)  # of the blur: a tenth of the side, as in the paper; odd

    def factor(purpose: str, strength: float) -> Tensor:
        return _between(keys, purpose, max(0.0, 1 - strength), 1 + strength)

    def recolour(x: Tensor) -> Tensor:
        x = adjust_brightness(x, factor("bright", brightness))
        x = adjust_contrast(x, factor("contrast", contrast))
        if rgb:
            x = adjust_saturation(x, factor("saturate", saturation))
            x = adjust_hue(x, _between(keys, "hue", -hue, hue))
        return x

    images = resized_crop(images, crop_boxes(keys, crop), uniform(fold(keys, "flip")) < flip)
    images = _sometimes(recolour, images, keys, "recolour", jitter_prob)
    images = _sometimes(greyscale, images, keys, "greyed", grey if rgb else 0.0)
    sigma = _between(keys, "sigma", 0.1, 2.0)
    return _sometimes(lambda x: gaussian_blur(x, sigma, size), images, keys, "blur", blur).clamp(0, 1)


REACH = 3
"""How many images before it, in a batch that goes round, `mix` may put into an image: one, and then two."""


def mix(images: Tensor, keys: Tensor, *, cutmix: float, mixup: float) -> Tensor:
    """Images mixed with others of the batch; the teacher labels what comes out, so no label is needed.

    With probability `cutmix` a rectangle of up to half of the image is its neighbour's (Yun et al. 2019); then each is
    blended with another, whose share is U(0, mixup) (Zhang et al. 2018).
    """
    if cutmix > 0 and len(images) > 1:
        height, width = images.shape[2:]
        top, left, high, wide = crop_boxes(fold(keys, "cutmix"), (0.1, 0.5)).unbind(1)
        down = (torch.arange(height, device=images.device) + 0.5) / height  # (H,)
        across = (torch.arange(width, device=images.device) + 0.5) / width  # (W,)
        rows = (down >= top[:, None]) & (down < (top + high)[:, None])  # (B, H)
        columns = (across >= left[:, None]) & (across < (left + wide)[:, None])  # (B, W)
        chosen = (uniform(fold(keys, "cutmixed")) < cutmix)[:, None, None, None]
        images = torch.where(
            rows[:, None, :, None] & columns[:, None, None, :] & chosen, images.roll(1, dims=0), images
        )
    if mixup > 0 and len(images) > 1:
        images = torch.lerp(images, images.roll(2, dims=0), _per_image(_between(keys, "mixup", 0.0, mixup), images))
    return images
