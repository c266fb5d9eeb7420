"""Grids without zero points, and files for runtimes that ask for them."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import VIT, VIT_ARGS, mostly_slow, pair, small_recipe, tiny_vit
from PIL import Image

import maskaq
from maskaq.artifact.export import export, runtimes
from maskaq.cli.main import main
from maskaq.errors import ExportError
from maskaq.models import geometry
from maskaq.quant.deployed import CodedWeight, FixedGrid
from maskaq.quant.plan import build_plan
from maskaq.quant.twin import deploy, quantizers
from maskaq.recipe.schema import Quantization

needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnx_ir", "onnxruntime", "onnxscript"))), reason="pip install maskaq[onnx]"
)
needs_openvino = pytest.mark.skipif(not find_spec("openvino"), reason="pip install maskaq[openvino]")
needs_executorch = pytest.mark.skipif(not find_spec("executorch"), reason="pip install maskaq[executorch]")


def deployed(bits, target, *overrides, build=tiny_vit):
    return deploy(
        pair(small_recipe(f"quantization.bits={bits}", f"quantization.target={target}", *overrides), build)[1]
    )


def images_for(model, n=5):
    facts = geometry(model)
    return torch.randn(n, facts.channels, *facts.image_size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", ["w8a8", "w4a4"])
def test_a_symmetric_student_has_no_zero_point_to_learn_and_its_codes_fit_int8(bits):
    _, student = pair(small_recipe(f"quantization.bits={bits}", "quantization.target=symmetric"))
    assert not any("zero_point" in name for name, _ in student.named_parameters())
    model = deploy(student)
    images = images_for(model)
    assert torch.equal(model(images), student(images))
    for name, part in model.named_modules():
        if isinstance(part, FixedGrid):
            first, last = -int(part.zero_point), part.top - int(part.zero_point)
            assert first >= -128 and last <= 127, name
            assert part(torch.zeros(3)).eq(0).all()
        if isinstance(part, CodedWeight):
            assert int(part.codes.min()) >= -127


def test_for_openvino_only_q_k_and_v_lose_their_zero_points():
    plan = build_plan(maskaq.expose(tiny_vit()), Quantization(target="openvino", bits="w8a8"))
    assert {site.name.split(".", 3)[3] for site in plan if site.symmetric} == {"qk.a", "qk.b", "av.b"}
    assert plan.sites["blocks.0.attn.av.a"].bits == 8
    everywhere = build_plan(maskaq.expose(tiny_vit()), Quantization(target="symmetric", bits="w8a8"))
    assert {site.name for site in everywhere if not site.symmetric} == {f"blocks.{i}.attn.av.a" for i in range(2)}
    assert everywhere.sites["blocks.0.attn.av.a"].bits == 7


def test_a_symmetric_range_covers_the_larger_side():
    _, student = pair(small_recipe("quantization.target=symmetric", "quantization.activation_range=minmax"))
    found = quantizers(student)["blocks.0.mlp.fc2.input_quantizer"]
    values = torch.tensor([-0.1, 3.0])
    found.set_range(values, "minmax")
    assert found.fake_quantize(values)[1].item() == pytest.approx(3.0, abs=found.scale.item() / 2 + 1e-6)
    assert found.fake_quantize(-values)[1].item() == pytest.approx(-3.0, abs=found.scale.item() / 2 + 1e-6)


def test_a_saved_model_keeps_its_symmetry(tmp_path):
    model = deployed("w4a4", "symmetric")
    folder = maskaq.save_pretrained(model, tmp_path / "m", architecture={"name": VIT, "args": VIT_ARGS})
    again = maskaq.from_pretrained(folder)
    assert torch.equal(again(images_for(model)), model(images_for(model)))
    assert all(
        g.symmetric for n, g in again.named_modules() if isinstance(g, FixedGrid) and not n.endswith("av.a_grid")
    )


@needs_openvino
@needs_onnx
@pytest.mark.parametrize("target", mostly_slow(["openvino", "symmetric"], "openvino"))
def test_openvino_multiplies_queries_and_keys_in_integers_without_zero_points(target, tmp_path):
    from maskaq.artifact.export import openvino as files

    model = deployed("w4a4", target, build=lambda: tiny_vit(depth=1))
    found = export(model, tmp_path / "m.xml", "openvino", images_for(model))
    assert found.turned <= 1e-4 * found.codes
    nodes = {node.get_friendly_name(): node for node in files.read(tmp_path / "m.xml").get_ops()}
    for name in ("qk.a_grid", "qk.b_grid", "av.b_grid"):
        low, high = (nodes[f"blocks.0.attn.{name}"].input_value(i).get_node().get_data().item() for i in (3, 4))
        assert low / (high - low) * 255 == pytest.approx(-128, abs=1e-3)
    _, in_float, fused, of_integers = files.products(tmp_path / "m.xml")
    assert in_float == 0 and fused == of_integers == 1


@pytest.mark.slow
@needs_openvino
@needs_onnx
def test_an_openvino_file_says_in_which_precision_it_runs(tmp_path):
    from maskaq.artifact.export import openvino as files

    model = deployed("w8a8", "openvino", build=lambda: tiny_vit(depth=1))
    export(model, tmp_path / "m.xml", "openvino", images_for(model), precision="bf16")
    assert files.metadata_of(tmp_path / "m.xml")["precision"] == "bf16"
    assert files.precision_of(files.read(tmp_path / "m.xml")) == "bf16"


SUPPORTED = {"Add", "Clip", "Concat", "Conv", "DequantizeLinear", "Expand", "Gather", "Gelu", "LayerNormalization"}
SUPPORTED |= {"MatMul", "Mul", "QuantizeLinear", "Reshape", "Shape", "Slice", "Softmax", "Squeeze", "Transpose"}
SUPPORTED |= {"Unsqueeze"}
"""Of onnx-tensorrt's operators.md, those that our files may have."""


