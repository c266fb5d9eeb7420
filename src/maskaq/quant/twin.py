"""The quantized twin Q of a teacher P: same modules under the same names, with quantizers at every linear map."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from maskaq.errors import ModelError
from maskaq.models import Matmul, geometry
from maskaq.quant.layers import QuantConv2d, QuantLinear, QuantMatmul, QuantWeightMixin
from maskaq.quant.quantizers import Quantizer, Site, make_quantizer
from maskaq.recipe.schema import Bits, Quantization


def quantized_twin(teacher: nn.Module, scheme: Quantization) -> nn.Module:
    """A quantized copy of an exposed model. Its ranges are not set yet: `init_ranges_` does that."""
    for name, module in teacher.named_modules():
        if isinstance(module, Quantizer) or (isinstance(module, Matmul) and type(module) is not Matmul):
            raise ModelError(
                f"this model is quantized already ({name} is a {type(module).__name__}); give the full-precision model "
                "it was made from"
            )
    twin = copy.deepcopy(teacher)
    for name, module in list(twin.named_modules()):
        layer: nn.Module
        if type(module) is nn.Linear or type(module) is nn.Conv2d:
            quant = QuantLinear if type(module) is nn.Linear else QuantConv2d
            weight, activation = (_quantizer(scheme, site) for site in linear_sites(teacher, name, module, scheme))
            layer = quant.from_float(module, weight, activation)  # type: ignore[arg-type]
        elif type(module) is Matmul:
            a, b = (_quantizer(scheme, site) for site in matmul_sites(name, module, scheme))
            layer = QuantMatmul.from_float(module, a, b)
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, layer)
    return twin.to(next(teacher.parameters()).device).eval().requires_grad_(True)


def linear_sites(
    teacher: nn.Module, name: str, module: nn.Module, scheme: Quantization
) -> tuple[Site | None, Site | None]:
    """Weight and input site of a linear layer; None is a tensor that stays in float."""
    facts, bits = geometry(teacher), Bits.parse(scheme.bits)
    weight = Site(f"{name}.weight", "weight", bits.weight, signed=True, channels=len(module.weight))  # type: ignore[arg-type]
    activation = Site(f"{name}.input", "activation", bits.activation, signed=True)
    if name in facts.first + facts.last:
        if scheme.first_last == "float":
            return None, None
        if scheme.first_last == "8":
            weight, activation = replace(weight, bits=8), replace(activation, bits=8)
    return weight, None if name in facts.first else activation  # the image itself is never quantized


def matmul_sites(name: str, module: Matmul, scheme: Quantization) -> tuple[Site, Site]:
    bits = Bits.parse(scheme.bits).activation
    a, b = (
        Site(f"{name}.{side}", "activation", bits, signed) for side, signed in zip("ab", module.signed, strict=True)
    )
    return a, b


def _quantizer(scheme: Quantization, site: Site | None) -> nn.Module:
    if site is None:
        return nn.Identity()
    return make_quantizer(scheme.weight if site.role == "weight" else scheme.activation, site)


def quantizers(student: nn.Module) -> dict[str, Quantizer]:
    """Module path -> quantizer, in the model's order."""
    return {name: module for name, module in student.named_modules() if isinstance(module, Quantizer)}


@torch.no_grad()
def init_ranges_(student: nn.Module, images: Tensor, scheme: Quantization, batch: int = 32) -> None:
    """Set the range of every quantizer: weights from themselves, activations from what these images give in float.

    Weights that have a range keep it: called again, with better images, this sets the activations anew.
    """
    activations = [q for q in quantizers(student).values() if q.site.role == "activation"]
    for module in student.modules():
        quantizer = module.weight_quantizer if isinstance(module, QuantWeightMixin) else None
        if isinstance(quantizer, Quantizer) and not quantizer.ready:
            quantizer.set_range(module.weight, scheme.weight_range, scheme.percentile)  # type: ignore[arg-type]
    try:
        for q in activations:
            q.observed = []
        with _float_weights(student):
            for part in images.split(batch):
                student(part)
        for q in activations:
            q.set_range(torch.cat(q.observed or []), scheme.activation_range, scheme.percentile)
    finally:
        for q in activations:
            q.observed = None


@contextmanager
def frozen(student: nn.Module, weight_cache: dict[nn.Module, Tensor] | None = None) -> Iterator[None]:
    """Hold the student still: weights quantized once, no gradient to any parameter. For synthesis and evaluation.

    Args:
        weight_cache: keeps the quantized weights of each layer in the same memory from one call to the next.
    """
    weight_cache = {} if weight_cache is None else weight_cache
    trained = [p for p in student.parameters() if p.requires_grad]
    layers = [m for m in student.modules() if isinstance(m, QuantWeightMixin)]
    held = [layer.held_weight for layer in layers]  # by an outer `frozen`, or None
    try:
        student.requires_grad_(False)
        for layer in layers:
            weight = layer.quantized_weight().detach()
            layer.held_weight = (
                weight_cache[layer].copy_(weight) if layer in weight_cache else weight_cache.setdefault(layer, weight)
            )
        yield
    finally:
        for layer, before in zip(layers, held, strict=True):
            layer.held_weight = before
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _float_weights(student: nn.Module) -> Iterator[None]:
    layers = [m for m in student.modules() if isinstance(m, QuantWeightMixin)]
    try:
        for layer in layers:
            layer.held_weight = layer.weight.detach()
        yield
    finally:
        for layer in layers:
            layer.held_weight = None
