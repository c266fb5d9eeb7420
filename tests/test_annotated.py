"""Annotated images: what is written in COCO's and ADE20K's folders is what is read, and what is damaged is named."""

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch
from annotated import Model, runs, save_png, scenes, write_ade20k, write_coco, write_json
from PIL import Image

from maskaq.cli.main import main
from maskaq.errors import DataError
from maskaq.images.ade20k import ade20k_folder
from maskaq.images.annotated import resized, target_size
from maskaq.images.coco import _counts, _filled, coco_folder
from maskaq.images.scenes import HELD_OUT, scene_images
from maskaq.models import data_config
from maskaq.models.detector import mask_rcnn
from maskaq.models.load import load_model
from maskaq.tasks import evaluate
from maskaq.tasks.metrics import Confusion, Instances, class_map
from maskaq.zoo.scenes import CLASSES, scene

needs_tools = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("faster_coco_eval") is None, reason="needs maskaq[detection]"
)


def coco(root, **options):
    return coco_folder(root, Model(len(CLASSES)), **options)


# --- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "short", "longest", "expected"),
    [
        ((480, 640), 800, 1333, (800, 1067)),
        ((640, 480), 800, 1333, (1067, 800)),
        ((427, 640), 800, 1333, (800, 1199)),
        ((300, 640), 800, 1333, (625, 1333)),  # the long side decides
        ((512, 683), 512, 2048, (512, 683)),
        ((256, 1600), 512, 2048, (328, 2048)),
        ((1, 5000), 800, 1333, (1, 1333)),
    ],
)
def test_a_resize_keeps_the_ratio_and_both_limits(size, short, longest, expected):
    assert target_size(size, short, longest) == expected


def test_a_resize_is_bilinear_between_the_centres_of_pixels():
    image = torch.tensor([[[0, 100], [200, 60]]], dtype=torch.uint8)
    wide = resized(image, (2, 4))[0]
    assert wide.tolist() == [[0, 25, 75, 100], [200, 165, 95, 60]]
    assert resized(image, (2, 2)) is image


# --- COCO ------------------------------------------------------------------------------------------------------


@needs_tools
def test_objects_of_a_coco_folder_are_those_that_were_written(tmp_path):
    content = write_coco(tmp_path)
    drawn = scenes()
    loader = coco(tmp_path)
    assert len(loader.dataset) == len(drawn)
    crowds = 0
    for of, (images, (found,)) in zip(drawn, loader, strict=True):
        height, width = of.image.shape[1:]
        assert found["size"] == (height, width) and images.shape[0] == 1
        assert min(images.shape[2:]) == 32 or max(images.shape[2:]) == round(32 * 1333 / 800)
        assert torch.equal(found["labels"], of.labels)
        assert torch.allclose(found["boxes"], of.boxes)
        for place, (mask, expected) in enumerate(zip(found["masks"], of.masks, strict=True)):
            if place % 2:  # written as the polygon of its box
                left, top, right, bottom = of.boxes[place].int().tolist()
                expected = torch.zeros_like(mask)
                expected[top:bottom, left:right] = True
            assert torch.equal(mask, expected)
        crowds += int(found["iscrowd"].sum())
    assert crowds == sum(entry["iscrowd"] for entry in content["annotations"]) > 0


@needs_tools
def test_categories_are_the_models_classes_of_the_same_names_whatever_their_order(tmp_path):
    content = write_coco(tmp_path)
    written = [entry["category_id"] for entry in content["annotations"]]
    id_of = {entry["name"]: entry["id"] for entry in content["categories"]}
    write_json(tmp_path, {**content, "categories": content["categories"][::-1]})

    def labels(names):
        model = Model(len(CLASSES))
        model.pretrained_cfg["label_names"] = names
        return [label for _, (found,) in coco_folder(tmp_path, model) for label in found["labels"].tolist()]

    in_the_files_order = [list(id_of.values())[::-1].index(number) for number in written]
    assert labels(list(CLASSES)) == [list(id_of.values()).index(number) for number in written]
    assert labels([*CLASSES[:-1], "another"]) == in_the_files_order
    assert labels([]) == in_the_files_order


