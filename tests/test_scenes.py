"""The procedural data set: the same everywhere, and truthful about what is drawn."""

import numpy as np
import pytest
import torch

from maskaq.cli.arguments import DataOptions
from maskaq.cli.evaluation import EvaluationImages
from maskaq.errors import DataError
from maskaq.models.hosts import embedded_model
from maskaq.randomness import image_keys
from maskaq.zoo.scenes import CLASSES, MOST, boxes_of_masks, draw, scene

SIZE = (64, 80)


@pytest.fixture(scope="module")
def scenes():
    return [scene(3, index, SIZE) for index in range(40)]


def test_a_seed_and_a_number_give_one_scene(scenes):
    again = scene(3, 7, SIZE)
    assert torch.equal(again.image, scenes[7].image)
    assert torch.equal(again.masks, scenes[7].masks)
    assert torch.equal(again.labels, scenes[7].labels)
    assert not torch.equal(scenes[7].image, scenes[8].image)
    assert not torch.equal(scenes[7].image, scene(4, 7, SIZE).image)


def test_a_batch_draws_the_same_scenes(scenes):
    images, masks, labels = draw(image_keys(3, torch.arange(40)), SIZE)
    for number, alone in enumerate(scenes):
        there = labels[number] >= 0
        assert torch.equal(labels[number, there], alone.labels)
        differ = (masks[number, there] != alone.masks).float().mean()
        assert differ < 1e-3, "rounding may move single pixels of an edge"
        assert (images[number] * 255 - alone.image).abs().median() <= 0.5


def test_scenes_have_shapes_as_promised(scenes):
    for found in scenes:
        assert found.image.shape == (3, *SIZE)
        assert found.image.dtype == torch.uint8
        assert found.masks.shape == (len(found.labels), *SIZE)
        assert found.masks.dtype == torch.bool
        assert found.labels.dtype == torch.int64
        assert 1 <= len(found.labels) <= MOST
    assert {len(found.labels) for found in scenes} == set(range(1, MOST + 1))
    assert set(torch.cat([found.labels for found in scenes]).tolist()) == set(range(len(CLASSES)))


def test_visible_parts_do_not_overlap_and_are_not_tiny(scenes):
    for found in scenes:
        assert (found.masks.sum(dim=0) <= 1).all()
        assert (found.masks.sum(dim=(1, 2)) >= 0.002 * SIZE[0] * SIZE[1]).all()


def test_objects_cover_each_other():
    """An object behind others shows less than it would alone."""
    shared = 0
    for index in range(30):
        masks = scene(5, index, SIZE).masks
        boxes = boxes_of_masks(masks)
        for i in range(len(masks)):
            for j in range(i):
                low = torch.maximum(boxes[i, :2], boxes[j, :2])
                high = torch.minimum(boxes[i, 2:], boxes[j, 2:])
                shared += bool((high > low).all())
    assert shared >= 10


def test_boxes_are_tight(scenes):
    for found in scenes[:10]:
        for box, mask in zip(found.boxes.tolist(), found.masks.numpy(), strict=True):
            rows, columns = np.nonzero(mask)
            assert box == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_an_empty_mask_has_an_empty_box():
    assert boxes_of_masks(torch.zeros(2, 5, 7, dtype=torch.bool)).tolist() == [[0, 0, 0, 0]] * 2


def test_the_class_map_repeats_the_masks(scenes):
    for found in scenes[:10]:
        expected = torch.zeros(SIZE, dtype=torch.int64)
        for mask, label in zip(found.masks, found.labels, strict=True):
            expected[mask] = 1 + label
        assert torch.equal(found.semantic, expected)


def test_an_object_is_seen_against_its_ground(scenes):
    """Its mean colour differs from that of the pixels just around it, mostly."""
    differ = []
    for found in scenes:
        for mask in found.masks:
            spread = torch.nn.functional.max_pool2d(mask[None].float(), 7, 1, 3)[0] > 0
            around = spread & ~found.masks.any(dim=0)
            if around.sum() > 20:
                pixels = found.image.float()
                differ.append((pixels[:, mask].mean(dim=1) - pixels[:, around].mean(dim=1)).abs().max())
    assert torch.stack(differ).quantile(0.1) > 8


def test_as_many_scenes_are_drawn_as_data_asks_for():
    model = embedded_model("scenes_segmenter")
    assert len(EvaluationImages(DataOptions("scenes:3"))(model).dataset) == 3
    assert len(EvaluationImages(DataOptions("scenes"))(model).dataset) == 500
    for wrong in ("scenes:0", "scenes:-1", "scenes:many"):
        with pytest.raises(DataError, match="number of scenes"):
            EvaluationImages(DataOptions(wrong))(model)
