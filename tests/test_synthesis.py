"""What synthesis promises: sound images, each made as if it were alone, and no harm from NaN or a full memory."""

import math
from functools import partial

import pytest
import torch
from helpers import DENSE_TERMS, Ears, hook, pair, small_recipe, tiny_swin, tiny_vit
from timm.data import IMAGENET_DEFAULT_STD

from maskaq.errors import RecipeError, SynthesisError
from maskaq.images import synthesis
from maskaq.images.sets import SyntheticSet, to_pixels
from maskaq.images.stored import state_digest
from maskaq.images.synthesis import Synthesizer, synthesize
from maskaq.losses import terms
from maskaq.losses.terms import SYNTHESIS_TERMS, SynthesisView, TermSpec, synthesis_term
from maskaq.runs.quantize import quantize
from maskaq.storage.runfolder import RunFolder

NO_JITTER = ("synthesis.roll=0", "synthesis.noise=0", "synthesis.colour=0")
DEFAULT_TERMS = list(small_recipe().synthesis.terms)


def maker(*overrides: str, build=tiny_vit, **kwargs) -> Synthesizer:
    recipe = small_recipe(*overrides)
    return Synthesizer(*pair(recipe, build), recipe, **kwargs)


def numbers(n: int) -> torch.Tensor:
    return torch.arange(n)


def greys_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


# ---- images


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_images_are_8_bit_pixels_numbered_in_order_with_every_class_as_often(build):
    recipe = small_recipe("synthesis.images=10")
    made = synthesize(*pair(recipe, build), recipe)
    assert made.images.shape == (10, 3, 32, 32) and made.images.dtype == torch.uint8
    assert made.images.min() == 0 and made.images.max() == 255  # noise of two sigma is cut at black and white
    assert made.indices.tolist() == list(range(10))
    assert made.labels.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1] and made.labels.dtype == torch.int64


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_an_image_is_the_same_whatever_batch_it_is_made_in(build):
    """Up to one grey level: a product of another size adds its numbers up in another order, and the last bits of a
    pixel can lie on either side of the middle between two greys. Nothing else of the batch is felt."""
    made = {
        batch: synthesize(*pair(recipe, build), recipe).images
        for batch in (1, 3, 8)
        for recipe in [small_recipe(f"synthesis.batch={batch}")]
    }
    assert greys_apart(made[1], made[3]) <= 1 and greys_apart(made[1], made[8]) <= 1


def test_an_image_is_the_same_whatever_others_are_in_its_batch():
    make = maker()
    together, apart = make(torch.tensor([5, 2, 7])), make(torch.tensor([7, 0, 1]))
    assert greys_apart(together.images[2], apart.images[0]) <= 1
    assert together.labels.tolist() == [1, 2, 3] and apart.labels.tolist() == [3, 0, 1]


def test_seed_round_and_number_each_give_another_image():
    def image(seed=0, round=0, number=3):
        return maker("refresh.start=cold", "refresh.steps=3", seed=seed)(torch.tensor([number]), round).images

    base = image()
    assert torch.equal(image(), base)
    for other in (image(seed=1), image(round=1), image(number=7)):
        assert (other != base).float().mean() > 0.5


def test_the_objective_falls_and_the_teacher_sees_the_class():
    make = maker("synthesis.steps=40", "synthesis.terms.class_prior=10", *NO_JITTER)
    made = make(numbers(4))
    first, last = make.curves[0], make.curves[-1]
    assert (first["step"], last["step"]) == (0, 39) and len(make.curves) == 20
    weights = make.config.terms
    assert sum(w * last[name] for name, w in weights.items()) < sum(w * first[name] for name, w in weights.items())
    assert last["class_prior"] < first["class_prior"] / 2
    seen = make.teacher(make.geometry.normalise(to_pixels(made.images))).argmax(dim=1)
    assert torch.equal(seen, made.labels)


