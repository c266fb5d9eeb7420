"""What a whole run promises: a kill costs nothing but time, the same is the same, damage is named, nothing is touched
that is not the run's own."""

import errno
import json
import math
import os
import re
import shlex
import shutil
import signal
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from helpers import (
    SMALL,
    SWIN,
    SWIN_ARGS,
    VIT,
    VIT_ARGS,
    WEIGHTS,
    Ears,
    assert_same,
    assert_same_run,
    content,
    hook,
    in_process,
    left_half_written,
    mostly_slow,
    packed,
    pair,
    quantize_and_die,
    quantize_and_tell,
    rewrite_run_json,
    small_recipe,
    tensors,
    tiny_swin,
    tiny_vit,
)
from torch import nn
from torchvision.utils import save_image

import maskaq
from maskaq.artifact.saved import from_pretrained
from maskaq.calibrate.calibrator import Calibrator
from maskaq.calibrate.handover import is_kept, is_worse
from maskaq.errors import (
    CalibrationError,
    CheckpointError,
    DeviceError,
    MaskaqError,
    ModelError,
    PretrainedError,
    RecipeError,
    RunFolderError,
    SynthesisError,
)
from maskaq.images.sets import SyntheticSet
from maskaq.images.stored import range_images, state_digest
from maskaq.images.synthesis import Synthesizer
from maskaq.models import expose
from maskaq.models.load import architecture_of, load_model
from maskaq.progress import Progress
from maskaq.quant.quantizers import QUANTIZERS, Static
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.recipe.schema import load_recipe, to_toml
from maskaq.runs import opened as results
from maskaq.runs.arguments import identity, model_identity
from maskaq.runs.provenance import pick_device
from maskaq.runs.quantize import quantize
from maskaq.storage import files
from maskaq.storage.runfolder import QUANTIZED, RunFolder
from maskaq.tasks import CALIBRATED
from maskaq.tasks.classification import EvalResult

quantize = partial(quantize, device="cpu")

# The two kinds of run that everything is tried on, with a checkpoint after every epoch and only where one must be.
WARM = ("refresh.start=warm", "calibration.optimizer=sgd")
COLD = ("refresh.start=cold", "calibration.optimizer=adamw", "calibration.terms.block_error=10")
COLD += ("calibration.augment.cutmix=0.5", "calibration.augment.mixup=0.3", "calibration.clip_grad=1")
RUNS = {"warm, sgd, checkpoints often": (WARM, 0.0), "cold, adamw, checkpoints rarely": (COLD, 1e9)}
every_run = pytest.mark.parametrize(("kind", "seconds"), RUNS.values(), ids=RUNS.keys())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    done: dict[tuple[str, ...], Path] = {}

    def make(kind: tuple[str, ...] = WARM) -> Path:
        if kind not in done:
            done[kind] = tmp_path_factory.mktemp("straight") / "run"
            quantize(tiny_vit(), small_recipe(*kind), done[kind])
        return done[kind]

    return make


# ---- a kill at any moment

MOMENTS = {
    "in the synthesis of the first shard": ("maskaq.images.synthesis:Synthesizer._view", 2, False),
    "before the first shard is saved": ("maskaq.storage.runfolder:RunFolder.write_shard", 1, False),
    "between shards": ("maskaq.storage.runfolder:RunFolder.write_shard", 1, True),
    "between a shard and its event": ("maskaq.storage.runfolder:RunFolder.event", 2, False),
    "while the first ranges are set": ("maskaq.runs.quantize:init_ranges_", 2, False),
    "in the first epoch": ("maskaq.calibrate.calibrator:Calibrator._step", 2, False),
    "in the second epoch": ("maskaq.calibrate.calibrator:Calibrator._step", 4, True),
    "before the checkpoint of the first round": ("maskaq.storage.runfolder:RunFolder.event", 4, True),
    "after the first checkpoint": ("maskaq.storage.runfolder:RunFolder.save_checkpoint", 1, True),
    "in the refresh's synthesis": ("maskaq.images.synthesis:Synthesizer._view", 8, False),
    "between shards of the refresh": ("maskaq.storage.runfolder:RunFolder.write_shard", 3, True),
    "in the first epoch after the refresh": ("maskaq.calibrate.calibrator:Calibrator._step", 6, False),
    "in the last epoch": ("maskaq.calibrate.calibrator:Calibrator._step", 8, True),
    "right before the final save": ("maskaq.runs.finish:save_model", 1, False),
}

KINDS = cycle(RUNS.values())  # in turn
KILLS = {name: (moment, *next(KINDS)) for name, moment in MOMENTS.items()}
SOME_KILLS = ("between shards", "in the refresh's synthesis", "in the last epoch")


@pytest.mark.parametrize(("moment", "kind", "seconds"), mostly_slow(KILLS, *SOME_KILLS))
def test_a_killed_run_goes_on_to_the_weights_and_images_of_one_that_was_not(tmp_path, straight, kind, seconds, moment):
    recipe, out = small_recipe(*kind), tmp_path / "run"
    assert in_process(quantize_and_die, out, recipe, seconds, *moment) == -signal.SIGKILL
    assert not (out / QUANTIZED).exists()
    quantize(tiny_vit(), recipe, out, checkpoint_seconds=seconds)
    assert_same_run(out, straight(kind))
    assert left_half_written(out) == []


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(tmp_path, straight):
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    for n in (4, 4, 3):  # in the second shard, in the refresh, between its shards
        killed = in_process(quantize_and_die, out, recipe, 0.0, "maskaq.images.synthesis:Synthesizer._view", n, True)
        assert killed == -signal.SIGKILL
    for n in (3, 1):  # in the last epoch, and again
        killed = in_process(quantize_and_die, out, recipe, 0.0, "maskaq.calibrate.calibrator:Calibrator._step", n, True)
        assert killed == -signal.SIGKILL
    quantize(tiny_vit(), recipe, out)
    assert_same_run(out, straight(WARM))