@needs_tools
def test_images_are_normalised_by_the_models_mean_and_std(tmp_path):
    write_coco(tmp_path, scenes(((32, 40),)))
    images, _ = next(iter(coco(tmp_path)))
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    assert torch.allclose(images[0], (scenes(((32, 40),))[0].image / 255 - mean) / std, atol=1e-6)


@needs_tools
def test_compressed_run_lengths_are_those_of_pycocotools(tmp_path):
    mask = pytest.importorskip("pycocotools.mask")
    generator = np.random.default_rng(0)
    for density in (0.0, 0.02, 0.5, 0.98, 1.0):
        drawn = generator.random((37, 53)) < density
        coded = mask.encode(np.asfortranarray(drawn.astype("uint8")))["counts"].decode()
        assert sum(_counts(coded)) == drawn.size
        assert np.array_equal(_filled(_counts(coded), drawn.shape), drawn)
        assert np.array_equal(_filled(runs(drawn), drawn.shape), drawn)


@needs_tools
def test_a_polygon_is_filled_as_pycocotools_fills_it(tmp_path):
    mask = pytest.importorskip("pycocotools.mask")
    content = write_coco(tmp_path, scenes()[:1])
    size = content["images"][0]["height"], content["images"][0]["width"]
    drawn = [[3.2, 4.1, 30.7, 8.5, 17.3, 40.9], [40.0, 3.0, 50.0, 3.0, 50.0, 20.5, 41.5, 21.0]]
    content["annotations"][0] |= {"segmentation": drawn}
    write_json(tmp_path, content)
    _, (found,) = next(iter(coco(tmp_path)))
    expected = mask.decode(mask.merge(mask.frPyObjects(drawn, *size))).astype(bool)
    assert np.array_equal(found["masks"][0].numpy(), expected)


@needs_tools
def test_any_name_of_instances_with_its_folder_beside_it_is_read(tmp_path):
    write_coco(tmp_path, name="mine")
    assert len(coco(tmp_path).dataset) == 3
    write_coco(tmp_path, scenes()[:1])
    assert len(coco(tmp_path).dataset) == 1  # val2017 where it is there
    write_coco(tmp_path / "two", name="a")
    write_coco(tmp_path / "two", name="b")
    with pytest.raises(DataError, match=r"instances_a\.json.*instances_b\.json"):
        coco(tmp_path / "two")


@needs_tools
def test_the_annotations_themselves_have_a_precision_of_100(tmp_path):
    write_coco(tmp_path)
    instances = Instances(len(CLASSES))
    for _, (truth,) in coco(tmp_path):
        found = {key: truth[key][~truth["iscrowd"]] for key in ("boxes", "labels", "masks")}
        instances.add({**found, "scores": torch.ones(len(found["labels"]))}, truth, truth["size"])
    assert instances.precision("boxes").ap == pytest.approx(100)
    assert instances.precision("masks").ap == pytest.approx(100)


def changed(content, where, **values):
    """The annotations with some values of an entry replaced; None removes one."""
    found = copy.deepcopy(content)
    key, place = where
    for name, value in values.items():
        if value is None:
            del found[key][place][name]
        else:
            found[key][place][name] = value
    return found