@needs_onnx
@pytest.mark.parametrize("bits", mostly_slow(["w8a8", "w4a8", "w4a4"], "w4a4"))
def test_a_file_for_tensorrt_keeps_its_published_rules(bits, tmp_path):
    import onnx
    from onnx import TensorProto, numpy_helper

    model = deployed(bits, "symmetric", build=lambda: tiny_vit(depth=1))
    found = export(model, tmp_path / "m.onnx", "onnx", images_for(model), target="tensorrt")  # codes in ONNX Runtime
    assert found.sites == sum(isinstance(m, FixedGrid) for m in model.modules()) and found.codes > 0
    proto = onnx.load(tmp_path / "m.onnx")
    assert [entry.version for entry in proto.opset_import] == [20]
    constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert {node.op_type for node in proto.graph.node} <= SUPPORTED
    made = {output: node for node in proto.graph.node for output in node.output}
    integers = {t.name for t in proto.graph.initializer if t.data_type == TensorProto.INT8 and t.dims}
    integers |= {node.output[0] for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            scale = constants[node.input[1]]  # build-time constants, above 0
            assert (scale > 0).all()
            if len(node.input) > 2:
                zero = constants[node.input[2]]
                assert zero.dtype == np.int8 and not zero.any()
        if node.op_type == "QuantizeLinear":
            assert len(node.input) == 3 and constants[node.input[1]].ndim == 0  # int8, one scale for a tensor
        if node.op_type != "DequantizeLinear":  # int8 goes from Q to DQ alone
            assert not integers & set(node.input)
        if node.op_type == "Clip":
            assert all(constants[name].dtype == np.float32 for name in node.input[1:])
        if node.op_type == "MatMul":
            assert {made[name].op_type for name in node.input} == {"DequantizeLinear"}
    weights = [constants[name] for name in integers if name in constants]
    assert weights and min(int(w.min()) for w in weights) >= -127
    kept = {node.op_type for node in proto.graph.node if node.op_type == "Clip"}
    assert bool(kept) == bits.endswith("4")


@needs_onnx
@pytest.mark.parametrize(
    ("bits", "target", "overrides", "format", "options", "named"),
    [
        ("w8a8", "cpu", (), "onnx", {"target": "tensorrt"}, "quantization.target=symmetric"),
        ("w8a8", "openvino", (), "onnx", {"target": "tensorrt"}, "quantization.target=symmetric"),
        ("w4a4", "symmetric", ('{match="*.av.a", quantizer="log"}',), "onnx", {"target": "tensorrt"}, "log"),
        ("w4a4", "symmetric", ('{match="*.qk.a", granularity="head"}',), "onnx", {"target": "tensorrt"}, "granularity"),
        ("w4a4", "cpu", (), "executorch", {}, "--bits w4a8"),
        ("w8a8", "symmetric", (), "pt2", {"target": "tensorrt"}, "--format onnx"),
        ("w8a8", "symmetric", (), "onnx", {"precision": "bf16"}, "--format openvino"),
    ],
)
def test_what_a_runtime_cannot_compute_is_refused_with_the_setting_that_would_do(
    bits, target, overrides, format, options, named, tmp_path
):
    rules = [f"quantization.rule={rule}" for rule in overrides]
    model = deployed(bits, target, *rules, build=lambda: tiny_vit(depth=1))
    suffix = {"onnx": ".onnx", "executorch": ".pte", "pt2": ".pt2"}[format]
    with pytest.raises(ExportError, match=named):
        export(model, tmp_path / f"m{suffix}", format, images_for(model), **options)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    architecture = {"name": VIT, "args": VIT_ARGS}
    model = deployed("w8a8", "symmetric")
    labels = ["a cat", "a dog", "a ship", "a frog"]
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    return maskaq.save_pretrained(model, folder, architecture=architecture, labels=labels, made={"seed": 3})


@needs_onnx
@pytest.mark.parametrize("name", mostly_slow(["m.onnx", "m.pt2"], "m.onnx"))
@pytest.mark.slow
def test_inspect_prints_what_a_file_says_of_itself(saved, tmp_path, capsys, name):
    words = ["export", str(saved), "-o", str(tmp_path / name)]
    words += ["--format", "pt2"] if name.endswith("pt2") else ["--target", "tensorrt"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / name)]) == 0
    told = capsys.readouterr().out
    for fact in ("a cat", "input_size", "[3, 32, 32]", "mean", "std", "crop_pct", "w8a8", "seed", VIT):
        assert fact in told, fact
    assert main(["inspect", str(tmp_path / name), "--bits", "w4a4"]) == 1
    (tmp_path / f"other{Path(name).suffix}").write_bytes(b"nothing")
    assert main(["inspect", str(tmp_path / f"other{Path(name).suffix}")]) == 1
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.slow
def test_images_of_a_run_become_pngs_with_a_manifest(tmp_path, capsys):
    model = maskaq.load_model("cifar10_vit")
    small = ("synthesis.images=6", "synthesis.steps=1", "calibration.epochs=1", "refresh.every=0")
    maskaq.quantize(
        model, maskaq.load_recipe("demo", *small), tmp_path / "run", source={"name": "cifar10_vit"}, report=False
    )
    run = maskaq.open_run(tmp_path / "run")
    words = ["export", str(tmp_path / "run"), "--format", "images", "-o", str(tmp_path / "png")]
    assert main(words) == 0
    manifest = json.loads((tmp_path / "png" / "manifest.json").read_text())
    files = (tmp_path / "png" / "files.txt").read_text().split()
    assert [row["file"] for row in manifest["images"]] == files and len(files) == 6
    for row, pixels, label in zip(manifest["images"], run.images().images, run.images().labels, strict=True):
        stored = np.asarray(Image.open(tmp_path / "png" / row["file"]))
        assert np.array_equal(stored, pixels.permute(1, 2, 0).numpy()) and row["label"] == label and row["name"]
    assert manifest["mean"] and manifest["data_free"] is True and manifest["seed"] == 0
    capsys.readouterr()
    assert main(words) == 1 and "exists" in capsys.readouterr().err
    words = ["export", str(tmp_path / "run" / "quantized"), "--format", "images", "-o", str(tmp_path / "more")]
    assert main(words) == 1 and "run folder" in capsys.readouterr().err


