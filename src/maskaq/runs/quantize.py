"""The method on one page: twin, ranges, then rounds of synthesis and calibration (Algorithm 1), saved as it goes."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maskaq.artifact.saved import as_deployed
from maskaq.calibrate import handover
from maskaq.calibrate.calibrator import Calibrator
from maskaq.calibrate.correct import Corrector
from maskaq.calibrate.evolve import Evolver
from maskaq.calibrate.interleave import Interleaver
from maskaq.calibrate.reconstruction import Reconstructor
from maskaq.calibrate.rectify import Rectifier
from maskaq.calibrate.reparametrize import Reparametrizer
from maskaq.calibrate.search import Searcher
from maskaq.calibrate.stage import Stage
from maskaq.engine import Engine, pick_engine
from maskaq.errors import ModelError, RunFolderError
from maskaq.images.sets import SyntheticSet, image_files
from maskaq.images.source import ImageSource
from maskaq.images.stored import StoredImages, StudentHistory, first_student, latest_images, noise, range_images
from maskaq.models import adopted, expose, geometry, refuse_zero_weights
from maskaq.progress import Progress
from maskaq.quant.plan import QuantPlan, with_own_mlps
from maskaq.quant.rotation import rotate, rotated
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.ranks import ALONE, Ranks, joined
from maskaq.recipe.schema import Recipe, is_copy, load_recipe, to_toml
from maskaq.report import collect
from maskaq.runs.arguments import check_arguments, check_recipe, identity, up_to_date_identity, whole_number
from maskaq.runs.finish import collect_report, hand_over, is_finished, saved_model
from maskaq.runs.plans import make_plan, plan_of_run
from maskaq.runs.provenance import check_alike, describe_run, pick_device
from maskaq.runs.rounds import PATIENCE, fit, restore
from maskaq.runs.sources import image_source
from maskaq.runs.torch_modes import own_torch_modes
from maskaq.storage.leases import SECONDS, Worker, check_shared
from maskaq.storage.runfolder import RunFolder, is_run

__all__ = ["Result", "noise", "quantize"]

_STAGES = (Rectifier, Reparametrizer, Searcher, Evolver, Reconstructor, Interleaver, Calibrator, Corrector)
STAGES: dict[str, Callable[..., Stage]] = {stage.name: stage for stage in _STAGES}
"""Name in `calibration.stages` -> stage."""


@dataclass(frozen=True)
class Result:
    """The result of a run."""

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
    lease: float = SECONDS,
    part: int | None = None,
) -> Result:
    """Quantize a model without data into the run folder `out`. The same call again continues where it stopped.

    Under torchrun every process calls this, and each returns the result.

    Args:
        recipe: a Recipe, or the name or file of one.
        bits: wXaY, in place of the recipe's.
        source: name, arguments and checkpoint of the model, recorded so that `out` can be evaluated later.
        only_images: stop after the first round of synthesis.
        forecast: report an estimate of the total time to `progress`, from a few timed steps.
        fast: False uses the reference engine (eager, float32); by default the fast engine is used where it works.
        keep: `better` saves the model from before calibration if that is better on synthetic images that calibration
            did not see; `last` always saves the model of the last epoch.
        report: measure at the end what a report needs.
        lease: seconds after which other workers take over the images of this process if it dies.
        part: images that a worker claims and makes together; default: what is fastest on one GPU, up to 256.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, bits=bits)
    elif bits is not None:
        recipe = replace(recipe, quantization=replace(recipe.quantization, bits=str(bits).strip().lower()))
    check_arguments(out, keep, progress, source, checkpoint_seconds, fast)
    progress = progress or Progress()
    seed = whole_number(seed)
    device = pick_device(device)
    model = adopted(model)
    teacher = _trained(model)
    check_recipe(recipe, geometry(teacher).task)
    asked = identity(model, recipe, seed)
    with joined(device) as ranks:
        if ranks.agreed(is_finished(out, asked, None if only_images else keep)):
            if ranks.leads:
                progress.note(f"{out} is finished: its model is saved, nothing is left to do")
            return Result(saved_model(out, model).to(device), Path(out))

        teacher = rotate(teacher, recipe.quantization.rotate).to(device)
        for reason in rotated(teacher).left_out if ranks.leads else ():
            progress.note(f"not rotated: {reason}")
        if (unused := geometry(teacher).left_out) and recipe.data_free and ranks.leads:
            progress.note(f"{len(unused)} attention layers are left out of the losses on attention maps: {unused[0]}")
        with ranks.leader_first():  # it writes run.json
            engine = pick_engine(device, fast, progress)
            job = _Job.prepare(teacher, recipe, out, seed, progress, engine, ranks)
            about = describe_run(teacher, source, job.engine) | {"data_free": recipe.data_free, "keep": keep}
            run = _open(job, out, asked, about, lease)
        with run:
            ranks.follow(job.student)
            images, history = job.resume(run, part)
            if forecast and ranks.leads:
                progress.forecast(_forecast(job, run, history.epoch, only_images, report))
            if only_images:
                images.of_round(0)
                ranks.wait()
                return Result(job.student, Path(out))
            _rounds(job, run, images, history, checkpoint_seconds)
            if ranks.leads:
                start = job.start(images)
                chosen = hand_over(run, teacher, start, job.student, source, keep, progress)
                run.drop_checkpoints(keep=list(run.checkpoints())[-2:])
                if report:
                    models = {"teacher": teacher, "searched": start, "student": chosen}
                    collect_report(run, recipe, seed, models, progress)
            with ranks.leader_first():
                return Result(chosen if ranks.leads else saved_model(out, model).to(device), Path(out))


