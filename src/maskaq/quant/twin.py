"""The quantized twin Q of a teacher P: same modules under the same names, with quantizers at every linear map."""

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from maskaq.errors import ModelError
from maskaq.models.structure import put_relu_, replace_module
from maskaq.quant.kinds import layers, refuse_quantized
from maskaq.quant.layers import QuantWeightMixin, holding
from maskaq.quant.plan import QuantPlan, build_plan
from maskaq.quant.quantizers import Quantizer, make_quantizer
from maskaq.quant.rotation import rotate_online_
from maskaq.recipe.schema import Quantization


def quantized_twin(teacher: nn.Module, scheme: Quantization, plan: QuantPlan | None = None) -> nn.Module:
    """A quantized copy of an exposed model. Its ranges are not set yet; `init_ranges_` sets them.

    Args:
        plan: what is quantized and how; by default as the scheme says.
    """
    refuse_quantized(teacher)
    plan = build_plan(teacher, scheme) if plan is None else plan
    twin = rotate_online_(copy.deepcopy(teacher))
    if scheme.mlp == "relu":
        put_relu_(twin)
    known = {f"{name}.{slot}" for name, (_, kind) in layers(twin).items() for slot in kind.slots}
    if odd := plan.sites.keys() - known:
        raise ModelError(f"the plan has {len(odd)} sites that this model does not have, {min(odd)!r} first")
    for name, (module, kind) in layers(twin).items():
        sites = (plan.get(name, slot) for slot in kind.slots)
        parts = (nn.Identity() if site is None else make_quantizer(site.quantizer, site) for site in sites)
        replace_module(twin, name, kind.quantized.from_float(module, *parts))
    return twin.to(next(teacher.parameters()).device).eval().requires_grad_(True)


@torch.no_grad()
def deploy(student: nn.Module) -> nn.Module:
    """A calibrated student as a deployed model: a copy, in eval mode, on the CPU, without gradients."""
    model = copy.deepcopy(student).cpu().eval().requires_grad_(False)
    for name, (module, kind) in layers(model).items():
        if isinstance(module, kind.quantized):
            replace_module(model, name, kind.deployed.from_quantized(module))
    return model


def quantizers(student: nn.Module) -> dict[str, Quantizer]:
    """Module path -> quantizer, in the model's order."""
    return {name: module for name, module in student.named_modules() if isinstance(module, Quantizer)}


@torch.no_grad()
def init_ranges_(student: nn.Module, images: Tensor, scheme: Quantization, batch: int = 32) -> None:
    """Set the range of every quantizer: weights from themselves, activations from what these images give.

    Weights that have a range keep it: called again with better images, this resets only the activations.
    """
    set_weight_ranges_(student, scheme, only_unset=True)
    set_activation_ranges_(student, images, scheme, batch)


@torch.no_grad()
def set_activation_ranges_(
    student: nn.Module, images: Tensor, scheme: Quantization, batch: int = 32, keep: Collection[Quantizer] = ()
) -> None:
    """Find the range of every activation except those to keep, in the float model or behind quantized layers."""
    found = [q for q in quantizers(student).values() if q.site.role == "activation" and q not in keep]

    def in_order(quantizer: Any, inputs: Any, output: Tensor) -> Tensor:
        """Set the range at once, so that later layers see quantized values."""
        quantizer.set_observed_range(scheme.percentile)
        return cast(Tensor, quantizer.fake_quantize(inputs[0]))

    with ExitStack() as stack:
        if scheme.range_inputs == "quantized":
            for q in found:
                stack.enter_context(q.register_forward_hook(in_order))
        else:
            stack.enter_context(in_float(student))
        try:
            for q in found:
                q.observed = []
            for part in images.split(batch):
                student(part)
            for q in found:
                q.set_observed_range(scheme.percentile)
        finally:
            for q in found:
                q.observed = None


@contextmanager
def frozen(student: nn.Module, weight_cache: dict[nn.Module, Tensor] | None = None) -> Iterator[None]:
    """Context in which the student is frozen: weights quantized once, no gradients to parameters.

    Args:
        weight_cache: keeps the quantized weights of each layer in the same memory from one call to the next.
    """
    weight_cache = {} if weight_cache is None else weight_cache
    trained = [p for p in student.parameters() if p.requires_grad]
    held: dict[QuantWeightMixin, Tensor] = {}
    try:
        student.requires_grad_(False)
        for layer in student.modules():
            if isinstance(layer, QuantWeightMixin):
                weight = layer.quantized_weight().detach()
                held[layer] = (
                    weight_cache[layer].copy_(weight)
                    if layer in weight_cache
                    else weight_cache.setdefault(layer, weight)
                )
        with holding(held):
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def in_float(student: nn.Module) -> Iterator[None]:
    """Context in which nothing is quantized: the float model with the student's current weights."""
    before = {quantizer: quantizer.drop for quantizer in quantizers(student).values()}
    try:
        for quantizer in before:
            quantizer.drop = 1.0
        yield
    finally:
        for quantizer, drop in before.items():
            quantizer.drop = drop


@torch.no_grad()
def float_inputs(student: nn.Module, images: Tensor, names: Iterable[str], batch: int = 32) -> dict[str, list[Tensor]]:
    """Layer -> each of its inputs for all images, while nothing is quantized."""
    seen: dict[str, list[list[Tensor]]] = {name: [] for name in names}

    def listener(name: str) -> Any:
        return lambda module, inputs: seen[name].append([x.detach() for x in inputs])

    handles = [student.get_submodule(name).register_forward_pre_hook(listener(name)) for name in seen]
    try:
        with in_float(student):
            for part in images.split(batch):
                student(part)
    finally:
        for handle in handles:
            handle.remove()
    return {name: [torch.cat(parts) for parts in zip(*calls, strict=True)] for name, calls in seen.items()}


@torch.no_grad()
def set_weight_ranges_(student: nn.Module, scheme: Quantization, only_unset: bool = False) -> None:
    """Find the range of every weight, or only of those that have none yet."""
    for module in student.modules():
        if isinstance(module, QuantWeightMixin) and isinstance(module.weight_quantizer, Quantizer):
            quantizer = module.weight_quantizer
            if not (only_unset and quantizer.ready):
                quantizer.set_range(module.weight, quantizer.site.range, scheme.percentile)
