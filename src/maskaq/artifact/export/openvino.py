"""A deployed model as OpenVINO's own files: `model.xml`, the graph, and `model.bin`, the numbers beside it.

It is the ONNX graph as OpenVINO reads it, with one change: QuantizeLinear, Clip of codes and DequantizeLinear become

    Minimum with the value of code 2^b - 1 -> FakeQuantize of 256 levels

which is the same grid and runs faster; the table of a logarithmic grid stays. On a symmetric grid the 256 levels lie
around zero, and a Maximum is needed too: int8 without a zero point, which OpenVINO asks of a product of activations.

A FakeQuantize of 2^b levels would be simpler, but the CPU plugin (2026.4) takes up only those of 16 and 256. Behind any
other it quantizes the activations once more, on the fly (its default, `DYNAMIC_QUANTIZATION_GROUP_SIZE` = 32), and
products are off by half a percent. The graph is read, not converted: `openvino.convert_model` folds the weights' Cast,
and would store 4 bits in 8.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskaq.artifact.export import weights_of
from maskaq.errors import ExportError
from maskaq.quant.deployed import DeployedConv2d, DeployedLinear, FixedGrid, LogGrid
from maskaq.storage.files import write_bytes_atomic

try:
    import openvino
    from openvino import opset13
except ImportError as error:  # pragma: no cover
    raise ExportError(f'OpenVINO files need more packages ({error}): pip install "maskaq[openvino]"') from error

from maskaq.artifact.export.metadata import DIGEST, PREFIX, REMEDY, as_text, check_digest, ours
from maskaq.artifact.export.onnx import CODES, QDQ, export_onnx
from maskaq.artifact.export.programs import OUTPUT
from maskaq.artifact.export.verify import (
    NEAR,
    Pass,
    Verification,
    as_codes,
    calls_of,
    compare_fed,
    compare_weights,
    grids_of,
    summary,
)

_BIN = ".bin"
_LEVELS = 256
_CORE = openvino.Core()
"""One for the process. Each has signals handled on a stack of its own, and gives back the one before when it goes: of
two that go in the order they came (2026.4), the second gives back one that is gone, and the next signal kills."""
_ON_GRID = ".on_grid"
"""Ends the name of a grid's output tensor."""


