"""The matrix products of attention as modules: named, so that they can be quantized and tapped."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn


class Matmul(nn.Module):
    """a @ b.

    Args:
        signed: whether each operand can be negative; known from the architecture (a softmax cannot be).
    """

    def __init__(self, signed: tuple[bool, bool] = (True, True)) -> None:
        super().__init__()
        self.signed = signed

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.operands(a, b)
        return a @ b

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """What is multiplied: here the operands themselves, in the student their quantized values."""
        return a, b


class AttentionProducts(nn.Module):
    """Base class of every exposed attention, on which `maskaq.models.taps` records.

    `qk` gives the scores QK^T before scale and softmax, `softmax` the probabilities, `av` the head outputs.
    """

    scale: float
    num_heads: int

    def __init__(self) -> None:
        super().__init__()
        self.qk = Matmul()
        self.softmax = nn.Softmax(dim=-1)
        self.av = Matmul(signed=(False, True))
        self.prefix_tokens = 0
        self.class_query = False
        self.fused: Callable[..., dict[str, Tensor]] | None = None
        """Replaces `products` while the fast engine is applied."""
        self.watched: Callable[[Tensor, Tensor], None] | None = None
        """Called with queries and keys while the layout of the tokens is determined."""
        self.listened: tuple[str, ...] = ()
        """Active tap points."""
        self.passed: dict[str, Tensor] = {}
        """Their values in the latest forward pass."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, gain: Tensor | None = None) -> Tensor:
        """(B*W, H, T, D) queries, keys, values -> head outputs; bias (W, H, T, T) is added to the scaled scores.

        Args:
            gain: (H, 1, 1), a learned factor of each head's scores, which are then the product and not QK^T itself.
        """
        if self.watched is not None:
            self.watched(q, k)
        compute = self.products if self.fused is None else partial(self.fused, self)
        points = compute(q, k, v, bias, gain)
        self.passed = {point: points[point] for point in self.listened}
        return points["heads"]

    def products(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, gain: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The values of all tap points."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # slices of one tensor: every pass over them is slower
        scores = self.qk(q, k.transpose(-2, -1))
        if gain is not None:
            scores = scores * gain
        logits = scores * self.scale
        if bias is not None:
            logits = (logits.unflatten(0, (-1, bias.shape[0])) + bias).flatten(0, 1)
        probs = self.softmax(logits)
        points = {"scores": scores, "probs": probs, "heads": self.av(probs, v)}
        return points | {f"{name}_received": self._received(points[name]) for name in ("scores", "probs")}

    def readers(self, tokens: int) -> tuple[int, int]:
        """First and number of the queries whose attention counts: the class token if it is read, else the patches."""
        return (0, 1) if self.class_query else (self.prefix_tokens, tokens - self.prefix_tokens)

    def _received(self, maps: Tensor) -> Tensor:
        """(..., T, T) -> (..., T): the mean of the readers' rows."""
        first, count = self.readers(maps.shape[-2])
        return maps[..., first : first + count, :].mean(dim=-2)
