"""A deployed model in the file formats of other runtimes; each file is verified before it has its name."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from maskaq.artifact.export.targets import SUFFIXES, check_grids, check_options
from maskaq.errors import ExportError, MaskaqError, unwritable
from maskaq.storage.files import rename_, replace_together

if TYPE_CHECKING:
    from maskaq.artifact.export.agreement import Agreement
    from maskaq.artifact.export.verify import Verification


def export(
    model: nn.Module,
    file: str | Path,
    format: str,
    images: Tensor,
    metadata: Mapping[str, Any] | None = None,
    *,
    target: str = "cpu",
    precision: str = "f32",
) -> "Verification | Agreement | None":
    """Write a deployed model and compare what was written with it, on normalised images (N, C, H, W).

    Args:
        target: what an ONNX file is laid out for: one of `targets.TARGETS`.
        precision: what OpenVINO computes in what is not quantized: one of `targets.PRECISIONS`. The file notes it.

    Returns what was compared (not of a pt2 program, which computes the same bits). Where the two differ an ExportError
    is raised, and there is no new file: one that was there under the name still is.
    """
    check_options(format, target, precision)
    path = check_target(file, format)
    check_grids(model, format, target)
    unproven = path.with_name(f".{path.stem}.{os.getpid()}.unproven{SUFFIXES[format]}")
    moves = {unproven: path}
    found: Verification | Agreement | None = None
    try:
        if format == "onnx":  # its packages are an extra
            from maskaq.artifact.export.onnx import LAYOUTS, export_onnx
            from maskaq.artifact.export.verify import verify

            notes = {"target": target} | dict(metadata or {})
            found = verify(export_onnx(model, unproven, notes, LAYOUTS[target]), model, images)
        elif format == "openvino":  # another extra
            from maskaq.artifact.export.openvino import export_openvino, verify_openvino

            moves = {weights_of(unproven): weights_of(path), unproven: path}
            notes = {"precision": precision} | dict(metadata or {})
            found = verify_openvino(export_openvino(model, unproven, notes), model, images)
        elif format == "executorch":  # another extra
            from maskaq.artifact.export.executorch import export_executorch, verify_executorch

            found = verify_executorch(export_executorch(model, unproven, metadata), model, images)
        else:
            from maskaq.artifact.export.pt2 import export_pt2, verify_pt2

            verify_pt2(export_pt2(model, unproven, metadata), model, images)
        replace_together(moves)
    except MaskaqError as error:
        rename_(error, unproven.with_suffix(""), path.with_suffix(""))  # without suffixes: OpenVINO has two files
        raise
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