def export_openvino(model: nn.Module, file: str | Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a deployed model as `file` and its `.bin`: input, output and notes as in `export_onnx`."""
    path, unknown = Path(file), 64 * "?"
    with tempfile.TemporaryDirectory() as folder:
        onnx = Path(folder) / "model.onnx"
        program = _CORE.read_model(export_onnx(model, onnx, metadata, QDQ))
        nodes = {node.get_friendly_name(): node for node in program.get_ops()}
        for name, grid in grids_of(model).items():
            for call in calls_of(name, nodes, ".quantize"):
                _fuse_grid(nodes, call, grid)
        program.validate_nodes_and_infer_types()
        program.set_rt_info(as_text({_BIN: unknown}), ["framework", PREFIX + DIGEST])  # in place of the ONNX file's
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            openvino.save_model(program, path, compress_to_fp16=False)
        except RuntimeError as error:
            raise ExportError(f"OpenVINO could not write {path}, perhaps for a full disk: {error}") from error
    graph = path.read_bytes()
    write_bytes_atomic(path, graph.replace(unknown.encode(), _digest(path).encode(), 1))
    return path


def _digest(file: str | Path) -> str:
    """SHA-256 of the numbers beside a graph."""
    return sha256(weights_of(file).read_bytes()).hexdigest()


def _fuse_grid(nodes: Mapping[str, Any], name: str, grid: FixedGrid) -> None:
    before, after = nodes[f"{name}.quantize"], nodes[f"{name}.dequantize"]
    x = before.input_value(0).get_node().input_value(0)  # a FakeQuantize of 256 levels and a Convert to uint8
    step = after.input_value(1).get_node().get_data()  # of the codes' values: with the gain of scores
    if grid.scale.dim():
        fused = _head_codes(nodes[f"{name}.cut_max"].input_value(0) if f"{name}.cut_max" in nodes else x, grid)
        values = opset13.multiply(opset13.subtract(fused, grid.zero_point.numpy()), np.float32(step))
        before.input(0).replace_source_output(fused.output(0))
    elif not isinstance(grid, LogGrid):
        scale, zero = grid.scale.item(), grid.zero_point.item()
        first = zero - _LEVELS // 2 if grid.symmetric else 0  # code of the lowest level
        if grid.bits < 8:
            x = opset13.minimum(x, np.float32((grid.top - zero) * scale))
        if first:
            x = opset13.maximum(x, np.float32(-zero * scale))
        ends = (first, first + _LEVELS - 1)
        bounds = [np.float32((code - zero) * factor) for factor in (scale, step) for code in ends]
        fused = values = opset13.fake_quantize(x, *bounds, _LEVELS)
    if isinstance(grid, LogGrid):  # its table stays
        after.output(0).set_names({name + _ON_GRID})
        return
    fused.set_friendly_name(name)
    fused.output(0).set_names({name + _ON_GRID})
    for reader in after.output(0).get_target_inputs():
        reader.replace_source_output(values.output(0))


def _head_codes(x: Any, grid: FixedGrid) -> Any:
    """Codes of a grid with a range for each head. The CPU plugin (2026.4) has no FakeQuantize of many ranges there."""
    x = opset13.add(opset13.divide(x, grid.scale.numpy()), grid.zero_point.numpy())
    if grid.bits < 8 and not isinstance(grid, LogGrid):
        x = opset13.minimum(x, np.float32(grid.top))
    ends = np.float32(0), np.float32(_LEVELS - 1)
    return opset13.fake_quantize(x, *ends, *ends, _LEVELS)


def read(file: str | Path) -> "openvino.Model":
    """A model from its two files, or from an ONNX file."""
    try:
        return _CORE.read_model(str(file))
    except Exception as error:  # a RuntimeError with the trace of a parser
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        raise ExportError(f"cannot read {file} as an OpenVINO model: {reason.strip()}; {REMEDY}") from error


def metadata_of(file: str | Path) -> dict[str, Any]:
    """The entries that maskaq wrote into a file; ExportError if the numbers beside it are not those that it wrote."""
    notes = _notes(read(file), file)
    check_digest(notes, _BIN, _digest(file), file)
    return notes


def precision_of(program: "openvino.Model") -> str:
    """What a file was exported to be run in; f32 for files of others."""
    entries = program.get_rt_info("framework").value if program.has_rt_info("framework") else {}
    return str(entries.get(f"{PREFIX}precision", "f32"))


def _notes(program: "openvino.Model", file: str | Path) -> dict[str, Any]:
    try:
        entries = program.get_rt_info("framework").value if program.has_rt_info("framework") else {}
    except UnicodeDecodeError as error:
        raise ExportError(f"{file} is damaged: its rt_info is not UTF-8 text ({error}); {REMEDY}") from error
    return ours(entries if isinstance(entries, Mapping) else {}, file, "rt_info")


def compiled(program: "openvino.Model", threads: int = 0, precision: str = "f32") -> "openvino.CompiledModel":
    """The model compiled for the CPU, with this many threads; 0 lets OpenVINO choose."""
    # Without the hint what is not quantized would be computed in bfloat16 where the CPU has it.
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    return _CORE.compile_model(program, "CPU", settings)


class OpenvinoModel(nn.Module):
    """OpenVINO's files as a module, for `maskaq.evaluate`."""

    def __init__(self, file: str | Path, threads: int = 0) -> None:
        super().__init__()
        program = read(file)
        self.request = compiled(program, threads, precision_of(program)).create_infer_request()

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.request.infer({0: images.numpy()})[OUTPUT].copy())


def products(file: str | Path) -> tuple[int, int, int, int]:
    """Matrix products in integers, those in float, attentions that are a fused kernel each, and how many of integers.

    Counted by the precision that OpenVINO reports, which is int8 also where OpenVINO itself chose to quantize
    activations: `verify_openvino` checks that a product is one of our codes.
    """
    kinds: Counter[str] = Counter()
    for node in compiled(read(file)).get_runtime_model().get_ops():
        notes = {key: node.get_rt_info()[key].value for key in ("layerType", "runtimePrecision", "originalLayersNames")}
        if notes["layerType"] in ("FullyConnected", "MatMul"):
            kinds["integer" if notes["runtimePrecision"] in ("u8", "i8") else "float"] += 1
        elif notes["layerType"] == "Subgraph" and "matmul" in notes["originalLayersNames"].lower():
            kinds["fused"] += 1
            types = [node.get_input_element_type(i) for i in range(node.get_input_size())]
            kinds["of integers"] += sum(kind in (openvino.Type.i8, openvino.Type.u8) for kind in types) >= 3  # q, k, v
    return kinds["integer"], kinds["float"], kinds["fused"], kinds["of integers"]


