"""A deployed model as an ONNX graph of standard operators, laid out so that runtimes multiply integers.

torch's exporter sees the model with placeholders, `maskaq::Grid` and `maskaq::Weight`, in place of its grids and coded
weights; they are then written out. An activation becomes

    QuantizeLinear (uint8) -> [Clip to 2^b - 1 in uint8] -> DequantizeLinear

and a weight an INT4 (up to 4 bits) or INT8 initializer -> [Cast to INT8] -> DequantizeLinear for each output channel.
ONNX Runtime (1.31) folds the Cast when it loads the file and multiplies uint8 by int8; other types, and one range per
activation channel, fall back to float. Outputs of products stay in float: rounding them would be another model.

A linear layer with a bias multiplies the codes themselves, for ONNX Runtime's CPU provider:

    MatMulInteger -> Cast to float -> Mul with (scale of x * scales of the weight) -> Add of the bias

which it makes one operator of (`MatMulIntegerToFloat`), bias included; of a MatMul between DequantizeLinear it makes
the same operator and leaves the bias as an Add of its own, and GELU behind that Add as a slower kernel. Other readers
of ONNX want the MatMul between DequantizeLinear: `QDQ`.

The second operands of attention's products, keys and values, are int8 too, their codes and zero point moved by 128:

    QuantizeLinear (int8) -> [Clip to 2^b - 129] -> Reshape -> Transpose -> DequantizeLinear

CPUs have instructions for uint8 by int8 (VNNI), and MLAS multiplies uint8 by uint8 without them. The Transpose, which
attention needs anyway, stands between: ONNX Runtime makes uint8 of a plain pair of int8 when it loads the file.

Where each head has a range, the codes of all heads get one zero point and are dequantized by a step of 1, so that the
product is one of integers still; it is multiplied by the steps of each head afterwards. (At 8 bits, heads with unlike
zero points have no codes in common: their product is one of floats.) A logarithmic grid is

    QuantizeLinear (uint8) -> table of 256 levels (uint8) -> DequantizeLinear

by GatherElements, which takes a tenth of the time that Gather takes in ONNX Runtime (1.31).
"""

import contextlib
import copy
import io
import json
import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import maskaq
from maskaq.artifact.export.metadata import DIGEST, PREFIX, REMEDY, as_text, check_digest, describe, ours
from maskaq.artifact.export.programs import Program, program_of
from maskaq.errors import ExportError
from maskaq.models import AttentionProducts, data_config
from maskaq.models.detector import Highest, Suppression
from maskaq.models.structure import replace_module
from maskaq.quant.deployed import CodedWeight, DeployedConv2d, DeployedLinear, DeployedMatmul, FixedGrid, LogGrid
from maskaq.quant.grid import level_table
from maskaq.storage.files import write_bytes_atomic

try:
    import onnx
    import onnx_ir as ir
    import onnxscript  # noqa: F401 (torch's exporter needs it)
except ImportError as error:  # pragma: no cover
    raise ExportError(f'ONNX files need more packages ({error}): pip install "maskaq[onnx]"') from error

INPUT = "images"
OPSET = 21
"""The first with INT4."""
CODES = ".codes"
"""Ends the names of tensors that hold integer codes: those of a grid's output and of a weight."""
_INITIALIZERS = "initializers"
_DOMAIN = "maskaq"
_OPERANDS = ("a_grid", "b_grid")
_SEEN = "traced_model."
"""Begins the names of the tensors that torch's exporter writes: `_Seen` has the model under it."""


@dataclass(frozen=True)
class Layout:
    """How the same numbers are written for a runtime."""

    opset: int = OPSET
    signed_operands: bool = False
    """Keys and values as int8, for MLAS."""
    integer_layers: bool = False
    """Linear layers as MatMulInteger."""
    integer_convolutions: bool = False
    """Convolutions as linear layers of patches, for ONNX Runtime."""
    signed: bool = False
    """All codes as int8 with a zero point of 0, cut in float, and only between a QuantizeLinear and a DequantizeLinear.
    """


CPU = Layout(signed_operands=True, integer_layers=True, integer_convolutions=True)
QDQ = Layout()
TENSORRT = Layout(opset=20, signed=True)
LAYOUTS = {"cpu": CPU, "qdq": QDQ, "tensorrt": TENSORRT}


def export_onnx(
    model: nn.Module, file: str | Path, metadata: Mapping[str, Any] | None = None, layout: Layout = CPU
) -> Path:
    """Write a deployed model as ONNX: `images` (N, C, H, W), normalised -> the outputs of its program. N is free.

    Args:
        metadata: more entries for the file's metadata, beside version, bits, image size, mean and std. What is not a
            string is written as JSON.
    """
    description = describe(model) | {"outputs": dict(program_of(model).outputs)}
    program = _traced(model, description["input_size"], layout.opset)
    _merge_transposes(program.graph)
    _select_before_norm(program.graph)
    if not layout.signed:  # TensorRT wants the same scale on both sides of the codes
        _fold_score_scale(program.graph)
    _write_out_placeholders(program.graph, layout)
    if layout.integer_convolutions:
        _unfold_convolutions(program.graph)
    if layout.integer_layers:
        _multiply_codes(program.graph)
    return _write(program, file, description | dict(metadata or {}))


