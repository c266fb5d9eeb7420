"""The method on one page: twin, ranges, then rounds of synthesis and calibration (Algorithm 1), saved as it goes."""

import operator
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.artifact import saved as pretrained
from maskaq.calibrate import handover
from maskaq.calibrate.calibrator import Calibrator
from maskaq.calibrate.handover import KEEP, WHICH
from maskaq.engine import pick_engine
from maskaq.errors import MaskaqError, ModelError, PretrainedError, RecipeError, RunFolderError
from maskaq.images.folder import FolderImages
from maskaq.images.sets import SyntheticSet, image_files, to_pixels
from maskaq.images.source import ImageSource
from maskaq.images.stored import StoredImages, StudentHistory, first_student, latest_images, noise, state_digest
from maskaq.images.synthesis import Synthesizer
from maskaq.models import data_config, expose, geometry, refuse_zero_weights
from maskaq.progress import Progress
from maskaq.quant.mixed import choose_bits
from maskaq.quant.plan import QuantPlan, build_plan
from maskaq.quant.rotation import rotate, rotated
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.recipe.schema import Recipe, load_recipe, recipe_from_dict, to_dict, to_toml
from maskaq.report import collect
from maskaq.runs.provenance import facts, pick_device
from maskaq.runs.torch_modes import own_torch_modes
from maskaq.storage import files
from maskaq.storage.runfolder import METRICS_FILE, QUANTIZED, Checkpoint, RunFolder

__all__ = ["Result", "noise", "quantize"]

DEFAULTS = {"recipe": to_dict(Recipe())}
"""What holds for settings that the recipe of an older run does not have."""

_MEASURED_ON = 16  # images that widths of mixed precision are chosen on


@dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    model: nn.Module
    """The quantized model that was handed over: of a run that was finished before, as it is saved in the folder."""
    folder: Path

    @cached_property
    def images(self) -> SyntheticSet:
        """The synthetic images of the last round."""
        return latest_images(RunFolder.read(self.folder))


