"""Run a model once and record what it does: which modules compute attention, on which grids, and what reads the image.

On the meta device this costs nothing and shows everything except values.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from maskaq.errors import ModelError
from maskaq.models import hf
from maskaq.models.rewiring import method_of
from maskaq.randomness import image_keys, normal

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm")
_OTHER_PRODUCTS = ("einsum", "baddbmm")
_SPATIAL = ("conv2d", "max_pool2d", "avg_pool2d")
# Functions that only move values: the output of a softmax remains one.
_MOVES = (
    *("transpose", "permute", "reshape", "view", "contiguous", "to", "type_as", "unflatten", "flatten", "squeeze"),
    *("unsqueeze", "dropout", "expand", "float", "__get__", "swapaxes", "movedim"),
)


@dataclass
class Seen:
    """What happened in one forward pass."""

    output: Any = None
    attentions: dict[str, set[str]] = field(default_factory=dict)
    """Module -> its methods that call `scaled_dot_product_attention`."""
    products: dict[str, set[str]] = field(default_factory=dict)
    """Module -> its methods that multiply two activations."""
    softmaxes: dict[str, set[str]] = field(default_factory=dict)
    """Module -> its methods that compute a softmax."""
    other_products: dict[str, set[str]] = field(default_factory=dict)
    """Module -> those of them whose product may be of another form than `a @ b`."""
    unreached: dict[str, None] = field(default_factory=dict)
    """Functions, not methods of a module, that compute attention."""
    grids: dict[tuple[int, int], None] = field(default_factory=dict)
    """Heights and widths of the feature maps."""
    inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """Module -> what it was called with."""
    outputs: dict[str, Any] = field(default_factory=dict)
    of_image: set[str] = field(default_factory=set)
    """Modules whose first input depends on the image."""


def watch(model: nn.Module, image: Tensor) -> Seen:
    """Run and record one forward pass."""
    seen = Seen()
    names = {id(module): name for name, module in model.named_modules()}
    with torch.enable_grad(), _recording(model, seen), _Watch(names, seen):  # parameters are frozen
        seen.output = model(image.clone().requires_grad_())
    return seen


def probe_image(model: nn.Module, channels: int, size: tuple[int, int]) -> Tensor:
    """(1, C, H, W) of fixed noise, where the model is."""
    first = next(model.parameters())
    if first.is_meta:
        return torch.empty(1, channels, *size, device="meta")
    return normal(image_keys(0, torch.zeros(1, dtype=torch.int64)), channels, *size).to(first.device)


@contextmanager
def _recording(model: nn.Module, seen: Seen) -> Iterator[None]:
    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        values = [*args, *kwargs.values()]
        if any(isinstance(value, Tensor) and value.requires_grad for value in values):
            seen.of_image.add(name)
        seen.inputs.setdefault(name, (args, kwargs))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        seen.outputs[name] = output

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch(TorchFunctionMode):
    def __init__(self, names: dict[int, str], seen: Seen) -> None:
        super().__init__()
        self.names, self.seen = names, seen
        self.functions: dict[Any, set[str]] = {}
        """Code of a function that is no method of a module -> its parts of an attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self._note(self.seen.attentions, "product", "softmax")
        elif name in _PRODUCTS:
            self._note(self.seen.products, "product")
        elif name in _OTHER_PRODUCTS:
            for where in (self.seen.products, self.seen.other_products):
                self._note(where, "product")
        elif name == "softmax":
            self._note(self.seen.softmaxes, "softmax")
        elif name in _SPATIAL and isinstance(output, Tensor) and output.dim() == 4:
            self.seen.grids[tuple(output.shape[2:])] = None  # type: ignore[index]
        return output

    def _note(self, where: dict[str, set[str]], *parts: str) -> None:
        """Note the module and the method that a call comes from; of a function that is no method, its parts."""
        module, method, code = self._caller()
        if module is not None:
            where.setdefault(module, set()).add(method)
            return
        computed = self.functions.setdefault(code, set())
        computed.update(parts)
        if len(computed) == 2:
            self.seen.unreached[code.co_name] = None

    def _caller(self) -> tuple[str | None, str, Any]:
        """The module, the method and the code that a call comes from; None where it is no method of a module."""
        frame = sys._getframe(2)
        while frame.f_back is not None and (frame.f_code.co_filename.startswith(_TORCH) or _is_ours(frame)):
            frame = frame.f_back
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and code is hf.attention.__code__:
            return self.names.get(id(owner)), "", code  # transformers hands it over: there is nothing to rewire
        method = method_of(type(owner), code) if isinstance(owner, nn.Module) else None
        return (None, "", code) if method is None else (self.names.get(id(owner)), method, code)


def _is_ours(frame: Any) -> bool:
    return frame.f_code.co_filename == __file__


class Softmaxed(TorchFunctionMode):
    """Records which tensors are outputs of a softmax, at most reshaped: they are never negative."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        moved = name in _MOVES and args and id(args[0]) in self.kept
        if isinstance(output, Tensor) and (name == "softmax" or moved):
            self.kept[id(output)] = output
        return output


WANTED = {
    "classification": "one row for each image, logits or features",
    "features": "one row for each image, logits or features",
    "segmentation": "logits of every pixel, (B, classes, height, width)",
    "detection": "tensors by name, with `boxes` among them, and an attribute `predictors`, as a MaskRCNN of maskaq",
}
"""What a model gives, by its task."""


def refuse_output(output: Any, model: nn.Module, task: str) -> None:
    """ModelError where a model of this task should give something else."""
    dims = {"segmentation": 4, "detection": None}.get(task, 2)
    if dims is None:
        fits = isinstance(output, dict) and "boxes" in output and hasattr(model, "predictors")
    else:
        fits = isinstance(output, Tensor) and output.dim() == dims
    if not fits:
        shape = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ModelError(f"this {hf.class_name(model)} gives {shape}: expected {WANTED[task]}")