def export_float(model: nn.Module, file: str | Path) -> Path:
    """Write a timm model in full precision with torch's exporter, as the baseline of speed comparisons."""
    size = list(data_config(model)["input_size"])
    program = _traced(model, size)
    _write_out_placeholders(program.graph, CPU)
    return _write(program, file, {"input_size": size})


def metadata_of(file: str | Path) -> dict[str, Any]:
    """The entries that maskaq wrote into a file; ExportError if its initializers are not those that it was given."""
    try:
        proto = onnx.load(str(file))
    except Exception as error:  # the parser's own classes, and OSError
        raise ExportError(f"cannot read {file} as an ONNX file: {error}; {REMEDY}") from error
    notes = ours({entry.key: entry.value for entry in proto.metadata_props}, file, "metadata")
    check_digest(notes, _INITIALIZERS, _digest(proto), file)
    return notes


def _digest(proto: onnx.ModelProto) -> str:
    """SHA-256 of the initializers, in the order of their names."""
    found = sha256()
    for tensor in sorted(proto.graph.initializer, key=lambda tensor: str(tensor.name)):  # bytes, if it is damaged
        found.update(json.dumps([str(tensor.name), tensor.data_type, list(tensor.dims)]).encode())
        found.update(tensor.raw_data)
    return found.hexdigest()


def _write(program: ir.Model, file: str | Path, metadata: Mapping[str, Any]) -> Path:
    _strip(program)
    program.metadata_props.update({PREFIX + key: as_text(value) for key, value in metadata.items()})
    proto = ir.to_proto(program)
    proto = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    proto.metadata_props.add(key=PREFIX + DIGEST, value=as_text({_INITIALIZERS: _digest(proto)}))
    onnx.checker.check_model(proto, full_check=True)
    write_bytes_atomic(file, proto.SerializeToString(deterministic=True))
    return Path(file)


# ---- the model that torch's exporter sees


class _Grid(nn.Module):
    scale: Tensor

    def __init__(self, grid: FixedGrid, name: str) -> None:
        super().__init__()
        self.shared_zero = _shared_zero(grid)
        self.attributes = {"name": name, "bits": grid.bits}
        if self.shared_zero is not None:
            self.attributes["shared_zero"] = self.shared_zero
        self.register_buffer("scale", grid.scale)
        self.register_buffer("zero_point", grid.zero_point)
        self.register_buffer("levels", grid.levels if isinstance(grid, LogGrid) else None)

    def forward(self, x: Tensor) -> Tensor:
        tensors = (x, self.scale, self.zero_point, *(() if self.levels is None else (self.levels,)))
        return _placeholder("Grid", tensors, self.attributes, x.shape)


def _shared_zero(grid: FixedGrid) -> int | None:
    """One zero point for the codes of all heads; None: there is one range, or 8-bit codes would not fit 8 bits then."""
    if not grid.scale.dim():
        return None
    zeros = {int(zero) for zero in grid.zero_point.flatten()}
    return zeros.pop() if len(zeros) == 1 else 128 if grid.bits < 8 else None


class _HeadProduct(nn.Module):
    """A product of operands of which some have a range for each head, which are integers until it is done."""

    steps: Tensor

    def __init__(self, a_grid: nn.Module, b_grid: nn.Module) -> None:
        super().__init__()
        self.a_grid, self.b_grid = a_grid, b_grid
        self.register_buffer("steps", torch.ones(()))
        for grid in (a_grid, b_grid):
            if _is_shared(grid):
                self.steps = self.steps * grid.scale  # type: ignore[operator]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.a_grid(a) @ self.b_grid(b)) * self.steps


def _is_shared(grid: nn.Module) -> bool:
    return isinstance(grid, _Grid) and grid.shared_zero is not None


class _Weight(nn.Module):
    """A coded weight; transposed for `x @ weight`, so that the channels of its scales are on the last axis."""

    codes: Tensor

    def __init__(self, codes: Tensor, scale: Tensor, bits: int, name: str, transposed: bool) -> None:
        super().__init__()
        self.attributes = {"name": name, "bits": bits, "axis": 1 if transposed else 0}
        self.register_buffer("codes", codes.t().contiguous() if transposed else codes)
        self.register_buffer("scale", scale)
        self.dtype, self.device = torch.float32, codes.device  # what some models ask of a layer's weight

    def forward(self) -> Tensor:
        return _placeholder("Weight", (self.codes, self.scale), self.attributes, self.codes.shape)


