"""A site: one tensor of the model that is quantized, and how."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["weight", "activation"]


@dataclass(frozen=True)
class Site:
    """One tensor of the model, and how it is quantized."""

    name: str
    """Module path and slot: `blocks.0.mlp.fc1.weight` or `.input`; `.a` and `.b` are the operands of a product."""
    role: Role
    bits: int
    signed: bool
    """Whether the values can be negative; given by the architecture, not guessed from data."""
    channels: int | None = None
    """One range for each slice along the first axis; None: one range for the whole tensor."""
    quantizer: str = ""
    """Name of the quantizer, as `maskaq list quantizers` prints it."""
    range: str = "minmax"
    """How its first range is found: a method of `maskaq.quant.ranges`."""
    rotation: str = ""
    """The rotation that the values of an activation have gone through, if any: one of `maskaq.quant.rotation`."""
    heads: int | None = None
    """One range for each head of an attention product's operand, (..., heads, rows, columns); None: as `channels`."""
    symmetric: bool = False
    """For runtimes without zero points: a signed activation's is fixed at the middle code; 8-bit weights have no -128.
    """

    @property
    def layer(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def slot(self) -> str:
        """`weight`, `input`, `a` or `b`."""
        return self.name.rpartition(".")[2]

    @property
    def granularity(self) -> str:
        """`channel`, `head` or `tensor`: what has a range of its own."""
        return "channel" if self.channels else "head" if self.heads else "tensor"

    @property
    def ranges(self) -> int:
        """How many scales and zero points it has."""
        return self.channels or self.heads or 1