@pytest.mark.slow
@every_run
def test_a_forecast_changes_nothing_in_what_is_resumed(tmp_path, straight, kind, seconds):
    recipe, out = small_recipe(*kind), tmp_path / "run"
    for moment in ("in the first epoch", "in the refresh's synthesis", "right before the final save"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            where, _, after = MOMENTS[moment]
            hook(patch.setattr, where, 2 if "_step" in where else 1, interrupt, after)
            quantize(tiny_vit(), recipe, out, checkpoint_seconds=seconds)
    quantize(tiny_vit(), recipe, out, forecast=True)
    assert_same_run(out, straight(kind))


def interrupt():
    raise KeyboardInterrupt


def test_progress_of_a_resumed_run_starts_at_what_is_done(tmp_path):
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.storage.runfolder:RunFolder.save_checkpoint", 3, interrupt, after=True)
        quantize(tiny_vit(), recipe, out, checkpoint_seconds=0)  # three of four epochs are kept
    ears = Ears()
    quantize(tiny_vit(), recipe, out, progress=ears, report=False)
    assert ears.stages[:2] == [("synthesize, round 2 of 2", 16, 16), ("calibrate, round 2 of 2", 16, 8)]
    assert not ears.notes


def disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", mostly_slow([2, 3, 5, 7, 9, 10, 11], 9))
def test_a_full_disk_says_how_to_go_on_and_that_is_true(tmp_path, straight, monkeypatch, write):
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    with monkeypatch.context() as patch:
        hook(patch.setattr, "os:replace", write, disk_full)
        with pytest.raises(RunFolderError, match=r"disk full: \d+ bytes .*run the same command again") as raised:
            quantize(tiny_vit(), recipe, out, checkpoint_seconds=0)
    assert str(out) in str(raised.value) and left_half_written(out) == []
    assert not (out / QUANTIZED).exists()
    quantize(tiny_vit(), recipe, out)
    assert_same_run(out, straight(WARM))


# ---- the same is the same


def test_the_same_seed_gives_the_same_run_and_another_gives_other_images(tmp_path, straight):
    quantize(tiny_vit(), small_recipe(*WARM), tmp_path / "same", seed=0)
    assert_same_run(tmp_path / "same", straight(WARM))
    other = quantize(tiny_vit(), small_recipe(*WARM), tmp_path / "other", seed=1)
    same = quantize(tiny_vit(), small_recipe(*WARM), tmp_path / "same", seed=0)
    assert (other.images.images != same.images.images).float().mean() > 0.5
    assert torch.equal(other.images.labels, same.images.labels)


def test_nothing_depends_on_the_global_generator_and_it_is_left_alone(tmp_path, straight):
    torch.manual_seed(1234)
    state = torch.get_rng_state()
    model = tiny_vit()
    torch.set_rng_state(state)
    quantize(model, small_recipe(*WARM), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_run(tmp_path / "run", straight(WARM))


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_a_whole_run_leaves_the_users_model_untouched(tmp_path, build):
    model = build().train()
    before, trains = state_digest(model.state_dict()), {name: p.requires_grad for name, p in model.named_parameters()}
    quantize(model, small_recipe(), tmp_path / "run")
    assert state_digest(model.state_dict()) == before and model.training
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trains
    assert all(p.grad is None for p in model.parameters())
    assert not [m for m in model.modules() if m._forward_hooks]


def test_only_the_images_and_then_the_rest_is_the_same_as_all_at_once(tmp_path, straight):
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    first = quantize(tiny_vit(), recipe, out, only_images=True)
    assert not (out / QUANTIZED).exists() and len(first.images) == 8
    assert [p.name for p in (out / "images").iterdir()] == ["round_00"]
    quantize(tiny_vit(), recipe, out)
    assert_same_run(out, straight(WARM))


def test_a_finished_run_called_again_changes_nothing_and_makes_nothing(tmp_path, straight, monkeypatch):
    out, recipe = straight(WARM), small_recipe(*WARM)
    before = content(out)
    for cls, name in ((Synthesizer, "_optimise"), (Calibrator, "_step")):
        monkeypatch.setattr(cls, name, lambda *_, **__: pytest.fail("a finished run has nothing to do"))
    ears = Ears()
    result = quantize(tiny_vit(), recipe, out, forecast=True, progress=ears)
    assert content(out) == before
    assert len(ears.notes) == 1 and ears.notes[0].startswith(f"{out} is finished")
    assert not ears.stages
    assert_same(packed(result.model), tensors(out / WEIGHTS))
    assert len(result.images) == 8


# ---- what is saved


@every_run
def test_the_student_of_the_last_epoch_is_what_is_saved(tmp_path, monkeypatch, kind, seconds):
    seen = []
    real = Calibrator.epoch

    def epoch(self, data, number):
        result = real(self, data, number)
        seen.append((number, packed(self.student)))
        return result

    monkeypatch.setattr(Calibrator, "epoch", epoch)
    # A large step, so that the last epoch is no better than the ones before and would not be picked for its loss.
    result = quantize(
        tiny_vit(),
        small_recipe(*kind, "calibration.lr=0.05"),
        tmp_path / "run",
        checkpoint_seconds=seconds,
        keep="last",
    )
    assert [number for number, _ in seen] == [0, 1, 2, 3]
    assert_same(tensors(tmp_path / "run" / WEIGHTS), seen[-1][1])
    assert_same(packed(result.model), seen[-1][1])


def test_the_saved_model_gives_the_outputs_of_the_student(straight):
    student = quantize(tiny_vit(), small_recipe(*COLD), straight(COLD)).model
    model = from_pretrained(straight(COLD) / QUANTIZED, like=tiny_vit(seed=9))
    images = batches(None)[0][0]
    with torch.no_grad():
        assert torch.equal(model(images), student(images))


def test_the_log_tells_of_every_shard_and_every_epoch(straight):
    events = RunFolder.read(straight(WARM)).events()
    shards = [(e["round"], e["shard"]) for e in events if e["stage"] == "synthesize"]
    assert shards == [(0, 0), (0, 1), (1, 0), (1, 1)]
    epochs = [(e["round"], e["epoch"]) for e in events if e["stage"] == "calibrate"]
    assert epochs == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert all(e["loss"] > 0 for e in events if e["stage"] == "calibrate")
    assert all(e["seconds"] > 0 for e in events)


def test_no_epochs_save_the_student_with_the_ranges_of_the_images(tmp_path):
    recipe = small_recipe("calibration.epochs=0")
    result = quantize(tiny_vit(), recipe, tmp_path / "run")
    fresh = quantized_twin(expose(tiny_vit()), recipe.quantization)
    init_ranges_(fresh, range_images(fresh, result.images, recipe), recipe.quantization)
    assert len(result.images) == 8 and not (tmp_path / "run" / "checkpoints").exists()
    assert_same(tensors(tmp_path / "run" / WEIGHTS), packed(fresh))
    before = content(tmp_path / "run")
    quantize(tiny_vit(), recipe, tmp_path / "run")
    assert content(tmp_path / "run") == before


def test_a_run_that_never_refreshes_makes_its_images_once(tmp_path):
    ears = Ears()
    quantize(tiny_vit(), small_recipe("refresh.every=0"), tmp_path / "run", progress=ears, report=False)
    assert ears.stages[:2] == [("synthesize, round 1 of 1", 24, 0), ("calibrate, round 1 of 1", 32, 0)]
    assert [p.name for p in (tmp_path / "run" / "images").iterdir()] == ["round_00"]


def test_a_warm_refresh_continues_from_the_images_before_and_a_cold_one_does_not(tmp_path):
    def change(start):
        still = ("refresh.lr=1e-9", "refresh.steps=1", f"refresh.start={start}")
        quantize(tiny_vit(), small_recipe(*still), tmp_path / start)
        first, second = (RunFolder.read(tmp_path / start).load_shard(round, 0).tensors["images"] for round in (0, 1))
        return (first.float() - second.float()).abs().mean()

    assert change("warm") == 0
    assert change("cold") > 10


# ---- damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def copy_of(straight_run: Path, to: Path) -> Path:
    for name, data in content(straight_run).items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(data)
    return to


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def swap(path: Path) -> None:
    """With its neighbour: both are sound files of this run, in the wrong place."""
    neighbour = path.with_name(
        "shard_0001.safetensors" if path.name == "shard_0000.safetensors" else "shard_0000.safetensors"
    )
    data = neighbour.read_bytes()
    neighbour.write_bytes(path.read_bytes())
    path.write_bytes(data)


DAMAGE = {
    "flipped": flip,
    "cut": cut,
    "emptied": lambda path: path.write_bytes(b""),
    "lost": Path.unlink,
    "swapped": swap,
}
STAGES = {  # where a run was killed, and the round whose shard is damaged then
    "before calibration": ("maskaq.calibrate.calibrator:Calibrator.epoch", 1, 0),
    "in the first round's calibration": ("maskaq.calibrate.calibrator:Calibrator.epoch", 2, 0),
    "before the refresh": ("maskaq.storage.runfolder:RunFolder.write_shard", 3, 0),
    "between the refresh's shards": ("maskaq.storage.runfolder:RunFolder.write_shard", 4, 0),
    "in the second round's calibration": ("maskaq.calibrate.calibrator:Calibrator.epoch", 4, 1),
    "in it, in a shard the refresh started from": ("maskaq.calibrate.calibrator:Calibrator.epoch", 4, 0),
    "right before the final save": ("maskaq.runs.finish:save_model", 1, 0),
}

LOSSES = {f"{what}, {when}": (*STAGES[when], DAMAGE[what]) for when in STAGES for what in DAMAGE}
SOME_LOSSES = (
    "lost, before calibration",
    "flipped, between the refresh's shards",
    "cut, in the second round's calibration",
)


@pytest.mark.parametrize(("where", "n", "round", "damage"), mostly_slow(LOSSES, *SOME_LOSSES))
def test_a_lost_shard_is_made_again_exactly_and_the_run_ends_the_same(tmp_path, straight, where, n, round, damage):
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, where, n, interrupt)
        quantize(tiny_vit(), recipe, out, checkpoint_seconds=0)
    for shard in (out / f"images/round_{round:02}").glob("shard_*"):
        damage(shard) if shard.exists() else None
    quantize(tiny_vit(), recipe, out)
    assert_same(tensors(out / WEIGHTS), tensors(straight(WARM) / WEIGHTS))


@pytest.mark.slow
def test_both_rounds_of_images_can_be_lost(tmp_path, straight):
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.calibrate.calibrator:Calibrator.epoch", 4, interrupt)
        quantize(tiny_vit(), recipe, out, checkpoint_seconds=0)
    shutil.rmtree(out / "images")
    quantize(tiny_vit(), recipe, out)
    assert_same_run(out, straight(WARM))


def test_a_shard_that_comes_out_different_stops_the_run_and_is_not_stored(tmp_path):
    """As on another GPU: what the student was calibrated on is gone, and the message says so."""
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.calibrate.calibrator:Calibrator.epoch", 2, interrupt)
        quantize(tiny_vit(), recipe, out, checkpoint_seconds=0)
    flip(out / "images/round_00/shard_0001.safetensors")
    before = content(out / "images")
    real = Synthesizer.__call__

    def elsewhere(*args):
        made = real(*args)
        made.images[0, 0, 0, 0] ^= 1
        return made

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RunFolderError, match="shards 1 of round 0.*another model"),
    ):
        patch.setattr(Synthesizer, "__call__", elsewhere)
        quantize(tiny_vit(), recipe, out)
    assert content(out / "images") == before


