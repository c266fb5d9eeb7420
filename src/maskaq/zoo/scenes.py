"""Scenes of shapes: a procedural data set for detection and segmentation, of any size, without files.

One to five shapes of six classes lie over each other on a cluttered ground. Shapes are turned, flattened, plain,
striped, spotted or rough; light falls from a side, and there is noise. Scene `index` of a `seed` is always the same.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq.randomness import fold, image_keys, uniform

CLASSES = ("disc", "square", "triangle", "star", "ring", "cross")
MOST = 5
"""Objects in a scene, at most."""

_RADIUS = (0.1, 0.27)  # of the shorter side
_SEEN = 0.4  # of an object: one that would be covered more is not drawn
_PIXELS = 0.002  # of the image: one that would show fewer is not drawn
_BARS = 4


@dataclass(frozen=True)
class Scene:
    """An image and what is to be found in it."""

    image: Tensor
    """(3, H, W) uint8."""
    masks: Tensor
    """(n, H, W) bool: the visible part of each object."""
    labels: Tensor
    """(n,) int64, numbers of `CLASSES`."""

    @property
    def boxes(self) -> Tensor:
        """(n, 4) float: left, top, right, bottom of the visible parts, right and bottom one beyond their last pixel."""
        return boxes_of_masks(self.masks)

    @property
    def semantic(self) -> Tensor:
        """(H, W) int64: 0 where nothing lies, else 1 + the class."""
        return ((1 + self.labels)[:, None, None] * self.masks).sum(dim=0)


def scene(seed: int, index: int, size: tuple[int, int]) -> Scene:
    """One scene of a height and a width."""
    image, masks, labels = draw(image_keys(seed, torch.tensor([index])), size)
    there = labels[0] >= 0
    return Scene((image[0] * 255).round().to(torch.uint8), masks[0, there], labels[0, there])


def draw(keys: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a batch of scenes, on the device of the keys, in fixed shapes.

    Returns:
        images (B, 3, H, W) in [0, 1], visible parts (B, 5, H, W) bool, labels (B, 5) int64, -1 where there is no object
    """
    keys = fold(keys, "scene")
    y, x = _pixels(keys, size)
    ground = uniform(fold(keys, "ground"), 1, 1, 1) * 0.6 + 0.2  # how bright, on the whole
    labels = (uniform(fold(keys, "class"), MOST) * len(CLASSES)).long()
    wanted = torch.arange(MOST, device=keys.device) < 1 + (uniform(fold(keys, "count"), 1) * MOST).floor()
    distance = _distances(keys, labels, y, x)
    masks, labels = _visible(distance <= 0, labels, wanted)
    painted = _background(keys, ground, y, x)
    objects = _objects(keys, ground, y, x)
    for number in reversed(range(MOST)):  # the first object is the foremost
        cover = (0.5 - distance[:, number, None]).clamp(0, 1) * (labels[:, number] >= 0)[:, None, None, None]
        painted = torch.lerp(painted, objects[:, number], cover)
    light, turn, noise = uniform(fold(keys, "light"), 3, 1, 1, 1).unbind(1)
    along = x * torch.cos(2 * math.pi * turn) + y * torch.sin(2 * math.pi * turn)
    grain = uniform(fold(keys, "noise"), *painted.shape[1:]) - 0.5
    image = painted * (1 + 0.6 * light * along / max(size)) + (0.05 + 0.15 * noise) * grain
    return image.clamp(0, 1), masks, labels


def boxes_of_masks(masks: Tensor) -> Tensor:
    """(..., H, W) masks -> (..., 4) the smallest boxes around them; zeros around an empty one."""
    sides = []
    for along in (masks.any(dim=-2), masks.any(dim=-1)):  # columns, rows
        place = torch.arange(along.shape[-1], device=masks.device)
        sides.append(torch.where(along, place, along.shape[-1]).amin(dim=-1))
        sides.append(torch.where(along, place + 1, 0).amax(dim=-1))
    left, right, top, bottom = sides
    boxes = torch.stack([left, top, right, bottom], dim=-1).float()
    return boxes * masks.any(dim=-1).any(dim=-1)[..., None]


