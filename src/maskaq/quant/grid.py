"""Integer grids as pure maths: codes, scales, zero points. value = (code - zero_point) * scale.

A logarithmic grid has levels, integers from 0 to 255, one for each code: value = (levels[code] - zero_point) * scale.
"""

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


def learned_grid(scale: Tensor, zero_point: Tensor, low: int, high: int, factor: float) -> tuple[Tensor, Tensor]:
    """Learned parameters -> the scale, a length whatever its sign, and the zero point, a code of the grid.

    Gradients are multiplied by factor. The zero point's goes straight through: one outside the grid can come back.
    """
    result: tuple[Tensor, Tensor] = _LearnedGrid.apply(scale, zero_point, low, high, factor)
    return result


class _LearnedGrid(torch.autograd.Function):
    """Custom gradient: a dozen scalar operations at every site took longer than the quantization itself."""

    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, zero_point: Tensor, low: int, high: int, factor: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(scale)
        ctx.factor = factor
        return scale.abs(), zero_point.clamp(low, high).round()  # not round_: see _FakeQuantize

    @staticmethod
    def backward(
        ctx: Any, to_scale: Tensor, to_zero_point: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (scale,) = ctx.saved_tensors
        learns_scale, learns_zero_point, *_ = ctx.needs_input_grad
        return (
            to_scale * scale.sign() * ctx.factor if learns_scale else None,
            to_zero_point * ctx.factor if learns_zero_point else None,
            None,
            None,
            None,
        )


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | int, low: int, high: int) -> Tensor:
    """dequantize(quantize(x)) in floats, differentiable in x, scale and zero point.

    The gradients are those of LSQ (Esser et al. 2020) and LSQ+ (Bhalgat et al. 2020): straight through inside the
    range, none to x outside it, and the rounding error inside or the clipped code outside to the scale.
    """
    result: Tensor = _FakeQuantize.apply(x, scale, torch.as_tensor(zero_point, device=x.device), low, high)
    return result


