"""Runs of detectors and segmenters: they keep the promises of all runs, with images that are made for layouts."""

import json
import signal

import pytest
import torch
from helpers import (
    DENSE,
    Ears,
    assert_same,
    assert_same_run,
    in_process,
    mostly_slow,
    packed,
    pair,
    quantize_and_die,
    small_recipe,
    tiny_vit,
)
from torch import nn

import maskaq
from maskaq.errors import DataError, MaskaqError, ModelError
from maskaq.images.scenes import scene_images
from maskaq.images.synthesis import Synthesizer
from maskaq.models import expose, geometry
from maskaq.models.folding import fold_
from maskaq.models.structure import tensors_of
from maskaq.quant.plan import build_plan
from maskaq.quant.rotation import rotate_online_, teacher_of
from maskaq.report import collect
from maskaq.report import comparison as page
from maskaq.runs.compare import Comparison, entries, rows_of
from maskaq.runs.opened import write_report
from maskaq.runs.plans import make_plan
from maskaq.runs.quantize import quantize
from maskaq.storage.runfolder import RunFolder
from maskaq.tasks import evaluate, task_of
from maskaq.tasks.drawing import colour

KINDS = pytest.mark.parametrize("kind", mostly_slow(list(DENSE), "segmentation"))
LITTLE = ("synthesis.relabel=1", "synthesis.images=4", "synthesis.batch=2")


@pytest.mark.parametrize("name", ["demo-scenes", "demo-boxes"])
def test_the_layouts_of_a_demo_follow_what_the_teacher_sees_while_images_are_made(name):
    synthesis = maskaq.load_recipe(name).synthesis
    assert 0 < synthesis.relabel < synthesis.steps


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """kind -> the folder of a run of two rounds that nothing interrupted, and its result; made once."""
    made = {}

    def make(kind):
        if kind not in made:
            out = tmp_path_factory.mktemp(kind) / "run"
            model = DENSE[kind]()
            names = [f"thing {number}" for number in range(model.num_classes)]
            if kind == "segmentation":
                names[0] = "background"
            model.pretrained_cfg["label_names"] = names
            made[kind] = out, quantize(model, small_recipe(*LITTLE), out, device="cpu", keep="last")
        return made[kind]

    return make


