"""Exported files: what they store, what they compute, and that a wrong one is refused."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers import pair, small_recipe, tiny_swin, tiny_vit

import maskaq
from maskaq.cli import main
from maskaq.deployed import CodedWeight, FixedGrid, deploy
from maskaq.errors import ExportError
from maskaq.export import export
from maskaq.export.pt2 import NOTES, export_pt2, verify_pt2
from maskaq.models import geometry

EXTRAS = ("onnx", "onnx_ir", "onnxruntime", "onnxscript")
missing = [name for name in EXTRAS if not find_spec(name)]
needs_onnx = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed (pip install maskaq[onnx])")
if not missing:
    import onnx
    from onnx import numpy_helper

    from maskaq.export.onnx import export_onnx, metadata_of
    from maskaq.export.runtimes import OnnxModel, bench_files, operators, products
    from maskaq.export.verify import verify


def deployed(bits="w4a4", build=tiny_vit, *overrides):
    return deploy(pair(small_recipe(f"quantization.bits={bits}", *overrides), build)[1])


def images_for(model, n=5):
    facts = geometry(model)
    return torch.randn(n, facts.channels, *facts.image_size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A tiny ViT at w4a4 and its file."""
    if missing:
        pytest.skip(f"{missing} not installed")
    model = deployed()
    return model, export_onnx(model, tmp_path_factory.mktemp("onnx") / "vit.onnx", {"recipe": {"a": 1}, "model": "x"})


VARIANTS = {
    "registers": lambda: tiny_vit(reg_tokens=2),
    "average pooling": lambda: tiny_vit(global_pool="avg", class_token=False),
    "q/k norm, LayerScale, no bias": lambda: tiny_vit(qk_norm=True, init_values=0.1, qkv_bias=False),
    "parallel": lambda: tiny_vit(block_fn=timm.models.vision_transformer.ParallelThingsBlock),
    "distilled": lambda: timm.create_model(
        "deit_tiny_distilled_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=16,
        depth=1,
        num_heads=2,
        num_classes=4,
    ).eval(),
    "swin": tiny_swin,
    "swin, padded": lambda: tiny_swin(img_size=40, window_size=4),
}


@needs_onnx
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_model_computes_the_same_codes_in_integer_products(variant, tmp_path):
    model = deployed("w4a4", VARIANTS[variant])
    file = export_onnx(model, tmp_path / "model.onnx")
    found = verify(file, model, images_for(model))
    assert found.sites == sum(isinstance(m, FixedGrid) for m in model.modules())
    assert found.weights == sum(isinstance(m, CodedWeight) for m in model.modules())
    assert found.codes > 0 and found.turned <= 1e-4 * found.codes
    assert found.agreement >= 0.8
    integer, in_float = products(file)
    assert in_float == 0 and integer > 0


@needs_onnx
@pytest.mark.parametrize("bits", ["w8a8", "w4a8", "w3a3", "w2a4", "w5a6", "w4a2"])
def test_every_bit_width_computes_the_same_codes_in_integer_products(bits, tmp_path):
    model = deployed(bits, lambda: tiny_vit(depth=1))
    file = export_onnx(model, tmp_path / "model.onnx")
    verify(file, model, images_for(model))
    left = operators(file)
    assert products(file)[1] == 0
    assert left["DequantizeLinear"] == 0 and left["Cast"] == 0 and left["Conv"] == 1
    assert (left["Clip"] > 0) == (bits[-1] != "8")


@needs_onnx
def test_layers_that_stay_in_float_are_the_only_float_products(tmp_path):
    model = deployed("w4a4", tiny_vit, "quantization.first_last=float")
    file = export_onnx(model, tmp_path / "model.onnx")
    verify(file, model, images_for(model))
    assert products(file)[1] == 1  # the classifier


