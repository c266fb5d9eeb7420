"""The adaptive mask (Eqs. 11-13): the most informative patches, thinned at random. Pure, and free of host syncs."""

import torch
from torch import Tensor

from maskaq import randomness


def top_patches(attention: Tensor, k: int | Tensor) -> Tensor:
    """(B, N) attention -> (B, N) mask of 0 and 1 with exactly k ones: the k largest (m, Eq. 11)."""
    return (_rank(attention) < k).to(attention.dtype)


def thin(mask: Tensor, keep: int | Tensor, keys: Tensor) -> Tensor:
    """Keep `keep` ones of each row, drawn at random without replacement (m', Eqs. 12-13)."""
    draws = randomness.uniform(keys, mask.shape[1])  # float32 whatever the mask's dtype: bfloat16 draws would tie
    return mask * (_rank(draws + mask) < keep).to(mask.dtype)  # masked patches draw from [1, 2), the others lose


def mask_size(patches: int, fraction: float, start: float, end: float) -> int:
    """k: annealed linearly from start to end (shares of the patches) as fraction goes from 0 to 1."""
    return max(1, round(patches * (start + (end - start) * fraction)))


def kept_size(k: int, drop: float, keep_at_least: int) -> int:
    """k_keep = max(k_min, floor(k (1 - p_drop))), never more than k (Eq. 13)."""
    return min(k, max(keep_at_least, int(k * (1 - drop) + 1e-9)))


def _rank(values: Tensor) -> Tensor:
    """Rank of each entry in its row, 0 for the largest; ties are broken by position."""
    order = values.argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(values.shape[1], device=values.device).expand_as(order)
    )