@own_torch_modes()
def quantize(
    model: nn.Module,
    recipe: Recipe | str | Path = "quick",
    out: str | Path = "runs/maskaq",
    *,
    bits: str | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    source: dict[str, Any] | None = None,
    checkpoint_seconds: float = 30.0,
    only_images: bool = False,
    forecast: bool = False,
    fast: bool | None = None,
    keep: str = "better",
    report: bool = True,
) -> Result:
    """Quantize a model without data into the run folder `out`. The same call again continues where it stopped.

    Args:
        recipe: a Recipe, or the name or file of one.
        bits: wXaY, in place of the recipe's.
        source: what the model is (name, arguments, checkpoint), written down so that `out` can be evaluated later.
        only_images: stop after the first round of synthesis.
        forecast: tell the progress how long it will take, from a few steps.
        fast: False runs every step as it is written, in float32; by default a GPU runs it the fast way where it can.
        keep: `better` hands over the start of calibration where that is the better model on synthetic images that
            calibration did not see; `last` hands over the last epoch's in any case.
        report: measure what a report needs of the models, at the end.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, bits=bits)
    elif bits is not None:
        recipe = replace(recipe, quantization=replace(recipe.quantization, bits=str(bits).strip().lower()))
    _check_arguments(progress, source, checkpoint_seconds, fast)
    progress, seed = progress or Progress(), _whole_number(seed)
    if not isinstance(out, str | Path) or "\0" in str(out):
        raise RunFolderError(f"out: expected the path of a run folder, got {out!r}")
    if keep not in KEEP:
        raise RecipeError(f"keep: expected one of {', '.join(KEEP)}, got {keep!r}")
    device = pick_device(device)
    teacher = expose(model)
    if any(tensor.is_meta for tensor in (*teacher.parameters(), *teacher.buffers())):
        raise ModelError(f"this {type(model).__name__} is on the meta device, where it has no weights: load them first")
    refuse_zero_weights(teacher)
    asked = identity(model, recipe, seed)
    if is_finished(out, asked, None if only_images else keep):
        progress.note(f"{out} is finished: its model is made, nothing is left to do")
        return Result(_saved_model(out, model).to(device), Path(out))

    teacher = rotate(teacher, recipe.quantization.rotate).to(device)
    for reason in rotated(teacher).left_out:
        progress.note(f"not rotated: {reason}")
    plan = plan_of_run(out) or make_plan(teacher, recipe, seed, progress)
    student = first_student(teacher, recipe, plan, seed)
    pretrained.as_deployed(student)  # what cannot be saved in the end fails early
    engine = pick_engine(device, fast, progress)
    image_source: ImageSource
    if recipe.data_free:
        image_source = Synthesizer(teacher, student, recipe, seed=seed, progress=progress, engine=engine)
    else:
        image_source = FolderImages(teacher, recipe, seed=seed, progress=progress)
    calibrator = Calibrator(teacher, student, recipe, seed=seed, progress=progress, engine=engine)

    about = facts(teacher, source, engine) | {"data_free": recipe.data_free, "keep": keep}
    check_folder(recipe, out)
    with RunFolder.open(out, asked, to_toml(recipe), about, plan.to_dict(), DEFAULTS) as run:
        if run.read_text("recipe.toml") != to_toml(recipe):
            progress.note(
                f"{run.path('recipe.toml')} was changed; it is a copy for reading, and the run keeps the recipe in "
                "run.json. Delete it to have it written anew"
            )
        if run.plan is not None and run.plan != plan.to_dict():
            raise RunFolderError(f"{out} was begun by another process meanwhile: run the same command again")
        history = StudentHistory(run, teacher, student, recipe, plan, seed)
        stored = StoredImages(run, image_source, history)
        history.epoch, stored.used = _restore(run, student, calibrator)
        if forecast:
            progress.forecast(_forecast(image_source, student, run, history.epoch, only_images, report))
        if only_images:
            stored.of_round(0)
            return Result(student, Path(out))
        for round, epochs in enumerate(recipe.rounds):
            if history.epoch >= epochs.stop > 0:
                continue  # an earlier call finished this round
            images = stored.of_round(round)
            if history.epoch == 0:
                init_ranges_(student, range_images(teacher, images, recipe), recipe.quantization)
            _calibrate(run, calibrator, history, stored, images, round, checkpoint_seconds)
        start = quantized_twin(teacher, recipe.quantization, plan)
        init_ranges_(
            start, range_images(teacher, stored.first(recipe.quantization.range_images), recipe), recipe.quantization
        )
        chosen = _hand_over(run, teacher, start, student, source, keep, progress)
        run.drop_checkpoints(keep=list(run.checkpoints())[-2:])
        if report:
            models = {"teacher": teacher, "searched": start, "student": chosen}
            _collect_report(run, recipe, seed, models, progress)
    return Result(model=chosen, folder=Path(out))


def _calibrate(
    run: RunFolder,
    calibrator: Calibrator,
    history: StudentHistory,
    stored: StoredImages,
    images: SyntheticSet,
    round: int,
    checkpoint_seconds: float,
) -> None:
    """The epochs of a round that are left, with a checkpoint now and then and at the end."""
    rounds = history.recipe.rounds
    epochs = rounds[round]
    left = range(max(history.epoch, epochs.start), epochs.stop)
    done = len(epochs) - len(left)
    title = f"calibrate, round {round + 1} of {len(rounds)}"
    calibrator.progress.stage(title, len(images) * len(epochs), done=len(images) * done)
    last_saved = time.monotonic()
    for epoch in left:
        began = time.monotonic()
        losses = calibrator.epoch(images, epoch)
        history.epoch = epoch + 1
        seconds = time.monotonic() - began
        run.event(stage="calibrate", round=round, epoch=epoch, seconds=seconds, **losses)
        if history.epoch == epochs.stop or time.monotonic() - last_saved > checkpoint_seconds:
            stored.used |= {round: stored.digests[round]}
            _checkpoint(run, history.student, calibrator, history.epoch, stored.used)
            last_saved = time.monotonic()


def make_plan(teacher: nn.Module, recipe: Recipe, seed: int = 0, progress: Progress | None = None) -> QuantPlan:
    """What a run of this recipe would quantize, and how; mixed precision is measured on synthetic images."""
    plan = build_plan(teacher, recipe.quantization)
    if recipe.bits.average is None:
        return plan
    images = handover.held_out_images(teacher, _MEASURED_ON, seed, "mixed precision")
    return choose_bits(teacher, plan, recipe.quantization, recipe.bits.average, images, progress)


def plan_of_run(folder: str | Path) -> QuantPlan | None:
    """The plan that a run in this folder began with; None if there is none yet."""
    if not os.path.exists(os.path.join(folder, "run.json")):
        return None
    found = RunFolder.read(folder).plan
    return None if found is None else QuantPlan.from_dict(found)


def is_finished(folder: str | Path, identity: Mapping[str, Any], keep: str | None = None) -> bool:
    """Whether a folder holds the finished model of this very run, and the one that `keep` asks for, if it is given.

    RunFolderError if the folder holds another run.
    """
    if not os.path.exists(os.path.join(folder, "run.json")):
        return False
    RunFolder.check(folder, identity, DEFAULTS)
    run = RunFolder.read(folder)
    try:
        config = pretrained.read_config(run.path(QUANTIZED), sound=True)
    except PretrainedError:
        return False
    made = config["made"]
    same = all(made.get(key) == value for key, value in run.identity.items())
    same = same and run.plan in (None, config["quantization_config"].get("plan"))
    return same and handover.is_kept(made.get("handover"), keep)


def _saved_model(folder: str | Path, model: nn.Module) -> nn.Module:
    path = RunFolder.read(folder).path(QUANTIZED)
    named = pretrained.read_config(path)["timm"] is not None
    return pretrained.from_pretrained(path, None if named else model)


def check_folder(recipe: Recipe, out: str | Path) -> None:
    """DataError for a folder of images that a new run cannot use: before anything is written."""
    if not recipe.data_free and not Path(out, "run.json").exists():
        image_files(recipe.synthesis.folder, recipe.synthesis.images)


def range_images(teacher: nn.Module, images: SyntheticSet, recipe: Recipe) -> Tensor:
    """The first synthetic images, as the model takes them: they set the ranges that calibration starts from."""
    chosen = images[: recipe.quantization.range_images].to(next(teacher.parameters()).device)
    return geometry(teacher).normalise(to_pixels(chosen.images))


def _hand_over(
    run: RunFolder,
    teacher: nn.Module,
    start: nn.Module,
    end: nn.Module,
    source: dict[str, Any] | None,
    keep: str,
    progress: Progress,
) -> nn.Module:
    """Save the calibrated student, or the start of calibration if that is the better model; gives what was saved."""
    recipe, seed = recipe_from_dict(run.identity["recipe"]), run.identity["seed"]
    found = None
    if recipe.calibration.epochs:
        found = handover.compare(teacher, start, end, recipe, seed=seed, keep=keep, progress=progress)
        run.event(stage="hand over", **found.to_dict())
        if found.end_is_worse:
            progress.note(f"{found}. {WHICH[found.kept]}")
    chosen = end if found is None or found.kept == "end" else start
    _save_model(run, chosen, source, keep, found)
    return chosen


def _save_model(
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


def _collect_report(
    run: RunFolder, recipe: Recipe, seed: int, models: Mapping[str, nn.Module], progress: Progress
) -> None:
    """Keep what a report of the run needs of its models, while they are at hand. Its failure is not the run's."""
    try:
        collected = collect.collect(recipe, seed, collect.images_of_rounds(run, recipe), models, progress)
        collect.write(run.root, collected)
    except (MaskaqError, RuntimeError) as error:
        progress.note(f"the run is finished, but nothing was collected for its report: {error}")


