"""Checkpoints of mmdetection and mmsegmentation: nothing missing, nothing left over, and the same numbers."""

import importlib
import json

import openmmlab_models as mm
import pytest
import safetensors.torch
import torch
from openmmlab_models import SMALL, TINY
from torch.nn import functional as F

from maskaq.errors import CheckpointError, ModelError
from maskaq.models import hosts, openmmlab, task_name
from maskaq.models.detector import mask_rcnn
from maskaq.models.load import architecture_of, load_model, load_shape, rebuild

SWIN = "swin_tiny_patch4_window7_224"
IMAGE = (61, 94)  # sides that no patch, window or stride divides


def arguments(of):
    return {"embed_dim": of["embed"], "depths": of["depths"], "num_heads": of["heads"]}


def images(size=IMAGE):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def close(found, expected):
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4), (found - expected).abs().max()


def detector(state, names=lambda state: state):
    model = mask_rcnn(SWIN, 5, 64, width=16, box_width=24, mask_width=16, **arguments(SMALL))
    model.load_state_dict(openmmlab.converted(names(state)))
    return model


@pytest.fixture(scope="module")
def small():
    return mm.filled(mm.mask_rcnn_shapes(**SMALL, classes=5, width=16, fc=24))


def fits(model, converted):
    own = model.state_dict()
    assert own.keys() == converted.keys()
    assert [key for key in own if own[key].shape != converted[key].shape] == []


def on_meta(shapes):
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


@pytest.mark.parametrize("names", [dict, mm.authors_names], ids=["mmdetection", "the authors' repository"])
def test_a_mask_rcnn_of_swin_tiny_fits_with_nothing_missing_and_nothing_left_over(names):
    state = names(on_meta(mm.mask_rcnn_shapes(**TINY)))
    assert openmmlab.architecture_in(state) == "mask_rcnn"
    assert openmmlab.classes_in(state) == 80
    with torch.device("meta"):
        fits(mask_rcnn(SWIN, 80, 800), openmmlab.converted(state))


def test_an_upernet_of_swin_tiny_fits_and_only_its_auxiliary_head_is_dropped():
    pytest.importorskip("segmentation_models_pytorch")
    from maskaq.models.segmenter import upernet

    state = on_meta(mm.upernet_shapes(**TINY))
    assert openmmlab.architecture_in(state) == "upernet"
    assert openmmlab.classes_in(state) == 150
    converted = openmmlab.converted(state)
    with torch.device("meta"):
        fits(upernet(SWIN, 150, 512), converted)
    kept = {key for key in state if not key.startswith("auxiliary_head.") and not key.endswith("position_index")}
    assert len(kept) == len(converted)


def test_weights_that_come_twice_or_have_no_rows_are_refused():
    state = mm.filled(mm.mask_rcnn_shapes(**SMALL, classes=5, width=16, fc=24))
    authors = mm.authors_names(state)
    with pytest.raises(CheckpointError, match="two weights"):
        openmmlab.converted({**state, **authors})
    with pytest.raises(CheckpointError, match="downsample"):
        openmmlab.converted({**state, "backbone.stages.0.downsample.norm.weight": torch.zeros(33)})
    for key in ("roi_head.bbox_head.fc_cls.weight",):
        for wrong in (torch.zeros(()), torch.zeros(0, 24)):
            with pytest.raises(CheckpointError, match="fc_cls"):
                openmmlab.classes_in({**state, key: wrong})


def test_other_checkpoints_are_not_taken_for_theirs():
    assert openmmlab.architecture_in({}) == ""
    assert openmmlab.architecture_in({"backbone.layer1.0.conv1.weight": torch.zeros(1)}) == ""
    model = mask_rcnn(SWIN, 5, 64, width=16, box_width=24, mask_width=16, **arguments(SMALL))
    assert openmmlab.architecture_in(model.state_dict()) == ""


