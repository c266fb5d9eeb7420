"""Packed codes take the bytes they must and come back as they were."""

import pytest
import torch

from maskaq.errors import ModelError
from maskaq.quant.packing import WIDTHS, pack, packed_bytes, unpack

widths = pytest.mark.parametrize("bits", WIDTHS)


def some_codes(bits: int, *shape: int) -> torch.Tensor:
    half, generator = 1 << bits - 1, torch.Generator().manual_seed(bits)
    return torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)


@widths
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (9,), (5, 3), (4, 3, 2, 2), (96, 384), (3, 0, 2)])
def test_codes_come_back_as_they_were(bits, shape):
    codes = some_codes(bits, *shape)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (-(-codes.numel() * bits // 8),)
    back = unpack(packed, bits, codes.shape)
    assert back.dtype == torch.int8 and back.shape == codes.shape and torch.equal(back, codes)


@widths
def test_every_code_survives_at_every_place(bits):
    half = 1 << bits - 1
    every = torch.arange(-half, half, dtype=torch.int8)
    for shift in range(8):
        codes = torch.cat([every, every])[shift:]
        assert torch.equal(unpack(pack(codes, bits), bits, codes.shape), codes)


@widths
def test_bytes_are_those_of_a_plain_loop_over_bits(bits):
    codes = some_codes(bits, 53)
    stream = [(int(code) + (1 << bits - 1)) >> i & 1 for code in codes for i in range(bits)]
    stream += [0] * (-len(stream) % 8)
    expected = [sum(bit << i for i, bit in enumerate(stream[at : at + 8])) for at in range(0, len(stream), 8)]
    assert pack(codes, bits).tolist() == expected


def test_the_layout_is_a_format_and_stays_as_it_is():
    assert pack(torch.tensor([-8, 7, 0, 1], dtype=torch.int8), 4).tolist() == [0xF0, 0x98]
    assert pack(torch.tensor([-4, 3, 0], dtype=torch.int8), 3).tolist() == [0x38, 0x01]
    assert pack(torch.tensor([-128, 127], dtype=torch.int8), 8).tolist() == [0x00, 0xFF]


@pytest.mark.parametrize(("code", "bits"), [(2, 2), (-3, 2), (8, 4), (-9, 4), (-65, 7)])
def test_codes_outside_the_width_are_refused(code, bits):
    with pytest.raises(ModelError, match=f"do not fit {bits} bits"):
        pack(torch.tensor([0, code], dtype=torch.int8), bits)


@widths
@pytest.mark.parametrize("change", [-1, 1, 100])
def test_a_wrong_number_of_bytes_is_refused(bits, change):
    packed = torch.zeros(max(0, packed_bytes(24, bits) + change), dtype=torch.uint8)
    with pytest.raises(ModelError, match=f"24 codes of {bits} bits are {3 * bits} bytes"):
        unpack(packed, bits, (24,))
