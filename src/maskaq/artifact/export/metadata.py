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

PREFIX = "maskaq."
"""Begins the names of our entries in a file's metadata."""

REMEDY = "copy it again, or export it again with `maskaq export`"
"""Advice for a file that cannot be used."""


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
    found = {key.removeprefix(PREFIX): from_text(text) for key, text in entries.items() if key.startswith(PREFIX)}
    if "input_size" not in found:
        raise ExportError(f"{file} was not written by maskaq: its {where} have no {PREFIX}input_size; {REMEDY}")
    return found


def as_text(value: Any) -> str:
    """A string unchanged, anything else as JSON. (A string that happens to be JSON is decoded by `from_text`.)"""
    return value if isinstance(value, str) else json.dumps(value)


def from_text(text: str) -> Any:
    """The inverse of `as_text`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
