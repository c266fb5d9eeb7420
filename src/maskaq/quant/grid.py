"""Integer grids as pure maths: codes, scales, zero points. value = (code - zero_point) * scale."""

import torch
from torch import Tensor


def code_range(bits: int, signed: bool) -> tuple[int, int]:
    """Smallest and largest code: exactly 2^bits of them."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | int, low: int, high: int) -> Tensor:
    """Values -> integer codes (int32)."""
    return (torch.round(x / scale) + zero_point).clamp(low, high).to(torch.int32)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | int) -> Tensor:
    """Integer codes -> values."""
    return (codes - zero_point) * scale


def round_ste(x: Tensor) -> Tensor:
    """Round to nearest; the gradient passes straight through."""
    return x + (torch.round(x) - x).detach()


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself, with its gradient multiplied by factor."""
    return x.detach() + (x - x.detach()) * factor


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | int, low: int, high: int) -> Tensor:
    """dequantize(quantize(x)) in floats, differentiable in x, scale and zero point.

    The gradients are those of LSQ (Esser et al. 2020) and LSQ+ (Bhalgat et al. 2020): straight through inside the
    range, none to x outside it, and the rounding error inside or the clipped code outside to the scale.
    """
    codes = (round_ste(x / scale) + zero_point).clamp(low, high)
    return (codes - zero_point) * scale