@KINDS
def test_a_saved_model_gives_the_outputs_of_the_student_at_any_size(straight, kind):
    out, result = straight(kind)
    loaded = maskaq.from_pretrained(out / "quantized")
    for size in ((64, 64), (50, 83)):
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            pairs = zip(tensors_of(result.model(images)), tensors_of(loaded(images)), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert {"pixel_kl" if kind == "segmentation" else "detection_gap"} <= events[-1].keys() | set().union(*events)


@KINDS
def test_a_report_shows_what_p_and_q_find_in_the_same_images_and_names_the_colours(straight, kind):
    pytest.importorskip("plotly")
    out, result = straight(kind)
    kept = collect.read(RunFolder.read(out))
    whole = task_of(result.model).drawn(result.model, geometry(result.model).normalise(kept.tensors["chosen"] / 255))
    assert torch.equal(kept.tensors["drawn_student"], whole)
    assert whole.shape == (4, 3, 256, 256)
    shown = write_report(out, device="cpu").read_text()
    for model in ("full precision (P)", "searched ranges", "maskaq (Q)"):
        assert [f'alt="{model}, image {number}"' in shown for number in range(5)] == [True] * 4 + [False]
    first = 1 if kind == "segmentation" else 0  # the background is not coloured
    assert (f"background:rgb{colour(0)}" in shown) == (first == 0)
    for number in range(first, result.model.num_classes):
        assert f"background:rgb{colour(number)}" in shown and f"thing {number}</span>" in shown


MOMENTS = {
    "in synthesis": ("maskaq.images.synthesis:Synthesizer._view", 2),
    "at a relabelling": ("maskaq.images.synthesis:Synthesizer._relabel", 3),
    "in calibration": ("maskaq.calibrate.calibrator:Calibrator._step", 3),
    "in the second round": ("maskaq.images.synthesis:Synthesizer._view", 8),
    "in the comparison": ("maskaq.calibrate.handover:compare", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
@KINDS
def test_a_killed_run_goes_on_to_the_weights_and_images_of_one_that_was_not(tmp_path, straight, kind, moment):
    out, recipe = tmp_path / "run", small_recipe(*LITTLE)
    assert in_process(quantize_and_die, out, recipe, 0.0, *moment, True, DENSE[kind]) == -signal.SIGKILL
    quantize(DENSE[kind](), recipe, out, device="cpu", keep="last")
    assert_same_run(out, straight(kind)[0])


@KINDS
def test_an_image_is_the_same_whatever_the_batch_and_its_layout_in_every_round(kind):
    recipe = small_recipe(*LITTLE)
    teacher, student = pair(recipe, DENSE[kind])
    make = Synthesizer(teacher, student, recipe)
    numbers = torch.arange(3)
    together, alone = make(numbers), [make(number) for number in numbers.split(1)]
    apart = torch.cat([found.images for found in alone]).int() - together.images.int()
    assert apart.abs().max() <= 1 and (apart != 0).float().mean() < 0.01  # products are summed in another order
    layouts = []
    make.task = type(
        "Seen", (type(make.task),), {"layouts": lambda *a: layouts.append(super_layouts(*a)) or layouts[-1]}
    )()
    super_layouts = type(make.task).__mro__[1].layouts
    for round_index in range(2):
        make(numbers, round_index, together if round_index else None)
    last = [found for found in layouts if len(found["foreground"]) == 2]
    assert_same(last[0], last[-1])


@KINDS
def test_scope_backbone_leaves_neck_decoder_and_heads_in_float_and_first_last_covers_the_predictors(kind):
    teacher = expose(DENSE[kind]())
    spec = geometry(teacher)
    whole = build_plan(teacher, small_recipe().quantization)
    part = build_plan(teacher, small_recipe("quantization.scope=backbone").quantization)
    assert part.sites.keys() == {name for name in whole.sites if name.startswith("backbone.")}
    assert any(not name.startswith("backbone.") for name in whole.sites)
    ends = build_plan(teacher, small_recipe("quantization.first_last=8", "quantization.bits=w4a4").quantization)
    assert set(spec.last) == set(teacher.predictors)
    wide = {site.layer for site in ends if site.bits == 8}
    assert wide == {*spec.first, *spec.last}
    assert {f"{name}.{slot}" for name in spec.last for slot in ("weight", "input")} <= ends.sites.keys()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("side", [2, 3])
def test_a_transposed_convolution_is_exactly_its_shuffled_convolution(side, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, side, stride=side, bias=bias)).double().requires_grad_(False)
    images = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    expected = model(images)
    fold_(model, images)
    assert not any(isinstance(module, nn.ConvTranspose2d) for module in model.modules())
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-12)


def test_a_transposed_convolution_that_overlaps_is_left_alone():
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 3, stride=2)).requires_grad_(False)
    fold_(model, torch.randn(1, 4, 5, 7))
    assert isinstance(model[0], nn.ConvTranspose2d)


@KINDS
@pytest.mark.slow
def test_mixed_bits_are_chosen_within_the_average(kind):
    recipe = small_recipe("quantization.bits=mixed:4")
    teacher = expose(DENSE[kind]())
    plan = make_plan(teacher, recipe)
    sizes = {s.name: teacher.get_submodule(s.layer).weight.numel() for s in plan if s.role == "weight"}
    spent = sum(plan.sites[name].bits * size for name, size in sizes.items())
    assert spent <= 4 * sum(sizes.values()) and len({plan.sites[name].bits for name in sizes}) > 1