def _checkpoint(
    run: RunFolder, student: nn.Module, calibrator: Calibrator, epoch: int, shards: dict[int, list[str]]
) -> None:
    ill = [name for name, value in student.named_parameters() if not torch.isfinite(value).all()]
    if ill:
        what = f"{len(ill)} tensors of the student became NaN or Inf by epoch {epoch - 1}, {ill[0]} first"
        raise calibrator.diverged(what)
    state = {"student": dict(student.state_dict()), "optimizer": calibrator.state_dict()}
    starts = [epochs.start for epochs in recipe_from_dict(run.identity["recipe"]).rounds]
    run.save_checkpoint(Checkpoint(epoch, *files.flatten_state(state), shards), keep=starts)


def _restore(run: RunFolder, student: nn.Module, calibrator: Calibrator) -> tuple[int, dict[int, list[str]]]:
    """Bring student and optimiser to the latest checkpoint; epochs done, and digests of the shards they used."""
    saved = run.load_checkpoint()
    if saved is None:
        return 0, {}
    state = saved.state()
    try:
        student.load_state_dict(state["student"])
        calibrator.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise files.DamagedError(run.path("checkpoints"), error, files.RESTORE) from error
    return saved.epoch, dict(saved.shards)


def _whole_number(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError as error:
        raise RecipeError(f"seed: expected a whole number, got {seed!r}") from error


def _forecast(
    source: ImageSource, student: nn.Module, run: RunFolder, first_epoch: int, only_images: bool, report: bool
) -> float:
    """Seconds that are left, roughly: a few steps or passes are timed, and an epoch of an image costs about a step."""
    recipe, one_pass = source.recipe, collect.seconds_per_pass(student)
    steps = 0.0 if only_images else float(recipe.calibration.epochs - first_epoch)
    for round, epochs in enumerate(recipe.rounds[:1] if only_images else recipe.rounds):
        if first_epoch < epochs.stop:
            there = len(run.shards(round)) * recipe.synthesis.batch / recipe.synthesis.images
            steps += recipe.steps_in_round(round) * max(0.0, 1 - there)
    one_step = source.seconds_per_image_step() or 5 * one_pass
    seconds = one_step * recipe.synthesis.images * steps
    if not only_images:
        passes = 3 * handover.held_out_count(recipe) + recipe.quantization.range_images
        seconds += one_pass * (passes + (collect.passes(student, recipe.synthesis.images) if report else 0))
    return seconds


def identity(model: nn.Module, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What makes a run this run: another of these is another folder."""
    weights = {"class": type(model).__name__, "weights": state_digest(model.state_dict())}
    images = data_config(model)
    preparation = {
        "image_size": list(images["input_size"][1:]),
        "mean": list(images["mean"]),
        "std": list(images["std"]),
    }
    return {"recipe": to_dict(recipe), "model": weights, "preparation": preparation, "seed": seed}


def _check_arguments(progress: Any, source: Any, checkpoint_seconds: Any, fast: Any) -> None:
    """MaskaqError for arguments of `quantize` that would only be noticed in the middle of the work."""
    wanted = 'expected a dict such as {"name": "deit_tiny_patch16_224", "args": {"num_classes": 10}}'
    if source is not None and not isinstance(source, dict):
        raise ModelError(f"source: {wanted}, got {source!r}")
    architecture = (source or {}).get("architecture")
    if architecture is not None and not (isinstance(architecture, dict) and "name" in architecture):
        raise ModelError(f"source['architecture']: {wanted}, got {architecture!r}")
    for where, part in (("source", source or {}), ("source['architecture']", architecture or {})):
        for key, kind, example in (("name", str, "a timm name"), ("args", dict, "a dict of timm's arguments")):
            if not isinstance(part.get(key, kind()), kind):
                raise ModelError(f"{where}[{key!r}]: expected {example}, or no such key, got {part[key]!r}")
    if not isinstance(checkpoint_seconds, Real) or checkpoint_seconds != checkpoint_seconds:
        raise RecipeError(f"checkpoint_seconds: expected a number of seconds, got {checkpoint_seconds!r}")
    if fast is not None and not isinstance(fast, bool):
        raise RecipeError(f"fast: expected True, False or None, got {fast!r}")
    methods = [name for name in vars(Progress) if not name.startswith("_")]
    lacks = [] if progress is None else [name for name in methods if not hasattr(progress, name)]
    if lacks:
        raise RecipeError(f"progress: expected a maskaq.progress.Progress, got {progress!r}, which has no {lacks[0]}")
