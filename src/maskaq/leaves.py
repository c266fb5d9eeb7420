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
_LARGEST = 0.6  # half length, of the shorter side; all orders of magnitude alike, down to the smallest of an image,
_SMALLEST = (0.015, 0.15)  # which lies between these
_TEXTURES = 5  # in one image


def dead_leaves(keys: Tensor, channels: int, height: int, width: int) -> Tensor:
    """(B,) keys -> (B, C, H, W) in [0, 1]."""
    leaf = _topmost(keys, height, width)
    contrast = uniform(fold(keys, "contrast"), 1, _LEAVES)
    painted = _seen(_colours(keys, channels), leaf) + _seen(contrast, leaf) * _textures_seen(keys, leaf, channels)
    return (painted * _light(keys, leaf)).clamp(0, 1)


def _topmost(keys: Tensor, height: int, width: int) -> Tensor:
    """(B, H, W): the number of the last of many ellipses and rectangles that fell on a pixel; 0 where none did."""
    short = min(height, width)
    y = torch.arange(height, device=keys.device)[:, None] / short
    x = torch.arange(width, device=keys.device)[None] / short
    topmost = torch.zeros(len(keys), height, width, dtype=torch.long, device=keys.device)
    smallest, lobed = uniform(fold(keys, "scene"), 2)[..., None, None].unbind(1)
    smallest = _SMALLEST[0] * (_SMALLEST[1] / _SMALLEST[0]) ** smallest
    for leaf in range(1, _LEAVES):
        draws = uniform(fold(keys, leaf), 8)[..., None, None]  # (B, 8, 1, 1)
        size, across, down, turn, aspect, shape, lobes, phase = draws.unbind(1)
        length = _LARGEST * (smallest / _LARGEST) ** size
        right = x - (1.2 * across - 0.1) * width / short  # centres may lie a little outside
        below = y - (1.2 * down - 0.1) * height / short
        cos, sin = torch.cos(math.pi * turn), torch.sin(math.pi * turn)
        along = (right * cos + below * sin) / length
        aside = (below * cos - right * sin) / (length * (0.15 + 0.85 * aspect))
        wave = torch.sin((2 + (6 * lobes).floor()) * torch.atan2(aside, along) + 2 * math.pi * phase)
        ellipse = along.square() + aside.square() < (1 + 0.35 * lobed * wave).square()
        rectangle = torch.maximum(along.abs(), aside.abs()) < 0.9
        topmost = torch.where(torch.where(shape < 0.7, ellipse, rectangle), leaf, topmost)
    return topmost


def _colours(keys: Tensor, channels: int) -> Tensor:
    """(B, C, leaves): those of an image share a tint, some more than others, its strength and how dark they are."""
    strength, alike, dark = uniform(fold(keys, "palette"), 3, 1, 1).unbind(1)
    shared = uniform(fold(keys, "common"), channels, 1) - 0.5
    tint = alike * shared + (1 - 0.7 * alike) * (uniform(fold(keys, "tint"), channels, _LEAVES) - 0.5)
    grey = uniform(fold(keys, "grey"), 1, _LEAVES) ** torch.exp(1.2 * (dark - 0.5))
    return (grey + (0.2 + strength) * tint).clamp(0, 1)


def _textures_seen(keys: Tensor, leaf: Tensor, channels: int) -> Tensor:
    """(B, C, H, W): each leaf shows one of the image's textures, from another place on."""
    height, width = leaf.shape[1:]
    which = (uniform(fold(keys, "which"), _LEAVES) * _TEXTURES).long()
    moved = (uniform(fold(keys, "place"), _LEAVES) * height).long() * width
    pixel = torch.arange(height * width, device=keys.device).view(height, width)
    place = _seen(which, leaf) * (height * width) + (pixel + _seen(moved, leaf)) % (height * width)
    textures = torch.stack([_texture(keys, number, channels, height, width) for number in range(_TEXTURES)], dim=2)
    index = place.flatten(1)[:, None].expand(-1, channels, -1)
    return textures.flatten(2).gather(2, index).view(-1, channels, height, width)


def _texture(keys: Tensor, number: int, channels: int, height: int, width: int) -> Tensor:
    """(B, C, H, W) of mean 0: rough, striped, spotted, striped, spotted for number 0, 1, 2, 3, 4."""
    if number:
        keys = fold(fold(keys, "kind"), number)
    rough = _octaves(keys, channels, height, width)
    if number == 0:
        return 0.22 * rough
    fine, turn, bent, sharp, roughness = uniform(fold(keys, "draws"), 5, 1, 1, 1).unbind(1)

    def smooth(purpose: str, cells: int) -> Tensor:
        cells = min(cells, max(2, min(height, width) // 5))  # of 5 pixels or more: smooth
        noise = normal(fold(keys, purpose), 1, cells, cells)
        return F.interpolate(noise, (height, width), mode="bicubic", align_corners=False)

    if number % 2:  # waves, bent
        y = torch.arange(height, device=keys.device)[:, None] / min(height, width)
        x = torch.arange(width, device=keys.device) / min(height, width)
        waves = 3 * (min(60.0, min(height, width) / 3.5) / 3) ** fine  # at most 60, and none shorter than 3.5 pixels
        across = waves * (x * torch.cos(math.pi * turn) + y * torch.sin(math.pi * turn))
        bend = 2 * bent * (2 * smooth("bend", 4) + smooth("bend2", 12))
        pattern = torch.tanh((0.5 + 4 * sharp) * torch.sin(2 * math.pi * across + bend))
    else:  # smooth noise, cut at a level
        pattern = torch.tanh((1 + 6 * sharp) * (torch.where(fine < 0.5, smooth("a", 10), smooth("b", 40)) + bent - 0.5))
    tone = 0.5 + uniform(fold(keys, "tone"), channels, 1, 1)
    return 0.22 * _standard(tone * pattern + 0.6 * roughness * rough)


def _octaves(keys: Tensor, channels: int, height: int, width: int) -> Tensor:
    """(B, C, H, W): noise in octaves, about as much in each, more alike in the channels than not."""
    slope = 0.8 * uniform(fold(keys, "slope"), 1, 1, 1) - 0.4
    total = torch.zeros(len(keys), channels, height, width, device=keys.device)
    cells = 2
    while cells < 2 * max(height, width):
        rows, columns = min(cells, height), min(cells, width)
        noise = normal(fold(fold(keys, "octave"), cells), channels, rows, columns)
        total += cells**slope * F.interpolate(noise, (height, width), mode="bilinear", align_corners=False)
        cells *= 2
    shared = total.mean(dim=1, keepdim=True)
    return _standard(1.5 * shared + 0.5 * (total - shared))


def _standard(pattern: Tensor) -> Tensor:
    """Of mean 0 and standard deviation 1 in each image."""
    pattern = pattern - pattern.mean(dim=(1, 2, 3), keepdim=True)
    return pattern / pattern.std(dim=(1, 2, 3), keepdim=True).clamp(min=1e-6)


def _light(keys: Tensor, leaf: Tensor) -> Tensor:
    """(B, 1, H, W): factors, for every leaf is lighter towards one side."""
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
