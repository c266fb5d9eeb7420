"""Layers as plain ones: BatchNorm folded into the layer before it, special convolutions written as usual ones, and
torch's multi-head attention with a linear layer each for q, k and v.

In a frozen model all of this is constant, so the outputs stay the same and every weight can be quantized. A BatchNorm
that does not follow a convolution or a linear layer stays, in float.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import BatchNormAct2d, Conv2dSame, StdConv2d, StdConv2dSame
from timm.layers.padding import get_same_padding
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from maskaq.models.structure import replace_module

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, BatchNormAct2d)


@torch.no_grad()
def fold_(model: nn.Module, image: Tensor) -> bool:
    """Fold what can be folded, in place; whether there was anything."""
    modules = list(model.modules())
    _write_plainly(model, image)
    for name, (layer, norm) in _pairs(model, image).items():
        _fold(layer, norm)
        replace_module(model, name, norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity())
    for module in model.modules():
        if isinstance(module, _NORMS):
            module.num_batches_tracked = None  # of no use any more, and no weight
            module.track_running_stats = False  # else it would be looked for in every file
    return modules != list(model.modules())


def _pairs(model: nn.Module, image: Tensor) -> dict[str, tuple[Any, Any]]:
    """Name of a norm -> the layer whose output it alone reads, and the norm; each is run once."""
    made: dict[int, tuple[Any, Tensor]] = {}
    calls: dict[nn.Module, int] = {}
    found: dict[nn.Module, Any] = {}

    def after(module: nn.Module, args: Any, output: Any) -> None:
        calls[module] = calls.get(module, 0) + 1
        if isinstance(module, _NORMS):
            found[module] = made.get(id(args[0]), (None, None))[0]
        else:
            made[id(output)] = (module, output)

    if not any(isinstance(module, _NORMS) for module in model.modules()):
        return {}
    kinds = (nn.Conv2d, nn.Linear)
    watched = [module for module in model.modules() if isinstance(module, _NORMS) or type(module) in kinds]
    with _hooked(watched, after), _Uses(made) as uses:
        model(image)
    read_once = {module for key, (module, _) in made.items() if uses.count.get(key) == 1}
    once = {n: layer for n, layer in found.items() if layer in read_once and calls[n] == calls[layer] == 1}
    return {
        name: (once[module], module) for name, module in model.named_modules() if module in once and _is_plain(module)
    }


class _Uses(TorchFunctionMode):
    """Counts what reads each of some tensors."""

    def __init__(self, made: dict[int, tuple[Any, Tensor]]) -> None:
        super().__init__()
        self.made = made
        self.count: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("__get__", "dim", "size"):
            for value in args:
                if isinstance(value, Tensor) and id(value) in self.made:
                    self.count[id(value)] = self.count.get(id(value), 0) + 1
        return func(*args, **(kwargs or {}))


def _is_plain(norm: Any) -> bool:
    return norm.running_var is not None and isinstance(getattr(norm, "drop", None), nn.Identity | None)


def _fold(layer: Any, norm: Any) -> None:
    """W' = g W and b' = g (b - mean) + shift, with g = scale / sqrt(variance + eps)."""
    if layer.weight.is_meta:
        layer.bias = nn.Parameter(torch.empty(len(layer.weight), device="meta"), requires_grad=False)
        return
    gain = (norm.running_var.double() + norm.eps).rsqrt()
    gain = gain if norm.weight is None else gain * norm.weight.double()
    bias = 0 if layer.bias is None else layer.bias.double()
    shift = 0 if norm.bias is None else norm.bias.double()
    weight = layer.weight.double() * gain.view(-1, *[1] * (layer.weight.dim() - 1))
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    layer.bias = nn.Parameter((gain * (bias - norm.running_mean.double()) + shift).float(), requires_grad=False)


def _write_plainly(model: nn.Module, image: Tensor) -> None:
    """Convolutions that pad by the size of their input, or standardise their weight, as plain ones."""
    special = [module for module in model.modules() if type(module) in (Conv2dSame, StdConv2d, StdConv2dSame)]
    sizes: dict[nn.Module, tuple[int, int]] = {}

    def after(module: nn.Module, args: Any, output: Any) -> None:
        sizes[module] = tuple(args[0].shape[2:])

    if special:
        with _hooked(special, after):
            model(image)
    for name, module in list(model.named_modules()):
        if module in sizes:
            replace_module(model, name, _plain(module, sizes[module]))
        elif type(module) is nn.ConvTranspose2d and _is_enlarging(module):
            replace_module(model, name, _shuffled(module))
        elif type(module) is nn.MultiheadAttention and module.bias_k is None:
            replace_module(model, name, MultiheadAttention(module).eval())


def _is_enlarging(conv: Any) -> bool:
    """Whether every pixel becomes a square of pixels of its own: no two of them overlap."""
    plain = conv.padding == (0, 0) and conv.output_padding == (0, 0) and conv.dilation == (1, 1) and conv.groups == 1
    return plain and conv.kernel_size == conv.stride and conv.stride[0] == conv.stride[1]


def _shuffled(conv: Any) -> nn.Sequential:
    """A transposed convolution without overlap: a 1x1 convolution to all pixels of a square, then their shuffle.

    Its weight has its output channels first, as all that is quantized, and any runtime multiplies it in integers.
    """
    side = conv.stride[0]
    weight = conv.weight.permute(1, 2, 3, 0).flatten(0, 2)[..., None, None]  # (out, side, side, in) -> (out', in, 1, 1)
    plain = nn.Conv2d(conv.in_channels, len(weight), 1, bias=conv.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if conv.bias is not None:
        plain.bias = nn.Parameter(conv.bias.detach().repeat_interleave(side * side), requires_grad=False)
    return nn.Sequential(plain, nn.PixelShuffle(side))


class MultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` as layers and one attention; it gives no maps, which nobody asks for."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.num_heads: int = attention.num_heads
        self.batch_first: bool = attention.batch_first
        self.in_proj_bias = None  # so that nn.TransformerEncoderLayer calls it
        biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
        if attention.in_proj_weight is None:  # keys or values have a width of their own
            weights = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
        else:
            weights = attention.in_proj_weight.chunk(3)
        self.q, self.k, self.v = (_linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.out_proj = _linear(attention.out_proj.weight, attention.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        tokens = (query, key, value) if self.batch_first else (x.transpose(0, 1) for x in (query, key, value))
        layers = (self.q, self.k, self.v)
        q, k, v = (f(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for f, x in zip(layers, tokens, strict=True))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask  # True is what is left out, there what is seen
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        return (output if self.batch_first else output.transpose(0, 1)), None


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return linear


def _plain(conv: Any, size: tuple[int, int]) -> nn.Module:
    plain = nn.Conv2d(
        *(conv.in_channels, conv.out_channels, conv.kernel_size),
        stride=conv.stride,
        dilation=conv.dilation,
        groups=conv.groups,
        bias=conv.bias is not None,
        device="meta",
    )
    weight = conv.weight
    if isinstance(conv, StdConv2d | StdConv2dSame) and not weight.is_meta:
        rows = weight.double().flatten(1)
        variance, mean = torch.var_mean(rows, dim=1, unbiased=False, keepdim=True)
        weight = ((rows - mean) * (variance + conv.eps).rsqrt()).view_as(weight).float()
    plain.weight = nn.Parameter(weight.detach(), requires_grad=False)
    plain.bias = conv.bias
    if isinstance(conv, Conv2dSame | StdConv2dSame) and getattr(conv, "same_pad", True):
        sides = zip(size, conv.kernel_size, conv.stride, conv.dilation, strict=True)
        height, width = (get_same_padding(*side) for side in sides)
        ends = (width // 2, width - width // 2, height // 2, height - height // 2)
        if ends[0] != ends[1] or ends[2] != ends[3]:
            return nn.Sequential(nn.ZeroPad2d(ends), plain)
        plain.padding = (ends[2], ends[0])
    else:
        plain.padding = conv.padding
    return plain


@contextmanager
def _hooked(modules: list[nn.Module], hook: Any) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