@pytest.mark.parametrize("damage", [DAMAGE[name] for name in ("flipped", "cut", "emptied", "lost")])
@pytest.mark.parametrize("round", [0, 1])
def test_a_finished_run_with_a_lost_shard_changes_nothing_and_its_images_name_it(tmp_path, straight, round, damage):
    out, recipe = copy_of(straight(WARM), tmp_path / "run"), small_recipe(*WARM)
    shard = out / f"images/round_{round:02}/shard_0001.safetensors"
    damage(shard)
    before = content(out)
    result = quantize(tiny_vit(), recipe, out)
    assert content(out) == before
    assert_same(packed(result.model), tensors(straight(WARM) / WEIGHTS))
    if round == 1:
        with pytest.raises(RunFolderError, match=str(shard)):
            _ = result.images


def test_a_finished_run_is_finished_without_its_checkpoints_too(tmp_path, straight):
    out = copy_of(straight(WARM), tmp_path / "run")
    shutil.rmtree(out / "checkpoints")
    before = content(out)
    quantize(tiny_vit(), small_recipe(*WARM), out)
    assert content(out) == before


def test_the_students_that_rounds_began_with_are_kept_until_the_run_ends(tmp_path):
    recipe, out = small_recipe(*WARM, "refresh.every=1"), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.runs.finish:save_model", 1, interrupt)
        quantize(tiny_vit(), recipe, out)
    assert list(RunFolder.read(out).checkpoints()) == [1, 2, 3, 4]
    quantize(tiny_vit(), recipe, out)
    assert list(RunFolder.read(out).checkpoints()) == [3, 4]


@pytest.mark.slow
def test_a_shard_or_a_checkpoint_of_another_run_is_not_taken(tmp_path, straight):
    recipe = small_recipe(*WARM)
    quantize(tiny_vit(), recipe, tmp_path / "other", seed=1)
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.calibrate.calibrator:Calibrator.epoch", 4, interrupt)
        quantize(tiny_vit(), recipe, out, checkpoint_seconds=0)
    shutil.copy(tmp_path / "other/images/round_01/shard_0000.safetensors", out / "images/round_01")
    mine = out / "checkpoints/checkpoint_000003.safetensors"
    sound = mine.read_bytes()
    shutil.copy(tmp_path / "other/checkpoints/checkpoint_000004.safetensors", mine)
    with pytest.raises(RunFolderError, match=f"{mine} is damaged .*another run"):
        quantize(tiny_vit(), recipe, out)
    mine.write_bytes(sound)
    quantize(tiny_vit(), recipe, out)
    assert_same_run(out, straight(WARM))


# ---- links


def test_no_link_in_a_run_folder_is_followed(tmp_path, straight):
    """A stranger's folder can neither overwrite, extend nor read what is outside it."""
    for name in (".lock", ".lock.pid", "events.jsonl", "run.json", "recipe.toml", "images", "checkpoints", QUANTIZED):
        outside = tmp_path / f"outside{name}"
        out = copy_of(straight(WARM), tmp_path / f"run{name}")
        shutil.rmtree(out / QUANTIZED)  # there is something left to write
        if name == QUANTIZED:
            outside.mkdir()
        else:
            (out / name).rename(outside) if (out / name).exists() else outside.write_text("precious")
        (out / name).symlink_to(outside)
        before = content(outside) if outside.is_dir() else outside.read_bytes()
        with pytest.raises(RunFolderError, match=f"{name}.* symbolic link"):
            quantize(tiny_vit(), small_recipe(*WARM), out)
        assert before == (content(outside) if outside.is_dir() else outside.read_bytes())