def _open(job: "_Job", out: str | Path, asked: dict[str, Any], about: dict[str, Any], lease: float) -> RunFolder:
    """The run folder: the leader opens it, the other ranks join it."""
    ranks = job.ranks
    worker = Worker(rank=ranks.rank if ranks.size > 1 else None)
    if not ranks.leads:
        run = RunFolder.join(out, lease, worker, PATIENCE)
        check_alike(run, about)
        return run
    check_folder(job.recipe, out)
    if ranks.size > 1:
        check_shared(Path(out) if Path(out).is_dir() else Path(out).parent)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    patience = PATIENCE if restarted else 0.0
    plan = job.plan.to_dict()
    return RunFolder.open(out, asked, to_toml(job.recipe), about, plan, up_to_date_identity, lease, worker, patience)


def _rounds(
    job: "_Job", run: RunFolder, images: StoredImages, history: StudentHistory, checkpoint_seconds: float
) -> None:
    """Algorithm 1: make images against the student as it is, fit it to the teacher on them, and again."""
    for round_index, epochs in enumerate(job.recipe.rounds):
        if history.epoch >= epochs.stop > 0:
            continue  # an earlier call finished this round
        synthetic = images.of_round(round_index)  # lines 2-7, or read from the folder
        if history.epoch == 0:
            if job.ranks.leads:
                first = range_images(job.teacher, synthetic, job.recipe)
                init_ranges_(job.student, first, job.recipe.quantization)
            job.ranks.follow(job.student)
        fit(run, job.stages, history, images, synthetic, round_index, checkpoint_seconds, job.ranks)  # lines 8-11
        job.ranks.follow(job.student)  # to the bit: the next images are made against it