def test_patches_are_sorted_from_unfolds_order_into_timms():
    """Tokens that say which channel of which patch they are: the sorted weights meet the same ones."""
    from timm.models.swin_transformer import PatchMerging

    state = mm.filled({"d.norm.weight": (12,), "d.norm.bias": (12,), "d.reduction.weight": (6, 12)})
    x = torch.randn(2, 5, 7, 3, generator=torch.Generator().manual_seed(0))
    expected = mm.merged(state, "d", x)
    merging = PatchMerging(3)
    plain = {key.removeprefix("d."): value for key, value in state.items()}
    merging.load_state_dict({key: openmmlab.by_patches(value) for key, value in plain.items()})
    assert torch.allclose(merging(x), expected, atol=1e-5)
    merging.load_state_dict(plain)  # the names alone fit too, and are wrong
    assert not torch.allclose(merging(x), expected, atol=0.1)


def test_the_bias_of_two_places_in_a_window_is_in_the_same_row_of_the_table():
    from timm.models.swin_transformer import get_relative_position_index

    for window in (3, 7, 12):
        assert torch.equal(mm.position_index(window), get_relative_position_index(window, window))


@pytest.mark.parametrize("names", [dict, mm.authors_names], ids=["mmdetection", "the authors' repository"])
@torch.no_grad()
def test_a_converted_detector_computes_the_same_pyramid_and_proposals(small, names):
    model = detector(small, names)
    padded = F.pad(images(), (0, -IMAGE[1] % 32, 0, -IMAGE[0] % 32))  # mmdetection's Pad(size_divisor=32)
    expected = mm.pyramid(small, mm.stages(small, padded, **SMALL))
    found = model.features(images())
    assert len(found) == 5
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    logits, deltas = model.rpn_head(found)
    for level in range(5):
        close(logits[level], mm.rpn(small, expected[level])[0])
        close(deltas[level], mm.rpn(small, expected[level])[1])


@torch.no_grad()
def test_a_converted_detector_classifies_moves_and_draws_the_same(small):
    model = detector(small)
    pooled = torch.randn(6, 16, 7, 7, generator=torch.Generator().manual_seed(2))
    scores, deltas = model.box_predictor(model.box_head(pooled))
    their_scores, their_deltas = mm.box_head(small, pooled)
    close(scores[:, 0], their_scores[:, 5])  # background
    close(scores[:, 1:], their_scores[:, :5])
    close(deltas, their_deltas)
    pooled = torch.randn(3, 16, 14, 14, generator=torch.Generator().manual_seed(3))
    close(model.mask_predictor(model.mask_head(pooled)), mm.mask_head(small, pooled))


@torch.no_grad()
def test_a_converted_segmenter_computes_the_same_logits():
    pytest.importorskip("segmentation_models_pytorch")
    from maskaq.models.segmenter import upernet

    state = mm.filled(mm.upernet_shapes(**SMALL, classes=6, width=16, auxiliary=8))
    model = upernet(SWIN, 6, 64, width=16, **arguments(SMALL))
    model.load_state_dict(openmmlab.converted(state))
    expected = mm.upernet_head(state, mm.stages(state, images(), **SMALL))
    close(model(images()), F.interpolate(expected, IMAGE, mode="bilinear", align_corners=False))


# --- by name ---------------------------------------------------------------------------------------------------

SMALL_HEADS = {"width": 16, "box_width": 24, "mask_width": 16}
LABELS = ("person", "bicycle", "car", "dog", "kite")


@pytest.fixture
def checkpoint(small, tmp_path):
    """A file as mmdetection publishes them."""
    path = tmp_path / "mask_rcnn_swin.pth"
    torch.save({"meta": {"epoch": 36, "CLASSES": LABELS}, "state_dict": small}, path)
    return path