class _Linear(nn.Module):
    """A linear layer as MatMul and Add, not Gemm: an integer Gemm needs an integer bias, and ours is float.

    Args:
        parts: compute so many equal parts of the output apart, as a `_Parts`.
    """

    def __init__(self, linear: DeployedLinear, name: str, parts: int = 1) -> None:
        super().__init__()
        coded: CodedWeight = linear.weight  # type: ignore[assignment]
        self.grid = _grid(linear.grid, f"{name}.grid")
        names = [f"{name}.weight" if parts == 1 else f"{name}.weight.{i}" for i in range(parts)]
        pieces = zip(coded.codes.chunk(parts), coded.scale.chunk(parts), names, strict=True)
        self.weights = nn.ModuleList(_Weight(c, s, coded.bits, n, transposed=True) for c, s, n in pieces)
        self.weight = coded  # what some models ask for its dtype
        bias: Tensor | None = linear.bias  # type: ignore[assignment]
        for i in range(parts):
            self.register_buffer(f"bias_{i}", None if bias is None else bias.chunk(parts)[i].clone())

    def forward(self, x: Tensor) -> "Tensor | _Parts":
        flat = x.dim() == 2  # ONNX Runtime makes a float Gemm of a two-dimensional product with a bias
        x = self.grid(x.unsqueeze(1) if flat else x)
        outputs = []
        for i, weight in enumerate(self.weights):
            y = x @ weight()
            bias = getattr(self, f"bias_{i}")
            y = y if bias is None else y + bias
            outputs.append(y.squeeze(1) if flat else y)
        return _Parts(outputs) if len(outputs) > 1 else outputs[0]


class _Parts:
    """A tensor whose equal parts are computed separately; it supports only the splitting that attention does.

    One product for q, k and v together is taken apart by copies that take longer than three products do.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "_Parts":
        if dim != -1 or sizes[0] != len(self.parts):
            raise ExportError(f"q, k, v are expected on the last axis, not as {sizes} on axis {dim}")
        return _Parts([part.unflatten(-1, sizes[1:]) for part in self.parts])

    def unbind(self, dim: int) -> Sequence[Tensor]:
        return self.parts


class _Suppression(nn.Module):
    def __init__(self, part: Suppression, name: str) -> None:
        super().__init__()
        self.attributes = {"name": name, "overlap": part.overlap, "least": part.least, "most": part.most}

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        return _placeholder("Suppression", (boxes, scores), self.attributes, scores.shape) > 0


class _Highest(nn.Module):
    """Becomes ONNX's TopK, which takes the first of equal values."""

    def forward(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values, index = scores.topk(min(count, scores.shape[1]), dim=1)
        return values, index


class _Seen(nn.Module):
    """A model with placeholders, as a function of images alone that gives all tensors of its program.

    Its name (`_SEEN`) before those of the tensors keeps them apart from the constants that are written out: torch's
    exporter shares a tensor with all that have the same values, a zero point of 128 with the width of an image.
    """

    def __init__(self, model: nn.Module, program: Program) -> None:
        super().__init__()
        self.traced_model = _with_placeholders(model)
        self.program = program

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        found = self.program.compute(self.traced_model, images)
        return tuple(found[name] for name in _names(self.program))


def _names(program: Program) -> list[str]:
    return [*program.outputs, *program.inner]


def _placeholder(kind: str, tensors: tuple[Any, ...], attributes: dict[str, Any], shape: Sequence[int]) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"{_DOMAIN}::{kind}", tensors, attributes, dtype=torch.float32, shape=shape, version=1
    )


def _grid(grid: nn.Module, name: str) -> nn.Module:
    return _Grid(grid, name) if isinstance(grid, FixedGrid) else grid


def _with_placeholders(model: nn.Module) -> nn.Module:
    seen = copy.deepcopy(model)
    for name, module in model.named_modules():
        parent, _, child = name.rpartition(".")
        if isinstance(module, DeployedLinear) and isinstance(module.weight, CodedWeight):
            joint = child == "qkv" and isinstance(model.get_submodule(parent), AttentionProducts)
            replace_module(seen, name, _Linear(module, name, parts=3 if joint else 1))
        elif isinstance(module, DeployedConv2d) and isinstance(module.weight, CodedWeight):
            conv = seen.get_submodule(name)
            coded = module.weight
            conv.grid = _grid(module.grid, f"{name}.grid")
            conv.weight = _Weight(coded.codes, coded.scale, coded.bits, f"{name}.weight", transposed=False)
        elif isinstance(module, DeployedMatmul):
            product, grids = seen.get_submodule(name), [_grid(getattr(module, g), f"{name}.{g}") for g in _OPERANDS]
            product.a_grid, product.b_grid = grids
            if any(map(_is_shared, grids)):
                replace_module(seen, name, _HeadProduct(*grids))
        elif isinstance(module, Suppression):
            replace_module(seen, name, _Suppression(module, name))
        elif isinstance(module, Highest):
            replace_module(seen, name, _Highest())
    return seen


def _traced(model: nn.Module, input_size: Sequence[int], opset: int = OPSET) -> ir.Model:
    """The model with placeholders as torch's exporter writes it."""
    kind = program_of(model)
    seen = _Seen(model, kind)
    images = torch.zeros(2, *input_size)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it tells its progress
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                seen,
                (images,),
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=({0: torch.export.Dim("N", min=1)},),
                input_names=[INPUT],
                output_names=_names(kind),
                verbose=False,
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    if not isinstance(program.model.graph.inputs[0].shape[0], ir.SymbolicDim):
        raise ExportError(
            f"{type(model).__name__} cannot be exported: its code fixes the number of images, which a file leaves "
            "open; len(x) does so, x.shape[0] does not"
        )
    graph = program.model.graph
    for value in list(graph.outputs):
        if value.name in kind.inner:  # it keeps its name, by which it is verified
            graph.outputs.remove(value)
    return program.model


