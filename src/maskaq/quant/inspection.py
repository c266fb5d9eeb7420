"""What a recipe would do to a model, or did to a saved one: every layer, its bits and its bytes."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from maskaq.quant.deployed import CodedWeight, DeployedConv2d, DeployedLinear, FloatWeight
from maskaq.quant.kinds import layers
from maskaq.quant.packing import packed_bytes
from maskaq.quant.plan import QuantPlan
from maskaq.quant.quantizers import Quantizer
from maskaq.quant.rotation import rotated, teacher_of
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
    quantizers: str = ""
    """Names of the quantizers of its two tensors, where they are known; `/head` where each head has a range."""
    rotation: str = ""
    """The rotation that its inputs have gone through."""


@dataclass(frozen=True)
class Inspection:
    rows: list[LayerRow]
    left_out: tuple[str, ...] = ()
    """Rotations that the model's structure forbids, and why."""

    @property
    def float_bytes(self) -> int:
        return sum(row.float_bytes for row in self.rows)

    @property
    def quantized_bytes(self) -> int:
        return sum(row.quantized_bytes for row in self.rows)


def inspect_model(model: nn.Module, recipe: Recipe, plan: QuantPlan | None = None) -> Inspection:
    """One row for each layer that would be quantized, and one for all that stays in float."""
    teacher = teacher_of(model, recipe.quantization)
    student = quantized_twin(teacher, recipe.quantization, plan)
    return _inspect(student, sum(p.numel() for p in teacher.parameters()))


def inspect_deployed(model: nn.Module) -> Inspection:
    """The same of a model that is quantized: deployed, or loaded with `maskaq.from_pretrained`."""
    buffers: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, CodedWeight):
            buffers.append(module.codes)
        elif isinstance(module, FloatWeight):
            buffers.append(module())
        elif isinstance(module, DeployedLinear | DeployedConv2d) and module.bias is not None:
            buffers.append(module.bias)  # type: ignore[arg-type]
    return _inspect(model, sum(tensor.numel() for tensor in (*buffers, *model.parameters())))


def _inspect(model: nn.Module, values: int) -> Inspection:
    rows = []
    for name, (module, kind) in layers(model).items():
        parts = [kind.part(module, slot) for slot in kind.slots]
        first, second = map(_bits, parts)
        sites = [site for part in parts if (site := getattr(part, "site", None)) is not None]
        names = ", ".join(site.quantizer + "/head" * bool(site.heads) for site in sites)
        turned = ", ".join(dict.fromkeys(site.rotation for site in sites if site.rotation))
        if kind.name == "product":
            bits = f"{first or 'float'}, {second or 'float'}"
            rows.append(LayerRow(name, kind.name, "", "", bits, 0, 0, names, turned))
            continue
        weight = _weight_of(module)
        values -= weight.numel()
        rows.append(replace(_linear(name, kind.name, weight, first, second), quantizers=names, rotation=turned))
    return Inspection([*rows, _rest(values)], rotated(model).left_out)


def _weight_of(module: Any) -> Tensor:
    weight = module.weight
    found: Tensor = weight.codes if isinstance(weight, CodedWeight) else weight
    return weight() if isinstance(weight, FloatWeight) else found


def _linear(name: str, kind: str, weight: Tensor, bits: int | None, input_bits: int | None) -> LayerRow:
    before = after = 4 * weight.numel()
    if bits is not None:
        after = packed_bytes(weight.numel(), bits) + 4 * len(weight)  # codes, and a float scale a channel
    shape = " x ".join(str(n) for n in weight.shape)
    return LayerRow(name, kind, shape, str(bits or "float"), str(input_bits or "float"), before, after)


def _rest(values: int) -> LayerRow:
    return LayerRow("all else", "biases, norms, embeddings", "", "float", "", 4 * values, 4 * values)


def _bits(part: Any) -> int | None:
    """Bits of a quantizer, of coded weights or of a fixed grid; None for what stays in float."""
    found: int | None = part.site.bits if isinstance(part, Quantizer) else getattr(part, "bits", None)
    return found
