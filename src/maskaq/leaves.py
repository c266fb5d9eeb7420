"""Dead leaves: images of shapes that lie over each other, the simplest model with the statistics of natural ones.

Edges, occlusion, objects of every size, spectra that fall like 1/f, and no picture of anything (Matheron 1968; Lee,
Mumford, Huang 2001). An image that is optimised from leaves keeps them; one from noise keeps the noise.

These leaves are a little more than discs of one colour: they come in groups, as the parts of things do, are lobed and
bent, striped, spotted or rough, lit from a side, cast shadows, and those that lie low may be out of focus.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq.randomness import fold, normal, uniform

_GROUPS, _PARTS = 30, 5
_LARGEST = 0.6  # half length of a group, of the shorter side; all orders of magnitude alike, down to the image's own
_SMALLEST = (0.015, 0.15)  # which lies between these
_KINDS = 5  # of texture in one image


def dead_leaves(keys: Tensor, channels: int, height: int, width: int) -> Tensor:
    """(B,) keys -> (B, C, H, W) in [0, 1]."""
    leaf = _topmost(keys, height, width)
    images = (_painted(keys, leaf, channels) * _light(keys, leaf)).clamp(0, 1)
    return _focused(keys, leaf, images)


def _topmost(keys: Tensor, height: int, width: int) -> Tensor:
    """(B, H, W): the number of the last of many ellipses and rectangles that fell on a pixel; 0 where none did."""
    short = min(height, width)
    y = torch.arange(height, device=keys.device)[:, None] / short
    x = torch.arange(width, device=keys.device)[None] / short
    topmost = torch.zeros(len(keys), height, width, dtype=torch.long, device=keys.device)
    smallest, lobed = uniform(fold(keys, "scene"), 2)[..., None, None].unbind(1)
    smallest = _SMALLEST[0] * (_SMALLEST[1] / _SMALLEST[0]) ** smallest
    for leaf in range(1, _GROUPS * _PARTS):
        group = uniform(fold(fold(keys, "group"), leaf // _PARTS), 3)[..., None, None]  # (B, 3, 1, 1)
        whole, middle, level = group.unbind(1)
        draws = uniform(fold(keys, leaf), 9)[..., None, None]
        size, across, down, turn, thickness, bend, lobes, phase, shape = draws.unbind(1)
        whole = _LARGEST * (smallest / _LARGEST) ** whole
        length = whole * (0.25 + 0.75 * size)
        # A group's middle may lie a little outside, and its parts lie around it.
        right = x - (1.2 * middle - 0.1) * width / short - 1.6 * whole * (across - 0.5)
        below = y - (1.2 * level - 0.1) * height / short - 1.6 * whole * (down - 0.5)
        cos, sin = torch.cos(math.pi * turn), torch.sin(math.pi * turn)
        along = (right * cos + below * sin) / length
        aside = (below * cos - right * sin) / length + 0.8 * (bend - 0.5) * along.square()
        aside = aside / torch.where(thickness < 0.3, 0.04 + 0.4 * thickness, 0.15 + 0.85 * thickness)  # some are stalks
        wave = torch.sin((2 + (6 * lobes).floor()) * torch.atan2(aside, along) + 2 * math.pi * phase)
        ellipse = along.square() + aside.square() < (1 + 0.35 * lobed * wave).square()
        rectangle = torch.maximum(along.abs(), aside.abs()) < 0.9
        topmost = torch.where(torch.where(shape < 0.7, ellipse, rectangle), leaf, topmost)
    return topmost


def _painted(keys: Tensor, leaf: Tensor, channels: int) -> Tensor:
    """(B, C, H, W): every leaf in its colour and its texture."""
    height, width = leaf.shape[1:]
    contrast = uniform(fold(keys, "contrast"), 1, _GROUPS * _PARTS)
    kind = (uniform(fold(keys, "kind"), _GROUPS) * _KINDS).long().repeat_interleave(_PARTS, -1)  # of a group's leaves
    # Each leaf shows its texture from another place on, mirrored at the borders.
    place = (2 * uniform(fold(keys, "place"), 2, _GROUPS * _PARTS) * min(height, width)).long()
    down, across = _seen(place, leaf).unbind(1)
    row = _mirrored(down + torch.arange(height, device=keys.device)[:, None], height)
    column = _mirrored(across + torch.arange(width, device=keys.device), width)
    pixel = ((_seen(kind, leaf) * height + row) * width + column).flatten(1)[:, None]
    textures = torch.stack([_texture(keys, kind, channels, height, width) for kind in range(_KINDS)], dim=2)
    texture = textures.flatten(2).gather(2, pixel.expand(-1, channels, -1)).view(-1, channels, height, width)
    return _seen(_colours(keys, channels), leaf) + _seen(contrast, leaf) * texture


def _colours(keys: Tensor, channels: int) -> Tensor:
    """(B, C, leaves): those of a group are much alike, those of an image a little, some images more than others."""

    def of_leaves(purpose: str, *shape: int) -> Tensor:
        group = uniform(fold(fold(keys, purpose), "group"), *shape, _GROUPS).repeat_interleave(_PARTS, -1)
        return group + 0.35 * (uniform(fold(keys, purpose), *shape, _GROUPS * _PARTS) - 0.5)

    strength, alike, dark = uniform(fold(keys, "palette"), 3, 1, 1).unbind(1)
    shared = uniform(fold(keys, "shared tint"), channels, 1) - 0.5
    tint = alike * shared + (1 - 0.7 * alike) * (of_leaves("tint", channels) - 0.5)
    grey = of_leaves("grey", 1).clamp(0, 1) ** torch.exp(1.2 * (dark - 0.5))
    return (grey + (0.2 + strength) * tint).clamp(0, 1)


def _texture(keys: Tensor, kind: int, channels: int, height: int, width: int) -> Tensor:
    """(B, C, H, W) of mean 0: rough, striped, spotted, striped, spotted, ... for kind 0, 1, ..."""
    keys = fold(fold(keys, "texture"), kind)
    rough = _octaves(keys, channels, height, width)
    if kind == 0:
        return _scaled(rough)
    coarse, turn, bent, sharp, roughness, cover = uniform(fold(keys, "draws"), 6, 1, 1, 1).unbind(1)

    def smooth(cells: int) -> Tensor:
        noise = normal(fold(fold(keys, "smooth"), cells), 1, min(cells, height), min(cells, width))
        return F.interpolate(noise, (height, width), mode="bicubic", align_corners=False)

    if kind % 2:  # waves, bent
        y = torch.arange(height, device=keys.device)[:, None] / min(height, width)
        x = torch.arange(width, device=keys.device) / min(height, width)
        most = max(4.0, min(height, width) / 4)  # waves of 4 pixels
        waves = 3 * (most / 3) ** coarse
        phase = waves * (x * torch.cos(math.pi * turn) + y * torch.sin(math.pi * turn))
        pattern = torch.tanh(
            (0.5 + 4 * sharp) * torch.sin(2 * math.pi * phase + 2 * bent * (2 * smooth(4) + smooth(12)))
        )
    else:  # smooth noise, cut at a level
        pattern = torch.tanh((1 + 6 * sharp) * (torch.where(coarse < 0.5, smooth(10), smooth(40)) + cover - 0.5))
    tone = 0.5 + uniform(fold(keys, "tone"), channels, 1, 1)
    return _scaled(tone * pattern + 0.6 * roughness * rough)


def _octaves(keys: Tensor, channels: int, height: int, width: int) -> Tensor:
    """(B, C, H, W) of std 1: noise in octaves, about as much in each, more alike in the channels than not."""
    slope = 0.8 * uniform(fold(keys, "slope"), 1, 1, 1) - 0.4
    total = torch.zeros(len(keys), channels, height, width, device=keys.device)
    cells = 2
    while cells < 2 * max(height, width):
        rows, columns = min(cells, height), min(cells, width)
        noise = normal(fold(fold(keys, "octave"), cells), channels, rows, columns)
        total += cells**slope * F.interpolate(noise, (height, width), mode="bilinear", align_corners=False)
        cells *= 2
    shared = total.mean(dim=1, keepdim=True)
    return _scaled(1.5 * shared + 0.5 * (total - shared), 1.0)


def _scaled(pattern: Tensor, std: float = 0.22) -> Tensor:
    """Of mean 0 and this std in each image."""
    pattern = pattern - pattern.mean(dim=(1, 2, 3), keepdim=True)
    return std * pattern / pattern.std(dim=(1, 2, 3), keepdim=True).clamp(min=1e-6)


def _light(keys: Tensor, leaf: Tensor) -> Tensor:
    """(B, 1, H, W) factors: a leaf is lighter on one side, and darker where a higher one keeps the light away."""
    height, width = leaf.shape[1:]
    y, x = torch.arange(height, device=keys.device)[:, None], torch.arange(width, device=keys.device)
    slant, turn = uniform(fold(keys, "slant"), 2, _GROUPS * _PARTS).unbind(1)
    towards = _seen(torch.stack([torch.cos(2 * math.pi * turn), torch.sin(2 * math.pi * turn)], dim=1), leaf)
    side = 1 + 0.8 * _seen(slant, leaf) * (towards[:, 0] * (x / width - 0.5) + towards[:, 1] * (y / height - 0.5))
    aside, up, depth = uniform(fold(keys, "shadow"), 3, 1, 1).unbind(1)
    rows = (y + (0.08 * height * up).long()).clamp(0, height - 1)
    columns = (x + (0.1 * width * (aside - 0.5)).long()).clamp(0, width - 1)
    above = leaf.flatten(1).gather(1, (rows * width + columns).flatten(1)).view(leaf.shape)
    return (side * (1 - 0.7 * depth * _blurred((above > leaf).float())))[:, None]


def _focused(keys: Tensor, leaf: Tensor, images: Tensor) -> Tensor:
    """The leaves below some height blurred, in some images."""
    height, passes = uniform(fold(keys, "focus"), 2, 1, 1, 1).unbind(1)
    far = leaf[:, None] <= height * _GROUPS * _PARTS
    soft = images
    for number in (1, 2, 3):
        soft = torch.where(6 * passes < number, _blurred(soft), soft)
    return torch.where(far, soft, images)


def _blurred(images: Tensor) -> Tensor:
    size = min(images.shape[-2:]) // 40 * 2 + 3
    return F.avg_pool2d(images, size, stride=1, padding=size // 2, count_include_pad=False)


def _seen(of_leaf: Tensor, leaf: Tensor) -> Tensor:
    """(B, ..., leaves) values of leaves -> (B, ..., H, W) of the pixels that show them."""
    index = leaf.flatten(1).view(len(leaf), *(1,) * (of_leaf.dim() - 2), -1)
    return of_leaf.gather(-1, index.expand(*of_leaf.shape[:-1], -1)).unflatten(-1, leaf.shape[1:])


def _mirrored(position: Tensor, side: int) -> Tensor:
    """Any whole number -> 0 ... side - 1, there and back again."""
    position = position % (2 * side)
    return torch.minimum(position, 2 * side - 1 - position)
