"""Integer grids as pure maths: codes, scales, zero points. value = (code - zero_point) * scale."""

from typing import Any

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


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself, with its gradient multiplied by factor."""
    return x.detach() + (x - x.detach()) * factor


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | int, low: int, high: int) -> Tensor:
    """dequantize(quantize(x)) in floats, differentiable in x, scale and zero point.

    The gradients are those of LSQ (Esser et al. 2020) and LSQ+ (Bhalgat et al. 2020): straight through inside the
    range, none to x outside it, and the rounding error inside or the clipped code outside to the scale.
    """
    result: Tensor = _FakeQuantize.apply(x, scale, torch.as_tensor(zero_point, device=x.device), low, high)
    return result


class _FakeQuantize(torch.autograd.Function):
    """By hand because it runs at every site of every step: keeps x alone, and writes over its own temporaries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.codes = (low, high)
        steps = x.float() / scale  # bfloat16 has too few digits to tell codes apart
        return steps.round_().add_(zero_point).clamp_(low, high).sub_(zero_point).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        low, high = ctx.codes
        steps = x.float() / scale
        codes = steps.round() + zero_point
        inside = (codes >= low) & (codes <= high)
        to_x = to_scale = to_zero_point = None
        if ctx.needs_input_grad[0]:
            to_x = torch.where(inside, grad, 0)
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, codes - zero_point - steps, codes.clamp(low, high) - zero_point)
            to_scale = (grad.float() * slope).sum_to_size(scale.shape)
        if ctx.needs_input_grad[2]:
            to_zero_point = torch.where(inside, 0, grad.float() * -scale).sum_to_size(zero_point.shape)
        return to_x, to_scale, to_zero_point, None, None
