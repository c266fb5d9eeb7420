"""The end of a run: compare the student with its start, save the better one, store what a report needs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from maskaq.artifact import saved as pretrained
from maskaq.calibrate import handover
from maskaq.calibrate.handover import WHICH
from maskaq.errors import MaskaqError, PretrainedError
from maskaq.models import geometry
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe, recipe_from_dict
from maskaq.report import collect
from maskaq.runs.arguments import up_to_date_identity
from maskaq.storage.runfolder import METRICS_FILE, QUANTIZED, RunFolder, is_run


def is_finished(folder: str | Path, identity: Mapping[str, Any], keep: str | None = None) -> bool:
    """Whether a folder holds the finished model of exactly this run, and the one that `keep` selects, if given.

    RunFolderError if the folder holds another run.
    """
    if not is_run(folder):
        return False
    RunFolder.check(folder, identity, up_to_date_identity)
    run = RunFolder.read(folder)
    try:
        config = pretrained.read_config(run.path(QUANTIZED), sound=True)
    except PretrainedError:
        return False
    made = config["made"]
    same = all(made.get(key) == value for key, value in run.identity.items())
    same = same and run.plan in (None, config["quantization_config"].get("plan"))
    return same and handover.is_kept(made.get("handover"), keep)


def saved_model(folder: str | Path, model: nn.Module) -> nn.Module:
    path = RunFolder.read(folder).path(QUANTIZED)
    named = pretrained.read_config(path)["timm"] is not None
    return pretrained.from_pretrained(path, None if named else model)


def hand_over(
    run: RunFolder,
    teacher: nn.Module,
    start: nn.Module,
    end: nn.Module,
    source: dict[str, Any] | None,
    keep: str,
    progress: Progress,
) -> nn.Module:
    """Save the calibrated student, or the start of calibration if that is the better model; returns what was saved."""
    recipe = recipe_from_dict(run.identity["recipe"])
    seed = run.identity["seed"]
    found = None
    if recipe.epochs:
        found = handover.compare(teacher, start, end, recipe, seed=seed, keep=keep, progress=progress)
        run.event(stage="hand over", **found.to_dict())
        if found.end_is_worse:
            progress.note(f"{found}. {WHICH[found.kept]}")
    chosen = end if found is None or found.kept == "end" else start
    save_model(run, chosen, source, keep, found)
    return chosen


def save_model(
    run: RunFolder, student: nn.Module, source: dict[str, Any] | None, keep: str, found: handover.Handover | None
) -> None:
    deployed = pretrained.as_deployed(student)
    named = source and (source.get("architecture") or {key: source[key] for key in ("name", "args") if key in source})
    architecture = pretrained.find_architecture(deployed, named)  # a model of the user's own may have none
    made = {**run.identity, "command": (source or {}).get("command"), **run.latest_facts, "keep": keep}
    made.pop("source", None)  # it has paths of this machine
    if found is not None:
        made["handover"] = {key: value for key, value in found.to_dict().items() if key != "seconds"}
    pretrained.write(deployed, run.path(QUANTIZED), architecture, made=made)
    metrics = run.read_json(METRICS_FILE) if run.path(METRICS_FILE).exists() else None
    if isinstance(metrics, dict) and metrics.get("model") == pretrained.saved_digest(run.path(QUANTIZED)):
        pretrained.add_metrics(run.path(QUANTIZED), metrics)  # measured before this very model was lost


def collect_report(
    run: RunFolder, recipe: Recipe, seed: int, models: Mapping[str, nn.Module], progress: Progress
) -> None:
    """Collect what the report needs from the models, while they are in memory. A failure does not fail the run."""
    try:
        labelled = collect.images_per_label(run, recipe, geometry(models["teacher"]).classes)
        collected = collect.collect(recipe, seed, collect.images_of_rounds(run, recipe), models, progress, labelled)
        collect.write(run.root, collected)
    except (MaskaqError, RuntimeError) as error:
        progress.note(f"the run is finished, but nothing was collected for its report: {error}")
