"""Losses on attention maps, (B, W, H, Q, K): images, windows, heads, queries, keys; patches only. Each gives (B,)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_C1, _C2 = 0.01**2, 0.03**2  # SSIM's constants for maps in [0, 1]


def head_ssim(maps: Tensor) -> Tensor:
    """SSIM between every ordered pair of heads, itself included: (B, W, H, Q, K) -> (B, W, Q, H, H).

    Global (one window over all keys), after each query's map was brought to [0, 1]: heads may differ in scale.
    """
    low, high = maps.amin(dim=-1, keepdim=True), maps.amax(dim=-1, keepdim=True)
    a = ((maps - low) / (high - low + 1e-8)).transpose(2, 3)  # (B, W, Q, H, K)
    mean = a.mean(dim=-1)
    centred = a - mean[..., None]
    covariance = centred @ centred.transpose(-2, -1) / a.shape[-1]  # (B, W, Q, H, H)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    luminance = (2 * _outer(mean) + _C1) / (_pair_sum(mean.square()) + _C1)
    structure = (2 * covariance + _C2) / (_pair_sum(variance) + _C2)
    return luminance * structure


def head_similarity(maps: Tensor) -> Tensor:
    """L_IH of one layer (Eq. 3): 1 - mean SSIM over head pairs and queries."""
    return 1 - head_ssim(maps).mean(dim=(1, 2, 3, 4))


def head_similarity_squared(maps: Tensor) -> Tensor:
    """The release's L_IH: 1 - mean SSIM^2, which also rewards heads that mirror each other."""
    return 1 - head_ssim(maps).square().mean(dim=(1, 2, 3, 4))


def similarity_entropy(maps: Tensor) -> Tensor:
    """-H_l of L_fb (Eqs. 5, 8-10): minus the Gaussian entropy of the off-diagonal cosine similarities of patches.

    A patch is its row of the head-mean map. Similarity is defined inside a window; all windows give one distribution.
    """
    rows = F.normalize(maps.mean(dim=2), dim=-1)  # (B, W, Q, K)
    similarity = rows @ rows.transpose(-2, -1)  # (B, W, Q, Q)
    patches = similarity.shape[-1]
    off_diagonal = 1 - torch.eye(patches, device=maps.device, dtype=maps.dtype)
    pairs = max(1, similarity.shape[1] * patches * (patches - 1))  # a window of one patch has none
    mean = (similarity * off_diagonal).sum(dim=(1, 2, 3)) / pairs
    spread = (similarity - mean[:, None, None, None]) * off_diagonal
    variance = spread.square().sum(dim=(1, 2, 3)) / pairs
    return -0.5 * torch.log(2 * math.pi * math.e * (variance + 1e-12))  # 1e-12: equal patches have no log


def masked_difference(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """||m' * (A^p - A^q)||_1 / ||m'||_0 of one layer (Eq. 14), on (B, N) attention to each patch."""
    return (mask * (teacher - student)).abs().sum(dim=1) / mask.sum(dim=1)


def _outer(x: Tensor) -> Tensor:
    return x[..., :, None] * x[..., None, :]


def _pair_sum(x: Tensor) -> Tensor:
    return x[..., :, None] + x[..., None, :]