BAD = {
    "a missing key": (("annotations", 2), {"bbox": None}, r"annotations\[2\] has no 'bbox'"),
    "a missing key of an image": (("images", 1), {"height": None}, r"images\[1\] has no 'height'"),
    "a missing file": (("images", 1), {"file_name": "gone.jpg"}, r"images\[1\].*'gone.jpg'"),
    "a file name that no file can have": (("images", 1), {"file_name": "x" * 5000}, r"images\[1\]"),
    "an unknown image": (("annotations", 0), {"image_id": 7}, r"annotations\[0\] \(id 1\).*image 7"),
    "an unknown category": (("annotations", 0), {"category_id": 2}, r"annotations\[0\].*category 2"),
    "an image twice": (("images", 2), {"id": 100}, r"images\[2\].*100"),
    "a category twice": (("categories", 1), {"id": 3}, r"categories\[1\].*3"),
    "a text for a number": (("images", 0), {"width": "64"}, r"images\[0\].*'width'"),
    "a box of three numbers": (("annotations", 0), {"bbox": [1, 2, 3]}, r"annotations\[0\].*bbox"),
    "a box of a negative width": (("annotations", 0), {"bbox": [1, 2, -3, 4]}, r"annotations\[0\].*bbox"),
    "a box far outside": (("annotations", 0), {"bbox": [1, 2, 9e9, 4]}, r"annotations\[0\].*bbox.*outside"),
    "an object twice": (("annotations", 1), {"id": 1}, r"annotations\[1\] has id 1"),
    "a polygon of two points": (("annotations", 0), {"segmentation": [[1, 2, 3, 4]]}, r"annotations\[0\].*polygon 0"),
    "an odd polygon": (("annotations", 0), {"segmentation": [[1, 2, 3, 4, 5, 6, 7]]}, r"polygon 0"),
    "a polygon of texts": (("annotations", 0), {"segmentation": [["a"] * 6]}, r"polygon 0"),
    "a polygon far outside": (("annotations", 0), {"segmentation": [[0, 0, 9e9, 0, 0, 5]]}, r"polygon 0.*outside"),
    "no polygon": (("annotations", 0), {"segmentation": []}, r"annotations\[0\].*empty"),
    "run lengths of another size": (
        ("annotations", 0),
        {"segmentation": {"size": [2, 2], "counts": [1, 3]}},
        r"annotations\[0\].*\[2, 2\]",
    ),
    "no size": (("annotations", 0), {"segmentation": {"size": 5, "counts": [5]}}, "mask is 5 pixels"),
    "too few run lengths": (("annotations", 0), {"segmentation": {"size": [48, 64], "counts": [5]}}, "3072"),
    "damaged text of run lengths": (("annotations", 0), {"segmentation": {"size": [48, 64], "counts": "~~"}}, "3072"),
    "a crowd of 7": (("annotations", 0), {"iscrowd": 7}, r"annotations\[0\].*iscrowd"),
}


@needs_tools
@pytest.mark.parametrize("name", BAD)
def test_wrong_annotations_are_named_with_file_and_entry(name, tmp_path):
    where, values, message = BAD[name]
    file = write_json(tmp_path, changed(write_coco(tmp_path), where, **values))
    with pytest.raises(DataError, match=message) as error:
        coco(tmp_path)
    assert str(file) in str(error.value)


