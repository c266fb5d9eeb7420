"""What calibration promises: the student comes nearer to the teacher, an epoch depends on its number alone, memory
changes nothing, and a loss that is no number ends the run with advice."""

import copy
import math

import pytest
import torch
from helpers import DENSE_TERMS, Ears, assert_same, hook, pair, small_recipe, tiny_swin, tiny_vit
from torch import nn

from maskaq.calibrate import calibrator as calibration
from maskaq.calibrate.calibrator import Calibrator
from maskaq.engine import Engine
from maskaq.errors import CalibrationError, MaskaqError, RecipeError
from maskaq.images.sets import SyntheticSet
from maskaq.images.stored import state_digest
from maskaq.losses import terms
from maskaq.losses.terms import CALIBRATION_TERMS, CalibrationView, TermSpec, calibration_term
from maskaq.quant.quantizers import LSQ
from maskaq.quant.twin import quantizers
from maskaq.runs.quantize import quantize
from maskaq.schedules import cosine
from maskaq.storage.runfolder import RunFolder

PLAIN = [f"calibration.augment.{k}=0" for k in ("flip", "jitter_prob", "grey", "blur")]
PLAIN.append("calibration.augment.crop=[1.0, 1.0]")
SGD = "calibration.optimizer=sgd"
ADAMW = ("calibration.optimizer=adamw", "calibration.lr=0.01")
SCHEME = ("quantization.weight=lsq", "quantization.bits=w3a3")  # every kind of learned range, and much to win


def calibrator(*overrides: str, build=tiny_vit, **kwargs) -> Calibrator:
    recipe = small_recipe(*overrides)
    return Calibrator(*pair(recipe, build), recipe, **kwargs)