@needs_onnx
@pytest.mark.parametrize("bits, kind", [(2, "INT4"), (3, "INT4"), (4, "INT4"), (5, "INT8"), (8, "INT8")])
def test_weights_are_stored_at_four_or_eight_bits(bits, kind, tmp_path):
    model = deployed(f"w{bits}a8", lambda: tiny_vit(depth=1))
    proto = onnx.load(export_onnx(model, tmp_path / "model.onnx"))
    codes = [t for t in proto.graph.initializer if t.name.endswith(".codes")]
    assert {onnx.TensorProto.DataType.Name(t.data_type) for t in codes} == {kind}
    assert all(len(t.raw_data) == np.prod(t.dims) // (2 if kind == "INT4" else 1) for t in codes)
    floats = [t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert max(np.prod(t.dims) for t in floats) <= 17 * 16  # position embeddings; no weight
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    values = np.concatenate([numpy_helper.to_array(t).astype(int).ravel() for t in codes])
    assert low <= values.min() and values.max() <= high and values.max() > 0


@needs_onnx
def test_the_graph_has_standard_operators_only_and_a_free_batch(vit):
    proto = onnx.load(vit[1])
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {""} and [o.domain for o in proto.opset_import] == [""]
    assert not proto.functions
    for value, name in ((proto.graph.input[0], "images"), (proto.graph.output[0], "logits")):
        batch, *rest = value.type.tensor_type.shape.dim
        assert value.name == name and batch.dim_param and all(dim.dim_value for dim in rest)
    known = {v.name for v in proto.graph.value_info if v.type.tensor_type.HasField("shape")} | {"logits"}
    assert {output for node in proto.graph.node for output in node.output} <= known
    left = {node.op_type for node in proto.graph.node}
    assert {"LayerNormalization", "Gelu", "Softmax"} <= left and not left & {"Erf", "ReduceMean", "Gemm"}


@needs_onnx
def test_the_file_says_what_it_is_and_not_where_it_was_made(vit):
    model, file = vit
    notes = metadata_of(file)
    assert notes["weight_bits"] == [4] and notes["activation_bits"] == [4]
    assert notes["input_size"] == [3, 32, 32] and notes["mean"] == list(geometry(model).mean)
    assert notes["recipe"] == {"a": 1} and notes["model"] == "x" and notes["version"]
    assert b".py" not in file.read_bytes() and b"site-packages" not in file.read_bytes()


@needs_onnx
@pytest.mark.parametrize("n", [1, 3, 8])
def test_any_number_of_images_gives_each_its_own_logits(vit, n):
    model, file = vit
    images = images_for(model, n)
    runner = OnnxModel(file)
    found = runner(images)
    assert found.shape == (n, 4)
    assert torch.allclose(found, torch.cat([runner(image[None]) for image in images]), atol=1e-5)


def changed(file, tmp_path, change):
    proto = onnx.load(file)
    change({t.name: t for t in proto.graph.initializer}, proto)
    onnx.save(proto, tmp_path / "changed.onnx")
    return tmp_path / "changed.onnx"


def one_weight_code(tensors, proto):
    tensor = tensors["blocks.1.mlp.fc1.weight.codes"]
    raw = bytearray(tensor.raw_data)
    raw[5] ^= 1
    tensor.raw_data = bytes(raw)


def one_bias(tensors, proto):
    name = next(name for name in tensors if "blocks.0.mlp.fc2" in name and "bias" in name)
    values = numpy_helper.to_array(tensors[name]).copy()
    values[3] += 0.05
    tensors[name].CopyFrom(numpy_helper.from_array(values, name))


def one_step(tensors, proto):
    name = "blocks.1.attn.av.a_grid.scale"
    tensors[name].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensors[name]) * np.float32(1.01), name))


def one_clip(tensors, proto):
    name = "blocks.0.attn.qkv.grid.top"
    tensors[name].CopyFrom(numpy_helper.from_array(np.array(14, np.uint8), name))


def a_classifier_bias(tensors, proto):
    name = next(name for name in tensors if name.startswith("head.bias"))
    values = numpy_helper.to_array(tensors[name]).copy()
    values[0] += 0.01
    tensors[name].CopyFrom(numpy_helper.from_array(values, name))


def another_epsilon(tensors, proto):
    node = next(node for node in proto.graph.node if node.op_type == "LayerNormalization")
    next(a for a in node.attribute if a.name == "epsilon").f = 0.1


CHANGES = [one_weight_code, one_bias, one_step, one_clip, a_classifier_bias, another_epsilon]


@needs_onnx
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_with_one_number_changed_is_refused(vit, tmp_path, change):
    model, file = vit
    with pytest.raises(ExportError, match="does not compute what the model computes"):
        verify(changed(file, tmp_path, change), model, images_for(model))


