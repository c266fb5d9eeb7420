"""What the second layer of an MLP reads, in one kernel each way: GELU, rotation in blocks of channels, grid.

It equals the plain ops of `torch.nn.GELU`, `maskaq.quant.rotation.Rotation` and `maskaq.quant.grid`, in 2 passes over
memory forward and 3 backward. With a product of the library between the two pointwise operations there are 6 and 8, and
a product with so small a matrix is slow. The backward makes everything again from the input of GELU, which is all that
is kept. Partial sums of the range's gradients are written out and added in a fixed order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels are Triton's values, which have no types to write down)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HALF_LOG2_E: tl.constexpr = tl.constexpr(0.7213475204444817)  # exp2 is the instruction that the hardware has
SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
DENSITY: tl.constexpr = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0: 1 / sqrt(2 pi)
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: floats there are integers, and sums round half to even

BLOCK = 2048  # values of a program, which has four warps: they stay in registers


def fits(size: int) -> bool:
    """Whether the kernels serve blocks of so many channels: tensor cores take no less than 16."""
    return size in (16, 32)


def rotated_gelu(x: Tensor, matrix: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
    """fake_quantize(gelu(x) @ matrix) for every block of channels; differentiable in x, scale and zero point.

    Args:
        x: (..., C), best contiguous. Products have its dtype; all else is in float32.
        matrix: (size, size) with a size that divides C; contiguous float32.
        scale, zero_point: one each, of a grid with the codes low .. high.
    """
    result: Tensor = torch.ops.maskaq.rotated_gelu(x, matrix, scale, zero_point, low, high)
    return result


# --------------------------------------------------------------------------------------------------------- kernels

# Values lie in one row, but for the products: of rows of blocks, Triton (3.6) computes GELU twice in the backward, once
# in the layout that each product has.


@triton.jit
def _rotated(x, matrix, SIZE: tl.constexpr):
    """x @ matrix for every block of SIZE values."""
    blocks = tl.reshape(x, (x.numel // SIZE, SIZE)).to(matrix.dtype)
    return tl.reshape(tl.dot(blocks, matrix, input_precision="ieee"), (x.numel,))


@triton.jit
def _share(x):
    """What GELU multiplies x by: the share of the normal distribution below it."""
    return 0.5 + 0.5 * tl.erf(x * SQRT_HALF)


@triton.jit
def _on_grid(steps, zero_point, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Steps rounded half to even, and the nearest that have a code. NaN stays NaN: an image with one is found by it."""
    rounded = (steps + ROUNDER) - ROUNDER  # inexact beyond 2^22, where no grid is
    return rounded, tl.clamp(rounded, LOW - zero_point, HIGH - zero_point, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _loaded(x_ptr, matrix_ptr, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """This program's values of x, where they are, which of them exist, and the matrix."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # offsets can pass 2^31
    x = tl.load(x_ptr + places, mask=places < count, other=0.0)
    index = tl.arange(0, SIZE)
    matrix = tl.load(matrix_ptr + index[:, None] * SIZE + index[None, :])
    return x.to(tl.float32), places, places < count, matrix.to(x.dtype)


@triton.jit
def _forward_kernel(
    x_ptr,
    matrix_ptr,
    scale_ptr,
    zero_point_ptr,
    y_ptr,
    count,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x, places, exist, matrix = _loaded(x_ptr, matrix_ptr, count, SIZE, BLOCK)
    scale, zero_point = tl.load(scale_ptr), tl.load(zero_point_ptr)
    steps = _rotated(x * _share(x), matrix, SIZE) * (1.0 / scale)
    _, clipped = _on_grid(steps, zero_point, LOW, HIGH)
    tl.store(y_ptr + places, (clipped * scale).to(y_ptr.dtype.element_ty), mask=exist)


@triton.jit
def _backward_kernel(
    x_ptr,
    matrix_ptr,
    scale_ptr,
    zero_point_ptr,
    dy_ptr,
    dx_ptr,
    d_grid_ptr,  # or None
    count,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x, places, exist, matrix = _loaded(x_ptr, matrix_ptr, count, SIZE, BLOCK)
    dy = tl.load(dy_ptr + places, mask=exist, other=0.0).to(tl.float32)
    scale, zero_point = tl.load(scale_ptr), tl.load(zero_point_ptr)
    share = _share(x)
    steps = _rotated(x * share, matrix, SIZE) * (1.0 / scale)
    rounded, clipped = _on_grid(steps, zero_point, LOW, HIGH)
    through = tl.where(rounded == clipped, dy, 0.0)  # straight through inside the grid, nothing outside
    if d_grid_ptr is not None:
        d_grid_ptr += tl.program_id(0)
        tl.store(d_grid_ptr, tl.sum(dy * clipped - through * steps))  # by the rounding error inside, the code outside
        tl.store(d_grid_ptr + tl.num_programs(0), tl.sum(through - dy) * scale)  # -scale outside
    dx = _rotated(through, tl.trans(matrix), SIZE) * (share + x * tl.exp2(x * x * -HALF_LOG2_E) * DENSITY)
    tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=exist)


# --------------------------------------------------------------------------------------------------------- launches


def _programs(x: Tensor) -> int:
    return int(triton.cdiv(x.numel(), BLOCK))


@torch.library.custom_op("maskaq::rotated_gelu", mutates_args=())
def _rotated_gelu(x: Tensor, matrix: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
    y = _rotated_gelu_fake(x)
    _forward_kernel[(_programs(x),)](
        x.contiguous(), matrix, scale, zero_point, y, x.numel(), LOW=low, HIGH=high, SIZE=len(matrix), BLOCK=BLOCK
    )
    return y


@_rotated_gelu.register_fake
def _rotated_gelu_fake(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("maskaq::rotated_gelu_backward", mutates_args=())
def _rotated_gelu_backward(
    x: Tensor, matrix: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dy: Tensor, want_d_grid: bool
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of scale and zero point from each program: (2, programs)."""
    dx, d_grid = _rotated_gelu_backward_fake(x, matrix, scale, zero_point, low, high, dy, want_d_grid)
    _backward_kernel[(_programs(x),)](
        x.contiguous(), matrix, scale, zero_point, dy.contiguous(), dx, d_grid if want_d_grid else None, x.numel(),
        LOW=low, HIGH=high, SIZE=len(matrix), BLOCK=BLOCK,
    )  # fmt: skip
    return dx, d_grid


@_rotated_gelu_backward.register_fake
def _rotated_gelu_backward_fake(
    x: Tensor, matrix: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dy: Tensor, want_d_grid: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(2, _programs(x) if want_d_grid else 0, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.low, ctx.high = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, matrix, scale, zero_point = ctx.saved_tensors
    _, _, *learned, _, _ = ctx.needs_input_grad
    dx, d_grid = torch.ops.maskaq.rotated_gelu_backward(
        x, matrix, scale, zero_point, ctx.low, ctx.high, dy, any(learned)
    )
    to_grid = [
        part.sum().reshape(scale.shape) if wanted else None for part, wanted in zip(d_grid, learned, strict=True)
    ]
    return dx, None, *to_grid, None, None


_rotated_gelu.register_autograd(_backward, setup_context=_setup_context)