@torch.no_grad()
def test_a_detector_is_loaded_by_name_with_the_classes_that_the_file_has(small, checkpoint):
    model = load_model(f"mask_rcnn_{SWIN}", checkpoint, {**arguments(SMALL), **SMALL_HEADS, "img_size": (64, 96)})
    close(model.features(images())[0], detector(small).features(images())[0])
    assert model.num_classes == 5 and task_name(model) == "detection"
    assert model.pretrained_cfg["label_names"] == list(LABELS)
    again = rebuild(json.loads(json.dumps(architecture_of(model, f"mask_rcnn_{SWIN}"))))
    again.load_state_dict(model.state_dict())
    close(again.features(images())[0], model.features(images())[0])


def test_a_detector_with_our_own_names_is_loaded_too(small, tmp_path):
    path = tmp_path / "own.safetensors"
    safetensors.torch.save_file({key: value.contiguous() for key, value in detector(small).state_dict().items()}, path)
    given = {**arguments(SMALL), **SMALL_HEADS, "num_classes": 5}
    loaded = load_model(f"mask_rcnn_{SWIN}", path, given)
    assert torch.equal(loaded.box_predictor.cls_score.weight, detector(small).box_predictor.cls_score.weight)


def test_a_name_alone_says_what_its_checkpoints_were_trained_for():
    with torch.device("meta"):
        model = load_shape(f"mask_rcnn_{SWIN}")
    assert model.num_classes == 80 and model.pretrained_cfg["input_size"] == (3, 800, 800)
    assert f"upernet_{SWIN}" in hosts.names()


def test_keys_that_no_checkpoint_of_theirs_has_are_named(small, tmp_path):
    path = tmp_path / "odd.pth"
    odd = {key.replace("rpn_conv", "rpn_convs.0"): value for key, value in small.items()}
    torch.save({"state_dict": odd}, path)
    with pytest.raises(CheckpointError, match=r"(?s)rpn_head\.conv\.0\.0\.weight.*rpn_head\.rpn_convs\.0\.weight"):
        load_model(f"mask_rcnn_{SWIN}", path, {**arguments(SMALL), **SMALL_HEADS})


def test_a_checkpoint_of_another_architecture_says_what_to_type(checkpoint):
    with pytest.raises(CheckpointError, match="mask_rcnn_"):
        load_model(f"upernet_{SWIN}", checkpoint)
    with pytest.raises(CheckpointError, match=f"mask_rcnn_{SWIN}"):
        load_model(SWIN, checkpoint)
    with pytest.raises(CheckpointError, match="mask_rcnn_SWIN in place of deit_tiny"):  # there is none on a DeiT
        load_model("deit_tiny_patch16_224", checkpoint)
    with pytest.raises(ModelError, match="--checkpoint"):
        load_model(f"mask_rcnn_{SWIN}")
    with pytest.raises(ModelError, match="swin_nano"):
        load_model("mask_rcnn_swin_nano", checkpoint)


@pytest.mark.parametrize(
    ("kind", "builder"),
    [("mask_rcnn", "detector:mask_rcnn"), ("upernet", "segmenter:upernet")],
    ids=["boxes", "pixels"],
)
def test_the_number_of_classes_is_the_files_with_our_names_too(tmp_path, kind, builder):
    if kind == "upernet":
        pytest.importorskip("segmentation_models_pytorch")
    module, name = builder.split(":")
    build = getattr(importlib.import_module(f"maskaq.models.{module}"), name)
    state = build(SWIN, 3, 64, width=16, **arguments(SMALL)).state_dict()
    path = tmp_path / "own.safetensors"
    safetensors.torch.save_file({key: value.contiguous() for key, value in state.items()}, path)
    model = load_model(f"{kind}_{SWIN}", path, model_args={"img_size": 64, "width": 16, **arguments(SMALL)})
    assert model.num_classes == 3


def test_other_weights_are_no_detector(tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"fc.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(
        CheckpointError, match=r"(?s)backbone\.patch_embed\.proj\.weight.*not in the model:\s+fc\.weight"
    ):
        load_model(f"mask_rcnn_{SWIN}", path, {**arguments(SMALL), **SMALL_HEADS})
