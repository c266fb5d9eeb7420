"""A deployed model as torch's own exported program (`.pt2`): `torch.export.load(FILE).module()` needs no maskaq."""

import io
import json
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.artifact.export.metadata import REMEDY, as_text, checked, describe
from maskaq.errors import ExportError
from maskaq.models import geometry
from maskaq.storage.files import write_bytes_atomic

NOTES = "maskaq.json"


def export_pt2(model: nn.Module, file: str | Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a deployed model as a program for any number of images; its notes are the extra file `maskaq.json`."""
    spec, path = geometry(model), Path(file)
    images = torch.zeros(2, spec.channels, *spec.image_size)
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("N", min=1)},))
    program.graph_module.graph.eliminate_dead_code()  # values that only taps would have recorded
    for node in program.graph_module.graph.nodes:
        node.meta.pop("stack_trace", None)  # names of source files on this machine
    program.graph_module.recompile()
    program.example_inputs = None  # or the images above would be in the file
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()  # torch's own writer ends the process where a disk is full
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found in the group")  # views of one buffer, on the CPU
        torch.export.save(program, buffer, extra_files={NOTES: as_text(describe(model) | dict(metadata or {}))})
    write_bytes_atomic(path, buffer.getvalue())
    return path


def metadata_of(file: str | Path) -> dict[str, Any]:
    """The entries that maskaq wrote into a program, read without loading it; ExportError if a part is damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            if damaged := archive.testzip():  # by the zip file's own checksums
                raise ValueError(f"wrong checksum of {damaged}")
            name = next((name for name in archive.namelist() if name.endswith(f"/{NOTES}")), None)
            found = {} if name is None else json.loads(archive.read(name))
    except Exception as error:  # a damaged zip file raises any of a dozen classes
        raise ExportError(f"cannot read {file} as an exported program: {error}; {REMEDY}") from error
    if not found:
        raise ExportError(f"{file} was not written by maskaq: it has no {NOTES}; {REMEDY}")
    return checked(found, file)


@torch.no_grad()
def verify_pt2(file: str | Path, model: nn.Module, images: Tensor) -> None:
    """ExportError unless the program's logits equal the model's: both run the same operations on the same numbers."""
    try:
        found = torch.export.load(file).module()(images)
    except Exception as error:
        raise ExportError(f"{file} is not a sound exported program: {error}") from error
    expected = model(images)
    if not torch.equal(found, expected):
        worst = ((found - expected).abs().max() / expected.abs().max()).item()
        raise ExportError(
            f"{file} does not compute what the model computes: logits differ by {worst:.1e} of the largest"
        )