@pytest.mark.parametrize("steps", [1, 2, 19, 21])
def test_any_number_of_steps_is_done_and_the_first_and_last_are_logged(steps):
    make = maker(f"synthesis.steps={steps}")
    make(numbers(1))
    assert (make.curves[0]["step"], make.curves[-1]["step"]) == (0, steps - 1)


def test_in_pixels_images_change_as_fast_whatever_std_the_model_has():
    """Adam's first step moves every value by the learning rate: 0.1 of ImageNet's std is 5.8 greys."""

    def made(steps, unit, std):
        build = partial(tiny_vit, pretrained_cfg_overlay={"mean": (0.5,) * 3, "std": std})
        recipe = small_recipe("synthesis.start=dead_leaves", f"synthesis.steps={steps}", f"synthesis.lr_unit={unit}")
        return Synthesizer(*pair(recipe, build), recipe)(numbers(2)).images

    def greys(unit, std):
        before, after = (made(steps, unit, std).int() for steps in (0, 1))
        is_free = (before > 30) & (before < 225)  # from black and white there is one way only
        return (after - before).abs()[is_free].float().mean().item()

    assert torch.equal(made(2, "pixels", IMAGENET_DEFAULT_STD), made(2, "input", IMAGENET_DEFAULT_STD))
    assert greys("input", (0.5,) * 3) == pytest.approx(0.1 * 0.5 * 255, rel=0.05)
    for std in (IMAGENET_DEFAULT_STD, (0.5,) * 3, (1.0,) * 3):
        assert greys("pixels", std) == pytest.approx(0.1 * 0.226 * 255, rel=0.05)


def test_jitter_does_not_change_where_an_image_lies():
    """With no step to take, an image is its start: what is optimised is the image, not a jittered view of it."""
    start = maker()(numbers(2))
    still = maker("refresh.lr=1e-12", "refresh.steps=1")(numbers(2), 1, start)
    assert torch.equal(still.images, start.images)


# ---- terms


@pytest.mark.parametrize("name", DEFAULT_TERMS)
def test_any_term_can_be_switched_off(name):
    make = maker(f"synthesis.terms.{name}=0")
    assert len(make(numbers(2))) == 2
    assert set(make.curves[0]) == {"step", *DEFAULT_TERMS} - {name}


@pytest.mark.parametrize("name", [name for name in SYNTHESIS_TERMS if name not in DENSE_TERMS])
@pytest.mark.parametrize("build", [tiny_vit, pytest.param(tiny_swin, marks=pytest.mark.slow)])
def test_any_term_can_be_alone(name, build):
    others = [f"synthesis.terms.{other}=0" for other in DEFAULT_TERMS if other != name]
    make = maker(*others, f"synthesis.terms.{name}=1", build=build)
    assert len(make(numbers(2))) == 2
    assert all(math.isfinite(point[name]) for point in make.curves)


@pytest.mark.parametrize("name", ["pixel_prior", "object_prior"])
def test_a_term_of_another_task_is_refused_with_what_it_reads(name):
    with pytest.raises(RecipeError, match="set its weight to 0"):
        maker(f"synthesis.terms.{name}=1")(numbers(2))


@pytest.mark.parametrize(("weight", "calls"), [(0.1, 3), (0, 0)])
def test_the_student_runs_only_where_a_term_needs_it(weight, calls):
    make = maker(f"synthesis.terms.attention_alignment={weight}")
    ran = []
    make.student.register_forward_pre_hook(lambda *_: ran.append(1))
    make(numbers(4))
    assert len(ran) == calls


@pytest.mark.parametrize("map", ["scores", "probs"])
def test_alignment_of_swin_is_not_zero_and_moves_the_images(map):
    alone = [f"synthesis.terms.{name}=0" for name in DEFAULT_TERMS]
    alone += ["synthesis.terms.attention_alignment=1", f"synthesis.map={map}", "synthesis.steps=20"]
    make = maker(*alone, *NO_JITTER, "synthesis.mask.end=0.5", "synthesis.mask.drop=0", build=tiny_swin)
    made = make(numbers(2))
    assert make.curves[0]["attention_alignment"] > 0
    assert make.curves[-1]["attention_alignment"] < make.curves[0]["attention_alignment"]
    assert not torch.equal(made.images, maker(*alone, "synthesis.steps=1", build=tiny_swin)(numbers(2)).images)


