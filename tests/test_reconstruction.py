"""What block after block promises: off by default, what it says it is, and after a kill as if nothing had happened."""

import pytest
import torch
from helpers import Ears, assert_same, assert_same_run, hook, pair, small_recipe, tiny_swin, tiny_vit
from test_calibration import PLAIN, SCHEME, pictures, state

from maskaq.calibrate.calibrator import Calibrator
from maskaq.calibrate.reconstruction import Reconstructor, units
from maskaq.errors import RecipeError
from maskaq.losses.distill import relative_error
from maskaq.models import expose
from maskaq.models.taps import taps
from maskaq.recipe.schema import Recipe, recipe_from_dict, to_dict
from maskaq.runs.quantize import quantize
from maskaq.storage.runfolder import RunFolder

ADAMW = ("calibration.optimizer=adamw", "calibration.lr=0.01")
BLOCKS = ("calibration.stages=reconstruct,calibrate", "calibration.reconstruct.epochs=4")
RATES = ("calibration.reconstruct.lr=0.003", "calibration.reconstruct.range_lr=2")
WAYS = {
    "reconstruct": (*BLOCKS, *RATES),
    "reconstruct alone": (*BLOCKS, *RATES, "calibration.stages=reconstruct"),
}


def fitted(kind: type[Calibrator], *overrides: str, build=tiny_vit, **kwargs) -> Calibrator:
    recipe = small_recipe(*SCHEME, *ADAMW, *overrides)
    return kind(*pair(recipe, build), recipe, **kwargs)


# ---- the recipe


def test_stages_follow_each_other_and_their_epochs_are_numbered_through():
    recipe = small_recipe(*BLOCKS, "calibration.epochs=5", "refresh.every=2")
    assert recipe.stages == {"reconstruct": range(4), "calibrate": range(4, 9)}
    assert recipe.epochs == 9 and [recipe.stage_of(epoch) for epoch in (0, 3, 4, 8)] == [
        *("reconstruct", "reconstruct", "calibrate", "calibrate")
    ]
    assert recipe.rounds == [range(6), range(6, 8), range(8, 9)]
    assert small_recipe(*BLOCKS, "calibration.stages=reconstruct").rounds == [range(4)]


@pytest.mark.parametrize("epochs", [0, 1, 2, 7, 30, 31, 60])
@pytest.mark.parametrize("every", [0, 1, 30])
def test_rounds_without_reconstruction_are_what_they_were(epochs, every):
    found = small_recipe(f"calibration.epochs={epochs}", f"refresh.every={every}")
    old = [range(epochs)]
    if every and every < epochs:
        old = [range(first, min(first + every, epochs)) for first in range(0, epochs, every)]
    assert found.rounds == old and found.epochs == epochs


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["calibration.stages=[]"], "at least one of relu, reparametrize"),
        (["calibration.stages=blocks"], "unknown value 'blocks'"),
        (["calibration.stages=3"], "expected a list out of"),
        (["calibration.reconstruct.epochs=0"], "calibration.reconstruct.epochs"),
        (["calibration.reconstruct.lr=-1"], "calibration.reconstruct.lr"),
        (["calibration.reconstruct.steps=1"], "unknown key 'steps'"),
    ],
)
def test_impossible_values_are_refused_by_their_key(overrides, words):
    with pytest.raises(RecipeError) as told:
        small_recipe(*overrides)
    assert words in str(told.value)


