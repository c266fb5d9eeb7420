"""Dead leaves: images of shapes that lie over each other, the simplest model with the statistics of natural ones.

Edges, occlusion, objects of every size, spectra that fall like 1/f, and no picture of anything (Matheron 1968; Lee,
Mumford, Huang 2001). An image that is optimised from leaves keeps them; one from noise keeps the noise. Images vary in
the sizes and colours of their leaves; leaves are lobed, rough, striped or spotted, and lit from a side.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq.randomness import fold, normal, uniform

_LEAVES = 150
_LARGEST = 0.6  # half length of a leaf, of the shorter side
_SMALLEST = (0.015, 0.15)  # the same of the smallest leaves: between these, another in each image
_TEXTURES = 5  # of an image


def dead_leaves(keys: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Draw dead leaves: (B,) keys -> (B, C, H, W) in [0, 1]."""
    leaf = _topmost(keys, height, width)
    contrast = 0.22 * uniform(fold(keys, "contrast"), 1, _LEAVES)
    painted = _seen(_colours(keys, channels), leaf) + _seen(contrast, leaf) * _textures_seen(keys, leaf, channels)
    return (painted * _light(keys, leaf)).clamp(0, 1)


def _topmost(keys: Tensor, height: int, width: int) -> Tensor:
    """(B, H, W): the number of the last of many ellipses and rectangles that fell on a pixel; 0 where none did."""
    y, x = _grid(keys, height, width)
    topmost = torch.zeros(len(keys), height, width, dtype=torch.long, device=keys.device)
    smallest, lobed = uniform(fold(keys, "scene"), 2)[..., None, None].unbind(1)
    smallest = _magnitude(*_SMALLEST, smallest)
    for leaf in range(1, _LEAVES):
        draws = uniform(fold(keys, leaf), 8)[..., None, None]  # (B, 8, 1, 1)
        size, across, down, turn, aspect, shape, lobes, phase = draws.unbind(1)
        length = _magnitude(_LARGEST, smallest, size)
        right = x - (1.2 * across - 0.1) * width / min(height, width)  # centres may lie a little outside
        below = y - (1.2 * down - 0.1) * height / min(height, width)
        cos, sin = torch.cos(math.pi * turn), torch.sin(math.pi * turn)
        along = (right * cos + below * sin) / length
        aside = (below * cos - right * sin) / (length * (0.15 + 0.85 * aspect))
        wave = torch.sin((2 + (6 * lobes).floor()) * torch.atan2(aside, along) + 2 * math.pi * phase)
        ellipse = along.square() + aside.square() < (1 + 0.35 * lobed * wave).square()
        rectangle = torch.maximum(along.abs(), aside.abs()) < 0.9
        topmost = torch.where(torch.where(shape < 0.7, ellipse, rectangle), leaf, topmost)
    return topmost


def _colours(keys: Tensor, channels: int) -> Tensor:
    """(B, C, leaves): colours. The leaves of an image share its darkness and, to a random degree, a tint."""
    strength, alike, dark = uniform(fold(keys, "palette"), 3, 1, 1).unbind(1)
    shared = uniform(fold(keys, "shared tint"), channels, 1) - 0.5
    tint = alike * shared + (1 - 0.7 * alike) * (uniform(fold(keys, "tint"), channels, _LEAVES) - 0.5)
    grey = uniform(fold(keys, "grey"), 1, _LEAVES) ** torch.exp(1.2 * (dark - 0.5))
    return (grey + (0.2 + strength) * tint).clamp(0, 1)


def _textures_seen(keys: Tensor, leaf: Tensor, channels: int) -> Tensor:
    """(B, C, H, W): each leaf shows one of the image's textures, at a random offset."""
    height, width = leaf.shape[1:]
    which = _seen((uniform(fold(keys, "which"), 1, _LEAVES) * _TEXTURES).long(), leaf)
    moved = _seen((uniform(fold(keys, "place"), _LEAVES) * height).long() * width, leaf).flatten(1)
    pixel = (torch.arange(height * width, device=keys.device) + moved) % (height * width)
    index = pixel[:, None].expand(-1, channels, -1)
    seen = torch.zeros(len(keys), channels, height, width, device=keys.device)
    for number in range(_TEXTURES):
        texture = _texture(keys, number, channels, height, width)
        seen = torch.where(which == number, texture.flatten(2).gather(2, index).view_as(seen), seen)
    return seen


def _texture(keys: Tensor, number: int, channels: int, height: int, width: int) -> Tensor:
    """(B, C, H, W) of mean 0 and standard deviation 1: rough for number 0, striped for odd ones, spotted for others."""
    keys = fold(fold(keys, "texture"), number)
    rough = _octaves(keys, channels, height, width)
    if number == 0:
        return rough
    pattern = (_stripes if number % 2 else _spots)(keys, height, width)
    tone = 0.5 + uniform(fold(keys, "tone"), channels, 1, 1)
    return _standard(tone * pattern + 0.6 * uniform(fold(keys, "roughness"), 1, 1, 1) * rough)