# ---- the graph, rewritten


def _merge_transposes(graph: ir.Graph) -> None:
    """Merge two consecutive transpositions into one: the keys pass through two before their product."""
    for node in list(graph):
        before = node.inputs[0].producer() if node.op_type == "Transpose" else None
        if before is not None and before.op_type == "Transpose":
            first, second = (list(n.attributes["perm"].as_ints()) for n in (before, node))
            node.attributes["perm"] = ir.AttrInt64s("perm", [first[i] for i in second])
            node.replace_input_with(0, before.inputs[0])
            if not before.outputs[0].uses():
                graph.remove(before, safe=True)


def _select_before_norm(graph: ir.Graph) -> None:
    """Normalise the class token alone, not all tokens of which it is then taken."""
    for select in list(graph):
        norm = select.inputs[0].producer() if select.op_type == "Gather" else None
        if norm is None or norm.op_type != "LayerNormalization" or len(norm.outputs[0].uses()) > 1:
            continue
        if any(select.outputs[0] is output for output in graph.outputs):  # which keeps its name, and is cheap
            continue
        if norm.attributes["axis"].as_int() == -1 and select.attributes["axis"].as_int() == 1:
            chosen, normal = select.outputs[0], norm.outputs[0]
            ir.convenience.replace_all_uses_with(chosen, normal)
            normal.shape = chosen.shape
            select.replace_input_with(0, norm.inputs[0])
            norm.replace_input_with(0, chosen)
            graph.remove(norm)
            graph.insert_after(select, norm)


def _fold_score_scale(graph: ir.Graph) -> None:
    """(a @ b) * number: the number goes into the step that multiplies a's codes, which saves a pass over the scores."""
    for node in list(graph):
        if node.op_type != "Mul" or node.inputs[1].const_value is None or node.inputs[1].const_value.size != 1:
            continue
        product = node.inputs[0].producer()
        if product is not None and product.op_type == "Mul" and product.inputs[1].name.endswith(".steps"):
            number, steps = node.inputs[1].const_value.numpy().item(), product.inputs[1]
            product.replace_input_with(1, _constant(graph, f"{steps.name}_with_gain", _numbers(steps) * number))
            ir.convenience.replace_all_uses_with(node.outputs[0], product.outputs[0])
            graph.remove(node, safe=True)
            continue
        grid = product.inputs[0].producer() if product is not None and product.op_type == "MatMul" else None
        if grid is None or grid.op_type != "Grid" or len(product.outputs[0].uses()) + len(grid.outputs[0].uses()) > 2:
            continue
        grid.attributes["gain"] = ir.AttrFloat32("gain", node.inputs[1].const_value.numpy().item())
        product.outputs[0].shape = node.outputs[0].shape
        ir.convenience.replace_all_uses_with(node.outputs[0], product.outputs[0])
        graph.remove(node, safe=True)


def _write_out_placeholders(graph: ir.Graph, layout: Layout) -> None:
    _merge_calls(graph)
    for node in list(graph):
        if node.domain == _DOMAIN:
            if node.op_type == "Weight":
                new = _weight_nodes(graph, node, layout)
            elif node.op_type == "Suppression":
                new = _suppression_nodes(graph, node)
            elif layout.signed:
                new = _signed_grid_nodes(graph, node)
            else:
                behind = _taken_behind(graph, node) if layout.signed_operands else []
                new = _grid_nodes(graph, node, behind, by_hand=_between_grids(node, layout))
            before = node.outputs[0]
            after = new[-1].outputs[0]
            after.type = before.type
            after.shape = before.shape
            ir.convenience.replace_nodes_and_values(graph, node, [node], new, [before], [after])


def _merge_calls(graph: ir.Graph) -> None:
    """Where a layer runs more than once for an image: one weight for all calls, and a name for the codes of each."""
    weights: dict[str, ir.Node] = {}
    grids: dict[str, list[ir.Node]] = {}
    for node in list(graph):
        name = node.attributes["name"].as_string() if node.domain == _DOMAIN else ""
        if node.op_type == "Grid":
            grids.setdefault(name, []).append(node)
        elif node.op_type == "Weight" and weights.setdefault(name, node) is not node:
            ir.convenience.replace_all_uses_with(node.outputs[0], weights[name].outputs[0])
            graph.remove(node, safe=True)
    for name, calls in grids.items():
        for number, node in enumerate(calls if len(calls) > 1 else ()):
            node.attributes["name"] = ir.AttrString("name", call_name(name, number))


def call_name(grid: str, number: int) -> str:
    """What a grid is called in a file when it runs more than once for an image."""
    return f"{grid}.{number}"


_Behind = tuple[str, Sequence[ir.Value | None], Mapping[str, ir.Attr]]
"""An operator that is moved: its type, its inputs after the first, its attributes."""


