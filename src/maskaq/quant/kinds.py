"""The kinds of layers that are quantized: what each is in full precision, in the student, and deployed."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from maskaq.errors import ModelError
from maskaq.models.products import Matmul
from maskaq.quant.deployed import DeployedConv2d, DeployedLinear, DeployedMatmul
from maskaq.quant.layers import QuantConv2d, QuantLinear, QuantMatmul


@dataclass(frozen=True)
class LayerKind:
    name: str
    float_type: type[nn.Module]
    quantized: Any
    """Has `from_float(layer, quantizer, quantizer)`, and `SLOT_quantizer` of each slot."""
    deployed: Any
    """Has `from_quantized(layer)` and `blank(float_layer, part, part)`."""
    slots: tuple[str, str]
    """Its tensors that can be quantized."""
    parts: tuple[str, str]
    """What they are called in the deployed layer."""

    def part(self, layer: nn.Module, slot: str) -> Any:
        """The quantizer of a student's slot, or the coded weight or grid of a deployed one."""
        if isinstance(layer, self.deployed):
            return getattr(layer, self.parts[self.slots.index(slot)])
        return getattr(layer, f"{slot}_quantizer", None)


KINDS = (
    LayerKind("linear", nn.Linear, QuantLinear, DeployedLinear, ("weight", "input"), ("weight", "grid")),
    LayerKind("convolution", nn.Conv2d, QuantConv2d, DeployedConv2d, ("weight", "input"), ("weight", "grid")),
    LayerKind("product", Matmul, QuantMatmul, DeployedMatmul, ("a", "b"), ("a_grid", "b_grid")),
)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a layer, in whatever form it is; None for a module that is not quantized."""
    return next((k for k in KINDS if type(module) in (k.float_type, k.quantized, k.deployed)), None)


def refuse_quantized(model: nn.Module) -> None:
    """ModelError for a student or a deployed model in the place of a full-precision one."""
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and type(module) is not kind.float_type:
            raise ModelError(
                f"this model is quantized already ({name} is a {type(module).__name__}); give the full-precision model "
                "it was made from"
            )


def layers(model: nn.Module) -> dict[str, tuple[nn.Module, LayerKind]]:
    """Name -> layer and kind, of all layers that can be quantized, in the model's order."""
    found = ((name, module, kind_of(module)) for name, module in model.named_modules())
    return {name: (module, kind) for name, module, kind in found if kind is not None}
