"""Images as a folder of PNG files, for the quantizers of other tools."""

import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from maskaq.errors import ExportError, MaskaqError, unwritable
from maskaq.images.sets import SyntheticSet
from maskaq.storage.files import rename_, write_bytes_atomic

MANIFEST = "manifest.json"
LIST = "files.txt"


def check_folder(folder: str | Path) -> Path:
    """The folder, if images can be written as a new one; ExportError otherwise."""
    path = Path(folder)
    if os.path.lexists(path):
        raise ExportError(f"{path} exists: expected the name of a new folder for the images")
    if problem := unwritable(path / MANIFEST):
        raise ExportError(problem)
    return path


def write_pngs(
    images: SyntheticSet, folder: str | Path, notes: Mapping[str, Any], names: Sequence[str] | None = None
) -> Path:
    """Write each image as a PNG, `manifest.json` with notes and labels, and `files.txt`, a name in each line.

    Args:
        notes: for the manifest: what the images were made for, and how a model's input is made of them.
        names: of the classes, where known.
    """
    path = check_folder(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(f".{path.name}.{os.getpid()}.begun")
    begun.mkdir()
    try:
        rows = []
        for pixels, label, number in zip(images.images, images.labels.tolist(), images.indices.tolist(), strict=True):
            name = f"{number:05d}.png"
            plane = pixels.permute(1, 2, 0).numpy()
            encoded = io.BytesIO()
            Image.fromarray(plane[..., 0] if plane.shape[2] == 1 else plane).save(encoded, "PNG")
            write_bytes_atomic(begun / name, encoded.getvalue())
            row = {"file": name, "label": label if label >= 0 else None}
            rows.append(row if names is None or label < 0 else row | {"name": names[label]})
        write_bytes_atomic(begun / MANIFEST, json.dumps({**notes, "images": rows}, indent=1).encode() + b"\n")
        write_bytes_atomic(begun / LIST, "".join(f"{row['file']}\n" for row in rows).encode())
        begun.replace(path)
    except MaskaqError as error:
        rename_(error, begun, path)
        raise
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return path
