"""Mask R-CNN on timm's Swin: every part against torchvision or a plain loop."""

import json
import math

import detector_loss as loss_module
import pytest
import torch
from detector_loss import Objects, detection_losses
from timm.models.swin_transformer import SwinTransformerBlock
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.ops import box_iou, nms, roi_align
from torchvision.ops.poolers import LevelMapper

from maskaq.boxes import ROI_UNITS, decoded, encoded
from maskaq.errors import ModelError
from maskaq.models import data_config
from maskaq.models.detector import RATIOS, STRIDES, mask_rcnn, paste
from maskaq.models.windows import WindowBlock
from maskaq.randomness import image_keys
from maskaq.zoo.scenes import CLASSES, boxes_of_masks, draw

SMALL = dict(
    backbone="swin_tiny_patch4_window7_224",
    num_classes=len(CLASSES),
    img_size=64,
    embed_dim=12,
    depths=(1, 2, 1, 1),
    num_heads=(1, 2, 2, 2),
    window_size=4,
    width=16,
    box_width=24,
    mask_width=12,
    mask_layers=1,
    anchor_scale=5,
    finest=14,
    proposals=30,
    per_level=3,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return mask_rcnn(**SMALL).requires_grad_(False)


def random_boxes(*shape: int, side: float = 60) -> torch.Tensor:
    corners = side * torch.rand(*shape, 2, 2)
    return torch.cat([corners.amin(dim=-2), corners.amax(dim=-2) + 1], dim=-1)


# ---- windows


def block(size: tuple[int, int], shift: int) -> SwinTransformerBlock:
    torch.manual_seed(1)
    return SwinTransformerBlock(
        8, size, num_heads=2, window_size=4, shift_size=shift, always_partition=True, dynamic_mask=True
    ).eval()


@pytest.mark.parametrize("shift", [0, 2])
def test_a_window_block_is_timms_where_windows_fit(shift):
    timms = block((8, 12), shift)
    x = torch.randn(2, 8, 12, 8)
    expected = timms(x)
    timms.__class__ = WindowBlock
    torch.testing.assert_close(timms(x), expected)


def test_no_window_joins_opposite_edges():
    """A shifted map is rolled around, but what came from the other edge is not attended to."""
    ours = block((7, 10), shift=2)
    ours.__class__ = WindowBlock
    x = torch.randn(1, 7, 10, 8)
    changed = x.clone()
    changed[:, :2, :, :] += 3.0  # the top rows
    differs = (ours(changed) - ours(x)).abs().amax(dim=(0, 2, 3)) > 1e-6
    assert differs[:2].all()
    assert not differs[4:].any()


@pytest.mark.parametrize("shift", [0, 2])
def test_merging_windows_undoes_cutting_them(shift):
    ours = block((7, 10), shift)
    ours.__class__ = WindowBlock
    x = torch.randn(2, 7, 10, 8)
    assert torch.equal(ours.merged(ours.windows(x), 7, 10), x)


def test_windows_are_padded_before_they_are_shifted():
    """The first window of a shifted map starts at the shift, and the last row of windows holds the padding."""
    ours = block((7, 8), shift=2)
    ours.__class__ = WindowBlock
    rows = torch.arange(1, 8.0)[None, :, None, None].expand(1, 7, 8, 1)
    windows = ours.windows(rows)[..., 0]  # (4, 4, 4)
    assert windows[0, :, 0].tolist() == [3, 4, 5, 6]
    assert windows[2, :, 0].tolist() == [7, 0, 1, 2]


def test_a_backbone_that_is_no_swin_is_refused():
    with pytest.raises(ModelError, match="Swin"):
        mask_rcnn("vit_tiny_patch16_224", 3, 64)


def test_an_argument_that_nobody_takes_is_refused():
    with pytest.raises(ModelError, match="depthz"):
        mask_rcnn(**SMALL, depthz=3)


# ---- boxes


def test_anchors_are_centred_on_multiples_of_the_stride_and_not_rounded(model):
    features = model.features(torch.randn(1, 3, 64, 96))
    expected = []
    for feature, stride in zip(features, STRIDES, strict=True):
        for y in range(feature.shape[2]):
            for x in range(feature.shape[3]):
                for ratio in RATIOS:
                    width, height = 5 * stride / math.sqrt(ratio), 5 * stride * math.sqrt(ratio)
                    centre = (x * stride, y * stride)
                    expected.append([centre[0] - width / 2, centre[1] - height / 2])
                    expected[-1] += [centre[0] + width / 2, centre[1] + height / 2]
    torch.testing.assert_close(model.anchors(features), torch.tensor(expected))


@pytest.mark.parametrize(("units", "weights"), [((1, 1), (1.0, 1.0, 1.0, 1.0)), (ROI_UNITS, (10.0, 10.0, 5.0, 5.0))])
def test_boxes_are_coded_as_torchvision_codes_them(units, weights):
    boxes, wanted, deltas = random_boxes(50), random_boxes(50), torch.randn(50, 4)
    coder = BoxCoder(weights)
    torch.testing.assert_close(encoded(boxes, wanted, units), coder.encode_single(wanted, boxes), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(decoded(boxes, deltas, units), coder.decode_single(deltas, boxes), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(decoded(boxes, encoded(boxes, wanted, units), units), wanted, rtol=1e-4, atol=1e-3)


def test_a_wild_delta_gives_a_finite_box():
    box = torch.tensor([0.0, 0, 10, 10])
    wild = decoded(box, torch.tensor([0, 0, 500.0, -500.0]))
    assert wild.isfinite().all()
    torch.testing.assert_close(wild[2:] - wild[:2], torch.tensor([625.0, 0.16]))


def test_top_boxes_are_the_best_of_each_level(model):
    size = (64, 40)
    features = model.features(torch.randn(2, 3, *size))
    objectness, deltas = model.rpn(features)
    anchors = model.anchors(features)
    found = model.top_boxes(objectness, deltas, anchors, size, per_level=5)
    lengths = [3 * f.shape[2] * f.shape[3] for f in features]
    assert lengths[-1] == 3, "fewer than asked for"
    for image in range(2):
        start, expected = 0, []
        for length in lengths:
            order = sorted(range(start, start + length), key=lambda a: -objectness[image, a].item())[:5]
            expected += [order[i % len(order)] for i in range(5)]
            start += length
        boxes = decoded(anchors[expected], deltas[image, expected])
        boxes[:, 0::2] = boxes[:, 0::2].clamp(0, size[1])
        boxes[:, 1::2] = boxes[:, 1::2].clamp(0, size[0])
        torch.testing.assert_close(found[image], boxes)


# ---- heads


def test_a_box_is_pooled_from_the_level_that_fits_it(model):
    features = [torch.randn(2, 6, 192 // stride, 192 // stride) for stride in STRIDES]
    boxes = random_boxes(2, 30, side=190)
    pooled = model.pool(features, boxes, 7).unflatten(0, (2, 30))
    levels = LevelMapper(0, 3, canonical_scale=14, canonical_level=0)([boxes.flatten(0, 1)]).view(2, 30)
    assert len(levels.unique()) == 4
    for image in range(2):
        for number in range(30):
            level = int(levels[image, number])
            expected = roi_align(
                features[level][image : image + 1],
                [boxes[image, number : number + 1]],
                7,
                1 / STRIDES[level],
                sampling_ratio=0,
                aligned=True,
            )
            torch.testing.assert_close(pooled[image, number], expected[0])


def test_an_empty_box_is_pooled_as_zero(model):
    features = [torch.randn(1, 4, 64 // stride, 64 // stride) for stride in STRIDES]
    assert not model.pool(features, torch.tensor([[[0.0, 0, 0, 0], [5, 5, 5, 9]]]), 7).any()


def test_forward_gives_what_its_parts_give(model):
    images = torch.randn(2, 3, 64, 64)
    outputs = model(images)
    features = model.features(images)
    expected = {f"pyramid_{i}": feature for i, feature in enumerate(features)}
    expected["objectness"], expected["deltas"] = model.rpn(features)
    expected["boxes"] = model.top_boxes(expected["objectness"], expected["deltas"], model.anchors(features), (64, 64))
    expected |= model.heads(features, expected["boxes"])
    assert list(outputs) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(outputs[key], value)
    assert outputs["boxes"].shape == (2, 15, 4)
    assert outputs["class_logits"].shape == (2, 15, 7)
    assert outputs["box_deltas"].shape == (2, 15, 6, 4)
    assert outputs["mask_logits"].shape == (2, 15, 6, 28, 28)


def test_given_boxes_reach_the_heads(model):
    images, boxes = torch.randn(2, 3, 64, 64), random_boxes(2, 4)
    outputs = model(images, boxes)
    assert torch.equal(outputs["boxes"], boxes)
    torch.testing.assert_close(outputs["class_logits"], model.heads(model.features(images), boxes)["class_logits"])


@pytest.mark.parametrize("size", [(64, 64), (40, 97), (33, 31), (128, 64)])
def test_images_of_any_size_are_taken(model, size):
    images = torch.randn(1, 3, *size)
    outputs = model(images)
    for level, stride in enumerate(STRIDES):
        sides = [math.ceil((side + -side % 32) / stride) for side in size]
        assert outputs[f"pyramid_{level}"].shape[2:] == tuple(sides)
    assert outputs["objectness"].shape[1] == 3 * sum(outputs[f"pyramid_{i}"].shape[2:].numel() for i in range(5))
    (found,) = model.detect(images)
    assert found["masks"].shape == (len(found["boxes"]), *size)
    assert (found["boxes"] >= 0).all()
    assert (found["boxes"] <= torch.tensor([size[1], size[0]] * 2)).all()


def test_an_image_does_not_depend_on_its_batch(model):
    images = torch.randn(3, 3, 64, 64)
    together, alone = model(images), model(images[1:2])
    for key, value in alone.items():
        torch.testing.assert_close(together[key][1:2], value, rtol=1e-4, atol=1e-4)


# ---- detect


class Told:
    """A detector whose proposals and heads say what they are told: so what `detect` makes of it is known."""

    def __init__(self, boxes, logits, masks):
        self.model = mask_rcnn(**SMALL)
        self.model.propose = lambda *_: boxes[None]
        self.model.classify = lambda features, rois: (logits[None], torch.zeros(1, len(boxes), 6, 4))
        self.model.segment = lambda features, rois: masks(rois)


def test_detect_keeps_the_best_of_overlapping_boxes_of_a_class():
    boxes = torch.tensor([[8.0, 8, 24, 24], [9, 8, 25, 24], [40, 40, 56, 48], [8, 8, 24, 24]])
    logits = torch.full((4, 7), -20.0)
    logits[0, 3], logits[0, 0] = 2.0, 0.0  # class 2
    logits[1, 3], logits[1, 0] = 1.0, 0.0  # the same, worse
    logits[2, 1], logits[2, 0] = 0.0, 1.0  # class 0, with a lower score
    logits[3, 0] = 5.0  # background

    def masks(rois):
        left = torch.where(torch.arange(28) < 14, 8.0, -8.0)
        return left.expand(1, rois.shape[1], 6, 28, 28)

    (found,) = Told(boxes, logits, masks).model.detect(torch.zeros(1, 3, 64, 64))
    assert found["labels"].tolist() == [2, 0]
    torch.testing.assert_close(found["boxes"], boxes[[0, 2]])
    torch.testing.assert_close(found["scores"], torch.tensor([2.0, -1.0]).sigmoid())
    expected = torch.zeros(2, 64, 64, dtype=torch.bool)
    expected[0, 8:24, 8:16] = True
    expected[1, 40:48, 40:48] = True
    assert torch.equal(found["masks"], expected)


def test_boxes_and_masks_are_those_of_the_image_before_it_was_resized():
    logits = torch.tensor([[0.0, 4, -9, -9, -9, -9, -9]])
    told = Told(torch.tensor([[8.0, 16, 24, 32]]), logits, lambda rois: torch.full((1, rois.shape[1], 6, 28, 28), 8.0))
    (found,) = told.model.detect(torch.zeros(1, 3, 64, 64), sizes=[(32, 128)])
    assert found["boxes"].tolist() == [[16, 8, 48, 16]]
    expected = torch.zeros(1, 32, 128, dtype=torch.bool)
    expected[0, 8:16, 16:48] = True
    assert torch.equal(found["masks"], expected)


def test_nothing_found_is_no_error():
    logits = torch.tensor([[20.0, 0, 0, 0, 0, 0, 0]])
    told = Told(torch.tensor([[8.0, 8, 24, 24]]), logits, lambda rois: torch.zeros(1, rois.shape[1], 6, 28, 28))
    (found,) = told.model.detect(torch.zeros(1, 3, 64, 64))
    assert {key: len(value) for key, value in found.items()} == dict(boxes=0, labels=0, scores=0, masks=0)
    assert found["masks"].shape == (0, 64, 64)


def test_proposals_are_the_best_boxes_without_overlaps(model):
    size = (64, 64)
    features = model.features(torch.randn(1, 3, *size))
    objectness, deltas = model.rpn(features)
    objectness = torch.randn_like(objectness)
    anchors = model.anchors(features)
    (found,) = model.propose(objectness, deltas, anchors, size)
    kept, start = [], 0
    for feature in features:
        length = 3 * feature.shape[2] * feature.shape[3]
        order = sorted(range(start, start + length), key=lambda a: -objectness[0, a].item())[: model.proposals]
        boxes = model.boxes_of(anchors[order], deltas[0, order], size)
        kept += [(objectness[0, order[i]].item(), boxes[i]) for i in nms(boxes, objectness[0, order], 0.7).tolist()]
        start += length
    kept.sort(key=lambda item: -item[0])
    torch.testing.assert_close(found, torch.stack([box for _, box in kept[: model.proposals]]))


def test_of_equal_scores_the_first_are_chosen_as_runtimes_do(model):
    """A model of few bits has few scores: the file of a detector chooses the same boxes only if both break ties so."""
    size = (64, 64)
    features = model.features(torch.randn(1, 3, *size))
    objectness, deltas = model.rpn(features)
    objectness = (2 * torch.rand(objectness.shape, generator=torch.Generator().manual_seed(0))).floor()
    anchors = model.anchors(features)
    distinct = objectness - 1e-4 * torch.arange(objectness.shape[1])  # the same order, and no two are equal
    expected = model.propose(distinct, deltas, anchors, size)
    assert torch.equal(model.propose(objectness, deltas, anchors, size), expected)


def test_a_mask_is_pasted_over_its_box():
    mask = torch.zeros(1, 4, 4)
    mask[0, :2] = 1
    pasted = paste(mask, torch.tensor([[2.0, 4, 10, 12]]), (16, 12))[0]
    expected = torch.zeros(16, 12, dtype=torch.bool)
    expected[4:8, 2:10] = True
    assert torch.equal(pasted >= 0.5, expected)
    assert (pasted[5:7, 3:9] == 1).all(), "away from edges nothing is blurred"


# ---- building


def test_the_recorded_architecture_builds_the_model_again(model):
    record = json.loads(json.dumps(model.architecture))
    assert record["name"] == "mask_rcnn"
    again = mask_rcnn(**record["args"])
    again.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 64, 64)
    for key, value in model(images).items():
        assert torch.equal(again(images)[key], value)


def test_images_are_prepared_as_the_record_says(model):
    config = data_config(model)
    assert config["input_size"] == (3, 64, 64)
    assert len(config["mean"]) == len(config["std"]) == 3


def test_a_swin_tiny_has_the_layers_of_mmdetections():
    full = mask_rcnn("swin_tiny_patch4_window7_224", 80, (800, 1344))
    count = sum(parameter.numel() for parameter in full.parameters())
    assert count == 47_794_602
    shapes = {name: tuple(parameter.shape) for name, parameter in full.named_parameters()}
    assert shapes["box_predictor.cls_score.weight"] == (81, 1024)
    assert shapes["box_predictor.bbox_pred.weight"] == (320, 1024)
    assert shapes["mask_predictor.mask_fcn_logits.weight"] == (80, 256, 1, 1)


# ---- losses


@pytest.fixture(scope="module")
def batch():
    keys = image_keys(0, torch.arange(4))
    images, masks, labels = draw(keys, (64, 64))
    return keys, images, Objects(boxes_of_masks(masks), labels, masks)


def test_losses_are_one_number_for_each_image_and_repeatable(model, batch):
    keys, images, objects = batch
    losses = detection_losses(model, images, objects, keys)
    assert set(losses) == {"objectness", "proposal", "class", "box", "mask"}
    again = detection_losses(model, images, objects, keys)
    for key, value in losses.items():
        assert value.shape == (4,)
        assert (value > 0).all()
        assert torch.equal(value, again[key])


def test_losses_of_an_image_do_not_depend_on_the_others(model, batch):
    keys, images, objects = batch
    part = Objects(objects.boxes[2:3], objects.labels[2:3], objects.masks[2:3])
    together = detection_losses(model, images, objects, keys)
    for key, value in detection_losses(model, images[2:3], part, keys[2:3]).items():
        torch.testing.assert_close(together[key][2:3], value, rtol=1e-3, atol=1e-4)


def test_an_image_without_objects_has_no_box_to_learn(model, batch):
    keys, images, objects = batch
    none = Objects(torch.zeros_like(objects.boxes), torch.full_like(objects.labels, -1), objects.masks & False)
    losses = detection_losses(model, images, none, keys)
    for key in ("proposal", "box", "mask"):
        assert not losses[key].any()
    for key in ("objectness", "class"):
        assert (losses[key] > 0).all()


def test_anchors_are_matched_as_torchvision_matches_them(model, batch, monkeypatch):
    """With every anchor sampled, the objectness loss is that of torchvision's labels."""
    monkeypatch.setattr(loss_module, "_ANCHORS", (10**9, 10**9))
    keys, images, objects = batch
    features = model.features(images)
    objectness, _ = model.rpn(features)
    losses = detection_losses(model, images, objects, keys)
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    for image in range(len(keys)):
        boxes = objects.boxes[image, objects.labels[image] >= 0]
        matched = matcher(box_iou(boxes, model.anchors(features)))
        sampled = matched != Matcher.BETWEEN_THRESHOLDS
        expected = torch.nn.functional.binary_cross_entropy_with_logits(
            objectness[image, sampled], (matched[sampled] >= 0).float()
        )
        torch.testing.assert_close(losses["objectness"][image], expected)


def test_a_perfect_mask_costs_nothing(model, batch, monkeypatch):
    keys, images, objects = batch
    wanted = {}

    def segment(features, boxes):
        logits = torch.zeros(*boxes.shape[:2], 6, 28, 28)
        best = loss_module._overlaps(boxes, objects).argmax(dim=2)
        for image in range(len(boxes)):
            rois = [boxes[image]]
            masks = roi_align(objects.masks[image][None].float(), rois, 28, sampling_ratio=0, aligned=True)
            for roi, number in enumerate(best[image].tolist()):
                logits[image, roi] = torch.where(masks[roi, number] >= 0.5, 30.0, -30.0)
        wanted["called"] = True
        return logits

    monkeypatch.setattr(model, "segment", segment)
    losses = detection_losses(model, images, objects, keys)
    assert wanted["called"]
    assert (losses["mask"] < 1e-6).all()


@pytest.mark.slow
def test_training_lowers_the_losses(batch):
    keys, images, objects = batch
    torch.manual_seed(0)
    learner = mask_rcnn(**SMALL)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=2e-3)
    totals = []
    for _ in range(25):
        loss = sum(detection_losses(learner, images, objects, keys).values()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals.append(loss.item())
    assert totals[-1] < 0.6 * totals[0]