@needs_onnx
def test_a_file_cut_short_is_refused(vit, tmp_path):
    (tmp_path / "cut.onnx").write_bytes(vit[1].read_bytes()[:-1000])
    with pytest.raises(ExportError, match="not a sound ONNX file"):
        verify(tmp_path / "cut.onnx", vit[0], images_for(vit[0]))
    with pytest.raises(ExportError, match="cannot read"):
        metadata_of(tmp_path / "nothing.onnx")


@needs_onnx
def test_a_failed_verification_leaves_no_file_and_the_old_one_untouched(vit, tmp_path, monkeypatch):
    file = tmp_path / "model.onnx"
    file.write_text("old")

    def damaged(model, path, metadata):
        return Path(path).write_bytes(b"nonsense") and path

    monkeypatch.setattr("maskaq.export.onnx.export_onnx", damaged)
    with pytest.raises(ExportError):
        export(vit[0], file, "onnx", images_for(vit[0]))
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"] and file.read_text() == "old"


@needs_onnx
def test_speeds_are_ratios_to_the_first_file(vit):
    rows = list(bench_files({"a": vit[1], "b": vit[1]}, batches=(1, 2), threads=1, repeats=2))
    ours = [row for row in rows if row.runtime == "onnxruntime"]
    assert [(row.file, row.batch) for row in ours] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert ours[0].ratio == 1 and all(row.fastest <= row.milliseconds <= row.slowest for row in rows)


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_a_pt2_program_gives_the_same_bits_for_any_number_of_images(build, tmp_path):
    model = deployed("w4a4", build)
    file = export_pt2(model, tmp_path / "model.pt2", {"model": "x"})
    for n in (1, 3, 8):
        verify_pt2(file, model, images_for(model, n))
    notes = {NOTES: ""}
    torch.export.load(file, extra_files=notes)
    assert json.loads(notes[NOTES])["model"] == "x"
    with torch.no_grad():
        model.head.get_submodule("fc" if build is tiny_swin else "").bias += 1
    with pytest.raises(ExportError, match="differ"):
        verify_pt2(file, model, images_for(model))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    sizes = ["synthesis.images=4", "synthesis.batch=4", "synthesis.steps=2", "calibration.epochs=1", "refresh.every=0"]
    words = ["quantize", "cifar10_vit", "--recipe", "demo", "--bits", "w4a4", "--out", str(folder), "--set", *sizes]
    assert main([*words, "quantization.range_images=4", "--device", "cpu"]) == 0
    return folder


@needs_onnx
def test_the_command_line_exports_verifies_and_measures(run_folder, capsys, tmp_path):
    assert main(["export", str(run_folder), "--data", "cifar10-demo"]) == 0
    told = capsys.readouterr().out
    assert "verified on 4 synthetic images" in told and "49 matrix products in integers, 0 in float" in told
    assert "model.onnx" in told and "top-1" in told
    file, figures = str(run_folder / "model.onnx"), tmp_path / "figures.json"
    words = ["bench-runtime", file, "--batch", "1", "--repeats", "1", "--threads", "1", "--json", str(figures)]
    assert main(words) == 0
    assert "float32" in capsys.readouterr().out
    assert {row["file"] for row in json.loads(figures.read_text())["speeds"]} == {"float32", file}
    assert main(["export", str(run_folder), "--format", "pt2", "-o", str(tmp_path / "m.pt2")]) == 0
    assert "bit for bit" in capsys.readouterr().out and (tmp_path / "m.pt2").exists()


@needs_onnx
def test_the_example_evaluates_a_file_without_maskaq(vit, tmp_path):
    from PIL import Image

    for label in range(4):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        Image.new("RGB", (40, 50), (60 * label, 0, 90)).save(tmp_path / "data" / str(label) / "a.png")
    example = Path(__file__).parent.parent / "examples" / "onnx_evaluate.py"
    assert "import maskaq" not in example.read_text()
    words = [sys.executable, str(example), str(vit[1]), str(tmp_path / "data")]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "of 4 images" in told


def test_without_the_packages_the_command_says_what_to_install():
    environment = os.environ | {"PYTHONPATH": str(Path(maskaq.__file__).parent.parent)}
    code = (
        "import sys\n"
        "for name in ('onnx', 'onnx_ir', 'onnxruntime'): sys.modules[name] = None\n"
        "from maskaq.cli import main\n"
        "sys.exit(main(['bench-runtime', 'model.onnx']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and 'pip install "maskaq[onnx]"' in done.stderr, done.stderr
