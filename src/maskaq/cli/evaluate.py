"""`maskaq evaluate`."""

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import DataOptions, Invocation, ModelOptions
from maskaq.errors import ModelError, RunFolderError

SUMMARY = "measure the accuracy of a run (full precision, round to nearest, searched ranges, maskaq) or of any model"
RESUMABLE = False


@dataclass(frozen=True)
class Arguments:
    model: ModelOptions
    data: DataOptions
    json: str | None
    device: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="a run folder, a saved model's folder, or a model as in `quantize`"
    )
    parser.add_argument(
        "--checkpoint",
        type=converters.path,
        metavar="FILE",
        help="weights of the model; for a run, where its weights are now",
    )
    options.add_timm(parser)
    options.add_json(parser, "table")
    options.add_device(parser)
    options.add_data(parser, required=True, old_name=True)


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq.cli import console as draw  # they bring torch and timm
    from maskaq.cli import evaluation, report
    from maskaq.runs import opened as results
    from maskaq.runs.provenance import pick_device
    from maskaq.storage.files import write_json_atomic
    from maskaq.storage.runfolder import is_run

    console = invocation.console
    data = str(arguments.data.data)
    batches = evaluation.EvaluationImages(arguments.data)
    device = pick_device(arguments.device)
    chosen = _checked(arguments.model)
    of_run = is_run(chosen.model)
    measure = evaluation.accuracy_of_run if of_run else evaluation.accuracy_of_model
    with draw.progress_for(console) as progress:
        table, caveat = measure(chosen, batches, device, progress)
    console.print(draw.accuracy_table(table, evaluation.title(chosen.model, data, caveat)))
    try:
        if of_run:
            results.write_metrics(chosen.model, table, data)
            console.print(f"metrics.json, the model card and the report of {chosen.model} now have these figures")
    finally:  # the figures are kept even if the run folder cannot be written
        if arguments.json:
            write_json_atomic(arguments.json, results.metrics(table, data))
    if of_run and Path(chosen.model, results.PAGE_FILE).exists():  # it shows other figures
        report.report_of_run(chosen.model, console, device)


def _checked(chosen: ModelOptions) -> ModelOptions:
    """The run, saved model or name to evaluate; an error if it can be none of these."""
    from maskaq.artifact.saved import is_pretrained
    from maskaq.models.checkpoint import SUFFIXES
    from maskaq.models.timm_models import weights_in_place_of_name
    from maskaq.storage.runfolder import is_run

    path = Path(chosen.model)
    if is_run(path) or is_pretrained(path):
        return replace(chosen, model=str(path))  # without a trailing slash
    if path.suffix.lower() in SUFFIXES:
        raise ModelError(weights_in_place_of_name(chosen.model))
    if os.path.exists(path):
        raise ModelError(
            f"{path} is neither a run folder (it has no run.json) nor a saved model (no config.json) nor a model name"
        )
    if path.name != chosen.model:  # it has a slash: meant as a folder
        raise RunFolderError(f"there is no run folder {path}: expected the --out of an earlier run, or a model name")
    return chosen
