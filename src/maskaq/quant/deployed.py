"""The deployed form of a quantized model: integer weight codes, fixed grids, plain torch operations.

`maskaq.quant.twin.deploy` turns a calibrated student into a module with the same module names and, bit for bit, the
same outputs. It holds no full-precision weight where it has codes, and needs none of the training code.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.errors import ModelError
from maskaq.models.products import Matmul
from maskaq.quant.grid import level_borders, log_dequantize, log_quantize
from maskaq.quant.layers import QuantConv2d, QuantLinear, QuantMatmul
from maskaq.quant.quantizers import Log, Quantizer
from maskaq.quant.site import Site

Part = tuple[int, Site | None] | None
"""Bits, and the site where it is known; None is a tensor that stays in float."""


class FixedGrid(nn.Module):
    """Rounds activations to a uniform unsigned grid: (code - zero_point) * scale.

    It has one scale and zero point, or one for each head, (heads, 1, 1).
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, bits: int, site: Site | None = None) -> None:
        super().__init__()
        self.bits = bits
        self.site = site
        self.top = (1 << bits) - 1
        shape = (site.heads, 1, 1) if site is not None and site.heads else ()
        self.register_buffer("scale", torch.ones(shape))
        self.register_buffer("zero_point", torch.zeros(shape))

    @property
    def symmetric(self) -> bool:
        """Whether zero is the middle code: as signed integers, the codes need no zero point."""
        return bool((self.zero_point == 1 << self.bits - 1).all())

    def codes(self, x: Tensor) -> Tensor:
        """The integer codes, 0 to top, as floats."""
        return (torch.round(x / self.scale) + self.zero_point).clamp(0, self.top)

    def values(self, codes: Tensor) -> Tensor:
        return (codes - self.zero_point) * self.scale

    def border(self, codes: Tensor) -> Tensor:
        """x / scale between each of these codes and the next."""
        return codes + 0.5 - self.zero_point

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.codes(x))

    def extra_repr(self) -> str:
        return f"{self.bits} bits"


class LogGrid(FixedGrid):
    """Rounds activations to a logarithmic grid, of a quantizer `log`: (levels[code] - zero_point) * scale."""

    levels: Tensor

    def __init__(self, bits: int, site: Site | None = None) -> None:
        super().__init__(bits, site)
        self.register_buffer("levels", torch.arange(1 << bits, dtype=torch.float32))

    def codes(self, x: Tensor) -> Tensor:
        return log_quantize(x, self.scale, self.levels, self.zero_point).to(x.dtype)

    def values(self, codes: Tensor) -> Tensor:
        return log_dequantize(codes.int(), self.scale, self.levels, self.zero_point)

    def border(self, codes: Tensor) -> Tensor:
        return level_borders(self.levels)[codes.int().clamp(max=self.top - 1)] - self.zero_point


class CodedWeight(nn.Module):
    """A weight as signed integer codes with one scale for each output channel."""

    codes: Tensor
    scale: Tensor

    def __init__(self, shape: torch.Size | tuple[int, ...], bits: int, site: Site | None = None) -> None:
        super().__init__()
        self.bits = bits
        self.site = site
        self.register_buffer("codes", torch.zeros(shape, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(shape[0]))

    @property
    def device(self) -> torch.device:
        return self.scale.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its values, as some models ask a layer's weight."""
        return self.scale.dtype

    def forward(self) -> Tensor:
        return self.codes * self.scale.view(-1, *[1] * (self.codes.dim() - 1))

    def extra_repr(self) -> str:
        return f"{tuple(self.codes.shape)}, {self.bits} bits"


class DeployedLinear(nn.Module):
    def __init__(self, weight: nn.Module, bias: Tensor | None, grid: nn.Module) -> None:
        super().__init__()
        self.weight = weight
        self.grid = grid
        self.register_buffer("bias", bias)

    @classmethod
    def from_quantized(cls, layer: QuantLinear) -> "DeployedLinear":
        return cls(_weight(layer), _plain(layer.bias), _grid(layer.input_quantizer))

    @classmethod
    def blank(cls, linear: nn.Linear, weight: Part, grid: Part) -> "DeployedLinear":
        return cls(_blank_weight(linear, weight), _blank_bias(linear), _blank_grid(grid))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.grid(x), self.weight(), self.bias)  # type: ignore[arg-type]


