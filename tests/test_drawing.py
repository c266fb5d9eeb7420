"""Drawings show what was found where it was found, large enough to see."""

import torch

from maskaq.tasks.drawing import colour, size_of_drawing, with_classes, with_objects

GREY = torch.full((1, 3, 64, 32), 0.5)


def painted(number):
    return torch.tensor(colour(number), dtype=torch.float32)


def test_a_drawing_keeps_the_ratio_of_its_image_and_has_256_pixels_in_its_longer_side():
    assert size_of_drawing((64, 32)) == (256, 128)
    assert size_of_drawing((800, 1333)) == (154, 256)
    assert size_of_drawing((1, 1000)) == (1, 256)


def test_every_pixel_is_under_the_colour_of_its_class():
    classes = torch.zeros(1, 256, 128, dtype=torch.long)
    classes[:, 100:] = 3
    drawn = with_classes(GREY, classes)
    assert drawn.shape == (1, 3, 256, 128) and drawn.dtype == torch.uint8
    for rows, number in ((slice(0, 100), 0), (slice(100, None), 3)):
        expected = (0.5 * 127.5 + 0.5 * painted(number))[:, None, None]
        assert (drawn[0, :, rows].float() - expected).abs().max() <= 1


def test_the_background_of_a_class_map_is_left_as_it_is():
    classes = torch.zeros(1, 256, 128, dtype=torch.long)
    classes[:, 100:] = 1
    drawn = with_classes(GREY, classes, ["background", "disc"])
    assert drawn[0, :, :100].unique().tolist() == [128]
    assert torch.equal(drawn[0, :, 100:], with_classes(GREY, classes)[0, :, 100:])


def test_boxes_and_masks_of_sure_objects_are_drawn_in_their_colours_and_nothing_else_changes():
    masks = torch.zeros(2, 256, 128, dtype=torch.bool)
    masks[0, 60:80, 40:60] = True
    masks[1, 150:200, 10:100] = True
    boxes = torch.tensor([[30.0, 50.0, 70.0, 90.0], [10.0, 150.0, 100.0, 200.0]])
    found = {"boxes": boxes, "masks": masks, "labels": torch.tensor([2, 1]), "scores": torch.tensor([0.9, 0.4])}
    drawn = with_objects(GREY, [found], (256, 128), 0.5)[0].float()
    assert torch.equal(drawn[:, 70, 30], painted(2)) and torch.equal(drawn[:, 70, 31], painted(2))
    assert (drawn[:, 70, 50] - (0.5 * 127.5 + 0.5 * painted(2))).abs().max() <= 1
    outside = torch.ones(256, 128, dtype=torch.bool)
    outside[48:93, 28:73] = False
    assert drawn[:, outside].unique().tolist() == [128]
