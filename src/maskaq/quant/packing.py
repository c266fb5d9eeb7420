"""Integer codes as dense bytes, at any width from 2 to 8 bits: pure maths.

Codes are signed and stored as code + 2^(bits-1), one after another from the lowest bit of the first byte on; only the
last byte can have bits to spare, and they are zero.
"""

import torch
from torch import Tensor

from maskaq.errors import ModelError

WIDTHS = range(2, 9)


def packed_bytes(count: int, bits: int) -> int:
    """How many bytes so many codes take."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Signed codes of any shape -> uint8, one axis."""
    half = 1 << bits - 1
    flat = codes.flatten().to(torch.int64)
    if flat.numel() and not -half <= int(flat.min()) <= int(flat.max()) < half:
        raise ModelError(f"codes from {flat.min()} to {flat.max()} do not fit {bits} bits, {-half} to {half - 1}")
    # Eight codes are `bits` whole bytes and fit one 64-bit word, whatever the width.
    words = _in_rows(flat + half, 8) << torch.arange(8) * bits
    octets = (words.sum(dim=1, keepdim=True) >> torch.arange(bits) * 8) & 255
    return octets.flatten()[: packed_bytes(flat.numel(), bits)].to(torch.uint8)


def unpack(packed: Tensor, bits: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """What `pack` was given, as int8 of this shape."""
    count = torch.Size(shape).numel()
    if packed.shape != (packed_bytes(count, bits),):
        raise ModelError(
            f"{count} codes of {bits} bits are {packed_bytes(count, bits)} bytes, found {packed.numel()} bytes"
        )
    words = (_in_rows(packed.to(torch.int64), bits) << torch.arange(bits) * 8).sum(dim=1, keepdim=True)
    codes = (words >> torch.arange(8) * bits) & (1 << bits) - 1
    return (codes.flatten()[:count] - (1 << bits - 1)).to(torch.int8).reshape(shape)


def _in_rows(values: Tensor, length: int) -> Tensor:
    """(n,) -> (rows, length), the last row filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % length)).view(-1, length)