class _FakeQuantize(torch.autograd.Function):
    """Custom gradient, as it runs at every site in every step: saves only x / scale, works in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # in bfloat16 many values would change codes
        steps = (x if x.dtype == wide else x.to(wide)) / scale
        ctx.save_for_backward(steps, scale, zero_point)
        ctx.codes = (low, high)
        # The last operation makes a new tensor: torch.compile (2.11) loses the gradient of one that was written into.
        values = steps.round().add_(zero_point).clamp_(low, high).sub_(zero_point) * scale
        return values if x.dtype == wide else values.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        steps, scale, zero_point = ctx.saved_tensors
        low, high = ctx.codes
        if grad.dtype != steps.dtype or grad.stride() != steps.stride():
            grad = torch.empty_like(steps).copy_(grad)  # one layout: passes over unlike ones are many times slower
        codes = steps.round().add_(zero_point)
        # Where low <= code <= high, in one pass: comparisons, their masks and `where` take ten times as long on a CPU.
        inside = torch.ops.aten.hardtanh_backward(grad, codes, low - 0.5, high + 0.5)
        to_scale = to_zero_point = None
        if ctx.needs_input_grad[1]:  # grad * (rounding error inside, clipped code outside)
            slope = codes.clamp_(low, high).sub_(zero_point).mul_(grad).addcmul_(inside, steps, value=-1)
            to_scale = _sum_to(slope, scale)
        if ctx.needs_input_grad[2]:  # grad * -scale outside
            to_zero_point = _sum_to((inside - grad).mul_(scale), zero_point)
        return inside if ctx.needs_input_grad[0] else None, to_scale, to_zero_point, None, None


LEVEL_BITS = 8
LARGEST_LEVEL = (1 << LEVEL_BITS) - 1
"""Of a logarithmic grid: a level fits uint8, so that a product with one is a product of 8-bit integers."""


def log_levels(bits: int, octaves: float) -> Tensor:
    """(2^bits,) levels of a logarithmic grid: 0, then integers up to 255 in equal ratios over so many octaves.

    AdaLog (Wu et al. 2024) has such ratios of any base; here each level is rounded to an integer. Where that would give
    two codes one level, the levels are consecutive integers.
    """
    last = (1 << bits) - 1
    exact = [LARGEST_LEVEL * 2 ** (-octaves * (last - code) / (last - 1)) for code in range(last + 1)]
    levels = [0]
    for code in range(1, last + 1):
        levels.append(min(max(round(exact[code]), levels[-1] + 1), LARGEST_LEVEL - (last - code)))
    return torch.tensor(levels, dtype=torch.float32)


def level_borders(levels: Tensor) -> Tensor:
    """(2^bits - 1,) borders between neighbouring levels, all halves: rounded to integers, no value lies on one.

    So a code is a function of x / scale + zero_point rounded to 8 bits: see `level_table`.
    """
    return ((levels[1:] + levels[:-1]) / 2).floor() + 0.5


def level_table(levels: Tensor) -> Tensor:
    """(256,) the level nearest to each integer."""
    integers = torch.arange(LARGEST_LEVEL + 1, device=levels.device, dtype=levels.dtype)
    return levels[torch.bucketize(integers, level_borders(levels))]


def log_quantize(x: Tensor, scale: Tensor, levels: Tensor, zero_point: Tensor | int = 0) -> Tensor:
    """Values -> codes (int32) of the nearest levels."""
    return torch.bucketize(torch.round(x / scale) + zero_point, level_borders(levels), out_int32=True)


def log_dequantize(codes: Tensor, scale: Tensor, levels: Tensor, zero_point: Tensor | int = 0) -> Tensor:
    """Codes -> values."""
    return (levels[codes] - zero_point) * scale


def log_fake_quantize(x: Tensor, scale: Tensor, levels: Tensor, zero_point: Tensor | int = 0) -> Tensor:
    """log_dequantize(log_quantize(x)), differentiable in x, scale and zero point, with LSQ's gradients.

    Zero need not be a level: AdaLog (Wu et al. 2024) shifts GELU's outputs by their minimum, from which levels start.
    """
    result: Tensor = _LogFakeQuantize.apply(x, scale, levels, torch.as_tensor(zero_point, device=x.device))
    return result


class _LogFakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, levels: Tensor, zero_point: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = (x if x.dtype == wide else x.to(wide)) / scale
        ctx.save_for_backward(steps, scale, levels, zero_point)
        codes = torch.bucketize(steps.round().add_(zero_point), level_borders(levels), out_int32=True)
        values = levels.to(wide)[codes].sub_(zero_point) * scale
        return values if x.dtype == wide else values.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
        steps, scale, levels, zero_point = ctx.saved_tensors
        if grad.dtype != steps.dtype or grad.stride() != steps.stride():
            grad = torch.empty_like(steps).copy_(grad)
        rounded = steps.round().add_(zero_point)
        inside = torch.ops.aten.hardtanh_backward(grad, rounded, -0.5, LARGEST_LEVEL + 0.5)
        to_scale = to_zero_point = None
        if ctx.needs_input_grad[1]:  # grad * (rounding error inside, smallest or largest level outside)
            found = levels[torch.bucketize(rounded, level_borders(levels), out_int32=True)].sub_(zero_point)
            to_scale = _sum_to((found * grad).addcmul_(inside, steps, value=-1), scale)
        if ctx.needs_input_grad[3]:  # grad * -scale outside
            to_zero_point = _sum_to((inside - grad).mul_(scale), zero_point)
        return inside if ctx.needs_input_grad[0] else None, to_scale, None, to_zero_point


def _sum_to(x: Tensor, like: Tensor) -> Tensor:
    """x summed to a smaller shape; rows first, which a compiler does in the pass that makes x."""
    return x.sum(dim=-1, keepdim=True).sum_to_size(like.shape)
