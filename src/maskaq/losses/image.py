"""Priors on the pixels. Each: (B, C, H, W) -> (B,)."""

import math

from torch import Tensor


def total_variation(images: Tensor) -> Tensor:
    """Sum of squared differences between neighbours, down and across (Eq. 2)."""
    return images.diff(dim=-2).square().sum(dim=(1, 2, 3)) + images.diff(dim=-1).square().sum(dim=(1, 2, 3))


def total_variation_norm(images: Tensor) -> Tensor:
    """L2 norms of the differences down, across and along the diagonals, these over sqrt 2 (the release's form)."""
    down, across, falling, rising = _norms(images)
    return down + across + (falling + rising) / 2**0.5


def total_variation_target(images: Tensor, target: Tensor) -> Tensor:
    """|TV - t| of PSAQ-ViT (Li et al. 2022): TV, the sum of four L2 norms, should be t (B,).

    PSAQ-ViT takes its norms over a batch of 32 images of 224 x 224. So that an image does not feel its batch, it stands
    here for 32 like itself, and t is scaled to its size.
    """
    down, across, falling, rising = _norms(images)
    variation = math.sqrt(32) * (down + across + falling + rising)
    return (variation - target * math.sqrt(images[0].numel() / (3 * 224 * 224))).abs()


def _norms(images: Tensor) -> list[Tensor]:
    """L2 norms of the differences down, across and along both diagonals: (B,) each."""
    down = images.diff(dim=-2)
    across = images.diff(dim=-1)
    falling = images[..., 1:, 1:] - images[..., :-1, :-1]
    rising = images[..., 1:, :-1] - images[..., :-1, 1:]
    return [_norm(x) for x in (down, across, falling, rising)]


def _norm(differences: Tensor) -> Tensor:
    return (differences.square().sum(dim=(1, 2, 3)) + 1e-12).sqrt()  # the norm has no gradient at 0
