"""Tasks: what a model is for decides what images are made for, what is compared and what is measured."""

import json
import math
from functools import partial

import pytest
import timm
import torch
from helpers import SMALL, packed, pair, small_recipe, tiny_swin, tiny_vit
from PIL import Image
from torch.nn import functional as F

import maskaq
from maskaq.cli.main import main
from maskaq.errors import DataError, ModelError, RecipeError, RunFolderError
from maskaq.images.sets import image_folder
from maskaq.images.synthesis import synthesize
from maskaq.losses.terms import SYNTHESIS_TERMS, SynthesisView, TermSpec
from maskaq.models import expose, geometry
from maskaq.models.timm_models import create_timm
from maskaq.quant.plan import build_plan
from maskaq.quant.twin import deploy
from maskaq.runs.opened import compare, open_run
from maskaq.runs.quantize import quantize
from maskaq.tasks import TASKS, evaluate, recovered, task_named, task_of
from maskaq.tasks.classification import EvalResult
from maskaq.tasks.features import FeatureResult, nearest_neighbour_accuracy

FEATURES = TASKS["features"]
SIGLIP = "vit_base_patch16_siglip_224"
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def siglip(**args):
    torch.manual_seed(0)
    model = timm.create_model(SIGLIP, **{**TINY, **args})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    """Images of two classes: dark and bright, each with some noise."""
    generator = torch.Generator().manual_seed(0)
    for name, level in (("dark", 40), ("bright", 200)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(6):
            pixels = (level + 30 * torch.randn(40, 40, 3, generator=generator)).clamp(0, 255).byte()
            Image.fromarray(pixels.numpy()).save(tmp_path / "data" / name / f"{i}.png")
    return tmp_path / "data"


# ---- which task a model has


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_a_model_without_a_classifier_gives_features_and_one_with_it_classes(build):
    assert geometry(expose(build(num_classes=0))).task == "features" == task_of(build(num_classes=0)).name
    facts = geometry(expose(build()))
    assert (facts.task, facts.classes) == ("classification", 4)


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(ModelError, match="features"):
        task_named("feature")


def test_pooling_by_attention_computes_the_same_once_exposed():
    model, images = siglip(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(expose(model)(images), model(images))
    assert expose(model).state_dict().keys() == model.state_dict().keys()
    sites = {site.name for site in build_plan(expose(model), small_recipe().quantization)}
    assert {"attn_pool.kv.weight", "attn_pool.q.input", "attn_pool.qk.a", "attn_pool.av.b"} <= sites
    assert {"attn_pool.proj.weight", "attn_pool.mlp.fc2.input"} <= sites


# ---- what is made, compared and measured


def test_classes_are_asked_for_in_turn_and_features_for_none():
    numbers = torch.tensor([0, 3, 4, 11])
    assert TASKS["classification"].targets(numbers, 4).tolist() == [0, 3, 0, 3]
    assert FEATURES.targets(numbers, 0).tolist() == [-1] * 4


def test_terms_of_classes_are_left_out_and_features_matched_in_place_of_logits():
    weights = {"class_prior": 1.0, "total_variation": 0.5, "logit_kl": 2.0, "region_prior": 1.0}
    assert TASKS["classification"].terms(weights) == weights
    assert FEATURES.terms(weights) == {"total_variation": 0.5, "feature_error": 2.0}
    assert FEATURES.terms({"logit_kl": 1.0, "feature_error": 0.5}) == {"feature_error": 1.5}


def test_distances_are_kl_and_cosine():
    def apart(task, p, q):
        return task.distance({task.output: p}, {task.output: q})

    p, q = torch.randn(5, 7), torch.randn(5, 7)
    kl = (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum(1)
    torch.testing.assert_close(apart(TASKS["classification"], p, q).float(), kl)
    cosine = (p * q).sum(1) / (p.norm(dim=1) * q.norm(dim=1))
    torch.testing.assert_close(FEATURES.agreement({"features": p}, {"features": q}).float(), cosine)
    torch.testing.assert_close(apart(FEATURES, p, q).float(), 1 - cosine)
    for scale in (0.0, 1e-30, 1e30):  # equal vectors are equal, however long
        assert apart(FEATURES, scale * p, scale * p).abs().max() < 1e-9
    assert apart(FEATURES, p, 3 * p).abs().max() < 1e-6 and apart(TASKS["classification"], p, p + 2).max() < 1e-6


def test_neighbours_vote_by_similarity_and_an_image_is_not_its_own():
    features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [0.7, 0.3]])
    labels = torch.tensor([0, 0, 1, 1, 1])
    unit, hits = F.normalize(features, dim=1), 0
    for i in range(5):
        similarity = unit @ unit[i]
        others = sorted((j for j in range(5) if j != i), key=lambda j: -similarity[j])[:2]
        votes = [sum(math.exp(similarity[j] / 0.07) for j in others if labels[j] == c) for c in (0, 1)]
        hits += votes.index(max(votes)) == labels[i]
    assert nearest_neighbour_accuracy(features, labels, k=2) == hits / 5
    assert nearest_neighbour_accuracy(features, labels, k=100) <= 1  # k is at most the others
    assert nearest_neighbour_accuracy(features, labels * 10**12, k=2) == hits / 5  # names of classes, not their number


def test_one_image_tells_no_error_and_no_share():
    one = FeatureResult(0.5, None, 1, math.inf)
    assert one.to_dict()["standard_error"] is None
    assert recovered(FeatureResult(1.0, None, 1), one, FeatureResult(0.9, None, 1)) is None


def test_features_are_not_compared_with_the_accuracy_of_a_classifier(folder):
    model = expose(tiny_vit(num_classes=0))
    with pytest.raises(DataError, match="same images"):
        evaluate(model, image_folder(folder, model), full=EvalResult(80.0, 90.0, 12))


def test_a_run_for_features_is_not_continued_as_one_for_classes(tmp_path):
    tower = "vit_base_patch32_clip_224.openai"
    model = timm.create_model(tower, **{**TINY, "num_classes": 512}).eval()
    recipe = small_recipe()
    quantize(model, recipe, tmp_path / "run", only_images=True)
    asked = create_timm(tower, **{**TINY, "num_classes": 512}).eval()  # a classifier: its outputs were asked for
    asked.load_state_dict(model.state_dict())
    with pytest.raises(RunFolderError, match="task"):
        quantize(asked, recipe, tmp_path / "run")
    source = {"name": tower, "args": {**TINY, "num_classes": 512}}
    quantize(model, recipe, tmp_path / "run", source=source)
    assert geometry(open_run(tmp_path / "run").student()).task == "features"


def test_a_share_is_of_the_headline_figure_of_either_task():
    full, rtn, ours = (FeatureResult(cosine, None, 100, 0.001) for cosine in (1.0, 0.5, 0.9))
    assert recovered(full, rtn, ours) == pytest.approx(0.8)
    top1 = [EvalResult(value, 99.0, 1000) for value in (80.0, 40.0, 70.0)]
    assert recovered(*top1) == pytest.approx(0.75)


def test_a_term_that_reads_logits_is_refused_where_there_are_none():
    view = SynthesisView(torch.zeros(1, 3, 4, 4), torch.tensor([-1]), {"features": torch.zeros(1, 8)}, (), ())
    with pytest.raises(RecipeError, match="logits.*features"):
        SYNTHESIS_TERMS["class_prior"].function(view)


def test_a_term_of_the_users_sees_the_features(monkeypatch):
    seen = []

    def spread(v):
        seen.append(v.outputs["features"].shape)
        return v.outputs["features"].var(dim=1)

    monkeypatch.setitem(SYNTHESIS_TERMS, "spread", TermSpec("spread", spread, ()))
    recipe = small_recipe("synthesis.terms.spread=1")
    images = synthesize(*pair(recipe, lambda: tiny_vit(num_classes=0)), recipe)
    assert seen[0] == (4, 16) and images.labels.tolist() == [-1] * 8


# ---- evaluation


def test_features_are_measured_by_cosine_and_by_neighbours(folder):
    model = expose(tiny_vit(num_classes=0))
    batches = image_folder(folder, model, batch=5)
    full = evaluate(model, batches).as_full()
    assert full.cosine == 1.0 and full.knn is not None and full.n == 12 and full.features.shape == (12, 16)
    other = evaluate(expose(tiny_vit(seed=1, num_classes=0)), batches, full=full)
    expected = F.cosine_similarity(full.features, other.features)
    assert other.cosine == pytest.approx(expected.mean().item(), abs=1e-6) and other.cosine < 0.9
    assert other.standard_error == pytest.approx(expected.std().item() / math.sqrt(12), rel=1e-4)
    same = evaluate(model, batches, full=full)
    assert same.cosine == pytest.approx(1.0, abs=1e-6) and same.knn == full.knn
    assert evaluate(model, batches).cosine is None  # nothing to compare with


def test_a_folder_without_classes_gives_no_accuracy_of_neighbours(folder):
    model = expose(tiny_vit(num_classes=0))
    found = evaluate(model, image_folder(folder / "dark", model))
    assert found.knn is None and found.n == 6
    with pytest.raises(DataError, match="sub-folder of images per class"):
        image_folder(folder / "dark", expose(tiny_vit()))


def test_a_folder_that_does_not_suit_a_model_without_classes_is_refused(folder, tmp_path):
    model = expose(tiny_vit(num_classes=0))
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "empty", "no image files"), (tmp_path / "gone", "does not exist")):
        with pytest.raises(DataError, match=f"{words}.*folder of images"):
            image_folder(path, model)
    with pytest.raises(DataError, match="class-index.*no classes"):
        image_folder(folder, model, class_index=tmp_path / "index.json")


