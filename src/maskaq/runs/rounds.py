"""Run the epochs of a round, saving checkpoints, and restore the latest checkpoint."""

import time
from collections.abc import Mapping

import torch
from torch import nn

from maskaq.calibrate.stage import Stage
from maskaq.errors import RunFolderError
from maskaq.images.sets import SyntheticSet
from maskaq.images.stored import StoredImages, StudentHistory
from maskaq.ranks import ALONE, Ranks
from maskaq.recipe.schema import Recipe, recipe_from_dict
from maskaq.storage import files
from maskaq.storage.runfolder import Checkpoint, RunFolder

PATIENCE = 90.0
"""Seconds until another machine sees, on NFS, what the leader has written, or that it has ended."""


def fit(
    run: RunFolder,
    stages: Mapping[str, Stage],
    history: StudentHistory,
    stored: StoredImages,
    images: SyntheticSet,
    round_index: int,
    checkpoint_seconds: float,
    ranks: Ranks = ALONE,
) -> None:
    """Run the remaining epochs of a round. The leader saves checkpoints regularly and at the end."""
    rounds = history.recipe.rounds
    epochs = rounds[round_index]
    last_saved, running = time.monotonic(), None
    for epoch in range(max(history.epoch, epochs.start), epochs.stop):
        began = time.monotonic()
        stage = stages[history.recipe.stage_of(epoch)]
        if stage is not running:
            here = _shared(epochs, history.recipe.stages[stage.name])
            title, done = f"{stage.name}, round {round_index + 1} of {len(rounds)}", epoch - here.start
            stage.progress.stage(title, len(images) * len(here), done=len(images) * done)
            running = stage
        if run.leads or stage.parallel:
            losses = stage.epoch(images, epoch)
        if not stage.parallel:
            ranks.follow(history.student)
        history.epoch = epoch + 1
        if not run.leads:
            continue
        seconds = time.monotonic() - began
        run.event(stage=stage.name, round=round_index, epoch=epoch, seconds=seconds, **losses)
        if history.epoch == epochs.stop or time.monotonic() - last_saved > checkpoint_seconds:
            stored.used |= {round_index: stored.digests[round_index]}
            _checkpoint(run, history.student, stage, history.epoch, stored.used)
            last_saved = time.monotonic()


def _shared(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _checkpoint(run: RunFolder, student: nn.Module, stage: Stage, epoch: int, shards: dict[int, list[str]]) -> None:
    non_finite = [name for name, value in student.named_parameters() if not torch.isfinite(value).all()]
    if non_finite:
        what = f"{len(non_finite)} tensors of the student became NaN or Inf by epoch {epoch - 1}, {non_finite[0]} first"
        raise stage.diverged(what)
    state = {"student": dict(student.state_dict()), "optimizer": stage.state_dict()}
    starts = [epochs.start for epochs in recipe_from_dict(run.identity["recipe"]).rounds]
    run.save_checkpoint(Checkpoint(epoch, *files.flatten_state(state), shards), keep=starts)


def restore(
    run: RunFolder, student: nn.Module, stages: Mapping[str, Stage], recipe: Recipe, ranks: Ranks = ALONE
) -> tuple[int, dict[int, list[str]]]:
    """Restore student and optimiser from the latest checkpoint; returns epochs done, and digests of the shards used.

    All ranks load the checkpoint that the leader finds. It holds the state of the stage in which it was written:
    earlier stages are done, later ones start from scratch.
    """
    epoch = ranks.agreed(max(run.checkpoints(), default=0))
    if not epoch:
        return 0, {}
    until = time.monotonic() + (0 if run.leads else PATIENCE)
    while (saved := run.load_checkpoint(epoch)) is None and time.monotonic() < until:
        time.sleep(1.0)
    if saved is None:
        raise RunFolderError(
            f"{run.root} has no checkpoint of epoch {epoch} here: do all machines see the same folder?"
        )
    state = saved.state()
    try:
        student.load_state_dict(state["student"])
        stages[recipe.stage_of(saved.epoch - 1)].load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise files.DamagedError(run.path("checkpoints"), error, files.RESTORE) from error
    return saved.epoch, dict(saved.shards)