class DeployedConv2d(nn.Module):
    def __init__(self, weight: nn.Module, bias: Tensor | None, grid: nn.Module, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight = weight
        self.grid = grid
        self.register_buffer("bias", bias)
        padding = (0, 0) if conv.padding == "valid" else conv.padding
        if conv.padding_mode != "zeros" or isinstance(padding, str):
            raise ModelError(f"a convolution with padding {conv.padding!r} ({conv.padding_mode}) cannot be deployed")
        self.kernel_size = conv.kernel_size  # what some models ask their layers
        self.stride = conv.stride
        self.padding = padding
        self.dilation = conv.dilation
        self.groups = conv.groups

    @classmethod
    def from_quantized(cls, layer: QuantConv2d) -> "DeployedConv2d":
        return cls(_weight(layer), _plain(layer.bias), _grid(layer.input_quantizer), layer)

    @classmethod
    def blank(cls, conv: nn.Conv2d, weight: Part, grid: Part) -> "DeployedConv2d":
        return cls(_blank_weight(conv, weight), _blank_bias(conv), _blank_grid(grid), conv)

    def forward(self, x: Tensor) -> Tensor:
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(self.grid(x), self.weight(), self.bias, *geometry)  # type: ignore[arg-type]


class DeployedMatmul(Matmul):
    """A product of two activations, each on its grid."""

    def __init__(self, a_grid: nn.Module, b_grid: nn.Module, signed: tuple[bool, bool]) -> None:
        super().__init__(signed)
        self.a_grid = a_grid
        self.b_grid = b_grid

    @classmethod
    def from_quantized(cls, layer: QuantMatmul) -> "DeployedMatmul":
        return cls(_grid(layer.a_quantizer), _grid(layer.b_quantizer), layer.signed)

    @classmethod
    def blank(cls, matmul: Matmul, a: Part, b: Part) -> "DeployedMatmul":
        return cls(_blank_grid(a), _blank_grid(b), matmul.signed)

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.a_grid(a), self.b_grid(b)


class FloatWeight(nn.Module):
    """A weight that stays in float (`first_last = "float"`)."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def forward(self) -> Tensor:
        return self.values


def _blank_weight(layer: nn.Linear | nn.Conv2d, part: Part) -> nn.Module:
    shape = layer.weight.shape
    return FloatWeight(torch.zeros(shape)) if part is None else CodedWeight(shape, *part)


def _blank_bias(layer: nn.Linear | nn.Conv2d) -> Tensor | None:
    return None if layer.bias is None else torch.zeros(layer.bias.shape)


def _blank_grid(part: Part) -> nn.Module:
    return nn.Identity() if part is None else _grid_type(part[1])(*part)


def _grid_type(site: Site | None) -> type[FixedGrid]:
    return LogGrid if site is not None and site.quantizer == "log" else FixedGrid


def _plain(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().clone()


def _grid(quantizer: nn.Module) -> nn.Module:
    if not isinstance(quantizer, Quantizer):
        return nn.Identity()
    grid = _grid_type(quantizer.site)(quantizer.site.bits, quantizer.site)
    if isinstance(grid, LogGrid) and type(quantizer) is Log:
        grid.levels.copy_(quantizer.levels)
    else:
        _refuse_other_grids(quantizer)
    scale, zero_point = quantizer.step(1)
    grid.scale.copy_(scale.reshape(grid.scale.shape))
    grid.zero_point.copy_(zero_point.reshape(grid.zero_point.shape))
    return grid


def _weight(layer: QuantLinear | QuantConv2d) -> nn.Module:
    quantizer = layer.weight_quantizer
    if not isinstance(quantizer, Quantizer):
        return FloatWeight(layer.weight.detach().clone())
    _refuse_other_grids(quantizer)
    weight = CodedWeight(layer.weight.shape, quantizer.site.bits, quantizer.site)
    weight.codes.copy_(quantizer.codes(layer.weight))
    weight.scale.copy_(quantizer.step(layer.weight.numel())[0])
    return weight


def _refuse_other_grids(quantizer: Quantizer) -> None:
    """ModelError for a quantizer with a custom grid, which the deployed layers cannot compute."""
    if type(quantizer).dequantize is not Quantizer.dequantize:
        raise ModelError(
            f"{quantizer.site.name}: quantizer {type(quantizer).__name__} has its own grid; only uniform grids "
            "and that of `log` can be deployed"
        )
