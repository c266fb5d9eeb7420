"""A deployed model in the file formats of other runtimes; each file is verified before it has its name."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from maskaq.export.verify import Verification

FORMATS = ("onnx", "pt2")


def export(
    model: nn.Module, file: str | Path, format: str, images: Tensor, metadata: Mapping[str, Any] | None = None
) -> "Verification | None":
    """Write a deployed model and compare what was written with it, on normalised images (N, C, H, W).

    Returns what was compared (ONNX; a pt2 program computes the same bits). Where the two differ an ExportError is
    raised, and there is no new file: one that was there under the name still is.
    """
    path = Path(file)
    unproven = path.with_name(f".{path.stem}.{os.getpid()}.unproven.{format}")
    found = None
    try:
        if format == "onnx":  # its packages are an extra
            from maskaq.export.onnx import export_onnx
            from maskaq.export.verify import verify

            found = verify(export_onnx(model, unproven, metadata), model, images)
        else:
            from maskaq.export.pt2 import export_pt2, verify_pt2

            verify_pt2(export_pt2(model, unproven, metadata), model, images)
        os.replace(unproven, path)
    finally:
        with suppress(FileNotFoundError):
            unproven.unlink()
    return found