def test_fewer_epochs_than_blocks_are_refused_before_anything_is_written(tmp_path):
    recipe = small_recipe(*BLOCKS, "calibration.reconstruct.epochs=1")
    with pytest.raises(RecipeError, match="expected at least 2, one for each block of the model, got 1"):
        quantize(tiny_vit(), recipe, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_recipe_of_before_has_none_of_it():
    tree = to_dict(small_recipe())
    for key in ("stages", "reconstruct"):
        del tree["calibration"][key]
    assert recipe_from_dict(tree) == small_recipe()
    assert Recipe().calibration.stages == ("calibrate",)


# ---- block after block


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_every_quantized_layer_but_the_classifier_belongs_to_one_unit(build):
    teacher = expose(build())
    found, tail = units(teacher)
    flat = [name for unit in found for name in unit]
    assert len(flat) == len(set(flat)) and found[0][0] == "patch_embed" and tail[-1].startswith("head")
    layers = [n for n, m in teacher.named_modules() if type(m) in (torch.nn.Linear, torch.nn.Conv2d)]
    assert all(any(n.startswith(f"{name}.") or n == name for name in [*flat, *tail]) for n in layers)


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_a_block_is_fitted_behind_the_quantized_ones_and_before_the_float_ones(build):
    one = fitted(Reconstructor, *BLOCKS, "calibration.batch=8", *PLAIN, *RATES, build=build)
    last = len(one.units) - 1
    seen = []
    one.teacher.register_forward_pre_hook(lambda _, images: seen.append(images[0].clone()))
    for unit in (0, 1, last):
        before, seen[:] = state(one.student), []
        told = one.epoch(pictures(), one.epochs_of(unit).start)
        after = state(one.student)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        mine = {name for name in before if any(name.startswith(f"{part}.") for part in one.units[unit])}
        assert changed and changed <= mine
        # The same by hand: a copy of the teacher with the first units of the student as it was.
        mixed, was = expose(build()), fitted(Reconstructor, *BLOCKS, build=build).student
        was.load_state_dict(before)
        for name in (name for names in one.units[: unit + 1] for name in names):
            parent, _, child = name.rpartition(".")
            setattr(mixed.get_submodule(parent), child, was.get_submodule(name))
        values = []
        for model in (one.teacher, mixed):
            with torch.no_grad(), taps(model, "blocks", "class_features") as heard:
                model(seen[-1])
                values.append((heard["class_features"][0], heard["blocks"][one.blocks[unit]]))
        errors = [relative_error(p, q).mean().item() for p, q in zip(*values, strict=True)]
        assert [told["class_feature"], told["block_error"]] == pytest.approx(errors, rel=1e-4)
        assert one.first.tolist() == pytest.approx(errors, rel=1e-4)
        assert told["loss"] == pytest.approx(3.0, rel=1e-4)  # 1 + 2: both over their first value


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_block_after_block_brings_the_student_nearer_and_leaves_no_trace(build):
    settings = ("calibration.stages=reconstruct", "calibration.reconstruct.epochs=16", *RATES, *PLAIN)
    one = fitted(Reconstructor, *settings, build=build)
    kinds = [type(m) for m in one.student.modules()]
    teacher = state(one.teacher)
    end_to_end = fitted(Calibrator, *PLAIN, build=build)
    before = end_to_end.start_error(pictures())
    for epoch in one.epochs:
        one.epoch(pictures(), epoch)
    end_to_end.student.load_state_dict(one.student.state_dict())
    assert end_to_end.start_error(pictures()) < 0.9 * before
    assert kinds == [type(m) for m in one.student.modules()]
    assert all(p.requires_grad for p in one.student.parameters())
    assert not any(p.requires_grad for p in one.teacher.parameters())
    assert_same(state(one.teacher), teacher)
    hooks = [m for model in (one.teacher, one.student) for m in model.modules() if m._forward_hooks]
    assert not hooks and not [m for m in one.student.modules() if m._forward_pre_hooks]


def test_the_epochs_are_shared_among_the_blocks_and_each_has_its_own_cosine():
    one = fitted(Reconstructor, "calibration.stages=reconstruct", "calibration.reconstruct.epochs=5", *RATES)
    assert [one.epochs_of(unit) for unit in range(2)] == [range(3), range(3, 5)]
    rates = [one.epoch(pictures(), epoch)["lr"] for epoch in range(5)]
    assert rates[0] > rates[1] > rates[2] < rates[3] > rates[4] and max(rates) <= 0.003


# ---- in a run


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.slow
def test_a_run_that_stops_after_any_epoch_goes_on_to_the_same_end(tmp_path, monkeypatch, way):
    recipe = small_recipe(*SCHEME, *ADAMW, *WAYS[way])
    quantize(tiny_vit(), recipe, tmp_path / "straight", device="cpu", report=False)

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    for _ in range(recipe.epochs):  # one epoch at a time
        with monkeypatch.context() as patch, pytest.raises(Stop):
            hook(patch.setattr, "maskaq.runs.rounds:_checkpoint", 1, stop, after=True)
            quantize(tiny_vit(), recipe, tmp_path / "halted", device="cpu", checkpoint_seconds=0, report=False)
    quantize(tiny_vit(), recipe, tmp_path / "halted", device="cpu", report=False)
    assert_same_run(tmp_path / "straight", tmp_path / "halted")


def test_events_and_progress_tell_of_both_stages(tmp_path):
    recipe, ears = small_recipe(*SCHEME, *ADAMW, *BLOCKS, *RATES), Ears()
    quantize(tiny_vit(), recipe, tmp_path, device="cpu", progress=ears, report=False)
    events = [e for e in RunFolder.read(tmp_path).events() if "epoch" in e]
    assert [(e["stage"], e["round"], e["epoch"]) for e in events] == [
        *(("reconstruct", 0, epoch) for epoch in range(4)),
        *(("calibrate", epoch // 6, epoch) for epoch in range(4, 8)),
    ]
    fits = [stage for stage in ears.stages if "calibrate" in stage[0] or "reconstruct" in stage[0]]
    assert fits == [
        ("reconstruct, round 1 of 2", 32, 0),
        ("calibrate, round 1 of 2", 16, 0),
        ("calibrate, round 2 of 2", 16, 0),
    ]
