"""Accuracy as counted by hand, and every way an image folder can be wrong."""

import gc
import json
import math
from io import BytesIO

import pytest
import timm
import torch
from helpers import Ears
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from maskaq.cli.main import main
from maskaq.errors import DataError, DeviceError, ModelError, RangeError
from maskaq.images.sets import SyntheticSet, TensorImages, image_folder, to_bytes, to_pixels
from maskaq.models import expose
from maskaq.quant.twin import init_ranges_, quantized_twin, quantizers
from maskaq.recipe.schema import Quantization
from maskaq.runs.provenance import pick_device
from maskaq.tasks import TASKS, evaluate
from maskaq.tasks.classification import EvalResult


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Echo(nn.Module):
    """A model whose predictions are its images."""

    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.anchor


def tiny_vit(name="vit_tiny_patch16_224", num_classes=3, **kwargs):
    size = {"embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 16, "num_classes": num_classes}
    return timm.create_model(name, pretrained=False, **{**size, **kwargs}).eval()


# --- evaluate ----------------------------------------------------------------------------------------------------

# Seven classes, scores fall from class 0 to class 6: the label is at place label + 1 of the ranking.
RANKED = torch.arange(7.0, 0, -1).repeat(8, 1)
LABELS = torch.tensor([0, 0, 0, 1, 4, 4, 5, 6])  # three first, three more among five, two missed


def test_top_1_and_top_5_are_the_hand_counts():
    result = evaluate(Echo(), [(RANKED, LABELS)])
    assert (result.top1, result.top5, result.n) == (100 * 3 / 8, 100 * 6 / 8, 8)
    assert result.standard_error == pytest.approx(100 * math.sqrt(3 / 8 * 5 / 8 / 8))


def test_uneven_batches_count_every_image_once():
    parts = [(RANKED[:1], LABELS[:1]), (RANKED[1:7], LABELS[1:7]), (RANKED[7:], LABELS[7:])]
    assert evaluate(Echo(), parts) == evaluate(Echo(), [(RANKED, LABELS)])


def test_images_in_another_precision_than_the_model_are_taken():
    batches = [(torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.arange(4) % 3)]
    assert evaluate(tiny_vit(), batches).n == 4


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
def test_with_at_most_five_classes_top_5_is_all(classes):
    labels = torch.arange(classes)
    result = evaluate(Echo(), [(RANKED[:classes, :classes], labels)])
    assert (result.top1, result.top5) == (pytest.approx(100 / classes), 100)


def test_the_standard_error_is_zero_at_both_ends():
    assert EvalResult(100.0, 100.0, 10).standard_error == EvalResult(0.0, 0.0, 10).standard_error == 0


def test_a_result_becomes_plain_numbers_for_json():
    found = json.loads(json.dumps(EvalResult(50.0, 75.0, 4).to_dict()))
    assert found == {"top1": 50.0, "top5": 75.0, "n": 4, "standard_error": 25.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_predictions_that_are_no_numbers_are_an_error_not_a_count(bad):
    logits = RANKED.clone()
    logits[3, 2] = bad
    with pytest.raises(DataError, match="NaN or Inf"):
        evaluate(Echo(), [(logits, LABELS)])


def test_no_images_are_an_error():
    with pytest.raises(DataError, match="no images"):
        evaluate(Echo(), [])


def test_evaluation_leaves_the_model_in_the_mode_it_came_in():
    class ModeSeen(Echo):
        def forward(self, x):
            assert not self.training
            return super().forward(x)

    for training in (True, False):
        model = ModeSeen().train(training)
        evaluate(model, [(RANKED, LABELS)])
        assert model.training is training
    model.train()
    with pytest.raises(DataError):
        evaluate(model, [])
    assert model.training


def test_a_watch_hears_of_every_image():
    ears = Ears()
    evaluate(Echo(), [(RANKED[:3], LABELS[:3]), (RANKED[3:], LABELS[3:])], ears)
    assert sum(units for units, _ in ears.advances) == 8


def test_a_student_is_evaluated_with_its_weights_quantized_once():
    teacher = expose(tiny_vit(num_classes=7))
    student, images = quantized_twin(teacher, Quantization()), torch.randn(6, 3, 32, 32)
    with pytest.raises(RangeError, match="no range yet"):
        evaluate(student, [(images, LABELS[:6])])
    init_ranges_(student, images, Quantization(activation_range="minmax"))
    calls = []
    for q in quantizers(student).values():
        if q.site.role == "weight":
            q.register_forward_hook(lambda q, args, out: calls.append(q.site.name))
    with torch.no_grad():
        hits = (student(images).argmax(dim=1) == LABELS[:6]).sum().item()
    calls.clear()
    result = evaluate(student, [(images[:3], LABELS[:3]), (images[3:], LABELS[3:6])])
    assert result.top1 == pytest.approx(100 * hits / 6)
    assert len(calls) == len(set(calls)) > 0
    assert all(p.requires_grad for p in student.parameters())


# --- an image folder ---------------------------------------------------------------------------------------------

COLOURS = {"ant": (255, 0, 0), "bee": (0, 255, 0), "cat": (0, 0, 255)}


@pytest.fixture
def folder(tmp_path):
    """Two images of one colour in each of three classes, of different sizes, made in no order."""
    for name in ("cat", "ant", "bee"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i, size in enumerate(((40, 40), (64, 48))):
            Image.new("RGB", size, COLOURS[name]).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


def all_of(loader):
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def test_sorted_folders_are_the_classes_and_pixels_are_normalised(folder):
    model = tiny_vit("deit_tiny_patch16_224")
    images, labels = all_of(image_folder(folder, model, batch=4))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2] and images.shape == (6, 3, 32, 32)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for image, label in zip(images, labels, strict=True):
        colour = torch.tensor(list(COLOURS.values())[label]) / 255
        expected = ((colour - mean) / std).view(3, 1, 1).expand_as(image)
        torch.testing.assert_close(image, expected, rtol=1e-4, atol=1e-4)


def test_images_get_the_size_the_model_was_built_for(folder):
    images, _ = next(iter(image_folder(folder, tiny_vit(img_size=(48, 32)), batch=1)))
    assert images.shape == (1, 3, 48, 32)


def test_a_model_for_grey_images_gets_one_channel(folder):
    model = tiny_vit(in_chans=1)
    images, labels = all_of(image_folder(folder, model))
    assert images.shape == (6, 1, 32, 32)
    assert evaluate(model, [(images, labels)]).n == 6
    with pytest.raises(DataError, match="4 channels"):
        next(iter(image_folder(folder, tiny_vit(in_chans=4))))


def test_exposed_and_quantized_models_read_the_same_images(folder):
    model = tiny_vit()
    exposed = expose(model)
    expected = all_of(image_folder(folder, model))
    for other in (exposed, quantized_twin(exposed, Quantization())):
        torch.testing.assert_close(all_of(image_folder(folder, other)), expected, rtol=0, atol=0)


def test_crop_and_interpolation_can_be_chosen(folder):
    Image.linear_gradient("L").resize((90, 90)).convert("RGB").save(folder / "ant" / "0.png")
    plain, cropped, nearest = (
        image_folder(folder, tiny_vit(), **kwargs).dataset[0][0]
        for kwargs in ({}, {"crop_pct": 0.5}, {"interpolation": "nearest"})
    )
    assert (cropped.max() - cropped.min()) < 0.7 * (plain.max() - plain.min())
    assert not torch.equal(plain, nearest)


def test_a_class_index_maps_a_subset_of_the_classes(folder, tmp_path):
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"ant": 5, "cat": 0, "bee": 9, "dog": 1}))
    _, labels = all_of(image_folder(folder, tiny_vit(num_classes=10), class_index=index))
    assert labels.tolist() == [5, 5, 9, 9, 0, 0]


