"""The fast engine, for CUDA: matrix products in bfloat16, transformer blocks compiled region by region, attention and
map losses in fused kernels, and a step, once warm, replayed as one CUDA graph.

It runs the same code as the plain engine. Each kernel replaces one plain function, and the tests compare the two.
"""

import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.engine.kernels import attention as attention_kernel
from maskaq.engine.kernels import maps as maps_kernel
from maskaq.engine.kernels import rotation as rotation_kernel
from maskaq.engine.reference import Engine, Step
from maskaq.errors import first_line
from maskaq.losses import attention as map_losses
from maskaq.losses.terms import LossRunner, SynthesisView
from maskaq.models import AttentionProducts, geometry, parts
from maskaq.models.seam import Fused, WrittenOut
from maskaq.models.structure import gelu_mlps
from maskaq.quant.grid import LARGEST_LEVEL, fake_quantize, level_table
from maskaq.quant.layers import QuantLinear, QuantMatmul
from maskaq.quant.quantizers import Log, Quantizer
from maskaq.quant.rotation import BLOCK as ROTATED_BLOCK
from maskaq.quant.rotation import Rotation, hadamard


class FastEngine(Engine):
    """For CUDA with Triton and a compiler; `pick_engine` checks that."""

    name = "fast"
    captures = True
    seconds_between_looks = 0.5

    def __init__(
        self, device: torch.device, backend: str = "inductor", note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.device = device
        self.note = note
        self._positions: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
        compiler = functools.partial(torch.compile, dynamic=False, backend=backend)
        self.compiled = functools.cache(functools.partial(compiler, options=_unpadded(backend)))  # type: ignore[method-assign]
        self.padded = functools.cache(compiler)
        self.losses = _FusedLosses(self.compiled)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        spec = geometry(model)
        regions = [model.get_submodule(name) for name in _regions(model)]
        attentions = [module for module in model.modules() if isinstance(module, AttentionProducts)]
        embeddings: list[Any] = [conv for conv in map(model.get_submodule, spec.first) if _is_patchwise(conv)]
        mlps: list[Any] = [mlp for mlp in map(model.get_submodule, gelu_mlps(model)) if _is_rotated_to_grid(mlp)]
        mlps = mlps if mlps and self._rotates else []
        rotary: list[Any] = [module for module in model.modules() if _is_fixed_rotary(module)]
        compiled = self.padded if _may_pad(attentions) else self.compiled
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high")  # what stays in float32 may use TF32
            # Methods of single modules are replaced, for as long as the context lasts. Torch's own seam,
            # `_compiled_call_impl`, skips hooks, which `taps` puts on blocks; `Module.compile` compiles the one
            # `_call_impl` that all classes share, so every class and every hook would fill a single cache of
            # recompilations; and a wrapper module would change the names of all that is inside.
            for region in regions:
                region.forward = types.MethodType(compiled(type(region).forward), region)  # type: ignore[method-assign]
            for attention in attentions:
                attention.fused = _fused_attention  # type: ignore[assignment]
            for conv in embeddings:
                conv._conv_forward = types.MethodType(_patchwise, conv)
            for mlp in mlps:
                mlp.forward = types.MethodType(_fused_mlp, mlp)
            for module in rotary:
                module.get_embed = functools.partial(self._embed, module)
            # One compiled block serves all alike; Swin's stages, teacher, student and gradients make many that are not.
            with torch._dynamo.config.patch(recompile_limit=64), _current(self.device):
                yield
        finally:
            torch.set_float32_matmul_precision(before)
            for region in regions:
                region.__dict__.pop("forward", None)
            for attention in attentions:
                attention.fused = None  # type: ignore[assignment]
            for conv in embeddings:
                conv.__dict__.pop("_conv_forward", None)
            for mlp in mlps:
                mlp.__dict__.pop("forward", None)
            for module in rotary:
                module.__dict__.pop("get_embed", None)

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)  # a cached cast would miss a replay's update

    def repeated(self, step: Step) -> Step:
        return _Replayed(step, self.device, self.note)

    @functools.cached_property
    def _rotates(self) -> bool:
        """Whether the rotation kernel serves this GPU: on a few values it gives what the plain operations give.

        GPUs and releases of Triton differ in what they compile, and a run can do without this kernel.
        """
        rotation = Rotation(hadamard(ROTATED_BLOCK)).to(self.device)
        grid = torch.tensor([0.25], device=self.device), torch.tensor([6.0], device=self.device), 0, 15
        values = 3 * torch.sin(torch.arange(8192.0, device=self.device)).reshape(-1, 8 * ROTATED_BLOCK)
        try:
            with _current(self.device), torch.enable_grad(), self.precision():
                x = values.to(_product_dtype(values)).requires_grad_()
                plain = fake_quantize(rotation(F.gelu(x)), *grid)
                fused = rotation_kernel.rotated_gelu(x, rotation.matrix, *grid)
                pairs = [(plain, fused), *zip(*(torch.autograd.grad(y.sum(), x) for y in (plain, fused)), strict=True)]
            differences = [((got - want).norm() / want.norm()).item() for want, got in pairs]
            odd = [difference for difference in differences if not difference < 0.1]  # NaN is odd too
            reason = f"its values differ by {odd[0]:.0%}" if odd else ""
        except Exception as error:  # each GPU and each release fails in its own way
            reason = first_line(error)
        if reason:
            self.note(f"the kernel for rotated hidden channels is left out, single operations take its place: {reason}")
        return not reason

    def _embed(self, rotary: Any, *args: Any, **kwargs: Any) -> Any:
        """`get_embed`, computed once: timm builds the grid on the CPU at each pass, and a CUDA graph cannot copy it.

        What is computed is kept as long as the module: captured graphs read it.
        """
        kept = self._positions.setdefault(rotary, {})
        key = repr((args, kwargs, [buffer.device for buffer in rotary.buffers()]))
        if key not in kept:
            with torch.no_grad():
                kept[key] = type(rotary).get_embed(rotary, *args, **kwargs)
        return kept[key]

    def once(self) -> AbstractContextManager[Any]:
        return torch.compiler.set_stance("force_eager")