def _taken_behind(graph: ir.Graph, grid: ir.Node) -> list[_Behind]:
    """Take the Reshape and Transpose before a product's second operand out of the graph, to be put behind its codes.

    Both: ONNX Runtime (1.31) would quantize a second time, before a Reshape that it finds before a QuantizeLinear. Not
    of a layer without bias: a product that ends in int8 codes is one of floats there.
    """
    uses = grid.outputs[0].uses()
    if not (len(uses) == 1 and uses[0].node.op_type == "MatMul" and uses[0].idx == 1):
        return []
    kinds = ("Transpose",) if _numbers(grid.inputs[1]).ndim else ("Transpose", "Reshape")  # heads are an axis
    found: list[ir.Node] = []
    node = grid.inputs[0].producer()
    while node is not None and node.op_type in kinds[len(found) : len(found) + 1] and len(node.outputs[0].uses()) == 1:
        found.append(node)
        node = node.inputs[0].producer()
    if not found or (node is not None and node.op_type == "MatMul"):
        return []
    behind = [(node.op_type, node.inputs[1:], node.attributes) for node in reversed(found)]
    grid.replace_input_with(0, found[-1].inputs[0])
    for node in found:
        graph.remove(node, safe=True)
    return behind


def _between_grids(grid: ir.Node, layout: Layout) -> bool:
    """Whether a convolution stands between this grid and the next, with nothing else that computes but ReLU and Clip.

    One that becomes a linear layer (`_unfold_convolutions`) does not count.

    ONNX Runtime (1.31) rounds the weights of such a convolution to 8 bits for the whole tensor (its pass
    WeightBiasQuantization, after another that moves a QuantizeLinear before what only moves values).
    """
    passed = ("Conv", "Relu", "Clip", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "MaxPool")
    for use in grid.outputs[0].uses():
        node = use.node
        while node.op_type in passed and len(node.outputs[0].uses()) == 1:
            node = node.outputs[0].uses()[0].node
        in_float = use.node.op_type == "Conv" and not (layout.integer_convolutions and not _has_groups(use.node))
        if in_float and node.op_type in ("Grid", "QuantizeLinear"):
            return True
    return False


def _grid_nodes(graph: ir.Graph, node: ir.Node, behind: Sequence[_Behind], by_hand: bool) -> list[ir.Node]:
    """Behind: what is done to the codes, which are int8 then. By hand: without a DequantizeLinear."""
    name, bits = node.attributes["name"].as_string(), node.attributes["bits"].as_int()
    x, scale, zero = node.inputs[0], _numbers(node.inputs[1]), _numbers(node.inputs[2])
    top, nodes = np.float32((1 << bits) - 1), []
    is_shared = "shared_zero" in node.attributes
    shared = np.full_like(zero, node.attributes["shared_zero"].as_int()) if is_shared else zero
    kind, moved = (np.int8, -128) if behind else (np.uint8, 0)
    perm = list(behind[-1][2]["perm"].as_ints()) if behind else [0, 1, 2, 3]
    if (shared != zero).any():  # the codes of each head end elsewhere: values are cut before
        for cut, code in (("Max", np.float32(0)), ("Min", top)):
            bound = _constant(graph, f"{name}.{cut.lower()}", ((code - zero) * scale)[None].transpose(np.argsort(perm)))
            nodes.append(ir.node(cut, [x, bound], name=f"{name}.cut_{cut.lower()}"))
            x = nodes[-1].outputs[0]
    axis = {"axis": perm[1]} if scale.ndim else {}  # heads
    scale, zero, shared = (numbers.reshape(-1 if axis else ()) for numbers in (scale, zero, shared))
    step = _constant(graph, f"{name}.scale", scale)
    zero_point = _constant(graph, f"{name}.zero_point", (shared + moved).astype(kind))
    nodes.append(ir.node("QuantizeLinear", [x, step, zero_point], axis, name=f"{name}.quantize"))
    codes = nodes[-1].outputs[0]
    if len(node.inputs) > 3:
        codes.name = f"{name}.steps_of_255"
        nodes += _table_nodes(graph, name, codes, _numbers(node.inputs[3]))
    elif bits < 8 and (shared == zero).all():  # 8 bits saturate at the smallest code by themselves
        codes.name = f"{name}.unclipped"
        largest = _constant(graph, f"{name}.top", (top + moved).astype(kind))
        nodes.append(ir.node("Clip", [codes, None, largest], name=f"{name}.clip"))
    for operator, inputs, attributes in behind:
        label = f"{name}.{operator.lower()}"
        nodes.append(ir.node(operator, [nodes[-1].outputs[0], *inputs], attributes, name=label))
    nodes[-1].outputs[0].name = f"{name}{CODES}"
    if is_shared:
        axis, step = {}, _constant(graph, f"{name}.one", np.float32(1))
        zero_point = _constant(graph, f"{name}.shared_zero_point", (shared[0] + moved).astype(kind))
    elif "gain" in node.attributes:
        scale = scale * np.float32(node.attributes["gain"].as_float())
        step = _constant(graph, f"{name}.scale_with_gain", scale)
    codes = nodes[-1].outputs[0]
    if not axis and not by_hand:
        return [*nodes, ir.node("DequantizeLinear", [codes, step, zero_point], name=f"{name}.dequantize")]
    # ONNX Runtime (1.31) also fuses a DequantizeLinear of many zero points into a product that it cannot compute.
    cast = ir.node("Cast", [codes], {"to": int(ir.DataType.FLOAT)}, name=f"{name}.cast")
    zeros, steps = (
        _constant(graph, f"{name}.{key}", n.reshape(-1, 1, 1) if axis else n)
        for key, n in (("zeros", zero + moved), ("steps", scale))
    )
    shifted = ir.node("Sub", [cast.outputs[0], zeros], name=f"{name}.subtract")
    return [*nodes, cast, shifted, ir.node("Mul", [shifted.outputs[0], steps], name=f"{name}.dequantize")]