@pytest.mark.parametrize(
    "name", ["images/round_00", "images/round_00/shard_0000.safetensors", "checkpoints/checkpoint_000004.safetensors"]
)
def test_no_link_further_down_is_followed(tmp_path, straight, name):
    out, outside = copy_of(straight(WARM), tmp_path / "run"), tmp_path / "outside"
    shutil.rmtree(out / QUANTIZED)
    (out / name).rename(outside)
    (out / name).symlink_to(outside)
    with pytest.raises(RunFolderError, match=f"{name}.* symbolic link"):
        quantize(tiny_vit(), small_recipe(*WARM), out)


def test_a_pipe_in_a_run_folder_does_not_hang(tmp_path, straight):
    out = copy_of(straight(WARM), tmp_path / "run")
    (out / "events.jsonl").unlink()
    os.mkfifo(out / "events.jsonl")
    shutil.rmtree(out / QUANTIZED)
    with pytest.raises(RunFolderError, match=r"events\.jsonl.* pipe"):
        quantize(tiny_vit(), small_recipe(*WARM), out)


# ---- progress, and what a finished run may be asked


class Strict(Progress):
    """As a bar: nothing advances before its stage began, nor beyond its end."""

    left: int | None = None

    def stage(self, title: str, total: int, done: int = 0) -> None:
        self.left = total - done

    def advance(self, units: int = 1, **metrics: float) -> None:
        assert self.left is not None and units <= self.left
        self.left -= units


@pytest.mark.parametrize("round", mostly_slow([0, 1], 1))
@pytest.mark.parametrize("where", ["maskaq.calibrate.calibrator:Calibrator.epoch", "maskaq.runs.finish:save_model"])
@pytest.mark.slow
def test_progress_is_sound_where_a_lost_shard_is_made_again(tmp_path, straight, round, where):
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, where, 4 if where.endswith("epoch") else 1, interrupt)
        quantize(tiny_vit(), recipe, out, checkpoint_seconds=0, progress=Strict())
    (out / f"images/round_{round:02}/shard_0000.safetensors").unlink()
    quantize(tiny_vit(), recipe, out, progress=Strict())
    assert_same(tensors(out / WEIGHTS), tensors(straight(WARM) / WEIGHTS))


def test_a_model_may_have_members_named_like_numbers_of_heads():
    model = tiny_vit()
    before = model_identity(model)
    model.heads = [1, 2, 3]
    assert model_identity(model) == before


@pytest.mark.parametrize(
    ("changed", "key"), [({"num_heads": 4}, "heads"), ({"act_layer": nn.ReLU}, "activations")], ids=["heads", "act"]
)
def test_a_model_that_differs_in_what_no_weight_tells_needs_another_folder(tmp_path, changed, key):
    quantize(tiny_vit(), small_recipe(), tmp_path / "run", only_images=True)
    with pytest.raises(RunFolderError, match=rf"model\.{key}"):
        quantize(tiny_vit(**changed), small_recipe(), tmp_path / "run", only_images=True)


def test_a_run_of_a_version_without_some_setting_goes_on_with_its_default(tmp_path, straight, monkeypatch):
    def older(*args):
        found = identity(*args)
        del found["recipe"]["quantization"]["rule"], found["recipe"]["synthesis"]["flip"]
        for key in ("heads", "norm_eps", "activations"):
            del found["model"][key]
        return found

    recipe, out = small_recipe(*WARM), tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("maskaq.runs.arguments.identity", older)
        hook(patch.setattr, "maskaq.calibrate.calibrator:Calibrator.epoch", 3, interrupt)
        quantize(tiny_vit(), recipe, out)
    quantize(tiny_vit(), recipe, out)
    assert_same(tensors(out / WEIGHTS), tensors(straight(WARM) / WEIGHTS))
    before = content(out)
    quantize(tiny_vit(), recipe, out)
    assert content(out) == before
    with pytest.raises(RunFolderError, match=r"recipe\.synthesis\.flip: 0\.0 in the folder, 0\.5 asked"):
        quantize(tiny_vit(), small_recipe(*WARM, "synthesis.flip=0.5"), out)


@every_run
def test_a_resumed_run_takes_the_shards_that_are_there_whatever_was_timed(tmp_path, straight, kind, seconds):
    recipe, out = small_recipe(*kind), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.storage.runfolder:RunFolder.write_shard", 4, interrupt)
        quantize(tiny_vit(), recipe, out, checkpoint_seconds=seconds)
    made = {path: path.stat().st_mtime_ns for path in out.glob("images/*/shard_*")}
    ears = Ears()
    quantize(tiny_vit(), recipe, out, progress=ears, forecast=True, report=False)
    assert len(made) == 3 and all(path.stat().st_mtime_ns == moment for path, moment in made.items())
    assert not [note for note in ears.notes if "made again" in note]
    assert_same(tensors(out / WEIGHTS), tensors(straight(kind) / WEIGHTS))


def test_a_lost_model_and_a_lost_first_shard_of_a_finished_run_come_back_or_stop(tmp_path, straight, monkeypatch):
    out, recipe = copy_of(straight(WARM), tmp_path / "run"), small_recipe(*WARM)
    shutil.rmtree(out / QUANTIZED)
    (out / "images/round_00/shard_0000.safetensors").unlink()
    real = Synthesizer.__call__

    def elsewhere(*args):
        made = real(*args)
        made.images[0, 0, 0, 0] ^= 1
        return made

    with monkeypatch.context() as patch, pytest.raises(RunFolderError, match="shards 0 of round 0"):
        patch.setattr(Synthesizer, "__call__", elsewhere)
        quantize(tiny_vit(), recipe, out)
    quantize(tiny_vit(), recipe, out)
    assert_same(tensors(out / WEIGHTS), tensors(straight(WARM) / WEIGHTS))


def test_what_cannot_be_saved_in_the_end_is_told_before_anything_is_written(tmp_path):
    class Odd(Static):
        def dequantize(self, codes):
            return super().dequantize(codes)

    name = f"odd_{tmp_path.name}"
    maskaq.quantizer(name)(Odd)
    try:
        with pytest.raises(MaskaqError, match="only uniform grids"):
            quantize(tiny_vit(), small_recipe(f"quantization.activation={name}"), tmp_path / "run")
    finally:
        del QUANTIZERS[name]
    assert not (tmp_path / "run").exists()


def test_asking_a_finished_run_for_its_images_changes_nothing(tmp_path):
    out = tmp_path / "run"
    quantize(tiny_vit(), harmful(), out, keep="last")
    before = content(out)
    result = quantize(tiny_vit(), harmful(), out, only_images=True)
    assert content(out) == before and len(result.images) == 8


