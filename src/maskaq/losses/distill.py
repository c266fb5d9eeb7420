"""Losses between teacher and student in calibration. Each gives (B,).

Head outputs are (B, H, N, D); weights (B, N) say how much each patch counts (w_l of Eq. 16).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_C2 = 0.03**2


def logit_kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(teacher || student) of logits (B, C), softened by T (Hinton et al. 2015)."""
    log_p = F.log_softmax(teacher / temperature, dim=-1)
    log_q = F.log_softmax(student / temperature, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1) * temperature**2


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of the softmax, (B, C) -> (B,)."""
    log_p = F.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def entropy_margin(teacher: Tensor, student: Tensor, low: float = 0.1, high: float = 0.8) -> Tensor:
    """AdaDFQ's margin: relu(low - h) + relu(h - high), of logits (B, C).

    h is the entropy of softmax(teacher - student), scaled to 0 at the least of the batch and to 1 at equal shares.
    """
    found = entropy(teacher - student)
    least = found.detach().amin()
    h = (found - least) / (math.log(teacher.shape[-1]) - least).clamp(min=1e-6)
    return F.relu(low - h) + F.relu(h - high)


def neighbour_contrast(teacher: Tensor, student: Tensor, temperature: float = 0.2) -> Tensor:
    """InfoNCE of patches (B, rows, columns, C): a patch of Q is that of P in its place, and none of those around it."""
    own, around, there = neighbours(teacher, F.normalize(student, dim=-1))
    scores = torch.where(there, around / temperature, -math.inf)
    scores = torch.cat([own[:, None] / temperature, scores], dim=1)
    return -scores.log_softmax(dim=1)[:, 0].mean(dim=(1, 2))


def neighbours(patches: Tensor, anchors: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines of each anchor with the patch in its place, with the eight around it, and which of these are there.

    (B, rows, columns, C) -> (B, rows, columns), (B, 8, rows, columns), (1, 8, rows, columns). Anchors are of length
    1; by default they are the patches.
    """
    unit = F.normalize(patches, dim=-1)
    anchors = unit if anchors is None else anchors
    rows, columns = unit.shape[1:3]
    padded = F.pad(unit, (0, 0, 1, 1, 1, 1))
    inside = F.pad(unit.new_ones(1, rows, columns), (1, 1, 1, 1))
    offsets = [(i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    around = torch.stack([(anchors * padded[:, i : i + rows, j : j + columns]).sum(dim=-1) for i, j in offsets], dim=1)
    there = torch.stack([inside[:, i : i + rows, j : j + columns] > 0 for i, j in offsets], dim=1)
    return (anchors * unit).sum(dim=-1), around, there


def head_structure(teacher: Tensor, student: Tensor, weights: Tensor) -> Tensor:
    """1 - the structural part of SSIM over patches, for each head and channel (Eq. 16, D as in the release).

    The weights enter the moments: informative patches count more in means, variances and covariance.
    """
    w = (weights / weights.sum(dim=1, keepdim=True))[:, None, :, None]  # (B, 1, N, 1)
    p = teacher - (w * teacher).sum(dim=2, keepdim=True)
    # Moments about the mean do not change with the mean, to first order: its gradient is 0, and need not be computed.
    q = student - (w * student).sum(dim=2, keepdim=True).detach()
    covariance = (w * p * q).sum(dim=2)  # (B, H, D)
    variances = (w * (p.square() + q.square())).sum(dim=2)
    return 1 - ((2 * covariance + _C2) / (variances + _C2)).mean(dim=(1, 2))


def head_cosine(teacher: Tensor, student: Tensor, weights: Tensor) -> Tensor:
    """Eq. 16 to the letter, with D = 1 - cosine of each patch's head output."""
    return _patch_mean(1 - F.cosine_similarity(teacher, student, dim=-1), weights)


def head_mse(teacher: Tensor, student: Tensor, weights: Tensor) -> Tensor:
    """Eq. 16 to the letter, with D = squared error of each patch's head output over the layer's mean square."""
    power = teacher.square().mean(dim=(1, 2, 3)).clamp(min=1e-12)[:, None, None]
    return _patch_mean((teacher - student).square().mean(dim=-1) / power, weights)


def relative_error(teacher: Tensor, student: Tensor) -> Tensor:
    """Squared error over the teacher's variance, of vectors (B, ..., C): 0 is equal, 1 as bad as a constant.

    Every vector, that is every token, is measured by its own variance, as the next LayerNorm does. Otherwise a few
    tokens a hundred times as long as the others, which many vision transformers have, would be all that counts.
    """
    variance = (teacher - teacher.mean(dim=-1, keepdim=True)).square().mean(dim=-1).reshape(len(teacher), -1)
    # A token that is nearly constant says nothing: no division by its variance.
    floor = (0.03 * variance.sqrt().mean(dim=1, keepdim=True)).square().clamp(min=1e-12)
    error = (teacher - student).square().mean(dim=-1).reshape_as(variance)
    return (error / torch.maximum(variance, floor)).mean(dim=1)


def weighted_error(teacher: Tensor, student: Tensor, weights: Tensor) -> Tensor:
    """(B,): squared error times the weight of each value, mean over all values of an image."""
    return (weights * (teacher - student).square()).flatten(1).mean(dim=1)


def mean_relative_error(
    teacher: Sequence[Tensor], student: Sequence[Tensor], error: Callable[[Tensor, Tensor], Tensor] = relative_error
) -> Tensor:
    """(B,): over the layers, of one tensor (B, ...) for each. `error` may be a compiled `relative_error`."""
    return torch.stack([error(t, s) for t, s in zip(teacher, student, strict=True)]).mean(dim=0)


def _patch_mean(distance: Tensor, weights: Tensor) -> Tensor:
    """(B, H, N) -> (B,): weighted over patches, plain over heads."""
    return ((distance * weights[:, None]).sum(dim=-1) / weights.sum(dim=1)[:, None]).mean(dim=1)