def _signed_grid_nodes(graph: ir.Graph, node: ir.Node) -> list[ir.Node]:
    """[Clip in float] -> QuantizeLinear (int8) -> DequantizeLinear, with a zero point of 0."""
    name, bits = node.attributes["name"].as_string(), node.attributes["bits"].as_int()
    x, scale, zero = node.inputs[0], _numbers(node.inputs[1]), _numbers(node.inputs[2])
    nodes = []
    if bits < (8 if zero else 7):  # else int8 saturates where the codes end
        ends = ((code - zero) * scale for code in (np.float32(0), np.float32((1 << bits) - 1)))
        bounds = [_constant(graph, f"{name}.{end}", bound) for end, bound in zip(("min", "max"), ends, strict=True)]
        nodes.append(ir.node("Clip", [x, *bounds], name=f"{name}.clip"))
        x = nodes[0].outputs[0]
    step, zero_point = _constant(graph, f"{name}.scale", scale), _constant(graph, f"{name}.zero_point", np.int8(0))
    quantize = ir.node("QuantizeLinear", [x, step, zero_point], name=f"{name}.quantize")
    quantize.outputs[0].name = f"{name}{CODES}"
    inputs = [quantize.outputs[0], step, zero_point]
    return [*nodes, quantize, ir.node("DequantizeLinear", inputs, name=f"{name}.dequantize")]


def _table_nodes(graph: ir.Graph, name: str, codes: ir.Value, levels: np.ndarray) -> list[ir.Node]:
    """From 0 .. 255 to the nearest level.

    Every head of every image has a row with the table: ONNX Runtime looks up rows on several threads, but not one row.
    """
    nearest = level_table(torch.from_numpy(levels)).numpy().astype(np.uint8)
    table = _constant(graph, f"{name}.table", nearest.reshape(1, 1, -1))
    rows = _constant(graph, f"{name}.rows", np.array([0, 0, -1]))
    one = _constant(graph, f"{name}.row", np.array([1]))
    shape = ir.node("Shape", [codes], name=f"{name}.shape")
    flat = ir.node("Reshape", [codes, rows], name=f"{name}.flatten")
    heads = ir.node("Shape", [flat.outputs[0]], {"start": 0, "end": 2}, name=f"{name}.heads")
    each = ir.node("Concat", [heads.outputs[0], one], {"axis": 0}, name=f"{name}.each_head")
    tables = ir.node("Expand", [table, each.outputs[0]], name=f"{name}.tables")
    index = ir.node("Cast", [flat.outputs[0]], {"to": int(ir.DataType.INT32)}, name=f"{name}.index")
    found = ir.node("GatherElements", [tables.outputs[0], index.outputs[0]], {"axis": 2}, name=f"{name}.lookup")
    back = ir.node("Reshape", [found.outputs[0], shape.outputs[0]], name=f"{name}.levels")
    return [shape, flat, heads, each, tables, index, found, back]


def _weight_nodes(graph: ir.Graph, node: ir.Node, layout: Layout) -> list[ir.Node]:
    name, bits, axis = (node.attributes[key].value for key in ("name", "bits", "axis"))
    codes, scale = _numbers(node.inputs[0]), _numbers(node.inputs[1])
    packed = bits <= 4 and layout.opset >= OPSET
    stored = ir.Tensor(codes.astype(ir.DataType.INT4.numpy()), dtype=ir.DataType.INT4) if packed else ir.tensor(codes)
    value = _constant(graph, f"{name}{CODES}", stored)
    if not layout.signed and all(_in_float(use.node) for use in node.outputs[0].uses()):
        # A product of constants is folded at load, and the runtime may then lay the weights out as it likes. Behind a
        # DequantizeLinear it would compute them for every batch (Conv), or round the other operand too (MatMul: ONNX
        # Runtime 1.31 makes a MatMulNBits of 8 bits of it).
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)}, name=f"{name}.cast")
        shape = [-1 if i == axis else 1 for i in range(codes.ndim)]
        factors = _constant(graph, f"{name}.scale", scale.reshape(shape))
        return [cast, ir.node("Mul", [cast.outputs[0], factors], name=f"{name}.dequantize")]
    nodes = []
    if packed:
        nodes.append(ir.node("Cast", [value], {"to": int(ir.DataType.INT8)}, name=f"{name}.cast"))
        value = nodes[0].outputs[0]
    step = _constant(graph, f"{name}.scale", scale)
    return [*nodes, ir.node("DequantizeLinear", [value, step], {"axis": axis}, name=f"{name}.dequantize")]


