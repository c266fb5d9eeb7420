"""UperNet on timm's Swin."""

import json
import sys

import pytest
import torch
from torch.nn import functional as F

from maskaq.errors import DependencyError
from maskaq.models import data_config
from maskaq.models.segmenter import upernet

SWIN = dict(embed_dim=12, depths=(1, 2, 1, 1), num_heads=(1, 2, 2, 2), window_size=4)
SMALL = dict(backbone="swin_tiny_patch4_window7_224", num_classes=7, img_size=64, width=16, **SWIN)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return upernet(**SMALL).requires_grad_(False)


@pytest.mark.parametrize("size", [(64, 64), (40, 97), (33, 31), (128, 64)])
def test_images_of_any_size_are_taken(model, size):
    logits = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, 7, *size)
    assert logits.isfinite().all()


def test_the_model_is_that_of_segmentation_models_pytorch(model):
    import segmentation_models_pytorch as smp

    theirs = smp.UPerNet(
        "tu-swin_tiny_patch4_window7_224",
        encoder_weights=None,
        decoder_channels=16,
        classes=7,
        img_size=128,
        always_partition=True,
        **SWIN,
    ).eval()
    names = {"backbone.": "encoder.model.", "decoder.": "decoder.", "head.": "segmentation_head.0."}
    state = {}
    for key, value in model.state_dict().items():
        prefix = next(prefix for prefix in names if key.startswith(prefix))
        state[names[prefix] + key.removeprefix(prefix)] = value
    theirs.load_state_dict(state)
    for norm in theirs.decoder.feature_norms:
        norm.eps = 1e-5
    images = torch.randn(2, 3, 128, 128)
    low = theirs.segmentation_head[0](theirs.decoder(theirs.encoder(images)))
    expected = F.interpolate(low, (128, 128), mode="bilinear", align_corners=False)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


def test_the_recorded_architecture_builds_the_model_again(model):
    record = json.loads(json.dumps(model.architecture))
    assert record["name"] == "upernet"
    again = upernet(**record["args"])
    again.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 40, 56)
    assert torch.equal(again(images), model(images))


def test_images_are_prepared_as_the_record_says(model):
    assert data_config(model)["input_size"] == (3, 64, 64)


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("segmentation_models_pytorch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(DependencyError, match="maskaq\\[segmentation\\]"):
        upernet(**SMALL)