def test_a_term_of_ones_own_takes_part_by_its_name(monkeypatch):
    monkeypatch.setattr(terms, "SYNTHESIS_TERMS", dict(SYNTHESIS_TERMS))
    monkeypatch.setattr(synthesis, "SYNTHESIS_TERMS", terms.SYNTHESIS_TERMS)

    @synthesis_term
    def darkness(v: SynthesisView) -> torch.Tensor:
        """Dark images."""
        return v.images.mean(dim=(1, 2, 3))

    plain, dark = maker("synthesis.steps=10"), maker("synthesis.steps=10", "synthesis.terms.darkness=1000")
    assert dark(numbers(2)).images.float().mean() < plain(numbers(2)).images.float().mean() - 20
    assert dark.curves[-1]["darkness"] < dark.curves[0]["darkness"]


# ---- teacher and student are only looked at


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_no_gradient_reaches_a_parameter_of_teacher_or_student(build, monkeypatch):
    make = maker(build=build)
    trains = []
    make.student.register_forward_pre_hook(
        lambda *_: trains.append(any(p.requires_grad for m in (make.teacher, make.student) for p in m.parameters()))
    )
    before = [state_digest(model.state_dict()) for model in (make.teacher, make.student)]
    make(numbers(4))
    assert trains == [False] * 3
    assert [state_digest(model.state_dict()) for model in (make.teacher, make.student)] == before
    assert all(p.grad is None for model in (make.teacher, make.student) for p in model.parameters())
    assert all(p.requires_grad for p in make.student.parameters())  # again, for the calibration to come
    assert not [m for model in (make.teacher, make.student) for m in model.modules() if m._forward_hooks]


# ---- NaN


def poison(monkeypatch, bad, attempts=(0,)):
    """The class prior of the images whose label is in `bad` becomes NaN, gradient and all, in these attempts."""
    real_make, real_term = Synthesizer._make, terms.SYNTHESIS_TERMS["class_prior"].function
    now = []

    def make(self, indices, round, start, attempt):
        now[:] = [attempt]
        return real_make(self, indices, round, start, attempt)

    def term(v):
        ill = torch.isin(v.labels, torch.tensor(bad)) & (now[0] in attempts)
        return real_term(v) * torch.where(ill, math.nan, 1.0)

    term.__module__ = real_term.__module__  # one of ours, not the user's
    monkeypatch.setattr(Synthesizer, "_make", make)
    monkeypatch.setitem(terms.SYNTHESIS_TERMS, "class_prior", TermSpec("class_prior", term, ()))


def test_an_image_that_becomes_nan_is_made_again_from_another_seed_and_that_is_told(monkeypatch):
    sound = maker()(numbers(4))
    poison(monkeypatch, bad=[2])
    ears = Ears()
    made = maker(progress=ears)(numbers(4))
    assert made.indices.tolist() == [0, 1, 2, 3] and made.labels.tolist() == [0, 1, 2, 3]
    assert (made.images[2] != sound.images[2]).float().mean() > 0.5
    assert len(ears.notes) == 1
    assert "images [2] of round 0 became NaN or Inf" in ears.notes[0] and "another seed" in ears.notes[0]


def test_images_beside_one_that_becomes_nan_do_not_feel_it(monkeypatch):
    sound = maker()(numbers(4))
    poison(monkeypatch, bad=[2])
    made = maker()(numbers(4))
    rest = torch.tensor([0, 1, 3])
    assert greys_apart(made.images[rest], sound.images[rest]) == 0


