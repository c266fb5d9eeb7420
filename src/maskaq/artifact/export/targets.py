"""What runtimes require of a model's grids, checked before anything is written."""

from torch import nn

from maskaq.errors import ExportError, unknown
from maskaq.quant.deployed import CodedWeight, DeployedLinear, FixedGrid, LogGrid
from maskaq.tasks import task_of

SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "executorch": ".pte", "pt2": ".pt2"}
"""Format -> suffix of its file; an OpenVINO model has a second file, `.bin`, beside it."""
TARGETS = ("cpu", "qdq", "tensorrt")
"""What an ONNX file is laid out for."""
PRECISIONS = ("f32", "bf16")
"""Of all that is not quantized, in OpenVINO."""
_TRIED = {"segmentation": ("onnx", "openvino", "pt2"), "detection": ("onnx",)}
"""Task -> the only formats that its models were tried in; TensorRT's layout was tried in none."""


def check_options(format: str, target: str, precision: str) -> None:
    """ExportError for an unknown option, or for options that do not go together."""
    known = {"format": (format, SUFFIXES), "target": (target, TARGETS), "precision": (precision, PRECISIONS)}
    for option, (value, values) in known.items():
        if value not in values:
            raise ExportError(unknown(option, str(value), values))
    if target != "cpu" and format != "onnx":
        raise ExportError(f"--target {target} is a layout of ONNX files: expected --format onnx, got {format}")
    if precision != "f32" and format != "openvino":
        raise ExportError(f"--precision {precision} is for OpenVINO: expected --format openvino, got {format}")


def check_grids(model: nn.Module, format: str, target: str = "cpu") -> None:
    """ExportError that names the setting that would do, if the runtime cannot compute a model's grids."""
    task = task_of(model).name
    if task in _TRIED and (format not in _TRIED[task] or target == "tensorrt"):
        what = f"--target {target}" if target == "tensorrt" else f"--format {format}"
        *others, last = _TRIED[task]
        formats = f"{', '.join(others)} or {last}" if others else last
        raise ExportError(f"{what} has not been tried for models of {task}: expected --format {formats}")
    if target == "tensorrt":
        _check_tensorrt(model)
    if format == "executorch":
        _check_executorch(model)


def _check_tensorrt(model: nn.Module) -> None:
    """Codes are int8 with a zero point of 0 (weights from -127), one scale for each activation, all of them uniform."""
    for name, part in model.named_modules():
        if isinstance(part, LogGrid):
            setting = "softmax" if name.endswith(".a_grid") else "gelu"
            raise ExportError(
                f"{name} has a logarithmic grid, TensorRT uniform ones: quantize with --set quantization.{setting}=same"
            )
        if isinstance(part, FixedGrid) and part.scale.dim():
            raise ExportError(
                f"{name} has a range for each head, TensorRT one for each tensor: expected granularity = tensor"
            )
        fits = True
        if isinstance(part, FixedGrid):
            fits = part.symmetric or (part.bits < 8 and not part.zero_point)
        elif isinstance(part, CodedWeight):
            fits = int(part.codes.min()) > -128
        if not fits:
            raise ExportError(
                f"{name} is not symmetric, and TensorRT has no zero points: quantize with "
                "--set quantization.target=symmetric"
            )


def _check_executorch(model: nn.Module) -> None:
    for name, module in model.named_modules():
        grid = module.grid if isinstance(module, DeployedLinear) else None
        if isinstance(grid, FixedGrid) and grid.bits < 8:
            raise ExportError(
                f"{name} has {grid.bits}-bit activations, and XNNPACK has 8-bit ones alone: quantize with --bits w4a8 "
                "or w8a8"
            )