def test_asking_a_run_in_its_second_round_for_images_makes_none_of_that_round(tmp_path):
    recipe, out = small_recipe(*WARM), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.storage.runfolder:RunFolder.write_shard", 3, interrupt)
        quantize(tiny_vit(), recipe, out)
    quantize(tiny_vit(), recipe, out, only_images=True)
    assert RunFolder.read(out).shards(0) == [0, 1] and not RunFolder.read(out).shards(1)
    assert not (out / QUANTIZED).exists()


def test_the_images_of_a_finished_run_are_those_of_its_last_round_or_an_error(tmp_path, straight):
    out = copy_of(straight(WARM), tmp_path / "run")
    shutil.rmtree(out / "images/round_01")
    with pytest.raises(RunFolderError, match=r"round_01.shard_0000\.safetensors is missing"):
        _ = quantize(tiny_vit(), small_recipe(*WARM), out).images


STRANGE = {
    "resumed": lambda run: run.update(resumed=5),
    "resumed of words": lambda run: run.update(resumed=["x"]),
    "no recipe": lambda run: run["identity"].pop("recipe"),
    "no seed": lambda run: run["identity"].pop("seed"),
    "no model": lambda run: run["identity"].pop("model"),
    "a name that is none": lambda run: run["facts"]["source"].update(name=5),
    "arguments that are none": lambda run: run["facts"]["source"].update(args=[1, 2]),
    "an architecture that is none": lambda run: run["facts"]["source"].update(architecture=7),
}


@pytest.mark.parametrize("change", mostly_slow(STRANGE, "resumed", "no recipe", "arguments that are none"))
@pytest.mark.parametrize("form", mostly_slow([1, 2], 2))
def test_a_strangers_run_json_is_refused_by_name(opened, change, form):
    def changed(text: str) -> str:
        found = json.loads(text) | {"format": form}
        change(found)
        return json.dumps(found)

    rewrite_run_json(opened.folder, changed)
    for use in (results.open_run, results.write_report):
        with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
            use(opened.folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pixels": torch.zeros(4, 3, 32, 32, dtype=torch.uint8)},
        {"images": torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "labels": torch.arange(4), "indices": torch.arange(4)},
        {"images": torch.zeros(4, 3, 32, 32), "labels": torch.arange(4), "indices": torch.arange(4)},
    ],
    ids=["names", "size", "type"],
)
@pytest.mark.slow
def test_a_sealed_shard_that_holds_no_images_is_refused(opened, wrong):
    folder = RunFolder.read(opened.folder)
    path = opened.folder / "images/round_00/shard_0000.safetensors"
    path.write_bytes(folder.seal_shard(0, 0, wrong))
    with pytest.raises(RunFolderError, match="does not hold images"):
        opened.ptq()
    path.write_bytes(files.seal(wrong, {}))  # as 0.1.0 wrote them
    with pytest.raises(RunFolderError, match="no shard of images"):
        opened.ptq()