def test_an_image_lost_twice_is_named_by_its_number_and_left_out(monkeypatch):
    poison(monkeypatch, bad=[1], attempts=(0, 1))
    ears = Ears()
    made = maker(progress=ears)(numbers(8)[4:])
    assert made.indices.tolist() == [4, 6, 7] and made.labels.tolist() == [0, 2, 3] and len(made.images) == 3
    assert ears.notes[-1] == "images [5] of round 0 are lost: NaN or Inf twice"


@pytest.mark.parametrize("batch", [1, 4])
def test_a_run_goes_on_without_the_images_it_may_lose_and_writes_down_which(tmp_path, monkeypatch, batch):
    poison(monkeypatch, bad=[3], attempts=(0, 1))
    recipe = small_recipe("synthesis.max_lost=0.25", f"synthesis.batch={batch}")
    result = quantize(tiny_vit(), recipe, tmp_path / "run", device="cpu")
    assert result.images.indices.tolist() == [0, 1, 2, 4, 5, 6]
    run = RunFolder.read(tmp_path / "run")
    assert sorted(n for shard in run.shards(0) for n in run.load_shard(0, shard).lost) == [3, 7]
    assert sorted(n for e in run.events() if e["stage"] == "synthesize" and not e["round"] for n in e["lost"]) == [3, 7]


@pytest.mark.parametrize("bad", [[3], [0, 1, 2, 3]], ids=["too many", "all"])
def test_a_run_that_lost_more_than_it_may_ends_and_says_what_to_do(tmp_path, monkeypatch, bad):
    poison(monkeypatch, bad=bad, attempts=(0, 1))
    share = "0.1" if bad == [3] else "1.0"
    lost = rf"{2 * len(bad)} of 8 images were lost .*synthesis.max_lost {share} .*lower synthesis.lr \(now 0.1\)"
    with pytest.raises(SynthesisError, match=lost):
        quantize(tiny_vit(), small_recipe(f"synthesis.max_lost={share}"), tmp_path / "run", device="cpu")


@pytest.fixture
def own_terms(monkeypatch):
    monkeypatch.setattr(terms, "SYNTHESIS_TERMS", dict(SYNTHESIS_TERMS))
    monkeypatch.setattr(synthesis, "SYNTHESIS_TERMS", terms.SYNTHESIS_TERMS)


def brightness(v: SynthesisView) -> torch.Tensor:
    return v.images.mean(dim=(1, 2, 3))


ILL = {
    "NaN": lambda v: brightness(v) * math.nan,
    "Inf": lambda v: brightness(v) * math.inf,
    "NaN after a step": lambda v: 1e4 * (0.09 - brightness(v)).sqrt(),
    "a gradient of NaN": lambda v: (v.images.mean(dim=(1, 2, 3)) * 0).sqrt(),
}


@pytest.mark.parametrize("function", ILL.values(), ids=ILL.keys())
def test_images_lost_to_a_term_of_ones_own_are_blamed_on_it_by_name(tmp_path, own_terms, function):
    def sparkle(v: SynthesisView) -> torch.Tensor:
        return function(v)

    synthesis_term(sparkle)
    with pytest.raises(SynthesisError, match=r"8 of 8 images were lost .*synthesis\.terms\.sparkle") as raised:
        quantize(tiny_vit(), small_recipe("synthesis.terms.sparkle=1"), tmp_path / "run", device="cpu")
    assert "weights" not in str(raised.value) and "synthesis.lr" not in str(raised.value)


def test_images_lost_to_the_model_are_not_blamed_on_a_term_of_ones_own(tmp_path, own_terms, monkeypatch):
    synthesis_term(brightness)
    poison(monkeypatch, bad=[0, 1, 2, 3], attempts=(0, 1))
    with pytest.raises(SynthesisError, match="check the model's weights") as raised:
        quantize(tiny_vit(), small_recipe("synthesis.terms.brightness=1"), tmp_path / "run", device="cpu")
    assert "brightness" not in str(raised.value)


