"""Any other model: its attention is found by running it once, and its own code is made to call our products.

Two ways of writing attention are seen: `F.scaled_dot_product_attention`, and products around a softmax, as `a @ b` or
with `einsum`. The module that does either gets a child `products` with the products as modules, so that they can be
quantized and tapped; its parameters, its other code and its result stay as they are. Afterwards the model is run again:
every attention must have gone through its products, and the outputs must be the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.errors import ModelError, first_line
from maskaq.models import hf, probe, rewiring, swinv2
from maskaq.models.folding import MultiheadAttention, fold_
from maskaq.models.layout import Layout, find_layout, is_in_raster_order
from maskaq.models.products import AttentionProducts, Matmul
from maskaq.models.structure import Exposed, main_output, outputs_again, tensors_of
from maskaq.shapes import Layer

HEADS = ("num_heads", "heads", "n_heads", "num_attention_heads")
_SWITCHES = ("fused_attn", "qkv_bias_separate")
"""Attributes of timm's modules: attention by the one function; q, k and v by a layer that is called, and its bias."""
_QUANTIZED = (nn.Linear, nn.Conv2d)
_TOLERANCE = 1e-4  # of the largest output: what sums in another order, of many layers, may differ by


class Fused(AttentionProducts):
    """The products of `F.scaled_dot_product_attention`, called in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 0
        self.windows_first = False
        """Of five axes, whether windows come before heads."""

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The same as torch's function; without dropout, which a frozen model does not have."""
        q, k, v, bias = self._four_axes(query, key, value, attn_mask)
        heads = self.attend(q, k, v, bias)
        if query.dim() == 5:
            heads = heads.unflatten(0, (query.shape[0], -1))  # len would fix the batch size of an exported graph
            return heads if self.windows_first else heads.transpose(1, 2)
        return heads.flatten(0, 1) if query.dim() == 3 else heads

    def scaled(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        """(B*W, H, T, D), with a learned gain for each head in the place of one scale."""
        return self.attend(q, k, v, bias, gain)

    def bind(self, query: Tensor, is_causal: bool, scale: float | None, heads: int) -> None:
        """Set the scale and the number of heads from a first call: they are the same in all calls."""
        if is_causal:
            raise ModelError("causal attention is not a vision transformer's: maskaq has no mask for it")
        if query.dim() not in (3, 4, 5):
            raise ModelError(f"attention over {query.dim()} axes cannot be quantized: expected 3 to 5")
        self.scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        self.windows_first = query.dim() == 5 and query.shape[2] == heads != query.shape[1]
        axis = {3: 0, 4: 1, 5: 2 if self.windows_first else 1}[query.dim()]
        self.num_heads = heads if query.dim() == 3 and heads else query.shape[axis]

    def _four_axes(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(B*W, H, T, D) of all three, and the mask as what is added, (W, H, T, T)."""
        if q.dim() == 5:
            q, k, v = ((x if self.windows_first else x.transpose(1, 2)).flatten(0, 1) for x in (q, k, v))
        elif q.dim() == 3:
            q, k, v = (x.unflatten(0, (-1, self.num_heads)) for x in (q, k, v))
            mask = None if mask is None or mask.dim() < 3 else mask.unflatten(0, (-1, self.num_heads))
        if k.shape[1] != q.shape[1]:  # heads that share keys and values
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if mask is None:
            return q, k, v, None
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        mask = mask[(None,) * (4 - mask.dim())]
        return q, k, v, mask.expand(mask.shape[0], q.shape[1], q.shape[2], k.shape[2])


class WrittenOut(AttentionProducts):
    """The products `a @ b` of an attention that is written out around a softmax."""

    def __init__(self) -> None:
        super().__init__()
        del self.qk, self.softmax, self.av
        self.num_heads = 0
        self.names: dict[str, str] = {}
        """Place in the source -> name of the product."""

    def multiply(self, place: str, a: Tensor, b: Tensor) -> Tensor:
        name = self.names[place]
        if name == "qk" and self.watched is not None:
            self.watched(a, b.transpose(-2, -1))
        product: Tensor = getattr(self, name)(a, b)
        if self.listened:
            self._record(name, a, product)
        return product

    def _record(self, name: str, a: Tensor, product: Tensor) -> None:
        points = {"scores": product} if name == "qk" else {"probs": a, "heads": product} if name == "av" else {}
        received = {f"{key}_received": self._received(points[key]) for key in ("scores", "probs") if key in points}
        self.passed = {**self.passed, **{k: v for k, v in {**points, **received}.items() if k in self.listened}}


@dataclass(frozen=True)
class _Product:
    """What is recorded of a product `a @ b` in the first forward pass with it."""

    signed: tuple[bool, bool]
    """Whether each operand can be negative; the output of a softmax cannot."""
    heads: int
    """The second of four axes; 0 where there are not four."""


def expose_(model: nn.Module, image: Tensor, task: str = "classification") -> Exposed:
    """Give every attention of a model its products, in place."""
    for module in model.modules():
        for switch in _SWITCHES:
            if getattr(module, switch, None) is False:
                setattr(module, switch, True)
    for name, value in model.state_dict().items():
        if not value.is_meta and not torch.isfinite(value).all():
            raise ModelError(f"the weights contain NaN or Inf ({name}): load a file that is not damaged")
    try:
        before = probe.watch(model, image)
    except Exception as error:  # whatever a model says to an image that it was not built for
        raise ModelError(
            f"this {hf.class_name(model)} does not run on an image of {tuple(image.shape[1:])}: {first_line(error)}. "
            "If it was built for another size, set model.pretrained_cfg = {'input_size': (channels, height, width)}"
        ) from error
    probe.refuse_output(before.output, model, task)
    expected = before.output
    try:
        if fold_(model, image):
            before = probe.watch(model, image)
    except Exception as error:
        if not any(isinstance(module, MultiheadAttention) for module in model.modules()):
            raise
        raise ModelError(
            f"this {hf.class_name(model)} cannot do without the maps that nn.MultiheadAttention returns "
            f"({first_line(error)}): expected a model that ignores them"
        ) from error
    if before.unreached:
        raise ModelError(
            f"attention is computed by {next(iter(before.unreached))}, which is no method of a module of this "
            f"{hf.class_name(model)}: compute it in a method of the attention module"
        )
    owners = _rewire(model, before)
    _bind(model, owners, image)
    _refuse_other_products(owners, before)
    _check(model, owners, expected, image)
    after = probe.watch(model, image)
    _leave_in_float(model, after)
    if after.attentions:
        raise ModelError(
            f"the attention of {next(iter(after.attentions))!r} cannot be reached: maskaq cannot expose it"
        )
    return _described(model, owners, after, image)


def _rewire(model: nn.Module, seen: probe.Seen) -> dict[str, Any]:
    """Module path -> module, with its products; modules that compute attention in one of the two ways."""
    owners: dict[str, Any] = {}
    written_out = {name: seen.products[name] for name in seen.products if name in seen.softmaxes}
    for name, methods in {**written_out, **seen.attentions}.items():
        module: Any = model.get_submodule(name)
        if hasattr(module, rewiring.CHILD):
            raise ModelError(f"layer {name!r} has a member {rewiring.CHILD!r} of its own: maskaq needs that name")
        cls = type(module)
        own = swinv2.EXPOSED.get(cls)
        fused = name in seen.attentions or own is not None
        if own is not None or methods - {""}:
            module.__class__ = own or rewiring.rewired(cls, methods - {""}, matmuls=not fused)
        module.products = Fused() if fused else WrittenOut()
        if own is not None:
            module.products.scale, module.products.num_heads = 1.0, module.num_heads
        owners[name] = module
    return owners


def _refuse_other_products(owners: dict[str, Any], seen: probe.Seen) -> None:
    """ModelError where a product of an attention would stay in float without a word."""
    for name in seen.other_products:
        products = owners[name].products if name in owners else None
        found = 2 if isinstance(products, Fused) else len(products.names) if products is not None else 0
        if name in seen.softmaxes and found < 2:
            raise ModelError(
                f"the attention of {name!r} is computed with baddbmm, or an einsum that is no product of two tensors: "
                "write its products with @ or scaled_dot_product_attention"
            )


def _bind(model: nn.Module, owners: dict[str, Any], image: Tensor) -> None:
    """Run the model once with products that only record, and set them up from what they recorded."""
    softmaxed = probe.Softmaxed()
    found: dict[str, dict[str, _Product]] = {name: {} for name in owners}  # of each owner by place in the source
    for name, module in owners.items():
        products = module.products
        if isinstance(products, Fused):
            products.attention = _recording_attention(module)  # type: ignore[method-assign]
        else:
            products.multiply = _recording_products(found[name], softmaxed)  # type: ignore[method-assign]
    try:
        with torch.no_grad(), softmaxed:
            model(image)
    finally:
        for module in owners.values():
            module.products.__dict__.pop("attention", None)
            module.products.__dict__.pop("multiply", None)
    for name, module in owners.items():
        if isinstance(module.products, WrittenOut):
            _name_products(module.products, found[name])


def _recording_attention(module: Any) -> Callable[..., Tensor]:
    heads = next((int(getattr(module, key)) for key in HEADS if _is_number(module, key)), 0)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        module.products.bind(query, is_causal, scale, heads)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa)

    return attention


def _recording_products(found: dict[str, _Product], softmaxed: probe.Softmaxed) -> Callable[..., Tensor]:
    def multiply(place: str, a: Tensor, b: Tensor) -> Tensor:
        heads = a.shape[1] if a.dim() == b.dim() == 4 else 0
        found.setdefault(place, _Product((a not in softmaxed, b not in softmaxed), heads))
        return a @ b

    return multiply


def _is_number(module: Any, key: str) -> bool:
    return type(getattr(module, key, None)) is int


def _name_products(products: WrittenOut, found: dict[str, _Product]) -> None:
    """`qk` and `av` where there are two products, the first of them before the softmax; else numbered ones."""
    in_order = list(found.values())
    if len(in_order) == 2 and all(in_order[0].signed):
        names = ["qk", "av"]
        products.num_heads = in_order[1].heads
    else:
        names = ["av"] if len(in_order) == 1 else [f"product_{i}" for i in range(len(in_order))]
    products.names = dict(zip(found, names, strict=True))
    for name, product in zip(names, in_order, strict=True):
        setattr(products, name, Matmul(product.signed))


def _check(model: nn.Module, owners: dict[str, Any], expected: Any, image: Tensor) -> None:
    """ModelError unless every attention goes through its products and the outputs are as before."""
    owner_of = {m: name for name, owner in owners.items() for m in owner.products.modules() if isinstance(m, Matmul)}
    reached: set[str] = set()

    def note(product: Any, args: Any, output: Any) -> None:
        reached.add(owner_of[product])

    handles = [product.register_forward_hook(note) for product in owner_of]
    try:
        with torch.no_grad():
            found = outputs_again(model, image, expected)
    finally:
        for handle in handles:
            handle.remove()
    for name in owners:
        if name not in reached:
            raise ModelError(
                f"the attention of {name!r} cannot be exposed: call F.scaled_dot_product_attention(...), or write "
                f"a @ b, in the code of a method of {type(owners[name]).__name__} itself"
            )
    if image.is_meta:
        return
    pairs = zip(found, tensors_of(expected), strict=True)
    error = max((now - then).abs().max() / then.abs().max().clamp(min=1e-12) for now, then in pairs)
    if error != error:
        raise ModelError(f"this {hf.class_name(model)} gives NaN or Inf: its weights are damaged")
    if not error <= _TOLERANCE:
        raise ModelError(
            f"the outputs of this {hf.class_name(model)} change by {error:.1e} when its attention is exposed, which "
            f"must not be: {', '.join(sorted({type(m).__name__ for m in owners.values()}))} is not what it seems"
        )


class FloatLinear(nn.Linear):
    """A linear layer that stays in float: it is not called, or its input does not depend on the image."""


class FloatConv2d(nn.Conv2d):
    """The same of a convolution."""


def _leave_in_float(model: nn.Module, seen: probe.Seen) -> None:
    """Layers that compute position biases from coordinates, and layers whose weight is read without calling them."""
    for name, module in model.named_modules():
        if type(module) in _QUANTIZED and name not in seen.of_image:
            module.__class__ = FloatLinear if type(module) is nn.Linear else FloatConv2d


def _described(model: nn.Module, owners: dict[str, Any], seen: probe.Seen, image: Tensor) -> Exposed:
    order = {name: i for i, name in enumerate(seen.inputs)}
    names = sorted(owners, key=lambda name: order[name])
    blocks = {name: _block_of(model, name, seen) for name in names}
    layers, left_out = [], []
    grids = [grid for grid in (*seen.grids, *_grids_of_sequences(model, seen, image)) if _is_alike(grid, image)]
    in_order: dict[str, bool] = {}  # form of the places -> whether they go over the image row by row; asked once
    for name in names if not image.is_meta else ():  # without values nobody can tell
        products = owners[name].products
        layout, reason = _layout_of(model, name, products, seen, grids)
        if layout is not None:
            if layout.form not in in_order:
                in_order[layout.form] = is_in_raster_order(model, products, image, layout)
            reason = "" if in_order[layout.form] else "its tokens do not go over the image row by row"
        if layout is None or reason:
            left_out.append(f"{name}: {reason}")
            continue
        products.prefix_tokens = layout.prefix_tokens
        where = f"{name}.{rewiring.CHILD}"
        layers.append(Layer(where, blocks[name], layout.grid, layout.windows, layout.prefix_tokens, layout.raster))
    reads_class_token = bool(layers) and _reads_class_token(model, layers[-1], image)
    for layer in layers:
        products = model.get_submodule(layer.attention)
        products.class_query = reads_class_token and layer.prefix_tokens > 0  # type: ignore[assignment]
    return Exposed(
        layers=tuple(layers),
        blocks=tuple(dict.fromkeys(blocks[name] for name in names)),
        left_out=tuple(left_out),
        first=_readers_of_image(model, seen, image),
        last=_last_layers(model, seen, names[-1] if names else ""),
        outputs=int(tensors_of(seen.output)[0].shape[1]),
    )


def _is_alike(grid: tuple[int, int], image: Tensor) -> bool:
    """Whether a grid has the proportions of the image, up to rounding."""
    return abs(grid[0] - grid[1] * image.shape[2] / image.shape[3]) <= 1


def _grids_of_sequences(model: Any, seen: probe.Seen, image: Tensor) -> list[tuple[int, int]]:
    """Grids of the image's shape that sequences of tokens may have, where no convolution tells."""
    height, width = image.shape[2:]
    tokens = {args[0].shape[1] for args, _ in seen.inputs.values() if args and getattr(args[0], "ndim", 0) == 3}
    patches = {count - (getattr(model, "num_prefix_tokens", None) or 0) for count in tokens}
    rows = {round((count * height / width) ** 0.5): count for count in patches if count > 0}
    return [(n, count // n) for n, count in rows.items() if n and n * (count // n) == count]


def _block_of(model: nn.Module, name: str, seen: probe.Seen) -> str:
    """The innermost member of a list of modules around an attention that has an output row for each image."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        parent = model.get_submodule(".".join(parts[: end - 1]))
        block = ".".join(parts[:end])
        if isinstance(parent, nn.ModuleList | nn.Sequential) and len(main_output(seen.outputs.get(block, ()))) == 1:
            return block
    around = name.rpartition(".")[0]
    return around if around and around in seen.outputs else name


def _layout_of(
    model: nn.Module, name: str, products: AttentionProducts, seen: probe.Seen, grids: list[tuple[int, int]]
) -> tuple[Layout | None, str]:
    """The layout of an attention's tokens, or why it has none."""
    if not hasattr(products, "qk") or not hasattr(products, "av"):
        return None, "no map of queries and keys"
    parts = name.split(".")
    for end in range(len(_block_of(model, name, seen).split(".")), len(parts) + 1):
        around = ".".join(parts[:end])
        if around in seen.inputs:
            found = find_layout(model.get_submodule(around), seen.inputs[around], products, grids)
            if found is not None:
                return found, ""
    return None, "its tokens are not patches of the image"


def _reads_class_token(model: Any, last: Layer, image: Tensor) -> bool:
    """Whether the outputs depend on the first token alone of what the last block gives."""
    pool = getattr(model, "global_pool", None)
    if isinstance(pool, str):
        return pool == "token"
    if image.is_meta or not last.prefix_tokens:
        return False
    kept: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        whole = output if isinstance(output, Tensor) else output[0]
        kept.append(whole.detach().requires_grad_())
        return kept[0] if isinstance(output, Tensor) else (kept[0], *output[1:])

    with model.get_submodule(last.block).register_forward_hook(cut), torch.enable_grad():
        outputs = model(image)
        (gradient,) = torch.autograd.grad(outputs.square().sum(), kept[0])
    return not bool(gradient[:, 1:].any())


def _readers_of_image(model: nn.Module, seen: probe.Seen, image: Tensor) -> tuple[str, ...]:
    """The layers that see the image itself, which is never quantized: convolutions, or what is run first."""
    layers = {name: module for name in seen.inputs if isinstance(module := model.get_submodule(name), _QUANTIZED)}
    convolutions = {name: module for name, module in layers.items() if isinstance(module, nn.Conv2d)}
    found = [name for name, conv in convolutions.items() if conv.in_channels == image.shape[1] and conv.groups == 1]
    return tuple(found or list(layers)[:1])


def _last_layers(model: nn.Module, seen: probe.Seen, last_attention: str) -> tuple[str, ...]:
    """The linear layers that the outputs come from: as wide as these, and run behind the last attention.

    A model with several heads tells them itself, in `predictors`.
    """
    if (named := getattr(model, "predictors", None)) is not None:
        return tuple(named)
    order = {name: i for i, name in enumerate(seen.inputs)}
    after = order.get(last_attention, -1)
    width = seen.output.shape[1]
    return tuple(
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.out_features == width
        and order.get(name, -1) > after
        and seen.outputs[name].shape == seen.output.shape
    )