def test_a_wrong_number_of_classes_says_both_numbers_and_the_way_out(folder):
    with pytest.raises(DataError, match=r"3 class folders, the model 10 classes.*--class-index"):
        image_folder(folder, tiny_vit(num_classes=10))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read the class index"),
        ("{", "cannot read the class index"),
        ("\x80", "cannot read the class index"),
        ("[0, 1, 2]", "expected a JSON object of folder name to class number"),
        ('{"ant": "0"}', "expected a JSON object"),
        ('{"ant": true}', "expected a JSON object"),
        ('{"ant": 0}', r"no entry for 2 folders of .*: bee, cat"),
        ('{"ant": 0, "bee": 1, "cat": 10}', r"classes 0 to 9, but \{'cat': 10\}"),
        ('{"ant": -1, "bee": 1, "cat": 2}', r"classes 0 to 9, but \{'ant': -1\}"),
    ],
)
def test_a_wrong_class_index_is_explained(folder, tmp_path, content, words):
    index = tmp_path / "index.json"
    if content is not None:
        index.write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=words) as caught:
        image_folder(folder, tiny_vit(num_classes=10), class_index=index)
    assert "index.json" in str(caught.value)


def test_a_folder_that_is_missing_empty_or_a_file_is_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist.*one sub-folder of images per class"):
        image_folder(tmp_path / "nowhere", tiny_vit())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty is not an image folder"):
        image_folder(tmp_path / "empty", tiny_vit())
    with pytest.raises(DataError, match=r"0\.png is a file"):
        image_folder(folder / "ant" / "0.png", tiny_vit())
    (folder / "dog").mkdir()
    with pytest.raises(DataError, match="dog"):
        image_folder(folder, tiny_vit(num_classes=4))