@KINDS
def test_hidden_channels_are_rotated_exactly(kind):
    model = DENSE[kind]()
    turned = rotate_online_(teacher_of(model, small_recipe("quantization.rotate=['hidden']").quantization))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    task = task_of(model)
    with torch.no_grad():
        expected = task.run(expose(model), images)
        found = task.run(turned, images, expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@KINDS
@pytest.mark.slow
def test_a_student_that_calibration_made_worse_is_not_handed_over(tmp_path, kind):
    ears = Ears()
    harm = ("calibration.lr=30", "calibration.optimizer=adamw", "refresh.every=0", "calibration.epochs=1")
    result = quantize(DENSE[kind](), small_recipe(*LITTLE, *harm), tmp_path / "run", device="cpu", progress=ears)
    config = json.loads((tmp_path / "run/quantized/config.json").read_text())
    told = config["made"]["handover"]
    assert told["kept"] == "start" and told["end"] > told["start"]
    assert any("worse" in note for note in ears.notes) and result.model is not None


# ---- comparison


@KINDS
@pytest.mark.slow
def test_recipes_are_compared_by_the_tasks_own_figure(tmp_path, kind):
    pytest.importorskip("faster_coco_eval")
    sets = ("quantization.range_images=2", "synthesis.images=2", "synthesis.batch=2", "calibration.batch=2")
    sets += ("calibration.epochs=1", "synthesis.steps=1", "refresh.every=0")
    model = DENSE[kind]()
    rows = rows_of("tiny", ["paper"], ["w4a4"], [0], sets)
    loaders = []

    def batches(model, folder):
        loaders.append(scene_images(model, 4, batch=2))
        return loaders[-1]

    compared = Comparison(tmp_path, model, rows, source={"name": "tiny"}, batches=batches, folders=("scenes",))
    (line,) = compared.run()
    task = task_of(model)
    wanted = evaluate(maskaq.from_pretrained(tmp_path / line.name / "quantized"), scene_images(model, 4))
    assert line.top1["scenes"] == wanted.headline == line.figures["scenes"][task.headline]
    assert line.figures["scenes"]["n"] == 4 and line.kl["scenes"] > 0 and not line.hits and len(loaders) == 1
    full = compared.full_precision()
    assert full["scenes"] == evaluate(model, scene_images(model, 4)).headline
    (entry,) = entries([line])
    assert entry.mean == wanted.headline and entry.error == pytest.approx(line.figures["scenes"]["standard_error"] or 0)
    head = page.head(page.Page("t", ("scenes",), (), (), headline=task.columns[task.headline].title))
    assert f"mean {task.columns[task.headline].title}" in head


# ---- what cannot work is refused


@KINDS
def test_weights_that_are_not_finite_are_refused(kind, tmp_path):
    model = DENSE[kind]()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(MaskaqError, match="NaN"):
        quantize(model, small_recipe(*LITTLE), tmp_path / "run", device="cpu")
    with pytest.raises(DataError, match="NaN"):
        evaluate(model, [])


def test_outputs_that_are_not_finite_and_annotations_that_do_not_count_give_no_figure():
    model = DENSE["segmentation"]()
    truth = {"name": "0", "size": (64, 64), "semantic": torch.full((64, 64), 255)}
    batches = [(torch.zeros(1, 3, 64, 64), [truth])]
    with pytest.raises(DataError, match="no pixel"):
        evaluate(model, batches)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e12)
    with pytest.raises(DataError, match="NaN or Inf"):
        evaluate(model, batches)


@KINDS
@pytest.mark.slow
def test_two_bits_and_a_teacher_that_sees_nothing_end_in_a_model(kind, tmp_path):
    model = DENSE[kind]()
    if kind == "detection":
        with torch.no_grad():  # background is certain
            model.box_predictor.cls_score.bias[0] = 1000.0
            model.rpn_head.cls_logits.bias.fill_(-1000.0)
    result = quantize(model, small_recipe(*LITTLE, "quantization.bits=w2a2"), tmp_path / "run", device="cpu")
    found = result.model(torch.zeros(1, 3, 64, 64))
    assert all(values.isfinite().all() for values in tensors_of(found)) and packed(result.model)


def test_a_task_that_does_not_suit_the_outputs_is_refused():
    with pytest.raises(ModelError, match="expected"):
        expose(DENSE["segmentation"](), task="classification")
    with pytest.raises(ModelError, match="expected"):
        expose(DENSE["segmentation"](), task="detection")
    with pytest.raises(ModelError, match="expected"):
        expose(DENSE["detection"](), task="features")
    for task in ("segmentation", "detection"):
        with pytest.raises(ModelError, match="expected"):
            expose(tiny_vit(), task=task)