def test_a_folder_of_images_that_has_changed_is_noticed(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    for number in range(12):
        save_image(torch.rand(3, 32, 32), real / f"{number}.png")
    recipe, out = load_recipe(f"paper+images:{real}", *SMALL, "synthesis.steps=0", "refresh.every=0"), tmp_path / "run"
    quantize(tiny_vit(), recipe, out, only_images=True)
    (out / "images/round_00/shard_0001.safetensors").unlink()
    (real / "3.png").unlink()
    with pytest.raises(RunFolderError, match=f"{real} has changed"):
        quantize(tiny_vit(), recipe, out)


# ---- never worse than the start


def harmful(*overrides: str):
    return small_recipe(*WARM, "calibration.lr=0.5", "calibration.optimizer=adamw", *overrides)


def test_a_student_that_calibration_made_worse_is_not_handed_over(tmp_path):
    ears, out = Ears(), tmp_path / "run"
    result = quantize(tiny_vit(), harmful(), out, progress=ears)
    (told,) = [event for event in RunFolder.read(out).events() if event["stage"] == "hand over"]
    assert told["kept"] == "start" and told["end"] > told["start"] > 0 and told["images"] >= 8
    assert [note for note in ears.notes if "worse" in note and "--keep last" in note]
    start = quantized_twin(expose(tiny_vit()), harmful().quantization)
    init_ranges_(
        start,
        range_images(start, SyntheticSet(**RunFolder.read(out).load_shard(0, 0).tensors), harmful()),
        harmful().quantization,
    )
    assert_same(tensors(out / WEIGHTS), packed(start))
    assert_same(packed(result.model), packed(start))
    assert "better" in (out / QUANTIZED / "README.md").read_text()
    assert json.loads((out / QUANTIZED / "config.json").read_text())["made"]["handover"]["kept"] == "start"
    assert "worse" in (results.write_report(out).with_suffix(".md")).read_text()


@pytest.mark.parametrize(
    ("start", "end", "noise", "worse"),
    [(1.0, 0.5, 0.1, False), (1.0, 1.1, 0.1, False), (1.0, 1.3, 0.1, True), (1.0, math.nan, 0.1, True)],
)
def test_worse_is_worse_by_more_than_the_noise_of_the_images(start, end, noise, worse):
    assert is_worse(start, end, noise) == worse
    told = {"start": start, "end": end, "noise": noise, "kept": "end"}
    assert is_kept(told, "better") == (not worse) and is_kept(told, "last") and is_kept(told, None)
    assert not is_kept(told | {"kept": "start"}, "last") and is_kept(told | {"kept": "start"}, "better")


def test_the_worse_student_is_handed_over_on_request_without_calibrating_again(tmp_path, monkeypatch):
    out = tmp_path / "run"
    quantize(tiny_vit(), harmful(), out)
    before = tensors(out / WEIGHTS)
    monkeypatch.setattr(Calibrator, "epoch", lambda *_: pytest.fail("calibrated again"))
    result = quantize(tiny_vit(), harmful(), out, keep="last")
    saved = RunFolder.read(out).load_checkpoint()
    assert saved is not None and saved.epoch == 4
    assert_same(packed(result.model), tensors(out / WEIGHTS))
    assert before.keys() == tensors(out / WEIGHTS).keys()
    assert not all(torch.equal(before[name], value) for name, value in tensors(out / WEIGHTS).items())
    with pytest.raises(MaskaqError, match="better, last"):
        quantize(tiny_vit(), harmful(), out, keep="worst")


def test_what_was_asked_for_decides_whatever_was_asked_before(tmp_path):
    quantize(tiny_vit(), harmful(), tmp_path / "run")
    start = tensors(tmp_path / "run" / WEIGHTS)
    quantize(tiny_vit(), harmful(), tmp_path / "run", keep="last")
    quantize(tiny_vit(), harmful(), tmp_path / "run")
    assert_same(tensors(tmp_path / "run" / WEIGHTS), start)


@pytest.mark.slow
def test_figures_of_one_model_are_not_those_of_the_other(tmp_path, checkpoint):
    model, source = from_file(checkpoint)
    out = tmp_path / "run"
    quantize(model, harmful(), out, source=source)
    results.write_metrics(out, {CALIBRATED: EvalResult(84.6, 99, 100)}, "data")
    page = results.write_report(out).with_suffix(".md")
    assert "84.60" in (out / QUANTIZED / "README.md").read_text() and "84.60" in page.read_text()
    distance = json.loads((out / "report.json").read_text())["attention"]["distance"]["student"]
    quantize(model, harmful(), out, source=source, keep="last", report=False)
    page = results.write_report(out).with_suffix(".md")
    assert "84.60" not in (out / QUANTIZED / "README.md").read_text() and "84.60" not in page.read_text()
    assert json.loads((out / "report.json").read_text())["attention"]["distance"]["student"] != distance


def test_a_run_that_is_continued_hands_over_what_it_was_last_asked_for(tmp_path, checkpoint):
    model, source = from_file(checkpoint)
    quantize(model, harmful(), tmp_path / "run", source=source, keep="last")
    assert results.open_run(tmp_path / "run").keep == "last"
    quantize(model, harmful(), tmp_path / "run", source=source)
    assert results.open_run(tmp_path / "run").keep == "better"


@pytest.mark.parametrize(
    "told", mostly_slow([None, 5, {"kept": 3}, {"start": "x", "end": 1, "noise": 0, "kept": "end"}], 5, {"kept": 3})
)
@pytest.mark.slow
def test_an_edited_handover_is_no_traceback(tmp_path, checkpoint, told):
    model, source = from_file(checkpoint)
    out = tmp_path / "run"
    quantize(model, small_recipe(), out, source=source)
    config = json.loads((out / QUANTIZED / "config.json").read_text())
    config["made"]["handover"] = told
    (out / QUANTIZED / "config.json").write_text(json.dumps(config))
    (out / "report.json").unlink()
    results.write_report(out)
    for keep in ("last", "better"):
        quantize(model, small_recipe(), out, source=source, keep=keep)


def test_a_student_that_calibration_made_better_is_handed_over_without_a_word(tmp_path):
    ears = Ears()
    recipe = small_recipe("calibration.lr=1e-4", "calibration.optimizer=adamw", "calibration.epochs=12")
    quantize(tiny_vit(), recipe, tmp_path / "run", progress=ears, report=False)
    (told,) = [event for event in RunFolder.read(tmp_path / "run").events() if event["stage"] == "hand over"]
    assert told["kept"] == "end" and told["end"] - told["start"] <= 2 * told["noise"]
    assert not ears.notes


def test_without_a_report_nothing_is_measured_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr("maskaq.report.collect.collect", lambda *_, **__: pytest.fail("measured"))
    quantize(tiny_vit(), small_recipe(), tmp_path / "run", report=False)
    assert not (tmp_path / "run/report.json").exists()


# ---- damage to other files


def test_a_damaged_checkpoint_is_named_and_once_deleted_the_run_goes_back_and_ends_the_same(tmp_path, straight):
    out, recipe = copy_of(straight(WARM), tmp_path / "run"), small_recipe(*WARM)
    *_, newest = sorted((out / "checkpoints").iterdir())
    flip(newest)
    shutil.rmtree(out / QUANTIZED)
    with pytest.raises(RunFolderError, match=f"{newest} is damaged .*delete it"):
        quantize(tiny_vit(), recipe, out)
    newest.unlink()
    quantize(tiny_vit(), recipe, out)
    assert_same_run(out, straight(WARM))


def test_a_damaged_model_file_is_named_and_the_same_command_mends_it(tmp_path, checkpoint):
    out = tmp_path / "run"
    model, source = from_file(checkpoint)
    quantize(model, small_recipe(), out, source=source)
    sound = content(out / QUANTIZED)
    for name in ("model.safetensors", "config.json"):
        (out / QUANTIZED / name).write_bytes(sound[name][:-100])
        with pytest.raises(PretrainedError, match=f"{out / QUANTIZED / name} is not .*: maskaq calibrate"):
            results.open_run(out).calibrated()
        quantize(model, small_recipe(), out, source=source)
        assert content(out / QUANTIZED) == sound


def test_a_recipe_toml_that_was_edited_is_noticed_and_changes_nothing(tmp_path, straight):
    out, recipe = copy_of(straight(WARM), tmp_path / "run"), small_recipe(*WARM)
    shutil.rmtree(out / QUANTIZED)
    (out / "recipe.toml").write_bytes((out / "recipe.toml").read_bytes().replace(b"steps = 3", b"steps = \xff"))
    ears = Ears()
    quantize(tiny_vit(), recipe, out, progress=ears)
    assert ears.notes[0].startswith(f"{out / 'recipe.toml'} was changed")
    assert_same_run(out, straight(WARM))
    (out / "recipe.toml").unlink()
    shutil.rmtree(out / QUANTIZED)
    quantize(tiny_vit(), recipe, out, progress=ears)
    assert load_recipe(out / "recipe.toml") == recipe and not [n for n in ears.notes[1:] if "was changed" in n]


# ---- refusals


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (dict(recipe=small_recipe(*WARM, "synthesis.lr=0.07")), "recipe.synthesis.lr: 0.1 in the folder, 0.07 asked"),
        (dict(recipe=small_recipe(*COLD)), 'recipe.refresh.start: "warm" in the folder, "cold" asked'),
        (dict(model=tiny_vit(seed=1)), "model.weights: "),
        (dict(model=tiny_swin()), 'model.class: "VisionTransformer" in the folder, "SwinTransformer" asked'),
        (dict(seed=7), "seed: 0 in the folder, 7 asked"),
    ],
    ids=["lr", "refresh and optimiser", "weights", "architecture", "seed"],
)
def test_a_folder_of_another_run_is_refused_by_the_key_that_differs_and_left_alone(straight, change, key):
    out = straight(WARM)
    before = content(out)
    asked = {"model": tiny_vit(), "recipe": small_recipe(*WARM), "seed": 0} | change
    with pytest.raises(RunFolderError) as raised:
        quantize(asked["model"], asked["recipe"], out, seed=asked["seed"])
    assert key in str(raised.value) and "choose another --out" in str(raised.value)
    assert not re.search("[0-9a-f]{13}", str(raised.value))  # a digest is cut to what one can compare
    assert content(out) == before


