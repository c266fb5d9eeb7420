"""A deployed model as an ExecuTorch program (`.pte`) for XNNPACK, which phones and small computers run.

XNNPACK (1.5) multiplies integers in linear layers whose activations it quantizes itself, to 8 bits for each token; a
layer with a fixed grid needs one for its output too, which our models do not have. So a program has our codes for the
weights, 4 or 8 bits, and the runtime's own 8-bit grids, finer than ours, for the activations of linear layers. Products
of attention are in float. It is not our model code by code: `verify_executorch` compares it with the same arithmetic in
torch, and its outputs with the model's.
"""

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.artifact.export.agreement import Agreement, correlation
from maskaq.artifact.export.metadata import REMEDY, as_text, checked, describe
from maskaq.artifact.export.programs import OUTPUT, program_of
from maskaq.errors import ExportError
from maskaq.models import geometry
from maskaq.models.structure import replace_module
from maskaq.quant.deployed import CodedWeight, DeployedConv2d, DeployedLinear, FixedGrid, FloatWeight
from maskaq.storage.files import write_bytes_atomic

try:
    import torch.ao.quantization.fx._decomposed  # registers the operators that XNNPACK knows
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime, Verification
except ImportError as error:  # pragma: no cover
    raise ExportError(f'ExecuTorch programs need more packages ({error}): pip install "maskaq[executorch]"') from error

NOTES = "maskaq"
"""A method of the program that returns its metadata as JSON."""
LARGEST_BATCH = 32
"""Memory is planned for so many images; `ExecutorchModel` takes more of them in parts."""
ALIKE = 0.99
"""The least correlation of a program's outputs with those of the same arithmetic in torch. XNNPACK rounds in its own
way: a step of 8 bits at a token here and there, in every layer."""


def export_executorch(model: nn.Module, file: str | Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a deployed model as a program for up to 32 images; its method `maskaq` returns its notes."""
    spec, notes = geometry(model), as_text(describe(model) | dict(metadata or {}))
    images = torch.zeros(2, spec.channels, *spec.image_size)
    batch = torch.export.Dim("N", min=1, max=LARGEST_BATCH)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(_dynamic(model), (images,), dynamic_shapes=({0: batch},))
        program.graph_module.graph.eliminate_dead_code()  # values that only taps would have recorded
        lowered = to_edge_transform_and_lower(
            program, partitioner=[XnnpackPartitioner()], constant_methods={NOTES: notes}
        )
        buffer = lowered.to_executorch().buffer
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(file, bytes(buffer))
    return Path(file)


class _DynamicLinear(nn.Module):
    """A linear layer of coded weights and activations that are quantized to 8 bits for each token."""

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, linear: DeployedLinear) -> None:
        super().__init__()
        coded: CodedWeight = linear.weight  # type: ignore[assignment]
        self.ends = (-8, 7) if coded.bits <= 4 else (-128, 127)
        self.register_buffer("codes", coded.codes.clone())
        self.register_buffer("scale", coded.scale.clone())
        self.register_buffer("zero", torch.zeros(len(coded.scale), dtype=torch.int64))
        self.register_buffer("bias", linear.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        ops: Any = torch.ops.quantized_decomposed
        scale, zero = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        codes = ops.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
        x = ops.dequantize_per_token(codes, scale, zero, -128, 127, torch.int8, torch.float32)
        weight = ops.dequantize_per_channel(self.codes, self.scale, self.zero, 0, *self.ends, torch.int8)
        return F.linear(x, weight, self.bias)  # type: ignore[arg-type]


def _dynamic(model: nn.Module) -> nn.Module:
    """The model as a program computes it."""
    found = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, DeployedLinear) and isinstance(module.weight, CodedWeight):
            replace_module(found, name, _DynamicLinear(module))
        elif isinstance(module, DeployedConv2d):  # of images, in float: XNNPACK takes no computed weights
            conv = found.get_submodule(name)
            conv.weight = FloatWeight(module.weight().detach())
    for name, module in list(found.named_modules()):
        if isinstance(module, FixedGrid):
            replace_module(found, name, nn.Identity())
    return found


class ExecutorchModel(nn.Module):
    """A program as a module, for `maskaq.evaluate`."""

    def __init__(self, file: str | Path, threads: int = 0) -> None:
        super().__init__()
        if threads:
            portable_lib._unsafe_reset_threadpool(threads)
        try:
            self.program = Runtime.get().load_program(Path(file), verification=Verification.InternalConsistency)
            self.method = self.program.load_method("forward")
        except Exception as error:  # RuntimeError with a number, or OSError
            raise ExportError(f"cannot read {file} as an ExecuTorch program: {error}; {REMEDY}") from error

    def forward(self, images: Tensor) -> Tensor:
        parts = images.contiguous().split(LARGEST_BATCH)
        return torch.cat([self.method.execute((part,))[0].clone() for part in parts])


def metadata_of(file: str | Path) -> dict[str, Any]:
    """The entries that maskaq wrote into a program."""
    model = ExecutorchModel(file)
    if NOTES not in model.program.method_names:
        raise ExportError(f"{file} was not written by maskaq: it has no method {NOTES}; {REMEDY}")
    try:
        notes = json.loads(model.program.load_method(NOTES).execute(())[0])
    except (ValueError, RecursionError) as error:
        raise ExportError(f"cannot read the notes of {file}: {error}; {REMEDY}") from error
    return checked(notes, file)


@torch.no_grad()
def verify_executorch(file: str | Path, model: nn.Module, images: Tensor) -> Agreement:
    """Compare a program with the same arithmetic in torch, and with the deployed model; ExportError if they differ."""
    found, reference, ours = ExecutorchModel(file)(images), _dynamic(model)(images), model(images)
    alike = correlation(reference, found)
    if not alike >= ALIKE:
        raise ExportError(
            f"{file} does not compute what it should: the correlation with torch's outputs is {alike:.3f}"
        )
    program = program_of(model)
    return Agreement(
        images=len(images),
        means=program.means(model),
        share=program.alike(model, {OUTPUT: ours}, {OUTPUT: found}).double().mean().item(),
        correlation=correlation(ours, found),
        reference=alike,
    )
