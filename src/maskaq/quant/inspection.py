"""What a recipe would do to a model, or did to a saved one: every layer, its bits and its bytes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from maskaq.models import expose
from maskaq.quant.deployed import CodedWeight, DeployedConv2d, DeployedLinear, DeployedMatmul
from maskaq.quant.layers import QuantMatmul, QuantWeightMixin
from maskaq.quant.packing import packed_bytes
from maskaq.quant.quantizers import Quantizer
from maskaq.quant.twin import quantized_twin
from maskaq.recipe.schema import Recipe


@dataclass(frozen=True)
class LayerRow:
    name: str
    kind: str
    shape: str
    weight_bits: str
    input_bits: str
    float_bytes: int
    quantized_bytes: int


@dataclass(frozen=True)
class Inspection:
    rows: list[LayerRow]

    @property
    def float_bytes(self) -> int:
        return sum(row.float_bytes for row in self.rows)

    @property
    def quantized_bytes(self) -> int:
        return sum(row.quantized_bytes for row in self.rows)


def inspect_model(model: nn.Module, recipe: Recipe) -> Inspection:
    """One row for each layer that would be quantized, and one for all that stays in float."""
    twin, rows, counted = quantized_twin(expose(model), recipe.quantization), [], 0
    for name, module in twin.named_modules():
        if isinstance(module, QuantWeightMixin):
            kind = "linear" if isinstance(module, nn.Linear) else "convolution"
            rows.append(
                _linear(name, kind, module.weight, _bits(module.weight_quantizer), _bits(module.input_quantizer))
            )
            counted += module.weight.numel()
        elif isinstance(module, QuantMatmul):
            rows.append(_product(name, _bits(module.a_quantizer), _bits(module.b_quantizer)))
    return Inspection([*rows, _rest(sum(p.numel() for p in model.parameters()) - counted)])


def inspect_deployed(model: nn.Module) -> Inspection:
    """The same of a model that is quantized: deployed, or loaded with `maskaq.from_pretrained`."""
    rows, rest = [], sum(p.numel() for p in model.parameters())
    for name, module in model.named_modules():
        if isinstance(module, DeployedLinear | DeployedConv2d):
            kind = "linear" if isinstance(module, DeployedLinear) else "convolution"
            values = module.weight.codes if isinstance(module.weight, CodedWeight) else module.weight()
            rows.append(_linear(name, kind, values, _bits(module.weight), _bits(module.grid)))
            rest += 0 if module.bias is None else module.bias.numel()  # type: ignore[operator]
        elif isinstance(module, DeployedMatmul):
            rows.append(_product(name, _bits(module.a_grid), _bits(module.b_grid)))
    return Inspection([*rows, _rest(rest)])


def _linear(name: str, kind: str, weight: Tensor, bits: int | None, input_bits: int | None) -> LayerRow:
    before = after = 4 * weight.numel()
    if bits is not None:
        after = packed_bytes(weight.numel(), bits) + 4 * len(weight)  # codes, and a float scale a channel
    shape = " x ".join(str(n) for n in weight.shape)
    return LayerRow(name, kind, shape, str(bits or "float"), str(input_bits or "float"), before, after)


def _product(name: str, a_bits: int | None, b_bits: int | None) -> LayerRow:
    return LayerRow(name, "product", "", "", f"{a_bits or 'float'}, {b_bits or 'float'}", 0, 0)


def _rest(values: int) -> LayerRow:
    return LayerRow("all else", "biases, norms, embeddings", "", "float", "", 4 * values, 4 * values)


def _bits(part: Any) -> int | None:
    """Bits of a quantizer, of coded weights or of a fixed grid; None for what stays in float."""
    found: int | None = part.site.bits if isinstance(part, Quantizer) else getattr(part, "bits", None)
    return found