@needs_tools
def test_a_folder_that_is_not_cocos_says_what_was_expected(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        coco(tmp_path / "gone")
    with pytest.raises(DataError, match=r"instances_.*json"):
        coco(tmp_path)
    content = write_coco(tmp_path)
    file = write_json(tmp_path, content["images"])
    with pytest.raises(DataError, match="images, annotations, categories"):
        coco(tmp_path)
    file.write_text(json.dumps(content)[:-9])
    with pytest.raises(DataError, match="instances_val2017.json is not JSON"):
        coco(tmp_path)
    write_json(tmp_path, {**content, "categories": content["categories"][:-1]})
    with pytest.raises(DataError, match="5 categories.*6 classes"):
        coco(tmp_path)
    write_json(tmp_path / "alone", content)
    with pytest.raises(DataError, match="val2017"):
        coco(tmp_path / "alone")


@needs_tools
def test_an_image_of_another_size_than_its_entry_is_named(tmp_path):
    content = write_coco(tmp_path)
    file = tmp_path / "val2017" / content["images"][1]["file_name"]
    save_png(scenes()[0].image.permute(1, 2, 0), file)
    with pytest.raises(DataError, match=f"image 101.*{file}"):
        list(coco(tmp_path))
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(DataError, match=str(file)):
        list(coco(tmp_path))


# --- ADE20K ----------------------------------------------------------------------------------------------------


PIXEL_CLASSES = 1 + len(CLASSES)  # the ground too


def ade(root, classes=PIXEL_CLASSES, **options):
    return ade20k_folder(root, Model(classes), **options)


def test_class_maps_of_an_ade20k_folder_are_those_that_were_written(tmp_path):
    write_ade20k(tmp_path)
    for of, (images, (found,)) in zip(scenes(), ade(tmp_path), strict=True):
        assert torch.equal(found["semantic"], of.semantic)
        assert min(images.shape[2:]) == 32 and found["size"] == tuple(of.image.shape[1:])


def test_label_0_and_255_of_a_file_do_not_count(tmp_path):
    write_ade20k(tmp_path, scenes()[:1])
    file = next((tmp_path / "annotations" / "validation").iterdir())
    labels = np.array(Image.open(file))
    labels[0], labels[1] = 0, 255
    save_png(labels, file)
    _, (found,) = next(iter(ade(tmp_path)))
    assert (found["semantic"][:2] == 255).all() and (found["semantic"][2:] < 255).all()


def test_logits_are_measured_in_the_size_of_the_annotation(tmp_path):
    """The class map of perfect logits of a resized image is almost the annotation; without a resize it is."""
    write_ade20k(tmp_path)
    measured = {}
    for short in (32, 200):
        confusion = Confusion(1 + len(CLASSES))
        for images, (truth,) in ade(tmp_path, short=short):
            one_hot = torch.nn.functional.one_hot(truth["semantic"], 1 + len(CLASSES)).permute(2, 0, 1)[None].float()
            seen = torch.nn.functional.interpolate(one_hot, images.shape[2:], mode="bilinear")
            confusion.add(class_map(seen, truth["size"])[0], truth["semantic"])
        measured[short] = confusion.miou
    assert 75 < measured[32] < measured[200] and measured[200] > 99


def test_what_is_wrong_in_an_ade20k_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="images/validation"):
        ade(tmp_path)
    write_ade20k(tmp_path)
    maps = tmp_path / "annotations" / "validation"
    first = sorted(maps.iterdir())[0]
    with pytest.raises(DataError, match=f"{first}.*label.*1 to 2"):
        list(ade(tmp_path, classes=2))
    whole = first.read_bytes()
    save_png(np.zeros((5, 5), dtype="uint8"), first)
    with pytest.raises(DataError, match=f"{first} is 5 x 5.*48 x 64"):
        list(ade(tmp_path))
    save_png(np.zeros((48, 64, 3), dtype="uint8"), first)
    with pytest.raises(DataError, match=f"{first}.*RGB"):
        list(ade(tmp_path))
    first.write_bytes(whole[:40])
    with pytest.raises(DataError, match=str(first)):
        list(ade(tmp_path))
    first.rename(maps / "other.png")
    with pytest.raises(DataError, match=first.stem):
        ade(tmp_path)
    (maps / "other.png").rename(first)
    save_png(np.zeros((5, 5), dtype="uint8"), maps / "other.png")
    with pytest.raises(DataError, match=r"other\.png has no image"):
        ade(tmp_path)


def test_an_annotation_that_is_no_png_or_has_two_images_is_named(tmp_path):
    write_ade20k(tmp_path, scenes()[:1])
    (annotation,) = (tmp_path / "annotations" / "validation").iterdir()
    Image.open(annotation).save(annotation, "JPEG")  # its labels are no longer those that were written
    with pytest.raises(DataError, match=f"{annotation}.*PNG.*JPEG"):
        list(ade(tmp_path))
    (image,) = (tmp_path / "images" / "validation").iterdir()
    Image.open(image).save(image.with_suffix(".jpg"))
    with pytest.raises(DataError, match=f"{annotation.stem}.jpg.*{image.name}|{annotation.stem}.png.*{image.stem}.jpg"):
        ade(tmp_path)


# --- back to the size of the annotation -------------------------------------------------------------------------


