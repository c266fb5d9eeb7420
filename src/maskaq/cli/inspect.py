"""`maskaq inspect`."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from maskaq.cli import arguments as options
from maskaq.cli.arguments import Invocation, ModelOptions, RecipeOptions
from maskaq.errors import RecipeError

if TYPE_CHECKING:
    from maskaq.quant.inspection import Inspection
    from maskaq.shapes import Geometry

SUMMARY = "list what is or would be quantized, with sizes (downloads no weights); of an exported file, its metadata"
RESUMABLE = False
_RECIPE = "quick"


@dataclass(frozen=True)
class Arguments:
    model: ModelOptions
    recipe: RecipeOptions


@dataclass(frozen=True)
class _Inspected:
    layers: "Inspection"
    geometry: "Geometry"
    title: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_recipe(parser, _RECIPE)


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.artifact.export import SUFFIXES  # they bring torch and timm
    from maskaq.artifact.saved import is_pretrained
    from maskaq.cli.console import preparation
    from maskaq.storage.runfolder import is_run

    name = arguments.model.model
    console = invocation.console
    if Path(name).suffix in SUFFIXES.values() and os.path.lexists(name):
        _show_file(arguments, console)
        return
    is_quantized = is_run(name) or is_pretrained(name)
    found = _of_quantized(arguments) if is_quantized else _of_name(arguments, console)
    console.print(_table(found))
    if turned := ", ".join(dict.fromkeys(row.rotation for row in found.layers.rows if row.rotation)):
        console.print(f"rotated before the grid: {turned}")
    for reason in found.layers.left_out:
        console.print(f"not rotated: {reason}")
    gives = f"{found.geometry.classes} classes" if found.geometry.classes else "no classifier"
    if found.geometry.task != "classification":
        gives += f" (task: {found.geometry.task})"
    console.print(f"{gives}, {preparation(found.geometry)}")
    before, after = found.layers.float_bytes / 1e6, found.layers.quantized_bytes / 1e6
    smaller = f"{before / after:.1f} x smaller"
    console.print(f"{before:.2f} MB in float32 -> {after:.2f} MB with weights packed at their bits ({smaller})")


def _show_file(arguments: Arguments, console: Console) -> None:
    """What an exported file says of itself: preprocessing, labels, where it comes from."""
    from maskaq.artifact.export.metadata import DIGEST
    from maskaq.artifact.export.runtimes import RUNTIMES, bytes_of, metadata_of

    name = arguments.model.model
    _refuse_options(arguments, "an exported file")
    notes = metadata_of(name)
    table = Table(title=f"{name}   ({bytes_of(name) / 1e6:.2f} MB)", title_justify="left", show_header=False)
    table.add_row("runtime", RUNTIMES.get(Path(name).suffix, "PyTorch (torch.export.load)"))
    if Path(name).suffix != ".pt2":  # a zip file, which has its own checksums
        notes.setdefault(DIGEST, "none: its weights are not checked (files of earlier versions, and of ExecuTorch)")
    for key, value in notes.items():
        table.add_row(key, _as_text(key, value))
    console.print(table)


def _as_text(key: str, value: Any) -> str:
    if key == "labels" and value:
        return f"{len(value)}: " + "; ".join(value[:3]) + ("; ..." if len(value) > 3 else "")
    if key == "recipe" and isinstance(value, dict):
        return ", ".join(f"{table} {len(rows)} settings" for table, rows in value.items() if isinstance(rows, dict))
    if key == "outputs" and isinstance(value, dict):
        return "\n".join(f"{name}: {meaning}" for name, meaning in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _refuse_options(arguments: Arguments, what: str) -> None:
    """RecipeError for options that are for a model's name."""
    recipe = arguments.recipe
    values = {"--bits": recipe.bits, "--set": recipe.set, "--recipe": recipe.recipe}
    given = [option for option, value in values.items() if value or value == ""]
    if given:
        raise RecipeError(f"{arguments.model.model} is {what} and has its bits: {given[0]} is for a model's name")


def _of_quantized(arguments: Arguments) -> _Inspected:
    """What is in a run or a saved model."""
    from maskaq.artifact.card import caveat_of
    from maskaq.cli import resolve
    from maskaq.cli.evaluation import calibrated_on
    from maskaq.models import geometry
    from maskaq.quant.inspection import inspect_deployed
    from maskaq.storage.runfolder import is_run

    name = arguments.model.model
    _refuse_options(arguments, "a run" if is_run(name) else "a saved model")
    model: Any = resolve.quantized_model(arguments.model)
    title = f"{name}{calibrated_on(caveat_of(model.maskaq_config))}"
    return _Inspected(inspect_deployed(model), geometry(model), title)


def _of_name(arguments: Arguments, console: Console) -> _Inspected:
    """What would be quantized of a full-precision model."""
    from maskaq.cli import resolve
    from maskaq.cli.console import progress_for
    from maskaq.models import geometry
    from maskaq.quant.inspection import inspect_model
    from maskaq.quant.rotation import teacher_of
    from maskaq.runs.plans import make_plan

    name = arguments.model.model
    recipe = resolve.recipe_of(arguments.recipe, _RECIPE)
    model = resolve.full_precision(arguments.model, resolve.shape_of)
    exposed = teacher_of(model, recipe.quantization)
    if recipe.bits.average is not None and any(p.is_meta for p in exposed.parameters()):
        raise RecipeError(
            f"{recipe.quantization.bits}: widths are chosen by measuring the weights, which {name} does not "
            "have here: give them with --checkpoint, or inspect a finished run"
        )
    with progress_for(console) as progress:
        plan = make_plan(exposed, recipe, progress=progress)
    return _Inspected(inspect_model(exposed, recipe, plan), geometry(exposed), f"{name} {recipe.quantization.bits}")


def _table(found: _Inspected) -> Table:
    table = Table(title=found.title, title_justify="left")
    left = ("layer", "kind", "quantizers")
    for column in ("layer", "kind", "shape", "weight bits", "input bits", "quantizers", "fp32 kB", "quantized kB"):
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in found.layers.rows:
        size = (f"{row.float_bytes / 1e3:.1f}", f"{row.quantized_bytes / 1e3:.1f}") if row.float_bytes else ("", "")
        kind = f"{row.kind} ({row.rotation})" if row.rotation else row.kind
        table.add_row(row.name, kind, row.shape, row.weight_bits, row.input_bits, row.quantizers, *size)
    return table