def verify_openvino(file: str | Path, model: nn.Module, images: Tensor) -> Verification:
    """Compare OpenVINO's files with the deployed model they were made from, as `verify` does an ONNX file.

    Raises ExportError that names the first site that differs.
    """
    try:
        weights = compare_weights(_constants(read(file)), model)
        # Attention that is watched is not fused: it is compared as it is, and once more as it will run.
        linear = [n for n, module in model.named_modules() if isinstance(module, DeployedLinear | DeployedConv2d)]
        fed = _compare_pass(read(file), model, images, list(grids_of(model)))
        _compare_pass(read(file), model, images, [n for n in grids_of(model) if n.rpartition(".")[0] in linear])
        free = {OUTPUT: OpenvinoModel(file)(images)}  # in the precision that it will run in
    except ExportError as error:
        raise ExportError(f"{file} does not compute what the model computes: {error}") from error
    except Exception as error:  # the runtime raises classes of its own
        raise ExportError(f"{file} is not a sound OpenVINO model: {error}") from error
    return summary(model, images, weights, [fed], free)


def _constants(program: "openvino.Model") -> dict[str, np.ndarray]:
    """Codes and scales of the weights, by name."""
    found = {}
    for node in program.get_ops():
        name = node.get_friendly_name()
        if node.get_type_name() == "Constant" and name.endswith((CODES, ".scale")):
            values = node.get_data()
            shape = tuple(node.get_output_shape(0))
            if node.get_element_type() == openvino.Type.i4:
                values = _unpacked(values.view(np.uint8), shape)
            found[name] = values
    return found


def _unpacked(pairs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Signed codes of 4 bits, two in a byte, the first in the lower half."""
    halves = np.stack([pairs << 4, pairs & 0xF0], axis=-1).view(np.int8) >> 4
    return halves.reshape(-1)[: int(np.prod(shape))].reshape(shape)


def _compare_pass(program: "openvino.Model", model: nn.Module, images: Tensor, names: list[str]) -> Pass:
    known = {tensor for node in program.get_ops() for output in node.outputs() for tensor in output.get_names()}
    calls = {name: calls_of(name, known, _ON_GRID) for name in names}
    program.add_outputs([call + _ON_GRID for name in names for call in calls[name]])
    values = compiled(program).create_infer_request().infer({0: images.numpy()})
    nodes = {node.get_friendly_name(): node for node in program.get_ops()}
    grids, codes = grids_of(model), {}
    for name in names:
        codes[name] = [_codes(nodes, call, grids[name], values[call + _ON_GRID]) for call in calls[name]]
    return compare_fed(model, images, codes, {OUTPUT: torch.from_numpy(values[OUTPUT].copy())})


def _codes(nodes: Mapping[str, Any], name: str, grid: FixedGrid, values: np.ndarray) -> np.ndarray:
    """The codes of values on a grid."""
    if isinstance(grid, LogGrid):
        steps = values.astype(np.float64) / nodes[f"{name}.dequantize"].input_value(1).get_node().get_data()
        steps = steps + grid.zero_point.numpy()
    else:
        low, high = (nodes[name].input_value(i).get_node().get_data() for i in (3, 4))
        steps = (values.astype(np.float64) - low) / (high - low) * (_LEVELS - 1)
    stored = np.round(steps).astype(np.float32)
    zero = grid.zero_point.numpy()
    if grid.symmetric and not isinstance(grid, LogGrid) and not zero.ndim:
        zero = np.full_like(zero, _LEVELS // 2)  # see _fuse_grid
    if not np.abs(steps - stored).max() <= NEAR:
        raise ExportError(f"at {name} it has values between those of its codes")
    return as_codes(name, grid, stored, zero)