def test_a_second_process_is_refused_while_the_first_works_and_does_not_disturb_it(tmp_path, straight):
    recipe, out = small_recipe(*WARM), tmp_path / "run"

    class Meddler(Ears):
        def stage(self, title: str, total: int, done: int = 0) -> None:
            super().stage(title, total, done)
            if len(self.stages) == 2:
                assert in_process(quantize_and_tell, out, recipe, tmp_path / "told") == 0

    quantize(tiny_vit(), recipe, out, progress=Meddler())
    told = (tmp_path / "told").read_text()
    assert told.startswith(f"BusyError: another maskaq process (pid {os.getpid()}) is working in {out}")
    assert_same_run(out, straight(WARM))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_name_and_nothing_is_written(tmp_path):
    with pytest.raises(DeviceError, match="device 'cuda' cannot be used"):
        quantize(tiny_vit(), small_recipe(), tmp_path / "run", device="cuda")
    with pytest.raises(DeviceError, match="device 'toaster' cannot be used"):
        pick_device("toaster")
    assert not (tmp_path / "run").exists()


# ---- what a caller may have set or given


@contextmanager
def double_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "double": double_by_default,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", mostly_slow(MODES, "inference_mode"))
def test_torch_modes_of_the_caller_change_nothing_and_are_left_as_they_were(tmp_path, straight, checkpoint, mode):
    model, source = from_file(checkpoint)
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        quantize(model, small_recipe(*WARM), tmp_path / "run", source=source)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()) == before
        table = results.compare(results.open_run(tmp_path / "run"), batches, device="cpu")
    assert_same_run(tmp_path / "run", straight(WARM))
    assert table == results.compare(results.open_run(tmp_path / "run"), batches, device="cpu")


def test_a_model_made_in_inference_mode_is_quantized_like_any_other(tmp_path, straight):
    with torch.inference_mode():
        model = tiny_vit()
    quantize(model, small_recipe(*WARM), tmp_path / "run")
    assert_same_run(tmp_path / "run", straight(WARM))