def _unpadded(backend: Any, version: Any = torch.__version__) -> dict[str, Any] | None:
    """Options without padded layouts: before torch 2.13, Inductor may read one in another order than it wrote it.

    That gives wrong gradients or NaN. It was seen where q, k and v are `permute(2, 0, 3, 1, 4).unbind(0)` of one tensor
    whose rows are no multiple of 128 bytes, such as the windows of 49 tokens of a detector.
    """
    return {"comprehensive_padding": False} if backend == "inductor" and version < "2.13" else None


def _may_pad(attentions: list[AttentionProducts]) -> bool:
    """Whether blocks may have padded layouts, which are faster: where this package splits q, k and v, not timm."""
    return not any(isinstance(attention, Fused | WrittenOut) for attention in attentions)


def _regions(model: nn.Module) -> list[str]:
    """Names of the modules to compile, each separately: all parts up to the last block. The rest sees few tokens."""
    found = parts(model)
    blocks = tuple(f"{block}." for block in geometry(model).blocks)  # a block that holds another comes in parts
    last = max((i for i, part in enumerate(found) if f"{part}.".startswith(blocks)), default=len(found) - 2)
    return found[: last + 1]


class _Replayed:
    """A step that runs eagerly a few times, then is captured in a CUDA graph and replayed with one launch.

    A model whose code cannot be captured, because it asks the host in the middle of a pass, goes on eagerly.
    """

    WARM_UP = 3
    IN_FLIGHT = 4  # steps the host may be ahead of the GPU: enough to keep it busy, few enough for a true progress bar

    def __init__(self, step: Step, device: torch.device, note: Callable[[str], None]) -> None:
        self.step = step
        self.note = note
        self.device = device
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.pending: deque[torch.cuda.Event] = deque()
        self.side = torch.cuda.Stream(device)  # what is set up on first use is set up on the stream that captures it

    def __call__(self) -> None:
        with _current(self.device):
            if self.graph is not None:
                self.graph.replay()
            elif self.calls == self.WARM_UP and self._capture():
                self.graph.replay()  # type: ignore[attr-defined]
            else:
                self.side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.side):
                    self.step()
                torch.cuda.current_stream().wait_stream(self.side)
            self.calls += 1
            event = torch.cuda.Event(blocking=True)
            event.record()
            self.pending.append(event)
            if len(self.pending) > self.IN_FLIGHT:
                self.pending.popleft().synchronize()

    def _capture(self) -> bool:
        """Capture a step, which does not run it; False, with a note, where that is not possible."""
        graph = torch.cuda.CUDAGraph()
        try:
            with _without_garbage(), torch.cuda.graph(graph, stream=self.side, capture_error_mode="thread_local"):
                self.step()
        except torch.OutOfMemoryError:
            raise  # the caller goes on with smaller parts
        except RuntimeError as error:
            reason = first_line(error)
            self.note(f"a step cannot be captured in a CUDA graph, and is launched kernel by kernel: {reason}")
            return False
        self.graph = graph
        return True


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Collect garbage now and not inside: freeing an earlier CUDA graph during a capture would abort the capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make the model's GPU the current one, which is where kernels, streams and graphs go."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _FusedLosses(LossRunner):
    """Map losses in fused kernels, the other loss functions compiled."""

    def __init__(self, compiled: Callable[[Callable], Callable]) -> None:
        self.compiled = compiled
        self.view: SynthesisView | None = None
        self.squared = False
        self.losses: list[Tensor] = []

    def __call__(self, function: Callable[..., Tensor], *tensors: Any) -> Tensor:
        ours = (function.__module__ or "").startswith("maskaq.losses")  # a user's own function runs as it is written
        return (self.compiled(function) if ours else function)(*tensors)

    def over_maps(self, function: Callable[[Tensor], Tensor], view: SynthesisView) -> Tensor:
        if function not in _FUSED_MAP_LOSSES or not all(maps_kernel.fits(m.shape[1], m.shape[3]) for m in view.maps):
            return super().over_maps(function, view)
        squared, output = _FUSED_MAP_LOSSES[function]
        # One kernel gives both losses: the second is kept until it is asked for.
        if self.view is not view or self.squared != squared:
            pairs = [
                maps_kernel.map_losses(raw, layer.windows, layer.prefix_tokens, squared)
                for layer, raw in zip(view.layers, view.maps, strict=True)
            ]
            self.view = view
            self.squared = squared
            self.losses = [torch.stack(x).mean(dim=0) for x in zip(*pairs, strict=True)]
        return self.losses[output]


