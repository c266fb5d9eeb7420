"""Check that an exported file computes what the deployed model does, site by site, with the kernels that will run.

A difference of 1e-6 turns a rounding here and there, and turned roundings move the logits of a 4-bit model by a third
of their size: comparing logits says little. So the deployed model is fed with the codes of the file: at each grid its
own codes are compared with the file's, and it continues with the file's. Between two grids both then compute from the
same integers and can differ by float rounding alone: codes are equal, or the value lay within `NEAR` steps of the
border between them. At the end logits are compared as floats.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskaq.artifact.export.agreement import correlation
from maskaq.artifact.export.programs import program_of
from maskaq.errors import ExportError
from maskaq.quant.deployed import CodedWeight, FixedGrid, LogGrid
from maskaq.tasks.task import Outputs

try:
    import onnx
    import onnxruntime
    from onnx import numpy_helper
except ImportError as error:  # pragma: no cover
    raise ExportError(f'ONNX files need more packages ({error}): pip install "maskaq[onnx]"') from error

from maskaq.artifact.export.onnx import CODES, INPUT, call_name

NEAR = 1e-3
"""Steps by which float rounding may change a value between two grids. (1e-5 was measured.)"""
APART = 1e-3
"""Share of the codes that may differ if not every site is compared. (2e-5 was measured.)"""
LOGITS = 1e-4
"""Largest difference of logits from the same codes, as a share of the largest logit."""
CHOICES = 0.99
"""Share of the boxes that both have to choose among the same ones."""
Codes = Mapping[str, Sequence[np.ndarray]]
"""Name of a grid -> its codes, for each time that it runs for a batch of images."""


@dataclass(frozen=True)
class Verification:
    """The result of a verification; `verify` raises if the file fails it."""

    weights: int
    """Weight tensors, all codes and scales equal."""
    sites: int
    """Activation grids; those of an ONNX file are compared with the runtime's optimisations and without."""
    codes: int
    """Integer codes compared at them."""
    turned: int
    """Codes that differ because a value lay on the border between two."""
    farthest: float
    """The largest distance of such a value from its border, in steps."""
    agreement_means: str
    """What file and model do on an image where they agree."""
    logits: float
    """The largest difference of logits from the same codes, in shares of the largest logit."""
    images: int
    agreement: float
    """Share of the images that file and model put into the same class, each left to itself."""
    correlation: float
    """Of all their logits, each left to itself."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(file: str | Path, model: nn.Module, images: Tensor) -> Verification:
    """Compare an ONNX file with the deployed model it was made from, on normalised images (N, C, H, W).

    Raises ExportError that names the first site that differs.
    """
    try:
        proto = onnx.load(str(file))
        onnx.checker.check_model(proto, full_check=True)
        weights = _compare_weights(proto, model)
        passes = [_compare_pass(proto, model, images, optimised) for optimised in (False, True)]
        free = tensors_of(session(proto), list(program_of(model).outputs), images)
    except ExportError as error:
        raise ExportError(f"{file} does not compute what the model computes: {error}") from error
    except Exception as error:  # the parser, the checker and the runtime raise classes of their own
        raise ExportError(f"{file} is not a sound ONNX file: {error}") from error
    return summary(model, images, weights, passes, free)


@torch.no_grad()
def summary(model: nn.Module, images: Tensor, weights: int, passes: "list[Pass]", free: Outputs) -> Verification:
    """Combine passes fed with the runtime's codes with a comparison of the outputs of a free-running pass."""
    program = program_of(model)
    ours = program.compute(model, images)
    return Verification(
        weights=weights,
        sites=len(grids_of(model)),
        codes=sum(p.codes for p in passes),
        turned=sum(p.turned for p in passes),
        farthest=max(p.farthest for p in passes),
        logits=max(p.logits for p in passes),
        images=len(images),
        agreement_means=program.means(model),
        agreement=program.alike(model, ours, free).double().mean().item(),
        correlation=correlation(ours[program.ranked], free[program.ranked]),
    )


def session(
    model: "onnx.ModelProto | str | Path", *, threads: int = 0, optimised: bool = True
) -> "onnxruntime.InferenceSession":
    """An ONNX Runtime session on the CPU, from memory or a file; 0 threads lets the runtime choose."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # idle workers leave the cores to others
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def tensors_of(opened: "onnxruntime.InferenceSession", names: list[str], images: Tensor) -> dict[str, Tensor]:
    """Tensors of a file by name."""
    return {n: torch.from_numpy(x) for n, x in zip(names, opened.run(names, {INPUT: images.numpy()}), strict=True)}


def grids_of(model: nn.Module) -> dict[str, FixedGrid]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FixedGrid)}


def _compare_weights(proto: "onnx.ModelProto", model: nn.Module) -> int:
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    return compare_weights(stored, model)


def compare_weights(stored: Mapping[str, np.ndarray], model: nn.Module) -> int:
    """Compare every weight code of a file with the model's; returns how many weights, raises at a mismatch."""
    coded = {name: module for name, module in model.named_modules() if isinstance(module, CodedWeight)}
    for name, weight in coded.items():
        parts = [name] if f"{name}{CODES}" in stored else [f"{name}.{i}" for i in range(3)]
        try:
            codes = [stored[f"{part}{CODES}"].astype(np.int8) for part in parts]
            scales = [stored[f"{part}.scale"].reshape(-1) for part in parts]
        except KeyError as error:
            raise ExportError(f"it has no tensor {error} of the weight {name}") from error
        if weight.codes.dim() == 2:
            codes = [part.T for part in codes]
        if not np.array_equal(np.concatenate(codes), weight.codes.numpy()):
            raise ExportError(f"the codes of the weight {name} differ")
        if not np.array_equal(np.concatenate(scales), weight.scale.numpy()):
            raise ExportError(f"the scales of the weight {name} differ")
    return len(coded)