def _visible(inside: Tensor, labels: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """What is seen of each object, from the foremost back; label -1 for those that would show too little."""
    free = torch.ones_like(inside[:, 0])
    masks, kept = [], []
    for number in range(MOST):
        seen = inside[:, number] & free
        pixels = seen.sum(dim=(1, 2))
        enough = pixels >= torch.clamp(_SEEN * inside[:, number].sum(dim=(1, 2)), min=_PIXELS * free[0].numel())
        kept.append(enough & wanted[:, number])
        masks.append(seen & kept[-1][:, None, None])
        free = free & ~masks[-1]
    return torch.stack(masks, dim=1), torch.where(torch.stack(kept, dim=1), labels, -1)


def _distances(keys: Tensor, labels: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """(B, 5, H, W): how many pixels a pixel lies outside of each object, negative inside; near its edge exact."""
    short = min(y.shape[-2], x.shape[-1])
    across, down, size, turn, flat = uniform(fold(keys, "place"), 5, MOST, 1, 1).unbind(1)
    radius = short * _RADIUS[0] * torch.exp(math.log(_RADIUS[1] / _RADIUS[0]) * size)
    flat = 1 - 0.3 * flat
    right = x - (0.8 * across - 0.4) * x.shape[-1]
    below = y - (0.8 * down - 0.4) * y.shape[-2]
    cos, sin = torch.cos(2 * math.pi * turn), torch.sin(2 * math.pi * turn)
    u = (right * cos + below * sin) / radius
    v = (below * cos - right * sin) / (radius * flat)
    a, b = u.abs(), v.abs()
    from_centre = (u.square() + v.square()).sqrt()
    shapes = (
        from_centre - 1,
        torch.maximum(a, b) - 0.85,
        torch.maximum(0.75**0.5 * b + 0.5 * u, -u) - 0.55,
        _star(from_centre, u, v),
        (from_centre - 0.78).abs() - 0.22,
        torch.maximum(torch.minimum(a, b) - 0.32, torch.maximum(a, b) - 0.95),
    )
    distance = torch.zeros_like(u)
    for number, shape in enumerate(shapes):
        distance = torch.where((labels == number)[..., None, None], shape, distance)
    return distance * radius * flat


def _star(from_centre: Tensor, u: Tensor, v: Tensor, points: int = 5, inner: float = 0.42) -> Tensor:
    """The distance from the edge of a star: all its edges are one, turned and mirrored."""
    half = math.pi / points
    angle = torch.atan2(v, u).abs()
    angle = (angle - 2 * half * (angle / (2 * half)).round()).abs()  # from the nearest point's direction
    along, aside = from_centre * torch.cos(angle), from_centre * torch.sin(angle)
    edge = (inner * math.cos(half) - 1, inner * math.sin(half))  # from the point to the notch
    return ((along - 1) * edge[1] - aside * edge[0]) / math.hypot(*edge)


def _objects(keys: Tensor, ground: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """(B, 5, 3, H, W): the paint of each object, brighter or darker than the ground."""
    draws = uniform(fold(keys, "paint"), 3, MOST, 1, 1).unbind(1)
    step, sign, kind = (value[..., None] for value in draws)
    step, ground = 0.15 + 0.4 * step, ground[:, None]
    up = torch.where(sign < 0.5, ground + step < 1, ground - step <= 0)
    tint = 0.35 * (uniform(fold(keys, "tint"), MOST, 3, 1, 1) - 0.5)
    pattern = _pattern(fold(keys, "objects"), MOST, y, x)[:, :, None]
    strength = 0.1 + 0.2 * uniform(fold(keys, "strength"), MOST, 1, 1, 1)
    return torch.where(up, ground + step, ground - step) + tint + torch.where(kind < 0.3, 0, strength) * pattern


def _background(keys: Tensor, ground: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """(B, 3, H, W): a textured ground of two tints, with bars across it."""
    tints = 0.3 * (uniform(fold(keys, "tints"), 2 + _BARS, 3, 1, 1) - 0.5)
    pattern = _pattern(fold(keys, "background"), 2, y, x)
    border = _smooth(fold(keys, "border"), 3, y.shape[-2], x.shape[-1])
    strength, shade, *_ = uniform(fold(keys, "shades"), 2, 1, 1, 1).unbind(1)
    second = (0.5 + 12 * border).clamp(0, 1)
    painted = torch.lerp(tints[:, 0] + pattern[:, :1], tints[:, 1] + pattern[:, 1:] + 0.3 * shade - 0.15, second)
    painted = ground + (0.03 + 0.12 * strength) * painted + 0.5 * torch.lerp(tints[:, 0], tints[:, 1], second)
    across, down, turn, length, width, grey = uniform(fold(keys, "bars"), 6, _BARS, 1, 1).unbind(1)
    short = min(y.shape[-2], x.shape[-1])
    right, below = x - (across - 0.5) * x.shape[-1], y - (down - 0.5) * y.shape[-2]
    cos, sin = torch.cos(math.pi * turn), torch.sin(math.pi * turn)
    beyond = (right * cos + below * sin).abs() - short * (0.1 + 0.4 * length)
    outside = torch.maximum(beyond, (below * cos - right * sin).abs() - short * (0.006 + 0.015 * width))
    cover = (0.5 - outside).clamp(0, 1)
    for bar in range(_BARS):
        colour = grey[:, None, bar] + tints[:, 2 + bar]
        painted = torch.lerp(painted, colour.expand_as(painted), cover[:, bar, None])
    return painted


def _pattern(keys: Tensor, count: int, y: Tensor, x: Tensor) -> Tensor:
    """(B, count, H, W) in about [-1, 1]: stripes, spots or something rough."""
    height, width = y.shape[-2], x.shape[-1]
    kind, fine, turn, sharp, phase = uniform(fold(keys, "pattern"), 5, count, 1, 1).unbind(1)
    waves = 2 * math.pi / (min(height, width) * (0.04 + 0.1 * fine))
    cos, sin = torch.cos(math.pi * turn), torch.sin(math.pi * turn)
    first = torch.sin(waves * (x * cos + y * sin) + 2 * math.pi * phase)
    second = torch.sin(waves * (y * cos - x * sin))
    sharp = 0.5 + 4 * sharp
    waved = torch.tanh(sharp * torch.where(kind < 0.4, first, 2 * first * second))
    rough = torch.zeros_like(waved[:, :1])
    for cells in (4, 8, 16, 32):
        rough = rough + _smooth(fold(keys, cells), cells, height, width)
    odd = 1 - 2 * (torch.arange(count, device=keys.device) % 2)[:, None, None]
    return torch.where(kind < 0.7, waved, odd * rough)


def _smooth(keys: Tensor, cells: int, height: int, width: int) -> Tensor:
    """(B, 1, H, W) in [-1, 1]: noise in so many cells across and down, joined."""
    noise = 2 * uniform(fold(keys, "smooth"), 1, cells, cells) - 1
    return F.interpolate(noise, (height, width), mode="bilinear", align_corners=False)


def _pixels(keys: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(1, 1, H, 1) and (1, 1, 1, W): how far down and across the middle of a pixel lies from the image's."""
    down, across = (torch.arange(side, device=keys.device) + 0.5 - side / 2 for side in size)
    return down[None, None, :, None], across[None, None, None]