def _octaves(keys: Tensor, channels: int, height: int, width: int) -> Tensor:
    """(B, C, H, W): noise with about equal power in each octave, mostly shared by the channels."""
    slope = 0.8 * uniform(fold(keys, "slope"), 1, 1, 1) - 0.4
    total = torch.zeros(len(keys), channels, height, width, device=keys.device)
    cells = 2
    while cells < 2 * max(height, width):
        rows, columns = min(cells, height), min(cells, width)
        noise = normal(fold(fold(keys, "octave"), cells), channels, rows, columns)
        weight = _magnitude(1, cells, slope)
        total += weight * F.interpolate(noise, (height, width), mode="bilinear", align_corners=False)
        cells *= 2
    shared = total.mean(dim=1, keepdim=True)
    return _standard(1.5 * shared + 0.5 * (total - shared))


def _stripes(keys: Tensor, height: int, width: int) -> Tensor:
    """(B, 1, H, W) in [-1, 1]: waves in one direction, bent, with soft or sharp edges."""
    fine, turn, bend, sharp = uniform(fold(keys, "stripes"), 4, 1, 1, 1).unbind(1)
    y, x = _grid(keys, height, width)
    short = min(height, width)
    waves = _magnitude(3, max(3, min(60, short / 3.5)), fine)
    across = waves * (x * torch.cos(math.pi * turn) + y * torch.sin(math.pi * turn))
    most = short // 18  # finer bends would crowd waves to less than a few pixels
    bends = 2 * _smooth(fold(keys, "bend"), min(4, most), height, width)
    bends = bends + _smooth(fold(keys, "fine bend"), min(12, most), height, width)
    return torch.tanh((0.5 + 4 * sharp) * torch.sin(2 * math.pi * across + 2 * bend * bends))


def _spots(keys: Tensor, height: int, width: int) -> Tensor:
    """(B, 1, H, W) in [-1, 1]: smooth noise, cut at a level, coarse or fine, with soft or sharp edges."""
    fine, level, sharp = uniform(fold(keys, "spots"), 3, 1, 1, 1).unbind(1)
    most = min(height, width) // 5  # finer spots would be noise
    coarse_spots = _smooth(fold(keys, "coarse spots"), min(10, most), height, width)
    fine_spots = _smooth(fold(keys, "fine spots"), min(40, most), height, width)
    return torch.tanh((1 + 6 * sharp) * (torch.where(fine < 0.5, coarse_spots, fine_spots) + level - 0.5))


def _smooth(keys: Tensor, cells: int, height: int, width: int) -> Tensor:
    """(B, 1, H, W): noise in so many cells across and down, at least two, smoothly joined."""
    noise = normal(keys, 1, max(2, cells), max(2, cells))
    return F.interpolate(noise, (height, width), mode="bicubic", align_corners=False)


def _standard(pattern: Tensor) -> Tensor:
    """Each image standardised to mean 0 and standard deviation 1."""
    pattern = pattern - pattern.mean(dim=(1, 2, 3), keepdim=True)
    return pattern / pattern.std(dim=(1, 2, 3), correction=0, keepdim=True).clamp(min=1e-6)


def _light(keys: Tensor, leaf: Tensor) -> Tensor:
    """(B, 1, H, W): factors that grow across the image, for every leaf in another direction."""
    height, width = leaf.shape[1:]
    turn = 2 * math.pi * uniform(fold(keys, "light"), 1, _LEAVES)
    strength = 0.8 * uniform(fold(keys, "slant"), 1, _LEAVES)
    y = torch.arange(height, device=keys.device)[:, None] / height - 0.5
    x = torch.arange(width, device=keys.device) / width - 0.5
    return 1 + _seen(strength * torch.cos(turn), leaf) * x + _seen(strength * torch.sin(turn), leaf) * y


def _seen(of_leaf: Tensor, leaf: Tensor) -> Tensor:
    """(B, ..., leaves): something of every leaf -> (B, ..., H, W): that of the leaf seen at each pixel."""
    index = leaf.flatten(1).view(len(leaf), *(1,) * (of_leaf.dim() - 2), -1)
    return of_leaf.gather(-1, index.expand(*of_leaf.shape[:-1], -1)).unflatten(-1, leaf.shape[1:])


def _grid(keys: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """(H, 1) and (1, W): how far down and across a pixel lies, in shorter sides."""
    down, across = (torch.arange(side, device=keys.device) / min(height, width) for side in (height, width))
    return down[:, None], across[None]


def _magnitude(low: float, high: float | Tensor, share: Tensor) -> Tensor:
    """A log-uniform value between low and high, from a uniform one in [0, 1)."""
    orders = torch.log(high / low) if isinstance(high, Tensor) else math.log(high / low)
    return low * torch.exp(orders * share)  # not a power, which torch rounds by its place in the batch