def broken_files():
    whole = Image.new("RGB", (64, 64), (10, 20, 30))
    return {
        "text.png": b"not an image",
        "empty.jpg": b"",
        "truncated.png": png(whole)[:60],
        "header.png": png(whole)[:20] + b"\0" * 40,
    }


def png(image):
    stream = BytesIO()
    image.save(stream, "png")
    return stream.getvalue()


@pytest.mark.parametrize("name", ["text.png", "empty.jpg", "truncated.png", "header.png"])
def test_a_broken_image_file_is_an_error_that_names_the_file(folder, name):
    (folder / "bee" / name).write_bytes(broken_files()[name])
    with pytest.raises(DataError, match=rf"cannot read the image .*bee/{name}: .+; replace or remove it"):
        evaluate(tiny_vit(), image_folder(folder, tiny_vit(), batch=2))


def test_a_broken_image_file_read_by_a_worker_gives_the_same_one_line(folder, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # how long torch waits for a worker
    (folder / "bee" / "text.png").write_bytes(b"not an image")
    with pytest.raises(DataError) as caught:
        evaluate(tiny_vit(), image_folder(folder, tiny_vit(), workers=1))
    assert str(caught.value).startswith("cannot read the image") and "\n" not in str(caught.value)
    del caught
    gc.collect()


def test_an_image_folder_is_evaluated_whole(folder):
    loader = image_folder(folder, tiny_vit(), batch=4)
    assert len(loader.dataset) == 6 and evaluate(tiny_vit(), loader).n == 6
    assert evaluate(tiny_vit(), loader).n == 6  # and once more: it is no one-time iterator


# --- images in memory --------------------------------------------------------------------------------------------


def test_tensor_images_are_normalised_for_the_model():
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    labels = torch.tensor([2, 0, 1, 1])
    data = TensorImages(images, labels, tiny_vit("deit_tiny_patch16_224"))
    assert len(data) == 4
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (images.double() / 255 - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
    batch, batch_labels = next(iter(DataLoader(data, batch_size=4)))
    torch.testing.assert_close(batch.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(batch_labels, labels)


def test_every_byte_survives_the_way_to_pixels_and_back():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_bytes(to_pixels(every)), every)
    assert to_pixels(every).min() == 0 and to_pixels(every).max() == 1
    assert to_bytes(torch.tensor([-0.5, 0.5, 1.5])).tolist() == [0, 128, 255]


def test_a_label_that_the_model_does_not_know_is_an_error():
    model = tiny_vit()
    classes = model.num_classes
    with pytest.raises(DataError, match=f"0 to {classes - 1}, got {classes}"):
        evaluate(model, [(torch.zeros(2, 3, 32, 32), torch.tensor([0, classes]))])


SCORES, CLASSES = torch.eye(4), torch.arange(4)


@pytest.mark.parametrize(
    "batches, name",
    [
        (None, "batches"),
        (5, "batches"),
        (SCORES, "batches"),
        ([SCORES], "batches"),
        ([(SCORES,)], "batches"),
        ([(SCORES, CLASSES, CLASSES)], "batches"),
        ([{"images": SCORES, "labels": CLASSES}], "batches"),
        ([(SCORES, CLASSES.tolist())], "batches"),
        ([(SCORES.numpy(), CLASSES.numpy())], "batches"),
        ([(SCORES, None)], "batches"),
        ([((255 * SCORES).byte(), CLASSES)], "images"),
        ([(SCORES, CLASSES + 0.5)], "labels"),
        ([(SCORES, CLASSES * math.nan)], "labels"),
        ([(SCORES, CLASSES > 2)], "labels"),
        ([(SCORES, CLASSES[:1])], "labels"),
        ([(SCORES, CLASSES[:3])], "labels"),
        ([(SCORES, CLASSES[:, None])], "labels"),
        ([(SCORES, torch.eye(4, dtype=torch.int64))], "labels"),
        ([(SCORES, torch.tensor(1))], "labels"),
        ([(SCORES, CLASSES - 1)], "labels"),
    ],
)
def test_batches_of_another_kind_are_an_error_not_a_count(batches, name):
    with pytest.raises(DataError, match=f"{name}: expected"):
        evaluate(Echo(), batches)


@pytest.mark.parametrize("output", [[SCORES], (SCORES,), SCORES[0], SCORES[None], SCORES[:2], torch.tensor(1.0)])
def test_outputs_of_another_kind_are_an_error_not_a_count(output):
    model = Echo()
    model.forward = lambda images: output
    with pytest.raises(ModelError, match="outputs: expected"):
        evaluate(model, [(SCORES, CLASSES)])


@pytest.mark.parametrize("model", [5, None, "cifar10_vit", Echo])
def test_what_is_not_a_model_is_refused(model, folder):
    with pytest.raises(ModelError, match="expected a model"):
        evaluate(model, [(SCORES, CLASSES)])
    with pytest.raises(ModelError, match="expected a model"):
        image_folder(folder, model)


@pytest.mark.parametrize("task", ["segmentation", "detection"])
def test_a_detector_or_segmenter_is_evaluated_on_annotations(task):
    if task == "detection":
        pytest.importorskip("faster_coco_eval")
    model = Echo()
    model.num_classes, model.pretrained_cfg = 4, {"task": task}
    for batch in (SCORES, (SCORES, CLASSES), (SCORES, None), (SCORES, CLASSES.tolist())):
        with pytest.raises(DataError, match="batches: expected"):
            evaluate(model, [batch])


ODD = {
    "path": [5, None, "", b"folder"],
    "class_index": [5, "", {"a": 0}],
    "crop_pct": [0, -1, 5, 1e-9, math.nan, math.inf, True, "0.9"],
    "interpolation": ["other", 5, ""],
    "batch": [0, -1, 1.5, True, None, "4"],
    "workers": [-1, 1.5, True, None, "2", 10**8],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in ODD.items() for value in values])
def test_an_argument_of_a_folder_that_makes_no_sense_is_refused_by_name(folder, name, value):
    with pytest.raises(DataError, match=name):
        image_folder(**{"path": folder, "model": tiny_vit(), name: value})


@pytest.mark.parametrize(
    "option", [("--crop-pct", "0.5"), ("--interpolation", "nearest"), ("--class-index", "nothing")]
)
def test_the_images_in_the_package_take_no_options_of_folders(option, capsys):
    assert main(["evaluate", "cifar10_vit", "--data", "cifar10-demo", *option]) == 1
    assert f"{option[0]}: " in capsys.readouterr().err


def test_an_empty_device_is_refused():
    with pytest.raises(DeviceError, match="''"):
        pick_device("")


def test_labels_are_balanced_over_the_classes():
    labels = TASKS["classification"].targets(torch.arange(25), 10)
    assert labels.bincount().tolist() == [3] * 5 + [2] * 5
    assert TASKS["classification"].targets(torch.tensor([7, 17]), 10).tolist() == [7, 7]  # the number alone decides


def test_a_synthetic_set_is_cut_joined_and_stored_as_one():
    whole = SyntheticSet(
        torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8), torch.arange(5) % 2, torch.arange(5) + 10
    )
    parts = SyntheticSet.concatenate([whole[:2], whole[2:]])
    assert len(whole) == 5 and whole[torch.tensor([3])].indices.tolist() == [13]
    for part in (parts, SyntheticSet(**whole.tensors()), whole.to("cpu")):
        assert all(torch.equal(a, b) for a, b in zip(part.tensors().values(), whole.tensors().values(), strict=True))


def test_an_image_of_16_bits_is_refused_not_clipped_to_white(folder):
    Image.new("I;16", (40, 40), 20_000).save(folder / "bee" / "deep.png")
    with pytest.raises(DataError, match=r"bee/deep.png: more than 8 bits a channel; replace or remove it"):
        evaluate(tiny_vit(), image_folder(folder, tiny_vit()))