def untrained():
    model = tiny_vit()
    torch.nn.init.zeros_(model.head.weight)
    return model


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (dict(recipe=3), RecipeError, "unknown recipe '3'"),
        (dict(recipe=None), RecipeError, "unknown recipe 'None'"),
        (dict(bits=4), RecipeError, "quantization.bits '4': expected wXaY"),
        (dict(seed="one"), RecipeError, "seed: expected a whole number, got 'one'"),
        (dict(seed=1.5), RecipeError, "seed: expected a whole number, got 1.5"),
        (dict(out=None), RunFolderError, "out: expected the path of a run folder, got None"),
        (dict(source=5), ModelError, "source: expected a dict"),
        (dict(source={"name": 5}), ModelError, "source['name']: expected a timm name"),
        (dict(source={"name": None}), ModelError, "source['name']: expected a timm name"),
        (dict(source={"name": VIT, "args": None}), ModelError, "source['args']"),
        (dict(source={"architecture": {"name": 5}}), ModelError, "source['architecture']['name']"),
        (dict(source={"architecture": {"args": {}}}), ModelError, "source['architecture']"),
        (dict(source={"architecture": 5}), ModelError, "source['architecture']"),
        (dict(checkpoint_seconds="x"), RecipeError, "checkpoint_seconds: expected a number of seconds, got 'x'"),
        (dict(checkpoint_seconds=float("nan")), RecipeError, "checkpoint_seconds"),
        (dict(fast="x"), RecipeError, "fast: expected True, False or None, got 'x'"),
        (dict(progress=5), RecipeError, "progress: expected a maskaq.progress.Progress, got 5"),
        (dict(device="privateuseone"), DeviceError, "device 'privateuseone' cannot be used"),
        (dict(device="hpu"), DeviceError, "device 'hpu' cannot be used"),
        (dict(device="meta"), DeviceError, "device 'meta' cannot be used"),
        (dict(device="xla"), DeviceError, "device 'xla' cannot be used"),
        (dict(device=3.5), DeviceError, "device: expected a name such as cpu or cuda:1, got 3.5"),
        (dict(seed=2**80), RecipeError, "2**63 - 1"),
        (dict(model=torch.compile(tiny_vit())), ModelError, "give model._orig_mod"),
        (dict(model=torch.nn.DataParallel(tiny_vit())), ModelError, "give model.module"),
        (dict(model="cifar10_vit"), ModelError, "maskaq.load_model('cifar10_vit') loads it"),
        (dict(model=None), ModelError, "expected a model, an nn.Module, got NoneType"),
        (dict(model=untrained()), ModelError, "layer 'head'"),
        (dict(model=tiny_vit().to("meta")), ModelError, "on the meta device, where it has no weights"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_of_a_wrong_kind_is_told_in_one_line(tmp_path, given, kind, words):
    asked = {"model": tiny_vit(), "recipe": small_recipe(), "out": tmp_path / "run"} | given
    with pytest.raises(kind) as raised:
        quantize(**asked)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("odd", ["n" * 300, "a\0b"], ids=["too long", "NUL"])
def test_a_path_that_no_system_takes_is_told_in_python_too(tmp_path, odd):
    path, model = tmp_path / odd, tiny_vit()
    for call in (
        lambda: quantize(model, small_recipe(), path),
        lambda: maskaq.load_model(VIT, path),
        lambda: maskaq.load_recipe(odd),
        lambda: maskaq.load_recipe(f"{odd}.toml"),
        lambda: maskaq.image_folder(path, model),
        lambda: maskaq.from_pretrained(path),
        lambda: maskaq.save_pretrained(pair(small_recipe())[1], path, architecture={"name": VIT, "args": VIT_ARGS}),
        lambda: maskaq.open_run(path),
        lambda: maskaq.write_report(path),
    ):
        with pytest.raises(MaskaqError):
            call()
    assert not list(tmp_path.iterdir())


def test_numbers_and_paths_of_other_libraries_are_taken(tmp_path, straight):
    source = {"name": VIT, "args": VIT_ARGS, "checkpoint": tmp_path / "weights.safetensors"}
    quantize(tiny_vit(), small_recipe(*WARM), tmp_path / "run", seed=numpy.int64(0), source=source)
    assert_same_run(tmp_path / "run", straight(WARM))
    assert results.open_run(tmp_path / "run").source["checkpoint"] == str(source["checkpoint"])


# ---- compare


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(tiny_vit().state_dict(), path)
    return path


def from_file(path: Path):
    model = load_model(VIT, path, VIT_ARGS)
    architecture = architecture_of(model, VIT, VIT_ARGS)
    return model, {"name": VIT, "args": VIT_ARGS, "checkpoint": str(path), "architecture": architecture}


@pytest.fixture
def opened(tmp_path, checkpoint) -> results.OpenedRun:
    model, source = from_file(checkpoint)
    quantize(model, small_recipe(), tmp_path / "run", source=source)
    return results.open_run(tmp_path / "run")


def batches(_model):
    generator = torch.Generator().manual_seed(3)
    images = [torch.randn(16, 3, 32, 32, generator=generator, dtype=torch.float32) for _ in range(2)]
    return [(part, torch.arange(16) % 4) for part in images]


ROWS = ["full precision", "round to nearest", "searched ranges", "maskaq"]


def test_compare_gives_four_rows_of_all_images(opened):
    table = results.compare(opened, batches, device="cpu")
    assert list(table) == ROWS
    assert all(isinstance(row, EvalResult) and row.n == 32 for row in table.values())


def test_the_models_of_a_run_are_the_ones_it_was_made_of(opened, checkpoint):
    images = batches(None)[0][0]
    with torch.no_grad():
        assert torch.allclose(opened.teacher()(images), tiny_vit()(images), atol=1e-5)
    rtn, ptq, ours = opened.rtn(), opened.ptq(), opened.calibrated()
    assert_same(packed(ours), tensors(opened.folder / WEIGHTS))
    weight = "blocks.0.mlp.fc1.weight"
    teacher = opened.teacher().state_dict()[weight]
    assert torch.equal(rtn.state_dict()[weight], teacher) and torch.equal(ptq.state_dict()[weight], teacher)
    assert not torch.equal(packed(ours)[f"{weight}.codes"], packed(rtn)[f"{weight}.codes"])
    scales = "blocks.0.mlp.fc1.input_quantizer.scale"
    assert rtn.state_dict()[scales] > ptq.state_dict()[scales]  # min-max covers all, the search cuts outliers


def test_the_images_of_a_run_are_those_of_its_latest_round(opened):
    images, folder = opened.images(), RunFolder.read(opened.folder)
    assert len(images) == 8
    assert torch.equal(images.images[:4], folder.load_shard(1, 0).tensors["images"])
    shutil.rmtree(opened.folder / "images")
    with pytest.raises(RunFolderError, match=r"shard_0000\.safetensors is missing"):
        opened.images()


def test_without_the_teachers_file_the_rows_that_need_it_say_so_and_ours_is_still_there(opened, checkpoint):
    checkpoint.unlink()
    table = results.compare(opened, batches, device="cpu")
    assert list(table) == ROWS and isinstance(table["maskaq"], EvalResult)
    for name in ROWS[:3]:
        assert isinstance(table[name], str) and str(checkpoint) in table[name]


def test_a_teachers_file_with_other_weights_is_noticed(opened, checkpoint):
    safetensors.torch.save_file(tiny_vit(seed=5).state_dict(), checkpoint)
    with pytest.raises(CheckpointError, match="has other weights now"):
        opened.teacher()
    table = results.compare(opened, batches, device="cpu")
    for name in ROWS[:3]:
        assert f"{checkpoint} has other weights now than when {opened.folder} was made" in table[name]
    assert isinstance(table["maskaq"], EvalResult)


def test_a_run_that_is_not_finished_has_no_calibrated_model_and_says_how_to_get_it(tmp_path, checkpoint):
    model, source = from_file(checkpoint)
    quantize(model, small_recipe(), tmp_path / "my run", source=source, only_images=True)
    with pytest.raises(RunFolderError, match="is not finished.*maskaq calibrate") as raised:
        results.open_run(tmp_path / "my run").calibrated()
    assert str(raised.value).endswith(shlex.quote(str(tmp_path / "my run")))


def test_a_run_of_a_model_without_a_name_cannot_be_opened_and_says_why(straight):
    with pytest.raises(RunFolderError, match="was made from a model in memory.*like=model"):
        results.open_run(straight(WARM))


def test_a_source_of_name_and_arguments_is_enough_to_evaluate(tmp_path, checkpoint):
    model, source = from_file(checkpoint)
    quantize(model, small_recipe(), tmp_path / "run", source={"name": source["name"], "args": source["args"]})
    results.open_run(tmp_path / "run").calibrated()


def test_a_run_json_without_its_recipe_is_damaged(opened):
    record = json.loads((opened.folder / "run.json").read_text())
    del record["identity"]["recipe"]
    (opened.folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunFolderError, match="run.json is damaged"):
        results.open_run(opened.folder)


@pytest.mark.slow
def test_the_model_file_of_another_run_is_refused_before_anything_is_evaluated(opened):
    recipe, other = small_recipe(), opened.folder.with_name("other")
    quantize(tiny_swin(), recipe, other, source={"name": SWIN, "args": SWIN_ARGS})
    shutil.rmtree(opened.folder / QUANTIZED)
    shutil.copytree(other / QUANTIZED, opened.folder / QUANTIZED)
    with pytest.raises(RunFolderError, match="is of another model or recipe than the run"):
        results.compare(opened, lambda model: pytest.fail("evaluated"), device="cpu")


def test_bits_win_over_those_of_a_recipe_and_a_recipe_may_be_a_file(tmp_path):
    (tmp_path / "recipe.toml").write_text(to_toml(small_recipe()))
    for number, recipe in enumerate((small_recipe(), tmp_path / "recipe.toml")):
        result = quantize(tiny_vit(), recipe, tmp_path / str(number), bits="W5a6")
        assert RunFolder.read(result.folder).identity["recipe"]["quantization"]["bits"] == "w5a6"


def test_a_student_that_diverges_in_its_last_step_is_not_saved(tmp_path, monkeypatch):
    def diverge(calibrator, data, epoch):
        next(calibrator.student.parameters()).data.fill_(torch.inf)
        return {"loss": 1.0}

    monkeypatch.setattr(Calibrator, "epoch", diverge)
    with pytest.raises(CalibrationError, match=r"became NaN or Inf by epoch \d.*calibration\.lr"):
        quantize(tiny_vit(), small_recipe(), tmp_path / "run")
    assert not (tmp_path / "run" / QUANTIZED).exists()


@pytest.mark.parametrize(("round", "blamed"), [(0, "synthesis.lr"), (1, "calibration.lr")])
def test_lost_images_blame_calibration_once_the_student_was_calibrated(tmp_path, monkeypatch, round, blamed):
    def make(_synthesizer, indices, number=0, _start=None):
        kept = indices[:0] if number == round else indices
        return SyntheticSet(torch.zeros(len(kept), 3, 32, 32, dtype=torch.uint8), kept % 4, kept)

    monkeypatch.setattr(Synthesizer, "__call__", make)
    with pytest.raises(SynthesisError, match="8 of 8 images were lost") as raised:
        quantize(tiny_vit(), small_recipe(), tmp_path / "run")
    assert [name for name in ("synthesis.lr", "calibration.lr") if f"lower {name}" in str(raised.value)] == [blamed]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rotate", ["[]", '["residual"]'])
def test_weights_with_nan_or_inf_are_named_and_refused(tmp_path, rotate, value):
    model = tiny_vit()
    model.blocks[1].mlp.fc1.weight.data[0, 0] = value
    with pytest.raises(ModelError, match=r"blocks.1.mlp.fc1.weight contains NaN or Inf"):
        quantize(model, small_recipe(f"quantization.rotate={rotate}"), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_torchscript_module_is_refused(tmp_path):
    traced = torch.jit.trace(tiny_vit().eval(), torch.zeros(1, 3, 32, 32))
    with pytest.raises(ModelError, match="TorchScript"):
        quantize(traced, small_recipe(), tmp_path / "run", device="cpu")