def _suppression_nodes(graph: ir.Graph, node: ir.Node) -> list[ir.Node]:
    """NonMaxSuppression gives the indices of boxes, in any number; they become a 1 at each of them."""
    name = node.attributes["name"].as_string()
    boxes, scores = node.inputs
    inputs = {"most": np.int64, "overlap": np.float32, "least": np.float32}
    limits = [_constant(graph, f"{name}.{k}", np.array([node.attributes[k].value], t)) for k, t in inputs.items()]
    columns = _constant(graph, f"{name}.columns", np.array([0, 2]))  # image, class, box
    axis = _constant(graph, f"{name}.axis", np.array([1]))
    classes = ir.node("Unsqueeze", [scores, axis], name=f"{name}.classes")
    chosen = ir.node("NonMaxSuppression", [boxes, classes.outputs[0], *limits], name=f"{name}.choose")
    places = ir.node("Gather", [chosen.outputs[0], columns], {"axis": 1}, name=f"{name}.places")
    count = ir.node("Shape", [chosen.outputs[0]], {"start": 0, "end": 1}, name=f"{name}.count")
    shape = ir.node("Shape", [scores], name=f"{name}.shape")
    ones, zeros = (
        ir.node("ConstantOfShape", x.outputs, {"value": ir.tensor(np.array([n], np.float32))}, name=f"{name}.of_{n}")
        for n, x in ((1, count), (0, shape))
    )
    inputs_of = [zeros.outputs[0], places.outputs[0], ones.outputs[0]]
    return [classes, chosen, places, count, shape, ones, zeros, ir.node("ScatterND", inputs_of, name=f"{name}.left")]


def _multiply_codes(graph: ir.Graph) -> None:
    """x @ W + bias between DequantizeLinear: multiply the codes, and then by the scales of both.

    The scales of x come from one DequantizeLinear of ones. That is the one operator of constants that ONNX Runtime
    does not fold, and it looks for the product of two scales: folded into one number for each channel it would find no
    layer.
    """
    layers = [found for node in graph if (found := _layer(node))]
    if not layers:
        return
    grids = list(dict.fromkeys(x for _, x, _ in layers))
    scales = np.stack([_numbers(x.inputs[1]) for x in grids])
    ones = _constant(graph, "ones", np.ones(len(grids), np.uint8))
    values = ir.node("DequantizeLinear", [ones, _constant(graph, "scales", scales)], {"axis": 0}, name="scales.values")
    split = ir.node("Split", values.outputs, {"num_outputs": len(grids)}, num_outputs=len(grids), name="scales.split")
    graph.insert_before(next(iter(graph)), [values, split])
    scale_of = dict(zip(grids, split.outputs, strict=True))
    calls: Counter[str] = Counter()
    for product, x, weight in layers:
        name = _next_call(weight, calls)
        codes = ir.node("MatMulInteger", [x.inputs[0], weight.inputs[0], x.inputs[2]], name=f"{name}.multiply")
        cast = ir.node("Cast", codes.outputs, {"to": int(ir.DataType.FLOAT)}, name=f"{name}.to_float")
        steps = ir.node("Mul", [scale_of[x], weight.inputs[1]], name=f"{name}.steps")
        values = ir.node("Mul", [cast.outputs[0], steps.outputs[0]], name=f"{name}.values")
        values.outputs[0].type, values.outputs[0].shape = product.outputs[0].type, product.outputs[0].shape
        new = [codes, cast, steps, values]
        ir.convenience.replace_nodes_and_values(graph, product, [product], new, product.outputs, values.outputs)
    for node in dict.fromkeys(node for _, *pair in layers for node in pair):
        if not node.outputs[0].uses():
            graph.remove(node, safe=True)


