"""Methods that choose a quantizer's range from values that it will see: (C, M) values -> (C,) low, (C,) high.

Optional (C, M) weights say how much the error of each value counts; by default all count the same.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from maskaq.quant.grid import LEVEL_BITS, code_range, fake_quantize, log_fake_quantize, log_levels

_SMALLEST_STEP = 1e-12  # for a tensor of zeros: below any relevant value, and far from underflow


def affine(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and integer zero point of the unsigned grid over [low, high]; zero is always a value of the grid."""
    top = code_range(bits, signed=False)[1]
    low = low.clamp(max=0.0)
    high = high.clamp(min=0.0)
    scale = ((high - low) / top).clamp(min=_SMALLEST_STEP)
    return scale, torch.round(-low / scale).clamp(0, top)


def symmetric(bound: Tensor, bits: int, narrow: bool = False) -> Tensor:
    """Scale of the signed grid that covers [-bound, bound] with 2^bits levels, or one less on a narrow grid.

    The step is 2 * bound / (2^bits - 1), so that no value inside is further than half a step from its level.
    """
    return (2 * bound / ((1 << bits) - 1 - narrow)).clamp(min=_SMALLEST_STEP)


def sample(x: Tensor, most: int, *others: Tensor) -> Tensor:
    """About `most` values of x at most, evenly spread over every axis, always with the smallest and the largest.

    A stride that shares a factor with the size of an axis would see only some of its channels. (If the number of values
    is just above `most` and has many small factors, the stride may keep only a tenth of them.)

    Args:
        others: tensors of the same shape, whose values at the same positions are returned too: (1 + others, M).
    """
    tensors = [tensor.flatten() for tensor in (x, *others)]
    flat = tensors[0]
    if flat.numel() > most:
        stride = -(-flat.numel() // most)
        while math.gcd(stride, flat.numel()) > 1:
            stride += 1
        ends = torch.stack([flat.argmin(), flat.argmax()])
        tensors = [torch.cat([tensor[::stride], tensor[ends]]) for tensor in tensors]
    return torch.stack(tensors) if others else tensors[0]


def importance(x: Tensor, axis: int) -> Tensor:
    """Weights that make errors relative: for each value, one over the mean square of its vector along an axis."""
    power = x.square().mean(dim=axis, keepdim=True)
    return (1 / power.clamp(min=1e-6 * power.mean()).clamp(min=_SMALLEST_STEP)).expand_as(x)


def minmax(
    values: Tensor, bits: int, is_symmetric: bool, percentile: float, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value."""
    return values.amin(dim=1), values.amax(dim=1)


def percentile(
    values: Tensor, bits: int, is_symmetric: bool, percentile: float, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The range without the outermost (1 - percentile) of the values, half of them at each end."""
    return _tails(values, (1 - percentile) / 2)


def mse(
    values: Tensor, bits: int, is_symmetric: bool, percentile: float, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The range with the least squared quantization error.

    The search for an asymmetric range starts from its full extent. First both ends shrink together, down to a
    thousandth (one value in a million may be a hundred times larger than the others), then each end in turn, in finer
    steps.
    """
    if is_symmetric:
        shrinks = torch.linspace(1.0, 0.02, 50, device=values.device)[:, None]  # (S, 1)
        bounds = values.abs().amax(dim=1) * shrinks  # (S, C)
        return _least_error(values, weights, bits, -bounds, bounds, is_symmetric=True)
    low, high = minmax(values, bits, False, percentile)
    together = torch.logspace(0, -10, 60, base=2, device=values.device)[:, None]
    best_low, best_high = _least_error(values, weights, bits, low * together, high * together)
    for octaves in (1.0, 0.25):
        around = torch.logspace(octaves, -octaves, 41, base=2, device=values.device)[:, None]
        highs = torch.minimum(best_high * around, high)
        best_low, best_high = _least_error(values, weights, bits, best_low.expand_as(highs), highs)
        lows = torch.maximum(best_low * around, low)
        best_low, best_high = _least_error(values, weights, bits, lows, best_high.expand_as(lows))
    return best_low, best_high


def best_percentile(
    values: Tensor, bits: int, is_symmetric: bool, percentile: float, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The percentile of three, applied at both ends, with the least squared error (RepQ-ViT)."""
    ends = [_tails(values, 1 - share) for share in (0.999, 0.9999, 0.99999)]
    lows, highs = (torch.stack(found) for found in zip(*ends, strict=True))  # (S, C)
    if is_symmetric:
        bounds = torch.maximum(-lows, highs)
        lows, highs = -bounds, bounds
    return _least_error(values, weights, bits, lows, highs, is_symmetric)


def _tails(values: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The values below which, and above which, this share of the values lies."""
    ordered = values.sort(dim=1).values
    cut = round(share * (ordered.shape[1] - 1))
    return ordered[:, cut], ordered[:, -1 - cut]


def lsq(
    values: Tensor, bits: int, is_symmetric: bool, percentile: float, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The range of LSQ's initial step 2 mean|v| / sqrt(Q_p): around zero, or from zero if no value is negative."""
    signed = is_symmetric or bool((values < 0).any())
    low, high = code_range(bits, signed)
    step = 2 * values.abs().mean(dim=1) / math.sqrt(high)
    if is_symmetric:
        bound = step * (high - low) / 2  # `symmetric` divides by the same number
        return -bound, bound
    return step * low, step * high


RANGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "minmax": minmax,
    "percentile": percentile,
    "mse": mse,
    "relative": mse,  # with weights: `importance`
    "best_percentile": best_percentile,
    "lsq": lsq,
}


def _least_error(
    values: Tensor, weights: Tensor | None, bits: int, lows: Tensor, highs: Tensor, is_symmetric: bool = False
) -> tuple[Tensor, Tensor]:
    """The best of (S, C) candidate ranges for each channel."""
    if is_symmetric:
        scales = symmetric(highs, bits)
        zero_points = torch.zeros_like(highs)
    else:
        scales, zero_points = affine(lows, highs, bits)
    codes = code_range(bits, signed=is_symmetric)
    at_once = _candidates_at_once(values)
    errors = torch.cat(
        [
            _mean_square(fake_quantize(values, s[..., None], z[..., None], *codes) - values, weights)
            for s, z in zip(scales.split(at_once), zero_points.split(at_once), strict=True)
        ]
    )
    best = errors.argmin(dim=0, keepdim=True)  # (1, C)
    return lows.gather(0, best)[0], highs.gather(0, best)[0]


def _candidates_at_once(values: Tensor) -> int:
    """How many candidates to try in one pass; on a CPU as many as fit its cache."""
    numbers = 1 << 18 if values.device.type == "cpu" else 1 << 24
    return max(1, numbers // values.numel())


def _mean_square(error: Tensor, weights: Tensor | None) -> Tensor:
    return (error.square() if weights is None else error.square() * weights).mean(dim=-1)


OCTAVES = [n / 2 for n in range(2, 17)]  # 255 is eight octaves above 1, the smallest positive level


def log_grid(
    values: Tensor, bits: int, method: str, percentile: float, weights: Tensor | None = None, signed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Levels of a logarithmic grid, and the (C,) values of its ends for each row of (C, M) values.

    `mse` and `relative` search the upper end, and the lower end of signed values is the smallest of them; with other
    methods both ends are those of their range. The levels are those of least squared error, the same for all rows.
    """
    if RANGES[method] is mse:
        lows = values.amin(dim=1)
        highs = values.amax(dim=1) * torch.linspace(1.0, 0.02, 50, device=values.device)[:, None]  # (S, C)
    else:
        lows, high = RANGES[method](values, bits, False, percentile, weights)
        highs = high[None]
    lows = lows.clamp(max=0.0) if signed else torch.zeros_like(lows)
    scales, zeros = affine(lows, highs, LEVEL_BITS)
    at_once = _candidates_at_once(values)
    found = []
    for octaves in OCTAVES:
        levels = log_levels(bits, octaves).to(values.device)
        parts = (
            log_fake_quantize(values, s[..., None], levels, z[..., None]) - values
            for s, z in zip(scales.split(at_once), zeros.split(at_once), strict=True)
        )
        least, best = torch.cat([_mean_square(part, weights) for part in parts]).min(dim=0)  # (C,)
        found.append((least.sum().item(), levels, highs.gather(0, best[None])[0]))
    _, levels, tops = min(found, key=lambda candidate: candidate[0])
    return levels, lows, tops
