"""Exported segmenters and detectors: what their files compute."""

from importlib.util import find_spec

import pytest
import torch

from maskaq.artifact.export import export
from maskaq.errors import ExportError
from maskaq.models import expose, geometry
from maskaq.models.detector import mask_rcnn
from maskaq.models.hosts import embedded_model
from maskaq.models.load import load_model
from maskaq.models.segmenter import upernet
from maskaq.quant.deployed import FixedGrid
from maskaq.quant.twin import deploy, init_ranges_, quantized_twin
from maskaq.recipe.schema import Quantization, load_recipe
from maskaq.runs.quantize import quantize

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
    assert left["Conv"] == 1  # that of the images is in float
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


def small_detector(bits="w4a8", proposals=30, **settings):
    torch.manual_seed(0)
    heads = dict(box_width=24, mask_width=12, mask_layers=1, anchor_scale=5, finest=14, detections=10)
    return deployed(mask_rcnn(num_classes=5, proposals=proposals, **heads, **SWIN), bits, **settings)


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """A model, its file, and what its verification found."""
    model, file = small_detector(), tmp_path_factory.mktemp("detector") / "model.onnx"
    return model, file, export(model, file, "onnx", images_for(model))


@needs_onnx
@pytest.mark.slow
def test_a_detectors_file_finds_its_objects(detector):
    from maskaq.artifact.export.runtimes import runnable

    model, file, verified = detector
    images = images_for(model)
    sizes = [(64, 96), (128, 96), (32, 32)]
    found = runnable(file).detect(images, sizes)
    assert verified.agreement == 1
    for ours, theirs, size in zip(model.detect(images, sizes=sizes), found, sizes, strict=True):
        assert len(ours["boxes"]) and theirs["masks"].shape[1:] == size
        assert torch.equal(ours["labels"], theirs["labels"])
        torch.testing.assert_close(ours["boxes"], theirs["boxes"], rtol=1e-3, atol=1e-2)


@needs_onnx
@pytest.mark.slow
def test_every_quantizer_of_a_detector_is_verified_in_integers(detector):
    from maskaq.artifact.export.runtimes import operators, products

    model, file, verified = detector
    assert verified.sites == sum(isinstance(m, FixedGrid) for m in model.modules()) > 0
    assert verified.turned <= 1e-3 * verified.codes
    assert products(file).in_float == 0
    left = operators(file)
    assert left["Conv"] == 1  # that of the images is in float
    assert left["NonMaxSuppression"] == 2 and left["RoiAlign"] == 8


@needs_onnx
@pytest.mark.slow
def test_a_detectors_file_takes_any_number_of_images_and_says_what_it_gives(detector):
    onnxruntime = pytest.importorskip("onnxruntime")
    from maskaq.artifact.export.runtimes import metadata_of

    model, file, _ = detector
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for count in (1, 2):
        found = session.run(None, {"images": images_for(model, count).numpy()})
        assert [x.shape for x in found] == [(count, 10, 4), (count, 10), (count, 10), (count, 10, 28, 28)]
    assert [x.name for x in session.get_outputs()] == list(metadata_of(file)["outputs"])


@needs_onnx
@pytest.mark.slow
def test_a_detector_of_few_bits_with_many_equal_scores_chooses_the_same_boxes_in_its_file(tmp_path):
    model = small_detector("w2a2", proposals=8)
    images = images_for(model)
    scores = model.rpn(model.features(images))[0][0]
    assert scores.unique().numel() < scores.numel() / 10
    export(model, tmp_path / "model.onnx", "onnx", images)


@needs_onnx
@pytest.mark.slow
def test_a_detectors_file_with_other_codes_is_refused(detector, tmp_path):
    """Of a layer that runs at every level of the pyramid, the last time."""
    import onnx

    from maskaq.artifact.export.verify import verify

    model, file, _ = detector
    proto = onnx.load(file)
    (scale,) = (x for x in proto.graph.initializer if x.name == "rpn_head.conv.0.0.grid.4.scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 1.5, scale.name))
    onnx.save(proto, tmp_path / "wrong.onnx")
    with pytest.raises(ExportError, match=r"rpn_head\.conv\.0\.0\.grid"):
        verify(tmp_path / "wrong.onnx", model, images_for(model))


@needs_onnx
def test_images_that_keep_their_ratio_are_refused_before_a_file_is_written(tmp_path, capsys):
    from annotated import write_ade20k

    from maskaq.cli import main as cli

    write_ade20k(tmp_path / "ade")
    settings = ("synthesis.images=2", "synthesis.steps=0", "synthesis.batch=2", "calibration.epochs=0")
    recipe = load_recipe("quick", *settings, "refresh.every=0", "quantization.range_images=2", bits="w4a4")
    quantize(load_model("scenes_segmenter"), recipe, tmp_path / "run", source={"name": "scenes_segmenter", "args": {}})
    words = ["export", str(tmp_path / "run"), "-o", str(tmp_path / "x.onnx"), "--data", str(tmp_path / "ade")]
    assert cli.main(words) == 1 and "maskaq evaluate" in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()


@pytest.mark.parametrize(
    ("format", "target", "suffix"),
    [("openvino", "cpu", "xml"), ("executorch", "cpu", "pte"), ("pt2", "cpu", "pt2"), ("onnx", "tensorrt", "onnx")],
)
def test_what_was_not_tried_for_detectors_is_refused_with_what_works(format, target, suffix, tmp_path):
    model = small_detector()
    with pytest.raises(ExportError, match="expected --format onnx$"):
        export(model, tmp_path / f"model.{suffix}", format, images_for(model), target=target)
    assert not list(tmp_path.iterdir())
