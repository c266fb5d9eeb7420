"""Dead leaves: images of shapes that lie over each other, the simplest model with the statistics of natural ones.

Edges, occlusion, objects of every size, spectra that fall like 1/f, and no picture of anything (Matheron 1968; Lee,
Mumford, Huang 2001). An image that is optimised from leaves keeps them; one from noise keeps the noise.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq import randomness

_LEAVES = 150
_SIZES = (0.02, 0.5)  # smallest and largest half length, of the shorter side; all orders of magnitude alike


def dead_leaves(keys: Tensor, channels: int, height: int, width: int) -> Tensor:
    """(B,) keys -> (B, C, H, W) in [0, 1]."""
    owner = _topmost(keys, height, width).flatten(1)  # (B, H*W) the leaf that is seen at each pixel

    def seen(of_leaf: Tensor) -> Tensor:  # (B, ..., leaves) -> (B, ..., H*W)
        index = owner.view(len(owner), *(1,) * (of_leaf.dim() - 2), -1)
        return of_leaf.gather(-1, index.expand(*of_leaf.shape[:-1], -1))

    grey = randomness.uniform(randomness.fold(keys, "grey"), 1, _LEAVES)
    tint = randomness.uniform(randomness.fold(keys, "tint"), channels, _LEAVES) - 0.5
    colour = (grey + 0.6 * tint).clamp(0, 1)  # (B, C, leaves)
    contrast = randomness.uniform(randomness.fold(keys, "contrast"), _LEAVES)
    # Each leaf shows the texture from another place on, with its own contrast.
    moved = (randomness.uniform(randomness.fold(keys, "place"), _LEAVES) * height).long() * width
    pixel = (torch.arange(height * width, device=keys.device) + seen(moved)) % (height * width)
    texture = _texture(keys, channels, height, width).flatten(2)
    texture = texture.gather(2, pixel[:, None].expand_as(texture))
    images = seen(colour) + seen(contrast)[:, None] * texture
    return images.clamp(0, 1).view(len(keys), channels, height, width)


def _topmost(keys: Tensor, height: int, width: int) -> Tensor:
    """(B, H, W): the number of the last of many ellipses and rectangles that fell on a pixel; 0 where none did."""
    short = min(height, width)
    y = torch.arange(height, device=keys.device)[:, None] / short
    x = torch.arange(width, device=keys.device)[None] / short
    owner = torch.zeros(len(keys), height, width, dtype=torch.long, device=keys.device)
    for leaf in range(1, _LEAVES):
        draws = randomness.uniform(randomness.fold(keys, leaf), 6)[..., None, None]  # (B, 6, 1, 1)
        size, across, down, turn, aspect, shape = draws.unbind(1)
        length = _SIZES[1] * (_SIZES[0] / _SIZES[1]) ** size
        right = x - (1.2 * across - 0.1) * width / short  # centres may lie a little outside
        below = y - (1.2 * down - 0.1) * height / short
        cos, sin = torch.cos(math.pi * turn), torch.sin(math.pi * turn)
        along = (right * cos + below * sin) / length
        aside = (below * cos - right * sin) / (length * (0.4 + 0.6 * aspect))
        ellipse = along.square() + aside.square() < 1
        rectangle = torch.maximum(along.abs(), aside.abs()) < 0.9
        owner = torch.where(torch.where(shape < 0.6, ellipse, rectangle), leaf, owner)
    return owner


def _texture(keys: Tensor, channels: int, height: int, width: int) -> Tensor:
    """(B, C, H, W) of mean 0: noise in octaves, about as much in each, more alike in the channels than not."""
    slope = 0.8 * randomness.uniform(randomness.fold(keys, "slope"), 1, 1, 1) - 0.4
    total = torch.zeros(len(keys), channels, height, width, device=keys.device)
    cells = 2
    while cells < 2 * max(height, width):
        rows, columns = min(cells, height), min(cells, width)
        noise = randomness.normal(randomness.fold(randomness.fold(keys, "octave"), cells), channels, rows, columns)
        total += cells**slope * F.interpolate(noise, (height, width), mode="bilinear", align_corners=False)
        cells *= 2
    shared = total.mean(dim=1, keepdim=True)
    total = 1.5 * shared + 0.5 * (total - shared)
    total = total - total.mean(dim=(1, 2, 3), keepdim=True)
    return 0.22 * total / total.std(dim=(1, 2, 3), keepdim=True).clamp(min=1e-6)
