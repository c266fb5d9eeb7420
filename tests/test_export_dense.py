"""Exported segmenters and detectors: what their files compute."""

from importlib.util import find_spec

import pytest
import torch

from maskaq.artifact.export import export
from maskaq.errors import ExportError
from maskaq.models import expose, geometry
from maskaq.models.detector import mask_rcnn
from maskaq.models.hosts import embedded_model
from maskaq.models.segmenter import upernet
from maskaq.quant.deployed import FixedGrid
from maskaq.quant.twin import deploy, init_ranges_, quantized_twin
from maskaq.recipe.schema import Quantization

missing = [name for name in ("onnx", "onnx_ir", "onnxruntime", "onnxscript") if not find_spec(name)]
needs_onnx = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed (pip install maskaq[onnx])")
needs_openvino = pytest.mark.skipif(
    bool(missing) or not find_spec("openvino"), reason="openvino not installed (pip install maskaq[openvino])"
)

SWIN = dict(
    backbone="swin_tiny_patch4_window7_224",
    img_size=(64, 96),
    embed_dim=12,
    depths=(1, 2, 1, 1),
    num_heads=(1, 2, 2, 2),
    window_size=4,
    width=16,
)


def images_for(model, n=3):
    facts = geometry(model)
    return torch.randn(n, facts.channels, *facts.image_size, generator=torch.Generator().manual_seed(0))


def deployed(model, bits="w4a8", **settings):
    scheme = Quantization(bits=bits, **settings)
    teacher = expose(model)
    student = quantized_twin(teacher, scheme)
    init_ranges_(student, images_for(teacher), scheme)
    return deploy(student)


@pytest.fixture(scope="module")
def segmenter():
    torch.manual_seed(0)
    return deployed(upernet(num_classes=5, **SWIN))


# ---- segmenter


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("bits", ["w4a8", "w4a4"])
def test_a_segmenter_is_one_file_of_integer_products(bits, tmp_path):
    from maskaq.artifact.export.runtimes import operators, products, runnable

    torch.manual_seed(0)
    model = deployed(upernet(num_classes=5, **SWIN), bits)
    images = images_for(model)
    found = export(model, tmp_path / "model.onnx", "onnx", images)
    assert found.sites == sum(isinstance(m, FixedGrid) for m in model.modules()) > 0
    assert found.turned <= 1e-4 * found.codes
    count, left = products(tmp_path / "model.onnx"), operators(tmp_path / "model.onnx")
    assert count.in_float == 0
    assert left["ConvInteger"] == 13 and left["Conv"] == 1  # that of the images is in float
    file = runnable(tmp_path / "model.onnx")
    assert file(images[:1]).shape == (1, 5, 64, 96), "any number of images"


@needs_onnx
@pytest.mark.slow
def test_the_embedded_segmenter_is_one_file_of_integer_products(tmp_path):
    from maskaq.artifact.export.runtimes import products

    model = deployed(embedded_model("scenes_segmenter"))
    found = export(model, tmp_path / "model.onnx", "onnx", images_for(model))
    assert found.agreement == 1 and found.correlation > 0.999
    assert products(tmp_path / "model.onnx").in_float == 0


@pytest.mark.slow
def test_a_segmenter_is_a_program_of_torch(segmenter, tmp_path):
    assert export(segmenter, tmp_path / "model.pt2", "pt2", images_for(segmenter)) is None


@pytest.mark.slow
@needs_openvino
def test_a_segmenter_runs_in_openvino(segmenter, tmp_path):
    found = export(segmenter, tmp_path / "model.xml", "openvino", images_for(segmenter))
    assert found.sites > 0 and found.correlation > 0.99


@pytest.mark.parametrize(("format", "target"), [("executorch", "cpu"), ("onnx", "tensorrt")])
def test_a_runtime_that_was_not_tried_is_refused_with_those_that_work(segmenter, format, target, tmp_path):
    suffix = {"executorch": "pte", "onnx": "onnx"}[format]
    with pytest.raises(ExportError, match="expected --format onnx, openvino or pt2"):
        export(segmenter, tmp_path / f"model.{suffix}", format, images_for(segmenter), target=target)
    assert not list(tmp_path.iterdir())


# ---- detector


def test_a_detector_is_refused_with_what_works(tmp_path):
    torch.manual_seed(0)
    model = deployed(mask_rcnn(num_classes=5, box_width=24, mask_width=12, mask_layers=1, proposals=30, **SWIN))
    with pytest.raises(ExportError, match="from_pretrained"):
        export(model, tmp_path / "model.onnx", "onnx", images_for(model))
    assert not list(tmp_path.iterdir())