# ---- runs


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(partial(tiny_vit, num_classes=0), id="vit"),
        pytest.param(partial(tiny_swin, num_classes=0), id="swin", marks=pytest.mark.slow),
        pytest.param(siglip, id="siglip", marks=pytest.mark.slow),
    ],
)
def test_a_run_without_classes_is_saved_loaded_and_resumed_equal(tmp_path, build):
    model, recipe = build(), small_recipe("quantization.bits=w4a4")
    whole = quantize(model, recipe, tmp_path / "whole")
    assert whole.images.labels.unique().tolist() == [-1]
    loaded = maskaq.from_pretrained(tmp_path / "whole" / "quantized", like=model)
    config = json.loads((tmp_path / "whole" / "quantized" / "config.json").read_text())
    assert (config["task"], config["num_labels"], geometry(loaded).task) == ("features", 0, "features")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), deploy(whole.model)(images))
    quantize(model, recipe, tmp_path / "parts", only_images=True)
    parts = quantize(model, recipe, tmp_path / "parts")
    for name, value in packed(whole.model).items():
        assert torch.equal(packed(parts.model)[name], value), name


def test_calibration_brings_features_closer(tmp_path):
    """On images that no calibration saw."""
    model = tiny_vit(num_classes=0)
    recipe = maskaq.load_recipe("quick", *SMALL, "calibration.epochs=8", bits="w3a3")
    result = quantize(model, recipe, tmp_path / "run", report=False)
    told = json.loads((tmp_path / "run" / "quantized" / "config.json").read_text())["made"]["handover"]
    assert "cosine" in told["distance"] and told["end"] < told["start"] and result.model is not None


