"""What a recipe would do to a model: every layer, its bits and its bytes."""

from dataclasses import dataclass

from torch import nn

from maskaq.config import Recipe
from maskaq.models import expose
from maskaq.quant.layers import QuantMatmul, QuantWeightMixin
from maskaq.quant.quantizers import Quantizer
from maskaq.quant.twin import quantized_twin


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
    """One row for each quantized layer, and one for all that stays in float."""
    twin = quantized_twin(expose(model), recipe.quantization)
    rows, counted = [], 0
    for name, module in twin.named_modules():
        if isinstance(module, QuantWeightMixin):
            weight = module.weight
            counted += weight.numel()
            kind = "linear" if isinstance(module, nn.Linear) else "convolution"
            shape = " x ".join(str(n) for n in weight.shape)
            quantizer, of_input = module.weight_quantizer, module.input_quantizer
            stored = weight.numel() * 4
            if isinstance(quantizer, Quantizer):
                stored = -(-weight.numel() * quantizer.site.bits // 8) + 4 * len(
                    weight
                )  # codes and a float scale a channel
            rows.append(LayerRow(name, kind, shape, _bits(quantizer), _bits(of_input), weight.numel() * 4, stored))
        elif isinstance(module, QuantMatmul):
            bits = f"{_bits(module.a_quantizer)}, {_bits(module.b_quantizer)}"
            rows.append(LayerRow(name, "product", "", "", bits, 0, 0))
    rest = 4 * (sum(p.numel() for p in model.parameters()) - counted)
    rows.append(LayerRow("all else", "biases, norms, embeddings", "", "float", "", rest, rest))
    return Inspection(rows)


def _bits(quantizer: object) -> str:
    return str(quantizer.site.bits) if isinstance(quantizer, Quantizer) else "float"