def pictures(n: int = 8) -> SyntheticSet:
    """Smooth random images."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(n, 3, 4, 4, generator=generator)
    images = (nn.functional.interpolate(coarse, size=32, mode="bilinear") * 255).to(torch.uint8)
    return SyntheticSet(images, torch.arange(n) % 4, torch.arange(n))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def inputs_of(model: nn.Module) -> list[torch.Tensor]:
    """A list that will hold every batch the model gets to see."""
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    return seen


# ---- it learns


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.002), ("adamw", 0.003)])
def test_the_loss_falls(build, optimizer, lr):
    settings = (f"calibration.optimizer={optimizer}", f"calibration.lr={lr}", "calibration.epochs=10")
    cal = calibrator(*settings, *SCHEME, *PLAIN, build=build)
    losses = [cal.epoch(pictures(), epoch)["loss"] for epoch in range(10)]
    assert losses[-1] < 0.8 * losses[0]


def test_an_epoch_tells_the_mean_of_every_term_and_the_loss_is_their_weighted_sum():
    cal = calibrator("calibration.lr=0", "calibration.batch=3")  # 3, 3 and 2 images
    told = cal.epoch(pictures(), 0)
    weights = cal.config.terms
    assert set(told) == {*weights, "loss", "lr"}
    assert told["loss"] == pytest.approx(sum(weight * told[name] for name, weight in weights.items()), rel=1e-5)
    one_batch = calibrator("calibration.lr=0", "calibration.batch=8").epoch(pictures(), 0)
    assert told["loss"] == pytest.approx(one_batch["loss"], rel=1e-4)


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
@pytest.mark.parametrize("name", [name for name in CALIBRATION_TERMS if name not in DENSE_TERMS])
def test_any_term_can_be_alone(name, build):
    others = [f"calibration.terms.{other}=0" for other in small_recipe().calibration.terms if other != name]
    cal = calibrator(*others, f"calibration.terms.{name}=1", build=build)
    told = cal.epoch(pictures(4), 0)
    assert set(told) == {name, "loss", "lr"} and abs(told["loss"]) > 0


@pytest.mark.parametrize("name", ["pixel_kl", "detection_gap", "pyramid_error"])
def test_a_term_of_another_task_is_refused_with_what_it_reads(name):
    with pytest.raises(RecipeError, match="set its weight to 0"):
        calibrator(f"calibration.terms.{name}=1").epoch(pictures(4), 0)


def test_a_term_of_ones_own_takes_part_by_its_name(monkeypatch):
    monkeypatch.setattr(terms, "CALIBRATION_TERMS", dict(CALIBRATION_TERMS))
    monkeypatch.setattr(calibration, "CALIBRATION_TERMS", terms.CALIBRATION_TERMS)

    @calibration_term
    def logit_mse(v: CalibrationView) -> torch.Tensor:
        """Squared error of the logits."""
        return (v.logits - v.student_logits).square().mean(dim=1)

    assert calibrator("calibration.terms.logit_mse=1").epoch(pictures(4), 0)["logit_mse"] > 0


def test_the_student_learns_and_the_teacher_does_not():
    cal = calibrator(*SCHEME, *ADAMW)
    before, student = state_digest(cal.teacher.state_dict()), state(cal.student)
    cal.epoch(pictures(), 0)
    assert state_digest(cal.teacher.state_dict()) == before
    assert all(p.grad is None and not p.requires_grad for p in cal.teacher.parameters())
    after = state(cal.student)
    assert [name for name, _ in cal.student.named_parameters() if torch.equal(after[name], student[name])] == []
    assert not [m for model in (cal.teacher, cal.student) for m in model.modules() if m._forward_hooks]


def test_learned_ranges_are_trained_and_only_with_a_rate_of_their_own():
    def moved(range_lr):
        cal = calibrator(*SCHEME, *ADAMW, f"calibration.range_lr={range_lr}")
        learned = {name: q for name, q in quantizers(cal.student).items() if isinstance(q, LSQ)}
        before = {f"{n}.{k}": p.detach().clone() for n, q in learned.items() for k, p in q.named_parameters()}
        cal.epoch(pictures(), 0)
        after = {f"{n}.{k}": p.detach() for n, q in learned.items() for k, p in q.named_parameters()}
        return [name for name in before if not torch.equal(before[name], after[name])], before

    names, all_ranges = moved(1.0)
    assert set(names) == set(all_ranges) and any("zero_point" in n for n in names) and any("scale" in n for n in names)
    assert moved(0.0)[0] == []


# ---- an epoch is its number


def test_order_and_augmentation_depend_on_the_epochs_number_alone():
    straight, resumed = calibrator(seed=5), calibrator(seed=5)
    seen, seen_later = inputs_of(straight.teacher), inputs_of(resumed.teacher)
    for epoch in range(3):
        straight.epoch(pictures(), epoch)
    resumed.epoch(pictures(), 2)
    assert len(seen) == 6 and len(seen_later) == 2
    assert all(torch.equal(a, b) for a, b in zip(seen[4:], seen_later, strict=True))
    assert not any(torch.equal(a, b) for a in seen[:4] for b in seen_later)


def test_teacher_and_student_see_the_same_views_and_every_image_once_an_epoch():
    cal = calibrator(*PLAIN)
    seen, seen_by_student = inputs_of(cal.teacher), inputs_of(cal.student)
    cal.epoch(pictures(), 0)
    assert all(torch.equal(a, b) for a, b in zip(seen, seen_by_student, strict=True))
    data, views = pictures(), torch.cat(seen)
    rows = [
        int((cal.geometry.pixels(v[None]) * 255 - data.images.float()).abs().mean((1, 2, 3)).argmin()) for v in views
    ]
    assert sorted(rows) == list(range(8)) and rows != list(range(8))


def test_an_engine_that_seldom_looks_waits_for_the_device_once_an_epoch():
    class Seldom(Engine):
        seconds_between_looks = 1e9

    ears = Ears()
    fit = calibrator("calibration.batch=2", progress=ears, engine=Seldom())
    fit.epoch(pictures(8), 0)
    ears.advances.clear()
    means = fit.epoch(pictures(8), 1)
    assert ears.advances == [(2, {}), (2, {}), (2, {}), (2, {"loss": pytest.approx(means["loss"])})]


def test_another_seed_gives_another_order_and_other_views():
    a, b = calibrator(seed=0), calibrator(seed=1)
    seen, seen_other = inputs_of(a.teacher), inputs_of(b.teacher)
    a.epoch(pictures(), 0)
    b.epoch(pictures(), 0)
    assert not any(torch.equal(x, y) for x, y in zip(seen, seen_other, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_calibrator_with_the_state_of_another_goes_on_as_that_one_would(optimizer):
    name = f"calibration.optimizer={optimizer}"
    first = calibrator(*SCHEME, name)
    first.epoch(pictures(), 0)
    second = calibrator(*SCHEME, name)
    second.student.load_state_dict(state(first.student))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for cal in (first, second):
        cal.epoch(pictures(), 1)
    assert_same(state(first.student), state(second.student))


# ---- memory


def small_memory(model: nn.Module, most: int) -> None:
    def refuse(_module, args):
        if len(args[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.register_forward_pre_hook(refuse)


@pytest.mark.parametrize("mixing", [(), ("calibration.augment.cutmix=1", "calibration.augment.mixup=0.4")])
@pytest.mark.parametrize("who", ["teacher", "student"])
def test_a_batch_that_does_not_fit_is_taken_in_parts_with_the_same_step(who, mixing):
    settings = (*SCHEME, SGD, "calibration.batch=8", "calibration.lr=0.01", "calibration.range_lr=100", *mixing)
    whole, ears = calibrator(*settings), Ears()
    parts = calibrator(*settings, progress=ears)
    small_memory(getattr(parts, who), most=3)
    start = state(whole.student)
    told, told_in_parts = (cal.epoch(pictures(), 0) for cal in (whole, parts))
    assert ears.notes == [f"out of GPU memory: calibration goes on in parts of {n} images" for n in (4, 2)]
    after, after_in_parts = state(whole.student), state(parts.student)
    for name, _ in whole.student.named_parameters():
        # A sum in another order may carry a value over the edge between two codes: few, so their share is small.
        assert (after[name] - after_in_parts[name]).norm() <= 0.02 * (after[name] - start[name]).norm() + 1e-7, name
    assert told_in_parts == pytest.approx(told, rel=1e-4)


def test_where_not_even_one_image_fits_the_memory_error_comes_through():
    cal = calibrator()
    small_memory(cal.student, most=0)
    with pytest.raises(torch.OutOfMemoryError):
        cal.epoch(pictures(), 0)


# ---- a loss that is no number


def poison(monkeypatch, factor) -> None:
    """The logit KL times factor()."""
    real = CALIBRATION_TERMS["logit_kl"].function

    def term(v: CalibrationView) -> torch.Tensor:
        return real(v) * factor()

    term.__module__ = real.__module__  # one of ours, not the user's
    monkeypatch.setitem(CALIBRATION_TERMS, "logit_kl", TermSpec("logit_kl", term, ()))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_epoch_by_its_number_with_what_to_do(monkeypatch, value):
    poison(monkeypatch, lambda: value)
    cal = calibrator("calibration.lr=0.25")
    advice = rf"loss became {value} in epoch 3, step 0; lower calibration.lr \(now 0.25\) or set calibration.clip_grad"
    with pytest.raises(CalibrationError, match=advice) as raised:
        cal.epoch(pictures(), 3)
    assert isinstance(raised.value, MaskaqError) and "new run folder" in str(raised.value)


def test_a_run_whose_loss_becomes_no_number_keeps_the_last_sound_student_and_saves_no_model(tmp_path, monkeypatch):
    factor = [1.0]
    poison(monkeypatch, lambda: factor[0])
    hook(
        monkeypatch.setattr,
        "maskaq.calibrate.calibrator:Calibrator._step",
        4,
        lambda: factor.append(factor.pop() * math.nan),
    )
    with pytest.raises(CalibrationError, match="in epoch 1, step 1"):
        quantize(tiny_vit(), small_recipe(), tmp_path / "run", device="cpu", checkpoint_seconds=0)
    saved = RunFolder.read(tmp_path / "run").load_checkpoint()
    assert saved.epoch == 1 and all(torch.isfinite(value).all() for value in saved.tensors.values())
    assert not (tmp_path / "run" / "quantized").exists()


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["looks at every step", "looks once"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_lost_to_a_term_of_ones_own_is_blamed_on_it_by_name(monkeypatch, seconds, value):
    class Looking(Engine):
        seconds_between_looks = seconds

    monkeypatch.setattr(terms, "CALIBRATION_TERMS", dict(CALIBRATION_TERMS))
    monkeypatch.setattr(calibration, "CALIBRATION_TERMS", terms.CALIBRATION_TERMS)
    calls = []

    @calibration_term
    def sparkle(v: CalibrationView) -> torch.Tensor:
        calls.append(1)
        return v.student_logits.mean(dim=1) * (value if len(calls) == 3 else 0.0)

    cal = calibrator("calibration.terms.sparkle=1", "calibration.batch=1", engine=Looking())
    cal._looked = 0.0 if seconds == 0 else float("inf")
    with pytest.raises(CalibrationError, match=r"in epoch 0.*calibration\.terms\.sparkle") as raised:
        cal.epoch(pictures(), 0)
    assert "calibration.lr" not in str(raised.value)


def test_a_student_that_diverges_is_not_blamed_on_a_term_of_ones_own_alone(monkeypatch):
    monkeypatch.setattr(terms, "CALIBRATION_TERMS", dict(CALIBRATION_TERMS))
    monkeypatch.setattr(calibration, "CALIBRATION_TERMS", terms.CALIBRATION_TERMS)

    @calibration_term
    def sparkle(v: CalibrationView) -> torch.Tensor:
        return v.student_logits.square().mean(dim=1)

    cal = calibrator("calibration.terms.sparkle=1")
    next(cal.student.parameters()).data.fill_(math.nan)
    with pytest.raises(CalibrationError, match=r"lower calibration\.lr"):
        cal.epoch(pictures(), 0)


@pytest.mark.parametrize(
    "value", [1.0, None, "x", torch.zeros(()), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)]
)
def test_a_term_that_does_not_give_one_number_per_image_is_named(monkeypatch, value):
    monkeypatch.setattr(terms, "CALIBRATION_TERMS", dict(CALIBRATION_TERMS))
    monkeypatch.setattr(calibration, "CALIBRATION_TERMS", terms.CALIBRATION_TERMS)

    @calibration_term
    def sparkle(v: CalibrationView) -> torch.Tensor:
        return value

    with pytest.raises(RecipeError, match=r"calibration\.terms\.sparkle: expected .*\(4,\)"):
        calibrator("calibration.terms.sparkle=1").epoch(pictures(), 0)


# ---- optimiser


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_weights_decay_and_biases_norms_and_ranges_do_not(build, optimizer):
    settings = ("calibration.weight_decay=0.3", "calibration.range_lr=5", f"calibration.optimizer={optimizer}")
    cal = calibrator(*SCHEME, *settings, "calibration.lr=0.01", build=build)
    name_of = {id(p): name for name, p in cal.student.named_parameters()}
    groups = [{name_of[id(p)] for p in group["params"]} for group in cal.optimizer.param_groups]
    assert sorted(n for names in groups for n in names) == sorted(name_of.values())  # each parameter once
    weights = {f"{n}.weight" for n, m in cal.student.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    ranges = {f"{n}.{k}" for n, q in quantizers(cal.student).items() for k, _ in q.named_parameters()}
    decays, still, learned = groups
    assert weights <= decays and not {n for n in decays if "norm" in n or n.endswith("bias")}
    assert {n for n in name_of.values() if n.endswith("bias")} <= still and learned == ranges
    assert [g["weight_decay"] for g in cal.optimizer.param_groups] == [0.3, 0.0, 0.0]
    cal.epoch(pictures(4), 0)
    assert [g["lr"] for g in cal.optimizer.param_groups] == pytest.approx([0.01, 0.01, 0.05])


def test_sgd_is_with_nesterov_momentum_and_without_momentum_plain():
    assert isinstance(calibrator("calibration.optimizer=adamw").optimizer, torch.optim.AdamW)
    sgd = calibrator(SGD).optimizer.param_groups[0]
    assert sgd["momentum"] == 0.9 and sgd["nesterov"]
    plain = calibrator(SGD, "calibration.momentum=0")
    assert not plain.optimizer.param_groups[0]["nesterov"]
    plain.epoch(pictures(4), 0)


def test_a_student_without_learned_ranges_can_be_calibrated():
    cal = calibrator("quantization.activation=static", "quantization.weight=static")
    assert len(cal.optimizer.param_groups) == 2
    cal.epoch(pictures(4), 0)


def test_the_cosine_goes_from_one_to_its_final_share():
    assert cosine(0.0, 0.01) == 1 and cosine(1.0, 0.01) == pytest.approx(0.01)
    assert cosine(0.5, 0.2) == pytest.approx(0.6)
    assert cosine(0.3, 1.0) == 1


def test_the_rate_starts_at_lr_and_falls_step_by_step_to_its_final_share(monkeypatch):
    cal = calibrator("calibration.lr=0.01", "calibration.lr_final=0.1", "calibration.epochs=20", "calibration.batch=2")
    rates = []
    monkeypatch.setattr(
        Calibrator, "_step", lambda self, *_: rates.append(float(cal.optimizer.param_groups[0]["lr"])) or {"loss": 0.0}
    )
    for epoch in range(20):
        cal.epoch(pictures(), epoch)
    assert len(rates) == 80 and rates == sorted(rates, reverse=True) and len(set(rates)) == 80
    assert rates[0] == pytest.approx(0.01) and rates[-1] == pytest.approx(0.001, rel=0.01)


PACED = "calibration.pace=error"


def outputs_of_blocks(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []
    handles = [block.register_forward_hook(lambda _, args, out: outputs.append(out)) for block in model.blocks]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return outputs


def test_a_paced_rate_is_lr_times_how_far_the_students_blocks_start_from_the_teachers():
    cal, data = calibrator(PACED, "calibration.lr=0.01", "calibration.epochs=1000"), pictures(10)
    images = cal.geometry.normalise(data.images / 255)
    both = zip(outputs_of_blocks(cal.teacher, images), outputs_of_blocks(cal.student, images), strict=True)
    errors = [(((p - q) ** 2).mean(-1) / p.var(-1, correction=0)).mean(1) for p, q in both]  # of each token
    error = math.sqrt(torch.stack(errors).mean())
    assert 0.05 < error < 1
    before = state(cal.student)
    assert cal.start_error(data) == pytest.approx(error, rel=1e-4)
    assert_same(state(cal.student), before)
    assert [cal.epoch(data, epoch)["lr"] for epoch in (0, 1)] == pytest.approx([0.01 * error] * 2, rel=1e-3)


def test_the_more_bits_the_smaller_the_paced_steps_and_none_is_longer_than_unpaced():
    paces = [calibrator(f"quantization.bits={bits}").start_error(pictures()) for bits in ("w8a8", "w4a8", "w3a3")]
    assert paces == sorted(paces) and paces[0] < 0.1 * paces[-1]
    far = calibrator(PACED, "calibration.lr=0.01", "calibration.epochs=1000", "quantization.bits=w2a2")
    with torch.no_grad():
        far.student.patch_embed.proj.weight.mul_(30)
    assert far.start_error(pictures()) > 1
    assert far.epoch(pictures(), 0)["lr"] == pytest.approx(0.01, rel=1e-3)


def test_a_resumed_calibrator_keeps_the_pace_it_began_with():
    settings = (PACED, *SCHEME, *ADAMW)
    straight, begun, resumed = (calibrator(*settings) for _ in range(3))
    for epoch in range(3):
        told = straight.epoch(pictures(), epoch)
    for epoch in range(2):
        begun.epoch(pictures(), epoch)
    resumed.student.load_state_dict(begun.student.state_dict())
    resumed.load_state_dict(begun.state_dict())
    assert resumed.epoch(pictures(), 2) == told
    assert_same(state(resumed.student), state(straight.student))


FIRST_STEP = "calibration.pace=first_step"


def test_the_pace_is_halved_until_the_first_step_lowers_the_loss_of_its_images():
    settings = (*ADAMW, "quantization.bits=w8a8", "calibration.lr=0.1", "calibration.batch=4")
    data = pictures(4)
    found = {}
    for pace in ("error", "first_step"):
        cal = calibrator(*settings, f"calibration.pace={pace}")
        start = cal.epoch(data, 0)["loss"]
        found[pace] = start, cal.optimizer.param_groups[0]["pace"], cal.epoch(data, 0)["loss"]
    (start, paced, after), (start_halved, halved, after_halved) = found.values()
    assert after > start == start_halved > after_halved
    assert paced > halved and math.log2(paced / halved).is_integer()


def test_looking_for_the_pace_changes_nothing_else():
    settings = (*ADAMW, "quantization.bits=w8a8", "calibration.lr=0.1", "calibration.clip_grad=0.1")
    searched = calibrator(*settings, FIRST_STEP)
    told = searched.epoch(pictures(), 0)
    pace = searched.optimizer.param_groups[0]["pace"]
    plain = calibrator(*settings, "calibration.pace=fixed")
    for group in plain.optimizer.param_groups:
        group["pace"] = pace
    assert pace < 0.01 and plain.epoch(pictures(), 0) == told
    assert_same(state(plain.student), state(searched.student))


def test_where_the_first_step_helps_the_pace_is_the_students_error():
    settings = (*ADAMW, *SCHEME, "calibration.lr=0.001")
    paces = []
    for pace in (PACED, FIRST_STEP):
        cal = calibrator(*settings, pace)
        cal.epoch(pictures(), 0)
        paces.append(cal.optimizer.param_groups[0]["pace"])
    assert paces[0] == paces[1]


def test_the_gradient_is_clipped_at_its_norm():
    def step(clip):
        cal = calibrator(SGD, "calibration.momentum=0", "calibration.lr=1", f"calibration.clip_grad={clip}", *SCHEME)
        before = state(cal.student)
        cal.epoch(pictures(4), 0)
        return math.sqrt(sum((v - before[k]).square().sum() for k, v in state(cal.student).items()))

    assert step(0.01) == pytest.approx(0.01, rel=1e-3)
    assert step(0) > 0.1


# ---- mask


@pytest.mark.parametrize("name", ["head_structure", "head_cosine", "head_mse"])
def test_a_mask_of_weight_one_is_no_mask(name):
    def after(weight, ratio):
        alone = [f"calibration.terms.{n}=0" for n in small_recipe().calibration.terms]
        mask = (f"calibration.mask_weight={weight}", f"calibration.mask_ratio={ratio}")
        cal = calibrator(*alone, f"calibration.terms.{name}=1", SGD, *mask)
        cal.epoch(pictures(4), 0)
        return state(cal.student)

    assert_same(after(1.0, 0.1), after(1.0, 0.6))
    masked = after(2.0, 0.1)
    assert any(not torch.equal(value, masked[key]) for key, value in after(1.0, 0.1).items())


def test_the_patches_with_the_strongest_head_outputs_count_w_times():
    cal = calibrator("calibration.mask_weight=3", "calibration.mask_ratio=0.25")
    heads = torch.full((1, 2, 17, 8), 0.1)  # a class token and 16 patches
    strong = [2, 3, 7, 11]
    heads[:, :, 0] = 9.0  # the class token is not a patch
    heads[:, 1, [1 + n for n in strong]] = -5.0  # strength is without sign
    (weights, _) = cal._patch_weights({"heads": [heads, heads]})
    assert weights.shape == (1, 16)
    assert (weights[0] == 3).nonzero().flatten().tolist() == strong and (weights == 1).sum() == 12