@dataclass
class Pass:
    """The result of one pass; fields as in `Verification`."""

    codes: int = 0
    turned: int = 0
    farthest: float = 0.0
    logits: float = 0.0


def _compare_pass(proto: "onnx.ModelProto", model: nn.Module, images: Tensor, optimised: bool) -> Pass:
    watched = onnx.ModelProto()
    watched.CopyFrom(proto)
    known = {output for node in proto.graph.node for output in node.output}
    program, grids = program_of(model), grids_of(model)
    calls = {name: calls_of(name, known, CODES) for name in grids}
    inner = [*program.inner, *(call + CODES for name in grids for call in calls[name])]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    watched = onnx.shape_inference.infer_shapes(watched)
    found = tensors_of(session(watched, optimised=optimised), [*program.outputs, *inner], images)
    zeros = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    codes = {
        name: [
            as_codes(name, grid, found.pop(call + CODES).numpy(), zeros[f"{call}.zero_point"]) for call in calls[name]
        ]
        for name, grid in grids.items()
    }
    return compare_fed(model, images, codes, found)


def calls_of(grid: str, known: Container[str], ending: str) -> list[str]:
    """What a grid is called in a file, each time that it runs: the names that are known with this ending."""
    if grid + ending in known:
        return [grid]
    calls: list[str] = []
    while (call := call_name(grid, len(calls))) + ending in known:
        calls.append(call)
    if not calls:
        raise ExportError(f"it has no tensor '{grid}{ending}' of the grid {grid}")
    return calls


def as_codes(name: str, grid: FixedGrid, stored: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """A grid's codes from the integers of a file, which has levels for them, or another zero point for some heads."""
    if isinstance(grid, LogGrid):
        levels = grid.levels.numpy()
        codes = np.searchsorted(levels, stored)
        if not np.array_equal(levels[codes.clip(max=grid.top)], stored):
            raise ExportError(f"at {name} it has values that are no levels of the grid")
        return codes.astype(np.float32)
    moved = grid.zero_point.numpy() - zero.astype(np.float32).reshape(grid.zero_point.shape)
    return stored.astype(np.float32) + moved


def compare_fed(model: nn.Module, images: Tensor, codes: Codes, outputs: Outputs) -> Pass:
    """Run the model, fed with the runtime's codes at every quantizer; raises at the first site that differs.

    Where a grid has no codes the model goes on with its own. A rounding that turned there moves what follows by more
    than float rounding does, so that then `APART` of the codes may differ, by however much.
    """
    found, program = Pass(), program_of(model)
    whole = codes.keys() == grids_of(model).keys()
    with torch.no_grad(), _fed(model, codes, found, strict=whole):
        ours = program.compute(model, images, outputs)
    if not whole and found.turned > APART * found.codes:
        raise ExportError(f"{found.turned} of {found.codes} codes differ where only some sites are watched")
    for name in (name for name in ours if name not in program.choices):
        apart = ((ours[name] - outputs[name]).abs().max() / ours[name].abs().max()).item()
        if not apart <= LOGITS:
            raise ExportError(f"from the same codes its {name} differ by {apart:.1e} of the largest")
        found.logits = max(found.logits, apart)
    if not (same := program.same_choices(ours, outputs)) >= CHOICES:
        raise ExportError(f"of the same boxes it chooses others: only {100 * same:.1f} % are the model's")
    return found


@contextmanager
def _fed(model: nn.Module, codes: Codes, found: Pass, strict: bool) -> Iterator[None]:
    """Context in which each grid compares its codes with the given ones, and continues with the given ones."""

    def compare(name: str, grid: FixedGrid, x: Tensor) -> Tensor:
        if (given := next(left[name], None)) is None:
            raise ExportError(f"at {name} it has codes for {len(codes[name])} of the times that the layer runs")
        theirs = torch.from_numpy(given).to(x.dtype)
        if theirs.squeeze().shape != x.squeeze().shape:  # a classifier's has an axis of length 1 more
            raise ExportError(f"at {name} it has shape {tuple(theirs.shape)}, the model {tuple(x.shape)}")
        theirs = theirs.view_as(x)
        ours = grid.codes(x)
        differ = ours != theirs
        if differ.any():
            border = grid.border(torch.minimum(ours, theirs))
            distance = (x / grid.scale - border)[differ].abs().max().item()
            jump = (ours - theirs).abs().max().item()
            if strict and (jump > 1 or not distance <= NEAR):
                raise ExportError(
                    f"at {name} {int(differ.sum())} of {differ.numel()} codes differ, by up to {jump:.0f}, and not for "
                    f"float rounding: a value is {distance:.1e} steps from the border between its two codes"
                )
            found.turned = found.turned + int(differ.sum())
            found.farthest = max(found.farthest, distance)
        found.codes += theirs.numel()
        return grid.values(theirs)

    left = {name: iter(calls) for name, calls in codes.items()}
    grids = grids_of(model)
    handles = [
        grid.register_forward_hook(lambda grid, args, _, name=name: compare(name, grid, args[0]))  # type: ignore[misc]
        for name, grid in grids.items()
        if name in codes
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