def _fused_attention(
    attention: AttentionProducts, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, gain: Tensor | None
) -> dict[str, Tensor]:
    """`AttentionProducts.products` as one kernel, which never writes the attention probabilities to memory."""
    grid = _probability_grid(attention.av, q)
    listened = any(point.startswith("probs") for point in attention.listened)
    alike = q.shape == k.shape == v.shape
    dtype = _product_dtype(q)
    if listened or grid is None or not alike or not attention_kernel.fits(q.shape[2], q.shape[3], dtype):
        return attention.products(q, k, v, bias, gain)
    q, k = attention.qk.operands(q, k)  # quantized element by element: before or after the transpose is the same
    if gain is not None:
        q = q * gain.to(q.dtype)
    if isinstance(attention.av, QuantMatmul):
        v = attention.av.b_quantizer(v)
    p_scale, p_top, p_table = grid
    heads, scores, received = attention_kernel.attention(
        *(q.to(dtype), k.to(dtype), v.to(dtype), attention.scale, bias, p_scale, p_top),
        keep_scores="scores" in attention.listened,
        readers=attention.readers(q.shape[2]) if "scores_received" in attention.listened else (0, 0),
        p_table=p_table,
    )
    return {"heads": heads, "scores": scores, "scores_received": received}


def _product_dtype(x: Tensor) -> torch.dtype:
    """What a product makes of its operands: under autocast, normalised queries and keys arrive in float32."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _patchwise(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution with stride equal to its kernel size, as a matrix product: ten times faster than cuDNN."""
    high, wide = conv.kernel_size
    x = x[:, :, : x.shape[2] // high * high, : x.shape[3] // wide * wide]  # a convolution drops the remainder too
    patches = (
        x.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 1, 3, 5)
    )  # (B, rows, columns, C, h, w)
    return F.linear(patches.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)


def _is_patchwise(conv: Any) -> bool:
    return conv.kernel_size == conv.stride and conv.padding == (0, 0) and conv.dilation == (1, 1) and conv.groups == 1


def _fused_mlp(mlp: Any, x: Tensor) -> Tensor:
    """The forward pass of timm's `Mlp`, with GELU, rotation and grid as one kernel."""
    quantizer = mlp.fc2.input_quantizer
    if quantizer.drop:  # some values are left in float, which the kernel does not know
        return type(mlp).forward(mlp, x)  # type: ignore[no-any-return]
    x = mlp.fc1(x)
    scale, zero_point = quantizer.step(x.numel())
    x = rotation_kernel.rotated_gelu(x, mlp.norm.matrix, scale, zero_point, quantizer.low, quantizer.high)
    return F.linear(x, mlp.fc2.quantized_weight(), mlp.fc2.bias)


def _is_rotated_to_grid(mlp: Any) -> bool:
    """Whether all between the layers of an MLP with GELU is GELU in its exact form, an online rotation and a grid."""
    quantizer = mlp.fc2.input_quantizer if isinstance(mlp.fc2, QuantLinear) else None
    if not isinstance(quantizer, Quantizer) or type(quantizer).fake_quantize is not Quantizer.fake_quantize:
        return False
    exact = type(mlp.act) is nn.GELU and mlp.act.approximate == "none"
    return exact and type(mlp.norm) is Rotation and rotation_kernel.fits(len(mlp.norm.matrix))


def _is_fixed_rotary(module: nn.Module) -> bool:
    """timm's rotary positions of a grid, unless they are learned."""
    return callable(getattr(module, "get_embed", None)) and not list(module.parameters())


def _probability_grid(av: nn.Module, q: Tensor) -> tuple[Tensor | None, int, Tensor | None] | None:
    """Scale, largest code and table of levels, if any, of the softmax's unsigned grid.

    (None, 0, None): in float; None: a grid the kernel has not.
    """
    quantizer = av.a_quantizer if isinstance(av, QuantMatmul) else None
    if not isinstance(quantizer, Quantizer):
        return None, 0, None
    if type(quantizer).fake_quantize not in (Quantizer.fake_quantize, Log.fake_quantize) or quantizer.site.signed:
        return None
    if quantizer.drop:  # some values are left in float, which the kernel does not know
        return None
    batch, heads, tokens, _ = q.shape
    scale, _ = quantizer.step(batch * heads * tokens * tokens)
    if isinstance(quantizer, Log):
        return scale, LARGEST_LEVEL, level_table(quantizer.levels)
    return scale, quantizer.high, None


_FUSED_MAP_LOSSES = {
    map_losses.head_similarity: (False, 0),
    map_losses.head_similarity_squared: (True, 0),
    map_losses.similarity_entropy: (False, 1),
}
