"""Metadata written into every exported file, so that it can be used without maskaq."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

import maskaq
from maskaq.errors import ExportError
from maskaq.models import class_names, data_config, geometry
from maskaq.quant.deployed import CodedWeight, FixedGrid
from maskaq.storage.files import misfit, short

PREFIX = "maskaq."
"""Begins the names of our entries in a file's metadata."""

DIGEST = "sha256"
"""The note with the digest of a file's numbers, under the name of what was digested: {"initializers": "3f0a..."}."""

REMEDY = "copy it again, or export it again with `maskaq export`"
"""Advice for a file that cannot be used."""

# Of what is read from a file: it may be damaged, or of another tool. Other entries are shown as they are.
_FORM = {
    "input_size": [int],
    "mean?": [float],
    "std?": [float],
    "crop_pct?": float,
    "interpolation?": str,
    "task?": str,
    "classes?": int,
    "labels?": [str],
    "architecture?": {"name": str, "args": dict},
    f"{DIGEST}?": {"*": str},
}


def describe(model: nn.Module) -> dict[str, Any]:
    """Metadata of a model: version, bits, how images are preprocessed, and names of its classes."""
    spec, config = geometry(model), data_config(model)
    return {
        "version": maskaq.__version__,
        "weight_bits": sorted({m.bits for m in model.modules() if isinstance(m, CodedWeight)}),
        "activation_bits": sorted({m.bits for m in model.modules() if isinstance(m, FixedGrid)}),
        "input_size": [spec.channels, *spec.image_size],
        "mean": list(spec.mean),
        "std": list(spec.std),
        "crop_pct": config["crop_pct"],
        "interpolation": config["interpolation"],
        "task": spec.task,
        "classes": spec.classes,
        "labels": class_names(model),
    }


def ours(entries: Mapping[str, str], file: str | Path, where: str) -> dict[str, Any]:
    """The entries of a file that maskaq wrote; ExportError if there are none. `where` names their place in the file."""
    texts = {key: text for key, text in entries.items() if isinstance(key, str) and isinstance(text, str)}
    if len(texts) < len(entries):  # protobuf gives bytes that are not UTF-8 as they are
        raise ExportError(f"{file} is damaged: its {where} are not all UTF-8 text; {REMEDY}")
    found = {key.removeprefix(PREFIX): from_text(text) for key, text in texts.items() if key.startswith(PREFIX)}
    if "input_size" not in found:
        raise ExportError(f"{file} was not written by maskaq: its {where} have no {PREFIX}input_size; {REMEDY}")
    return checked(found, file)


def checked(notes: Any, file: str | Path) -> dict[str, Any]:
    """The notes of a file, if what maskaq uses of them has its form; ExportError otherwise."""
    if wrong := misfit(notes, _FORM):
        raise ExportError(f"{file} is damaged: its notes have another form: {wrong.lstrip(': ')}; {REMEDY}")
    found: dict[str, Any] = notes
    return found


def check_digest(notes: Mapping[str, Any], what: str, found: str, file: str | Path) -> None:
    """ExportError if a file holds other numbers than were exported. Files of earlier versions have no digest."""
    expected = (notes.get(DIGEST) or {}).get(what, found)
    if expected != found:
        raise ExportError(
            f"{file} is damaged or was changed: expected {short(expected)} as the sha256 of its {what}, got "
            f"{short(found)}; {REMEDY}"
        )


def as_text(value: Any) -> str:
    """A string unchanged, anything else as JSON. (A string that happens to be JSON is decoded by `from_text`.)"""
    return value if isinstance(value, str) else json.dumps(value)


def from_text(text: str) -> Any:
    """The inverse of `as_text`."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