@dataclass(frozen=True)
class _Job:
    """The objects that a run works with."""

    teacher: nn.Module
    student: nn.Module
    recipe: Recipe
    plan: QuantPlan
    seed: int
    progress: Progress
    engine: Engine
    ranks: Ranks
    source: ImageSource
    stages: dict[str, Stage]
    """Name -> stage, in the order in which they run."""

    @classmethod
    def prepare(
        cls,
        teacher: nn.Module,
        recipe: Recipe,
        out: str | Path,
        seed: int,
        progress: Progress,
        engine: Engine,
        ranks: Ranks = ALONE,
    ) -> "_Job":
        """The student with its first ranges, its image source, and the stages that fit it."""
        plan = plan_of_run(out) or make_plan(teacher, recipe, seed, progress)
        if ranks.leads:
            student = first_student(teacher, recipe, plan, seed)
            as_deployed(student)  # what cannot be saved in the end fails early
        else:
            student = quantized_twin(teacher, recipe.quantization, plan)  # and its ranges from the leader
        source = image_source(teacher, student, recipe, seed, progress, engine)
        stages = {
            name: STAGES[name](teacher, student, recipe, seed=seed, progress=progress, engine=engine)
            for name in recipe.calibration.stages
        }
        for stage in stages.values():
            if isinstance(stage, Calibrator) and stage.parallel:
                stage.ranks = ranks
        return cls(teacher, student, recipe, plan, seed, progress, engine, ranks, source, stages)

    def resume(self, run: RunFolder, part: int | None = None) -> tuple[StoredImages, StudentHistory]:
        """Bring student and stages to the latest checkpoint of the folder, if it has one."""
        if not is_copy(run.read_text("recipe.toml"), self.recipe):
            self.progress.note(
                f"{run.path('recipe.toml')} was changed; it is a copy for reading, and the run keeps the recipe in "
                "run.json. Delete it to have it written again"
            )
        if run.plan is not None and run.plan != self.plan.to_dict():
            raise RunFolderError(f"{run.root} was begun by another process meanwhile: run the same command again")
        history = StudentHistory(run, self.teacher, self.student, self.recipe, self.plan, self.seed)
        images = StoredImages(run, self.source, history, self.ranks.size > 1, part)
        history.epoch, images.used = restore(run, self.student, self.stages, self.recipe, self.ranks)
        return images, history

    def start(self, images: StoredImages) -> nn.Module:
        """The student before calibration: ranges from the first images, nothing fitted."""
        scheme, plan = with_own_mlps(self.teacher, self.recipe.quantization, self.plan)
        start = quantized_twin(self.teacher, scheme, plan)
        first = images.first(scheme.range_images)
        init_ranges_(start, range_images(self.teacher, first, self.recipe), scheme)
        return start


def _trained(model: nn.Module) -> nn.Module:
    """The exposed model; ModelError if it has no weights, or untrained ones."""
    teacher = expose(model)
    if any(tensor.is_meta for tensor in (*teacher.parameters(), *teacher.buffers())):
        raise ModelError(f"this {type(model).__name__} is on the meta device, where it has no weights: load them first")
    for name, weight in teacher.named_parameters():
        if not weight.isfinite().all():
            raise ModelError(f"the weights of this {type(model).__name__} are damaged: {name} contains NaN or Inf")
    refuse_zero_weights(teacher)
    return teacher


def check_folder(recipe: Recipe, out: str | Path) -> None:
    """DataError for a folder of images that a new run cannot use: before anything is written."""
    if not recipe.data_free and not is_run(out):
        image_files(recipe.synthesis.folder, recipe.synthesis.images)


def _forecast(job: _Job, run: RunFolder, first_epoch: int, only_images: bool, report: bool) -> float:
    """Rough estimate of the remaining seconds, from a few timed steps; an epoch costs about one step per image."""
    recipe = job.recipe
    one_pass = collect.seconds_per_pass(job.student)
    steps = 0.0 if only_images else float(recipe.epochs - first_epoch)
    for round_index, epochs in enumerate(recipe.rounds[:1] if only_images else recipe.rounds):
        if first_epoch < epochs.stop:
            there = len(run.shards(round_index)) * recipe.synthesis.batch / recipe.synthesis.images
            steps += recipe.steps_in_round(round_index) * max(0.0, 1 - there)
    one_step = job.source.seconds_per_image_step() or 5 * one_pass
    seconds = one_step * recipe.synthesis.images * steps / job.ranks.size
    if not only_images:
        passes = 3 * handover.held_out_count(recipe) + recipe.quantization.range_images
        seconds += one_pass * (passes + (collect.passes(job.student, recipe.synthesis.images) if report else 0))
    return seconds
