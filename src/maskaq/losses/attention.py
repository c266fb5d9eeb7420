"""Losses on attention maps, (B, W, H, Q, K): images, windows, heads, queries, keys; patches only. Each gives (B,)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maskaq.losses.distill import neighbours

_C1, _C2 = 0.01**2, 0.03**2  # SSIM's constants for maps in [0, 1]


def head_ssim(maps: Tensor) -> Tensor:
    """SSIM between every ordered pair of heads, itself included: (B, W, H, Q, K) -> (B, W, Q, H, H).

    Global (one window over all keys), after each query's map was brought to [0, 1]: heads may differ in scale.
    """
    maps = maps.transpose(2, 3).contiguous()  # (B, W, Q, H, K)
    low, high = _Ends.apply(maps)
    span, mean = high - low + 1e-8, maps.mean(dim=-1, keepdim=True)  # (B, W, Q, H, 1)
    # Scaling to [0, 1] reaches the moments as factors: the maps themselves are only centred.
    covariance = _gram(maps - mean) / maps.shape[-1] / (span * span.mT)  # (B, W, Q, H, H)
    mean = (mean - low) / span
    variance = covariance.diagonal(dim1=-2, dim2=-1)[..., None]
    luminance = (2 * mean * mean.mT + _C1) / (mean.square() + mean.square().mT + _C1)
    structure = (2 * covariance + _C2) / (variance + variance.mT + _C2)
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


BINS = 64
"""Of a histogram of cosine similarities, from -1 to 1: Eq. 6 leaves their number open."""


def similarity_histogram(maps: Tensor) -> Tensor:
    """-H(p_l) of the paper's first L_fb (Eqs. 5-7): minus the Shannon entropy of a histogram of the similarities.

    A similarity is shared out between the centres of its two nearest bins, so that the histogram has a gradient. Pairs
    and windows as in `similarity_entropy`.
    """
    rows = F.normalize(maps.mean(dim=2), dim=-1)  # (B, W, Q, K)
    similarity = rows @ rows.transpose(-2, -1)
    patches = similarity.shape[-1]
    off_diagonal = 1 - torch.eye(patches, device=maps.device, dtype=maps.dtype).expand_as(similarity).flatten(1)
    place = ((similarity.flatten(1) + 1) / 2 * (BINS - 1)).clamp(0, BINS - 1)
    low = place.detach().floor().clamp(max=BINS - 2)
    share = place - low
    counts = place.new_zeros(len(place), BINS)
    counts = counts.scatter_add(1, low.long(), off_diagonal * (1 - share))
    counts = counts.scatter_add(1, low.long() + 1, off_diagonal * share)
    p = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)  # a window of one patch has no pair
    return (p * torch.log(p.clamp(min=1e-12))).sum(dim=1)


def masked_difference(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """||m' * (A^p - A^q)||_1 / ||m'||_0 of one layer (Eq. 14), on (B, N) attention to each patch."""
    return (mask * (teacher - student)).abs().sum(dim=1) / mask.sum(dim=1)


def masked_map_difference(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """The same of whole maps (B, W, H, Q, K), mean over heads: the keys in the mask (B, W, K), for every query."""
    difference = (teacher.mean(dim=2) - student.mean(dim=2)).abs()  # (B, W, Q, K)
    return (difference * mask[:, :, None]).sum(dim=(1, 2, 3)) / mask.sum(dim=(1, 2))


def patch_entropy(outputs: Tensor) -> Tensor:
    """-H_l of PSAQ-ViT (Li et al. 2022): minus the entropy of patch similarities, of head outputs (B, W, H, Q, D).

    A patch is its head-mean output. Cosine similarities of all pairs of a window, each patch with itself included; all
    windows give one distribution. Its density is taken at 10 points from the image's least to its largest similarity.
    """
    patches = F.normalize(outputs.mean(dim=2), dim=-1)  # (B, W, Q, D)
    similarity = (patches @ patches.mT).flatten(1)  # (B, pairs)
    low, high = (end.detach() for end in similarity.aminmax(dim=1, keepdim=True))
    points = low + (high - low) * torch.linspace(0, 1, 10, device=outputs.device, dtype=outputs.dtype)
    return -density_entropy(similarity, points)


def density_entropy(values: Tensor, points: Tensor, bandwidth: float = 0.01) -> Tensor:
    """Differential entropy of (B, n) values: Gaussian kernel density p at (B, m) points, trapezoids under -p log p."""
    distance = (points[:, :, None] - values[:, None]) / bandwidth
    density = torch.exp(-0.5 * distance.square()).mean(dim=2) / (bandwidth * math.sqrt(2 * math.pi)) + 1e-4
    return torch.trapezoid(-density * density.log(), points)


def patch_contrast(patches: Tensor, temperature: float = 0.2, positives: int = 4) -> Tensor:
    """L_C of one layer (CLAMP-ViT), of patches (B, rows, columns, C): InfoNCE in each patch's 3 x 3 neighbourhood.

    The most alike neighbours, at most four by cosine, are positives, the others negatives. Ours: the temperature.
    """
    _, around, there = neighbours(patches)
    scores = torch.where(there, around / temperature, -math.inf)  # (B, 8, rows, columns)
    count = min(positives, scores.shape[1])
    best = scores.detach().topk(count, dim=1).indices
    alone = ~there.any(dim=1)  # a grid of one patch has no neighbours
    chosen = scores.gather(1, best).logsumexp(dim=1) - scores.logsumexp(dim=1)
    return -torch.where(alone, 0.0, chosen).mean(dim=(1, 2))


def prior_difference(received: Tensor, prior: Tensor) -> Tensor:
    """sum_h MSE(A^c_h, G_h) of one layer (SARDFQ's L_APA), of (B, W, H, Q): mean over patches, sum over heads.

    The prior is scaled to the attention that the patches of each window receive in all, which no image can change.
    """
    prior = prior * (received.detach().sum(dim=3, keepdim=True) / prior.sum(dim=3, keepdim=True))
    return (received - prior).square().mean(dim=(1, 3)).sum(dim=1)


def _gram(x: Tensor) -> Tensor:
    """x @ x.mT; its gradient (G + G^T) x as one product with the small G + G^T, where autograd would take two of x."""
    half = x @ x.detach().mT
    return half + half.mT - half.detach()


class _Ends(torch.autograd.Function):
    """Smallest and largest over the last axis, kept as an axis of 1. Gradients are those of amin and amax: equal shares
    for all that tie. By hand because signs are several times faster than comparisons and boolean masks on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        ctx.save_for_backward(x, low, high)
        return low, high

    @staticmethod
    def backward(ctx: Any, to_low: Tensor, to_high: Tensor) -> Tensor:
        x, low, high = ctx.saved_tensors
        lowest, highest = (low - x).sign_().add_(1), (x - high).sign_().add_(1)  # 1 at an end, else 0
        to_low = to_low / lowest.sum(dim=-1, keepdim=True)
        to_high = to_high / highest.sum(dim=-1, keepdim=True)
        return lowest.mul_(to_low).addcmul_(highest, to_high)
