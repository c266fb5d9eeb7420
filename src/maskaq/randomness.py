"""Random numbers as a pure function of (seed, purpose, image, step): no generator, no hidden state.

Every draw hashes a 64-bit key per image. So an image's noise, jitter and mask do not depend on the batch or the worker
that computes it, a run resumed after a kill draws what it would have drawn, and nothing has to be saved.
The hash is SplitMix64 (Steele, Lea, Flood 2014), in int64 arithmetic that wraps alike on CPU and CUDA.
"""

import hashlib
import math

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit constant as the int64 with the same bits."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E37_79B9_7F4A_7C15)
_MIX_1 = _signed(0xBF58_476D_1CE4_E5B9)
_MIX_2 = _signed(0x94D0_49BB_1331_11EB)


def _shift_right(x: Tensor, n: int) -> Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)  # logical shift: int64 >> copies the sign bit


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def fold(keys: Tensor, value: int | Tensor | str) -> Tensor:
    """New keys from keys and a number, a tensor of numbers, or the name of a purpose."""
    number = _number(value) if isinstance(value, str) else value
    return _mix(keys * _GOLDEN + number + 1)


@torch.compiler.assume_constant_result
def _number(purpose: str) -> int:
    return _signed(int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little"))


def image_keys(seed: int, indices: Tensor) -> Tensor:
    """One key per image index, for one run seed."""
    root = torch.full_like(indices, _signed(seed), dtype=torch.int64)
    return fold(fold(root, "image"), indices.to(torch.int64))


def uniform(keys: Tensor, *shape: int) -> Tensor:
    """(B,) keys -> (B, *shape) floats in [0, 1)."""
    counter = -(~torch.arange(math.prod(shape), device=keys.device))  # 1, 2, ... in a form that no compiler narrows
    bits = _mix(keys[:, None] + counter * _GOLDEN)
    return (_shift_right(bits, 40).to(torch.float32) * 2.0**-24).reshape(len(keys), *shape)


def normal(keys: Tensor, *shape: int) -> Tensor:
    """(B,) keys -> (B, *shape) standard normal floats (Box-Muller)."""
    radius = (-2 * torch.log1p(-uniform(fold(keys, "radius"), *shape))).sqrt()
    return radius * torch.cos(2 * math.pi * uniform(fold(keys, "angle"), *shape))


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """The order of n images in one epoch, the same on every device."""
    keys = fold(image_keys(seed, torch.arange(n)), "order")
    return fold(keys, epoch).argsort(stable=True)
