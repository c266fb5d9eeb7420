"""The matrix products of attention as modules: named, so that they can be quantized and tapped."""

from torch import Tensor, nn


class Matmul(nn.Module):
    """a @ b.

    Args:
        signed: whether each operand can be negative. The architecture knows (a softmax cannot); nobody guesses.
    """

    def __init__(self, signed: tuple[bool, bool] = (True, True)) -> None:
        super().__init__()
        self.signed = signed

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class AttentionProducts(nn.Module):
    """Base of every exposed attention: the three points that `maskaq.taps` listens to.

    `qk` gives the scores QK^T before scale and softmax, `softmax` the probabilities, `av` the head outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qk = Matmul()
        self.softmax = nn.Softmax(dim=-1)
        self.av = Matmul(signed=(False, True))