def run_line(tmp_path, folder):
    args = [f"--model-arg={key}={value}" for key, value in TINY.items()]
    weights = tmp_path / "siglip.safetensors"
    import safetensors.torch

    safetensors.torch.save_file(siglip().state_dict(), weights)
    small = [part for override in SMALL for part in ("--set", override)]
    out = tmp_path / "run"
    return out, ["quantize", SIGLIP, "--checkpoint", str(weights), "--bits", "w4a4", "--out", str(out), *args, *small]


@pytest.mark.slow
def test_a_model_without_a_classifier_goes_all_the_way_by_command(tmp_path, folder, capsys):
    out, line = run_line(tmp_path, folder)
    assert main([*line, "--data", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "cosine to full precision" in told and "k-NN top-1 %" in told and "top-5" not in told
    metrics = json.loads((out / "metrics.json").read_text())["accuracy"]
    assert metrics["full precision"]["cosine"] == 1.0 and 0 < metrics["maskaq"]["cosine"] < 1
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert "cosine" in page and "cosine to full precision" in text and "KL" not in text
    card = (out / "quantized" / "README.md").read_text()
    assert "image-feature-extraction" in card and "cosine to full precision" in card
    assert main(["inspect", str(out)]) == 0 and main(["evaluate", str(out / "quantized"), "--data", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "task: features" in told and "k-NN" in told
    assert main(["export", str(out), "--data", str(folder)]) == 0
    assert "cosine similarity above 0.99 on" in capsys.readouterr().out and (out / "model.onnx").exists()
    assert main(["evaluate", str(out / "quantized"), "--data", str(folder / "dark")]) == 1  # nothing to compare with
    assert "full-precision model" in capsys.readouterr().err
    table = compare(open_run(out), lambda model: image_folder(folder, model))
    assert table["maskaq"].to_dict() == pytest.approx(metrics["maskaq"])
