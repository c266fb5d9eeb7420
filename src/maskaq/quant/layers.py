"""Quantized layers: subclasses of float layers that override `forward`, built by `from_float`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.models.products import Matmul


class QuantWeightMixin:
    """A layer whose quantized weight can be held while weights are constant (synthesis, evaluation)."""

    weight: Tensor
    weight_quantizer: nn.Module
    input_quantizer: nn.Module
    held_weight: Tensor | None = None

    def quantized_weight(self) -> Tensor:
        return self.weight_quantizer(self.weight) if self.held_weight is None else self.held_weight


@contextmanager
def holding(weights: Mapping[QuantWeightMixin, Tensor]) -> Iterator[None]:
    """Context in which these layers use the given weights in place of their quantized ones."""
    before = {layer: layer.held_weight for layer in weights}
    try:
        for layer, weight in weights.items():
            layer.held_weight = weight
        yield
    finally:
        for layer, earlier in before.items():
            if earlier is not None:  # of an outer context
                layer.held_weight = earlier
            else:
                vars(layer).pop("held_weight", None)  # the class has None


class QuantLinear(QuantWeightMixin, nn.Linear):
    @classmethod
    def from_float(cls, linear: nn.Linear, weight_quantizer: nn.Module, input_quantizer: nn.Module) -> "QuantLinear":
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight = linear.weight
        layer.bias = linear.bias
        layer.weight_quantizer = weight_quantizer
        layer.input_quantizer = input_quantizer
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.input_quantizer(x), self.quantized_weight(), self.bias)


class QuantConv2d(QuantWeightMixin, nn.Conv2d):
    @classmethod
    def from_float(cls, conv: nn.Conv2d, weight_quantizer: nn.Module, input_quantizer: nn.Module) -> "QuantConv2d":
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,  # type: ignore[arg-type]
            stride=conv.stride,  # type: ignore[arg-type]
            padding=conv.padding,  # type: ignore[arg-type]
            dilation=conv.dilation,  # type: ignore[arg-type]
            groups=conv.groups,
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
            device="meta",
        )
        layer.weight = conv.weight
        layer.bias = conv.bias
        layer.weight_quantizer = weight_quantizer
        layer.input_quantizer = input_quantizer
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(self.input_quantizer(x), self.quantized_weight(), self.bias)


class QuantMatmul(Matmul):
    a_quantizer: nn.Module
    b_quantizer: nn.Module

    @classmethod
    def from_float(cls, matmul: Matmul, a_quantizer: nn.Module, b_quantizer: nn.Module) -> "QuantMatmul":
        layer = cls(matmul.signed)
        layer.a_quantizer = a_quantizer
        layer.b_quantizer = b_quantizer
        return layer

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.a_quantizer(a), self.b_quantizer(b)
