"""Layouts: what the images of detectors and segmenters are made for. They follow from an image's key alone."""

import pytest
import torch

from maskaq.boxes import iou
from maskaq.losses.layouts import ANYWHERE, MOST_OBJECTS, MOST_REGIONS, NEAR, class_maps, ellipses, in_ellipse, objects
from maskaq.models import expose, geometry
from maskaq.randomness import fold, image_keys
from maskaq.tasks import TASKS

SIZE = (48, 80)  # height and width
KEYS = fold(image_keys(0, torch.arange(64)), "layout")
MAKERS = {"maps": class_maps, "objects": objects}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_layout_is_the_same_whatever_batch_it_is_drawn_in(make):
    whole = make(KEYS, 7, SIZE)
    for name, values in whole.items():
        alone = torch.cat([make(key, 7, SIZE)[name] for key in KEYS.split(1)])
        pairs = torch.cat([make(key.flip(0), 7, SIZE)[name].flip(0) for key in KEYS.split(2)])
        assert torch.equal(values, alone) and torch.equal(values, pairs), name
    assert not torch.equal(*(values for values in next(iter(whole.values()))[:2]))


def test_a_class_map_has_two_to_five_classes_of_the_model_and_the_others_are_foreground():
    found = class_maps(KEYS, 150, SIZE)
    assert found["classes"].shape == found["foreground"].shape == (64, *SIZE)
    assert found["classes"].min() >= 0 and found["classes"].max() < 150
    counts = [len(classes.unique()) for classes in found["classes"]]
    assert min(counts) >= 2 and max(counts) == MOST_REGIONS and len(set(counts)) == 4
    for classes, foreground in zip(found["classes"], found["foreground"], strict=True):
        commonest = classes.flatten().mode().values
        assert torch.equal(foreground.bool(), classes != commonest)
    neighbours = (found["classes"][:, :, 1:] == found["classes"][:, :, :-1]).float().mean()
    assert neighbours > 0.9  # smooth


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_a_model_of_few_classes_has_maps_of_these(classes):
    found = class_maps(KEYS, classes, SIZE)["classes"]
    assert set(found.unique().tolist()) == set(range(classes))


def test_objects_lie_in_the_image_and_are_one_to_eight():
    found = objects(KEYS, 6, SIZE)
    left, top, right, bottom = found["boxes"].unbind(-1)
    assert found["boxes"].shape == (64, MOST_OBJECTS + NEAR + ANYWHERE, 4) and torch.equal(
        found["boxes"][:, :MOST_OBJECTS], found["objects"]
    )
    assert (left >= 0).all() and (top >= 0).all() and (right <= SIZE[1]).all() and (bottom <= SIZE[0]).all()
    assert (right - left > 1).all() and (bottom - top > 1).all()
    assert set(found["present"].sum(dim=1).tolist()) == set(range(1, MOST_OBJECTS + 1))
    assert set(found["labels"].flatten().tolist()) == set(range(6))
    sides = (found["objects"][..., 2:] - found["objects"][..., :2]) / torch.tensor([80.0, 48.0])
    assert 0.149 < sides.min() < 0.2 and 0.5 < sides.max() < 0.601


def test_some_boxes_show_their_object_and_some_show_none():
    found = objects(KEYS, 6, SIZE)
    overlap = iou(found["boxes"], found["objects"])  # (B, 24, 8)
    near = overlap[:, 8:16].diagonal(dim1=1, dim2=2)
    assert (near > 0.15).all() and 0.3 < (near >= 0.5).float().mean() < 0.9
    assert (overlap[:, 16:].amax(dim=2) < 0.5).float().mean() > 0.5


def test_the_foreground_is_the_union_of_the_ellipses_that_are_present():
    found = objects(KEYS[:4], 6, SIZE)
    for number in range(4):
        inside = torch.zeros(SIZE)
        boxes, present = (found[name][number].tolist() for name in ("objects", "present"))
        for (left, top, right, bottom), there in zip(boxes, present, strict=True):
            for row in range(SIZE[0]):
                for column in range(SIZE[1]):
                    x = (column + 0.5 - (left + right) / 2) / ((right - left) / 2)
                    y = (row + 0.5 - (top + bottom) / 2) / ((bottom - top) / 2)
                    if there and x * x + y * y <= 1:
                        inside[row, column] = 1
        assert (inside != found["foreground"][number]).sum() <= 1  # a place on the edge may be rounded
    none = ellipses(found["objects"], torch.zeros_like(found["present"]), SIZE)
    assert not none.any()
    assert not in_ellipse(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0, 1.0, 1.0]])).any()  # an empty box


# ---- what the teacher says of them


def test_objects_that_the_teacher_does_not_see_are_given_up_but_never_all():
    task = TASKS["detection"]
    layout = objects(KEYS[:3], 6, SIZE)
    layout["present"] = torch.tensor([[1.0, 1.0, 0.0, 0, 0, 0, 0, 0]]).repeat(3, 1)
    logits = torch.zeros(3, MOST_OBJECTS + NEAR + ANYWHERE, 7)
    logits[..., 0] = 20.0  # background
    for image, seen in ((0, 1), (1, 2)):  # the second object; one that is not there
        logits[image, seen, layout["labels"][image, seen] + 1] = 40.0
    found = task.relabelled(layout, {"class_logits": logits})
    assert found["present"].tolist() == [[0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert torch.equal(found["foreground"], ellipses(layout["objects"], found["present"], SIZE))
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in layout.items()}


def test_pixels_that_the_teacher_is_sure_of_get_its_class():
    task = TASKS["segmentation"]
    layout = class_maps(KEYS[:1], 7, (2, 2))
    layout["classes"].fill_(3)
    logits = torch.zeros(1, 7, 2, 2)
    logits[0, 5, 0, 0] = 10.0
    logits[0, 5, 1, 1] = 0.5  # likeliest, and not likely
    assert task.relabelled(layout, {"logits": logits})["classes"].tolist() == [[[5, 3], [3, 3]]]


@pytest.mark.parametrize("kind", ["segmentation", "detection"])
def test_a_task_makes_layouts_of_its_models_classes_and_size(kind):
    from helpers import DENSE

    spec = geometry(expose(DENSE[kind]()))
    found = TASKS[kind].layouts(KEYS[:2], spec)
    assert found["foreground"].shape == (2, *spec.image_size)
    assert found["classes" if kind == "segmentation" else "labels"].max() < spec.classes
    assert TASKS[kind].targets(torch.arange(3), spec.classes).tolist() == [-1, -1, -1]
