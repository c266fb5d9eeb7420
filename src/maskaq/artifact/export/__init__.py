"""A deployed model in the file formats of other runtimes; each file is verified before it has its name."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from maskaq.errors import ExportError, unwritable
from maskaq.storage.files import replace_together

if TYPE_CHECKING:
    from maskaq.artifact.export.verify import Verification

SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2"}
"""Of the file that each format is asked for by; an OpenVINO model has a second, `.bin`, beside it."""


def export(
    model: nn.Module, file: str | Path, format: str, images: Tensor, metadata: Mapping[str, Any] | None = None
) -> "Verification | None":
    """Write a deployed model and compare what was written with it, on normalised images (N, C, H, W).

    Returns what was compared (not of a pt2 program, which computes the same bits). Where the two differ an ExportError
    is raised, and there is no new file: one that was there under the name still is.
    """
    path = check_target(file, format)
    unproven = path.with_name(f".{path.stem}.{os.getpid()}.unproven{SUFFIXES[format]}")
    moves = {unproven: path}
    found = None
    try:
        if format == "onnx":  # its packages are an extra
            from maskaq.artifact.export.onnx import export_onnx
            from maskaq.artifact.export.verify import verify

            found = verify(export_onnx(model, unproven, metadata), model, images)
        elif format == "openvino":  # another extra
            from maskaq.artifact.export.openvino import export_openvino, verify_openvino

            moves = {weights_of(unproven): weights_of(path), unproven: path}
            found = verify_openvino(export_openvino(model, unproven, metadata), model, images)
        else:
            from maskaq.artifact.export.pt2 import export_pt2, verify_pt2

            verify_pt2(export_pt2(model, unproven, metadata), model, images)
        replace_together(moves)
    finally:
        for left in moves:
            with suppress(OSError):  # an error before it says more
                left.unlink()
    return found


def weights_of(file: str | Path) -> Path:
    """Where OpenVINO looks for the numbers of a graph."""
    return Path(file).with_suffix(".bin")


def check_target(file: str | Path, format: str) -> Path:
    """The file, if a model in this format can be written there; ExportError otherwise, so that export fails early."""
    path = Path(file)
    if path.suffix != SUFFIXES[format]:
        raise ExportError(f"{file}: expected a name that ends in {SUFFIXES[format]} for --format {format}")
    if problem := unwritable(path):
        raise ExportError(problem)
    return path
