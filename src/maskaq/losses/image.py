"""Priors on the pixels. Each: (B, C, H, W) -> (B,)."""

from torch import Tensor


def total_variation(images: Tensor) -> Tensor:
    """Sum of squared differences between neighbours, down and across (Eq. 2)."""
    return images.diff(dim=-2).square().sum(dim=(1, 2, 3)) + images.diff(dim=-1).square().sum(dim=(1, 2, 3))


def total_variation_norm(images: Tensor) -> Tensor:
    """L2 norms of the differences down, across and along the diagonals, these over sqrt 2 (the release's form)."""
    down = images.diff(dim=-2)
    across = images.diff(dim=-1)
    falling = images[..., 1:, 1:] - images[..., :-1, :-1]
    rising = images[..., 1:, :-1] - images[..., :-1, 1:]
    return _norm(down) + _norm(across) + (_norm(falling) + _norm(rising)) / 2**0.5


def _norm(differences: Tensor) -> Tensor:
    return (differences.square().sum(dim=(1, 2, 3)) + 1e-12).sqrt()  # the norm has no gradient at 0
