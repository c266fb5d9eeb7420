"""What images are drawn towards at random in SARDFQ (Zhong et al. 2025).

Every draw is a function of an image's key: the same at every step, whatever the batch. "Ours" is what we could not find
out about the paper and chose ourselves.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from maskaq.randomness import fold, normal, uniform

COMPONENTS = 5  # K_APA
CELLS = 4  # K_MSR: the quarters of an image


def mixtures(keys: Tensor, heads: int, positions: Tensor) -> Tensor:
    """G, up to its scale: a Gaussian mixture over the image for each head, at (W, Q, 2) positions -> (B, W, H, Q).

    1 to 5 components of equal weight with centres anywhere on the image. Ours: covariances of any direction with
    standard deviations from 0.05 to 0.25 of the side; a trace everywhere, so that no window is without attention.
    """
    shape = (heads, COMPONENTS)
    centres = uniform(fold(keys, "centre"), *shape, 2)[..., None]  # (B, H, K, 2, 1)
    spread = 0.05 + 0.2 * uniform(fold(keys, "spread"), *shape, 2)[..., None]
    angle = math.pi * uniform(fold(keys, "angle"), *shape)[..., None]  # (B, H, K, 1)
    count = (uniform(fold(keys, "components"), heads) * COMPONENTS).floor() + 1  # (B, H)
    down, across = (positions.flatten(0, 1).T - centres).unbind(dim=3)  # (B, H, K, W*Q)
    along = angle.cos() * down + angle.sin() * across
    aside = angle.cos() * across - angle.sin() * down
    distance = (along / spread[..., 0, :]).square() + (aside / spread[..., 1, :]).square()
    density = torch.exp(-0.5 * distance) / spread.prod(dim=3)
    present = torch.arange(COMPONENTS, device=keys.device) < count[..., None]  # (B, H, K)
    mixture = (density * present[..., None]).sum(dim=2) + 1e-6  # (B, H, W*Q)
    return mixture.unflatten(2, positions.shape[:2]).transpose(1, 2)


def soft_labels(keys: Tensor, labels: Tensor, present: Tensor, classes: int) -> Tensor:
    """softmax(Z), (B, C): Z ~ U(5, 10) at those of the classes (B, K) that are present. Ours: N(0, 1) elsewhere."""
    strength = 5 + 5 * uniform(fold(keys, "strength"), labels.shape[1])
    strength = torch.where(present, strength, -math.inf)
    z = normal(fold(keys, "other classes"), classes)
    return z.scatter_reduce(1, labels, strength, "amax").softmax(dim=1)  # of a class drawn twice, the stronger


@dataclass(frozen=True)
class Regions:
    """The parts of each image that are images of their own, of which the first `count` are there."""

    cells: Tensor
    """(B, 4) int64: quarters of the image, numbered in raster order; none twice."""
    labels: Tensor
    """(B, 4) int64: the class of each; the first has the image's."""
    count: Tensor
    """(B,) int64, from 1 to 4."""

    @property
    def present(self) -> Tensor:
        return torch.arange(CELLS, device=self.count.device) < self.count[:, None]


def regions(keys: Tensor, labels: Tensor, classes: int) -> Regions:
    """m ~ U{1..4} regions that do not overlap, each with a class of its own. Ours: they are quarters of the image."""
    cells = uniform(fold(keys, "cells"), CELLS).argsort(dim=1, stable=True)
    others = (uniform(fold(keys, "region classes"), CELLS - 1) * classes).long()
    count = (uniform(fold(keys, "regions")) * CELLS).long() + 1
    return Regions(cells, torch.cat([labels[:, None], others], dim=1), count)