@pytest.mark.slow
@needs_executorch
@pytest.mark.parametrize("bits", ["w8a8", "w4a8"])
def test_an_executorch_program_gives_the_models_classes(bits, tmp_path):
    from maskaq.artifact.export.executorch import ExecutorchModel, metadata_of

    recipe = maskaq.load_recipe("demo", "synthesis.images=8", "synthesis.steps=1", "calibration.epochs=0", bits=bits)
    model = maskaq.quantize(maskaq.load_model("cifar10_vit"), recipe, tmp_path / "run", report=False).model
    model = maskaq.from_pretrained(tmp_path / "run" / "quantized")
    pixels, _ = maskaq.zoo.test_images()
    images = geometry(model).normalise(pixels[:100].float() / 255)
    found = export(model, tmp_path / "m.pte", "executorch", images)
    assert found.share >= 0.95 and found.correlation > 0.99
    assert metadata_of(tmp_path / "m.pte")["input_size"] == [3, 32, 32]
    runner = ExecutorchModel(tmp_path / "m.pte")
    assert torch.allclose(runner(images[:1]), runner(images[:3])[:1], atol=1e-3)


def test_products_of_an_executorch_program_are_not_counted():
    assert runtimes.products("model.pte") is None


def test_without_executorch_the_command_says_what_to_install(saved, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.setitem(sys.modules, "executorch.backends.xnnpack.partition.xnnpack_partitioner", None)
    monkeypatch.delitem(sys.modules, "maskaq.artifact.export.executorch", raising=False)
    assert main(["export", str(saved), "--format", "executorch", "-o", str(tmp_path / "m.pte")]) == 1
    assert 'pip install "maskaq[executorch]"' in capsys.readouterr().err


@pytest.mark.slow
@needs_onnx
def test_other_quantizers_are_measured_beside_ours_on_the_runs_images(tmp_path, capsys):
    model = maskaq.load_model("cifar10_vit")
    small = ("synthesis.images=16", "synthesis.steps=1", "calibration.epochs=1", "refresh.every=0")
    recipe = maskaq.load_recipe("demo", *small, bits="w8a8")
    maskaq.quantize(model, recipe, tmp_path / "run", source={"name": "cifar10_vit"}, report=False)
    words = ["bench-runtime", str(tmp_path / "run"), "--peers", "--batch", "1", "--repeats", "1", "--threads", "1"]
    figures = tmp_path / "figures.json"
    assert main([*words, "--data", "cifar10-demo", "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    names = {row["file"] for row in found["speeds"]}
    assert {"float32", "maskaq w8a8, onnx", "quantize_static", "quantize_dynamic"} <= names
    top1 = {name: row["top1"] for name, row in found["accuracy"].items()}
    assert top1["float32"] > 85 and all(value > 60 for value in top1.values())
    capsys.readouterr()
    assert main([*words, "--real", str(tmp_path / "none")]) == 1 and "none" in capsys.readouterr().err
    assert main(["bench-runtime", str(tmp_path / "run"), "--real", str(tmp_path)]) == 1
    assert main(["bench-runtime", str(tmp_path / "m.onnx"), "--peers"]) == 1
