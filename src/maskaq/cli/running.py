"""A run as `quantize`, `synthesize`, `calibrate` and `demo` show it: plan, progress, accuracy, summary."""

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from maskaq.cli import console as draw
from maskaq.cli.arguments import DataOptions
from maskaq.cli.evaluation import Accuracy, EvaluationImages, evaluation_images, title
from maskaq.cli.report import report_of_run
from maskaq.models import expose, geometry, refuse_zero_weights
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe
from maskaq.runs import opened as results
from maskaq.runs import provenance
from maskaq.runs import quantize as run
from maskaq.runs.arguments import identity, up_to_date_identity
from maskaq.storage import runfolder
from maskaq.storage.leases import SECONDS
from maskaq.storage.runfolder import RunFolder
from maskaq.torchrun import is_leader


@dataclass(frozen=True)
class Request:
    """The arguments of a run, from any of these commands."""

    name: str
    model: nn.Module
    source: dict[str, Any]
    """Where the model comes from, as `maskaq.runs.quantize.quantize` records it."""
    recipe: Recipe
    out: str
    seed: int
    keep: str
    report: bool
    device: str | None
    plain: bool
    data: DataOptions
    only_images: bool = False
    lease: float = SECONDS
    part: int | None = None


def carry_out(request: Request, console: Console) -> None:
    """Plan, run, evaluate, summary."""
    began = time.monotonic()
    request = replace(request, out=str(Path(request.out)))  # without a trailing slash
    device = provenance.pick_device(request.device)
    batches = evaluation_images(request.data)
    if batches:
        batches(request.model)  # a wrong folder fails now, not after the work
    teacher = _checked_teacher(request)
    console.print(
        draw.plan_table(request.name, request.model, geometry(teacher), request.recipe, str(device), request.out)
    )
    with draw.progress_for(console) as progress:
        _quantize(request, device, progress)
        if not is_leader():
            return
        table = _compare(request, teacher, batches, device, progress) if batches else None
    console.print()
    if request.only_images:
        console.print(f"images are in {request.out}; go on with: maskaq calibrate {shlex.quote(request.out)}")
        return
    if table:
        _show_accuracy(request, table, console)
    took = draw.duration(time.monotonic() - began)
    console.print(f"quantized model: {request.out}/{runfolder.QUANTIZED}   ({took})")
    if request.report:
        report_of_run(request.out, console, device)
    if not table:
        console.print(f"evaluate it with: maskaq evaluate {shlex.quote(request.out)} --data DIR")


def _checked_teacher(request: Request) -> nn.Module:
    """The exposed model; a model or folder that the run would refuse fails here, before the plan is shown."""
    teacher = expose(request.model)
    refuse_zero_weights(teacher)
    RunFolder.check(request.out, identity(request.model, request.recipe, request.seed), up_to_date_identity)
    run.check_folder(request.recipe, request.out)
    return teacher


def _quantize(request: Request, device: torch.device, progress: Progress) -> None:
    run.quantize(
        request.model,
        request.recipe,
        request.out,
        seed=request.seed,
        device=device,
        progress=progress,
        source=request.source,
        only_images=request.only_images,
        forecast=True,
        fast=False if request.plain else None,
        keep=request.keep,
        report=request.report,
        lease=request.lease,
        part=request.part,
    )


def _compare(
    request: Request, teacher: nn.Module, batches: EvaluationImages, device: torch.device, progress: Progress
) -> Accuracy:
    # The teacher is loaded already and known to be the run's: its file may have moved since the run was finished.
    opened = replace(results.open_run(request.out), known_teacher=teacher)
    return results.compare(opened, batches, device=device, progress=progress)


def _show_accuracy(request: Request, table: Accuracy, console: Console) -> None:
    data = request.data.data
    assert data is not None
    what = f"{request.name} {request.recipe.quantization.bits}"
    console.print(draw.accuracy_table(table, title(what, data, request.recipe.caveat)))
    console.print(draw.what_was_recovered(table))
    results.write_metrics(request.out, table, data)