def _layer(product: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """A MatMul of dequantized activations and a dequantized weight, before a bias: it, and what dequantizes both."""
    uses = list(product.outputs[0].uses()) if product.op_type == "MatMul" else []
    if [use.node.op_type for use in uses] != ["Add"] or uses[0].node.inputs[1 - uses[0].idx].const_value is None:
        return None
    x, weight = (value.producer() for value in product.inputs)
    if x is None or weight is None or {x.op_type, weight.op_type} != {"DequantizeLinear"}:
        return None
    return (product, x, weight) if len(weight.inputs) == 2 else None  # weights have no zero point


def _has_groups(node: ir.Node) -> bool:
    return node.op_type == "Conv" and node.attributes["group"].as_int() > 1


def _in_float(product: ir.Node) -> bool:
    """Whether no grid is before a product; also a convolution of groups, in which integers are no faster."""
    if _has_groups(product):
        return True
    before = product.inputs[0].producer()  # type: ignore[union-attr]
    dequantized = before is not None and str(before.name).endswith(".dequantize")  # by a Mul
    return before is None or not (before.op_type in ("Grid", "DequantizeLinear") or dequantized)


def _unfold_convolutions(graph: ir.Graph) -> None:
    """DequantizeLinear, DequantizeLinear -> Conv becomes a layer, which `_multiply_codes` finds, of patches of codes:

        Transpose -> Pad with the zero point -> Slice for each place of the kernel -> Concat -> MatMul -> Transpose

    ONNX Runtime (1.31) computes the former in float, or, before a QuantizeLinear, gives other codes: probably it
    quantizes the weights or the bias once more. Its ConvInteger takes seven to ten times as long as the patches do.
    """
    kernels: dict[ir.Node, ir.Node] = {}
    for node in list(graph):
        x, weight = (
            (value and value.producer() for value in node.inputs[:2]) if node.op_type == "Conv" else (None, None)
        )
        if x is None or weight is None or {x.op_type, weight.op_type} != {"DequantizeLinear"}:
            continue
        name, shape = str(node.name), _numbers(weight.inputs[1]).shape
        if weight not in kernels:  # one for all calls of a layer
            new = _kernel_nodes(graph, weight)
            graph.insert_after(weight, new)
            kernels[weight] = new[-1]
        new = _patch_nodes(graph, node, x.inputs[0], x.inputs[2])
        new.append(ir.node("DequantizeLinear", [new[-1].outputs[0], *x.inputs[1:]], name=f"{name}.patches.dequantize"))
        new.append(ir.node("MatMul", [new[-1].outputs[0], kernels[weight].outputs[0]], name=f"{name}.multiply"))
        has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
        bias = node.inputs[2] if has_bias else _constant(graph, f"{name}.bias", np.zeros(shape, np.float32))
        new.append(ir.node("Add", [new[-1].outputs[0], bias], name=f"{name}.add_bias"))
        new.append(ir.node("Transpose", new[-1].outputs, {"perm": [0, 3, 1, 2]}, name=f"{name}.channels_first"))
        before, after = node.outputs[0], new[-1].outputs[0]
        after.type, after.shape = before.type, before.shape
        ir.convenience.replace_nodes_and_values(graph, node, [node], new, [before], [after])
        for left in (x, weight):
            if not left.outputs[0].uses():
                graph.remove(left, safe=True)


def _kernel_nodes(graph: ir.Graph, weight: ir.Node) -> list[ir.Node]:
    """A kernel's codes as the matrix that patches are multiplied by: (places * channels, output channels)."""
    name = str(weight.name).removesuffix(".dequantize")
    rows = _constant(graph, f"{name}.rows", np.array([-1, len(_numbers(weight.inputs[1]))]))
    moved = ir.node("Transpose", [weight.inputs[0]], {"perm": [2, 3, 1, 0]}, name=f"{name}.transpose")
    matrix = ir.node("Reshape", [moved.outputs[0], rows], name=f"{name}.matrix")
    inputs = [matrix.outputs[0], weight.inputs[1]]
    return [moved, matrix, ir.node("DequantizeLinear", inputs, {"axis": 1}, name=f"{name}.matrix.dequantize")]


def _patch_nodes(graph: ir.Graph, conv: ir.Node, codes: ir.Value, zero: ir.Value) -> list[ir.Node]:
    """Codes (N, C, H, W) -> (N, h, w, places * C): what each output of a convolution is computed from."""
    name = str(conv.name)
    kernel, strides, dilations, pads = (
        list(conv.attributes[key].as_ints()) for key in ("kernel_shape", "strides", "dilations", "pads")
    )
    nodes = [ir.node("Transpose", [codes], {"perm": [0, 2, 3, 1]}, name=f"{name}.channels_last")]
    if any(pads):
        around = _constant(graph, f"{name}.pads", np.array([0, *pads[:2], 0, 0, *pads[2:], 0]))
        nodes.append(ir.node("Pad", [nodes[-1].outputs[0], around, zero], name=f"{name}.pad"))
    if kernel == strides == [1, 1]:
        return nodes
    whole, parts = nodes[-1].outputs[0], []
    axes, steps = (_constant(graph, f"{name}.{key}", np.array(n)) for key, n in (("axes", [1, 2]), ("steps", strides)))
    for place in np.ndindex(*kernel):
        starts = np.array([i * d for i, d in zip(place, dilations, strict=True)])
        behind = np.array([(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]) - starts
        ends = np.where(behind, -behind, np.iinfo(np.int64).max)
        label = f"{name}.place_{'_'.join(map(str, place))}"
        bounds = [_constant(graph, f"{label}.{key}", n) for key, n in (("starts", starts), ("ends", ends))]
        parts.append(ir.node("Slice", [whole, *bounds, axes, steps], name=label))
    joined = ir.node("Concat", [part.outputs[0] for part in parts], {"axis": 3}, name=f"{name}.patches")
    return [*nodes, *parts, joined]


def _next_call(weight: ir.Node, calls: Counter[str]) -> str:
    """A name for the next product with a weight: that of the weight, and a number from the second on."""
    name = str(weight.name).removesuffix(".dequantize")
    calls[name] += 1
    return name if calls[name] == 1 else f"{name}.{calls[name]}"


def _numbers(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _constant(graph: ir.Graph, name: str, numbers: Any) -> ir.Value:
    tensor = numbers if isinstance(numbers, ir.TensorProtocol) else ir.tensor(numbers)
    tensor.name = name
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
    graph.initializers[name] = value
    return value


def _strip(program: ir.Model) -> None:
    """Remove what is unused: the placeholders' constants, and the exporter's notes with traces of source files."""
    graph = program.graph
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
        elif (short := name.removeprefix(_SEEN)) not in graph.initializers:
            value.name = short  # as the model calls it
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
    graph.metadata_props.clear()
    program.metadata_props.clear()
    program.opset_imports.pop(_DOMAIN, None)
    program.producer_name = "maskaq"
    program.producer_version = maskaq.__version__
    graph.name = "maskaq"