def test_objects_found_in_a_resized_image_are_given_in_the_size_it_had():
    model = mask_rcnn(
        *("swin_tiny_patch4_window7_224", 3, 64),
        **dict(width=16, box_width=24, mask_width=16, embed_dim=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)),
    )
    images = torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.box_predictor.cls_score.bias[0] = -1.0  # an untrained model finds enough
    plain = model.detect(images, 20)
    scaled = model.detect(images, 20, sizes=[(96, 128), (24, 64)])
    for one, other, (height, width) in zip(plain, scaled, ((96, 128), (24, 64)), strict=True):
        assert len(one["labels"]) > 0 and torch.equal(one["labels"], other["labels"])
        assert torch.allclose(other["boxes"], one["boxes"] * torch.tensor([width / 64, height / 48] * 2))
        assert other["masks"].shape[1:] == (height, width) and one["masks"].shape[1:] == (48, 64)


# --- scenes ----------------------------------------------------------------------------------------------------


def test_held_out_scenes_come_in_the_models_size_with_all_that_is_known_of_them():
    loader = scene_images(Model(len(CLASSES)), 6, batch=4)
    sizes = []
    for images, annotations in loader:
        sizes.append(len(annotations))
        assert images.shape == (len(annotations), 3, 32, 48)
        for found in annotations:
            assert found["size"] == (32, 48) and len(found["labels"]) == len(found["masks"]) > 0
            assert torch.equal(found["semantic"] > 0, found["masks"].any(dim=0))
    assert sizes == [4, 2] and len(scene_images(Model(1 + len(CLASSES))).dataset) == 500
    with pytest.raises(DataError, match="6 classes"):
        scene_images(Model(80))


# --- all together ----------------------------------------------------------------------------------------------

COUNT = 12


@pytest.mark.parametrize("name", ["scenes_detector", "scenes_segmenter"])
def test_a_folder_of_scenes_is_measured_as_the_scenes_themselves_are(name, tmp_path):
    """Held-out scenes, written as COCO's or ADE20K's and read again: the same figures, errors included."""
    if name == "scenes_detector":
        pytest.importorskip("faster_coco_eval")
        write, read = partial(write_coco, exact=True), coco_folder
    else:
        pytest.importorskip("segmentation_models_pytorch")
        write, read = write_ade20k, ade20k_folder
    model = load_model(name)
    size = data_config(model)["input_size"][1:]
    write(tmp_path, [scene(HELD_OUT, index, size) for index in range(COUNT)])
    expected = evaluate(model, scene_images(model, COUNT, batch=4)).to_dict()
    assert evaluate(model, read(tmp_path, model)).to_dict() == pytest.approx(expected, rel=1e-3)
    assert expected["n"] == COUNT and next(iter(expected.values())) > 40


@needs_tools
def test_the_command_line_names_a_damaged_annotation(tmp_path, capsys):
    file = write_json(tmp_path, changed(write_coco(tmp_path), ("annotations", 3), category_id=5))
    assert main(["evaluate", "scenes_detector", "--data", str(tmp_path)]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert file.name in message and "annotations[3]" in message and "category 5" in message


@needs_tools
@pytest.mark.parametrize(
    "option", [("--class-index", "none.json"), ("--crop-pct", "0.9"), ("--interpolation", "bicubic")]
)
@pytest.mark.parametrize("name", ["scenes_detector", "scenes_segmenter"])
def test_options_for_the_images_of_classifiers_are_refused_not_ignored(name, option, capsys):
    assert main(["evaluate", name, "--data", "scenes:1", *option]) == 1
    assert option[0] in capsys.readouterr().err


@needs_tools
@pytest.mark.parametrize(
    ("model", "data", "kind"),
    [
        ("cifar10_vit", "scenes", "detectors"),
        ("cifar10_vit", "scenes:9", "detectors"),
        ("scenes_detector", "cifar10-demo", "CIFAR-10"),
    ],
)
def test_packaged_images_say_what_they_are_for(model, data, kind, capsys):
    assert main(["evaluate", model, "--data", data]) == 1
    assert kind in capsys.readouterr().err