WRONG = {
    "a number": lambda v: 1.0,
    "nothing": lambda v: None,
    "one for all": lambda v: v.images.mean(),
    "a column": lambda v: v.images.mean(dim=(1, 2, 3))[:, None],
    "one too few": lambda v: v.images.mean(dim=(1, 2, 3))[1:],
    "whole numbers": lambda v: v.labels,
    "another device": lambda v: v.images.mean(dim=(1, 2, 3)).to("meta"),
}


@pytest.mark.parametrize("function", WRONG.values(), ids=WRONG.keys())
def test_a_term_that_does_not_give_one_number_per_image_is_named(own_terms, function):
    def sparkle(v: SynthesisView) -> torch.Tensor:
        return function(v)

    synthesis_term(sparkle)
    with pytest.raises(RecipeError, match=r"synthesis\.terms\.sparkle: expected .*\(4,\)"):
        maker("synthesis.terms.sparkle=1")(numbers(4))


def test_terms_that_do_not_depend_on_the_images_are_named(own_terms):
    @synthesis_term
    def constant(v: SynthesisView) -> torch.Tensor:
        return torch.ones(len(v.labels))

    alone = [f"synthesis.terms.{name}=0" for name in DEFAULT_TERMS]
    with pytest.raises(RecipeError, match=r"synthesis\.terms: .*constant"):
        maker(*alone, "synthesis.terms.constant=1")(numbers(4))
    assert len(maker("synthesis.terms.constant=1")(numbers(4))) == 4  # beside others it does no harm


def test_a_warm_start_keeps_what_there_is_and_gives_images_lost_before_a_start_from_noise():
    make = maker("refresh.lr=1e-12", "refresh.steps=1")
    start = make(numbers(4))[torch.tensor([0, 1, 3])]
    warm, cold = make(numbers(4), 1, start), make(numbers(4), 1, None)
    assert warm.indices.tolist() == [0, 1, 2, 3]
    assert torch.equal(warm.images[torch.tensor([0, 1, 3])], start.images)
    assert torch.equal(warm.images[2], cold.images[2])
    assert not torch.equal(warm.images[0], cold.images[0])


def test_a_warm_start_that_becomes_nan_is_tried_again_from_noise(monkeypatch):
    make = maker("refresh.lr=1e-12", "refresh.steps=1")
    start = make(numbers(4))
    poison(monkeypatch, bad=[2])
    warm = maker("refresh.lr=1e-12", "refresh.steps=1")(numbers(4), 1, start)
    assert len(warm) == 4 and not torch.equal(warm.images[2], start.images[2])
    assert isinstance(warm, SyntheticSet)


# ---- memory


def small_memory(model, most: int) -> None:
    def refuse(_module, inputs):
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.register_forward_pre_hook(refuse)


def test_a_batch_that_does_not_fit_is_halved_and_that_is_told_and_the_images_are_the_same():
    ears = Ears()
    make = maker("synthesis.batch=8", progress=ears)
    small_memory(make.teacher, most=2)
    made = make(numbers(8))
    assert ears.notes == [f"out of GPU memory: synthesis goes on with batches of {n}" for n in (4, 2)]
    make(numbers(8))
    assert len(ears.notes) == 2  # once learned, it is not tried again
    assert greys_apart(made.images, maker("synthesis.batch=8")(numbers(8)).images) <= 1
    two_at_a_time = maker("synthesis.batch=2")
    assert torch.equal(made.images, torch.cat([two_at_a_time(part).images for part in numbers(8).split(2)]))


def test_where_not_even_one_image_fits_the_memory_error_comes_through():
    make = maker()
    small_memory(make.teacher, most=0)
    with pytest.raises(torch.OutOfMemoryError):
        make(numbers(4))
    assert all(p.requires_grad for p in make.student.parameters())


def test_an_interrupt_leaves_teacher_and_student_as_they_were(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    make = maker()
    hook(monkeypatch.setattr, "maskaq.images.synthesis:Synthesizer._view", 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(numbers(4))
    assert all(p.requires_grad for p in make.student.parameters())
    assert not [m for model in (make.teacher, make.student) for m in model.modules() if m._forward_hooks]
