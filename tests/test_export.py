"""Exported files: what they store, what they compute, and that a wrong one is refused."""

import ctypes
import errno
import gc
import json
import os
import random
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers import VIT, VIT_ARGS, mostly_slow, pair, small_recipe, tiny_swin, tiny_vit
from torch import nn

import maskaq
from maskaq.artifact.export import export, pt2, weights_of
from maskaq.artifact.export.pt2 import NOTES, export_pt2, verify_pt2
from maskaq.artifact.export.targets import SUFFIXES
from maskaq.cli.main import main
from maskaq.errors import ExportError, MaskaqError
from maskaq.images.pngs import write_pngs
from maskaq.images.sets import SyntheticSet
from maskaq.models import geometry
from maskaq.quant.deployed import CodedWeight, FixedGrid
from maskaq.quant.twin import deploy
from maskaq.storage import files

EXTRAS = ("onnx", "onnx_ir", "onnxruntime", "onnxscript")
missing = [name for name in EXTRAS if not find_spec(name)]
needs_onnx = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed (pip install maskaq[onnx])")
needs_openvino = pytest.mark.skipif(
    bool(missing) or not find_spec("openvino"), reason="openvino not installed (pip install maskaq[openvino])"
)
each_format = pytest.mark.parametrize(
    "format", [pytest.param("onnx", marks=needs_onnx), pytest.param("openvino", marks=needs_openvino), "pt2"]
)
if not missing:
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    from maskaq.artifact.export.onnx import export_onnx, metadata_of
    from maskaq.artifact.export.runtimes import OnnxModel, bench_files, operators, products
    from maskaq.artifact.export.verify import grids_of, verify


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
    "average pooling": lambda: tiny_vit(global_pool="avg", class_token=False),
    "registers, q/k norm, LayerScale, no bias": lambda: tiny_vit(
        reg_tokens=2, qk_norm=True, init_values=0.1, qkv_bias=False
    ),
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
    "features of the class token": lambda: tiny_vit(num_classes=0),
    "swin, padded": lambda: tiny_swin(img_size=40, window_size=4, depths=(2, 1)),
}


@needs_onnx
@pytest.mark.parametrize("variant", mostly_slow(list(VARIANTS), "distilled"))
def test_every_kind_of_model_computes_the_same_codes_in_integer_products(variant, tmp_path):
    model = deployed("w4a4", VARIANTS[variant])
    file = export_onnx(model, tmp_path / "model.onnx")
    found = verify(file, model, images_for(model))
    assert found.sites == sum(isinstance(m, FixedGrid) for m in model.modules())
    assert found.weights == sum(isinstance(m, CodedWeight) for m in model.modules())
    assert found.codes > 0 and found.turned <= 1e-4 * found.codes
    assert found.agreement >= 0.8
    count = products(file)
    assert count.in_float == 0 and count.integer > 0


@needs_onnx
@pytest.mark.parametrize("bits", mostly_slow(["w8a8", "w4a8", "w3a3", "w2a4", "w5a6", "w4a2"], "w3a3"))
def test_every_bit_width_computes_the_same_codes_in_integer_products_from_small_weights(bits, tmp_path):
    model = deployed(bits, lambda: tiny_vit(depth=1))
    file = export_onnx(model, tmp_path / "model.onnx")
    verify(file, model, images_for(model))
    left = operators(file)
    assert products(file).in_float == 0
    assert left["DequantizeLinear"] == 1 and left["Cast"] == 0 and left["Conv"] == 1  # one for the scales
    assert (left["Clip"] > 0) == (bits[-1] != "8")
    wide = int(bits[1])
    assert_stored_at(8 if wide > 4 else 4, file, wide)


def assert_stored_at(room, file, bits):
    """Every weight is codes of so many bits, in so much room, and nothing of its size is float."""
    tensors = onnx.load(file).graph.initializer
    codes = [tensor for tensor in tensors if tensor.name.endswith(".codes")]
    assert {onnx.TensorProto.DataType.Name(t.data_type) for t in codes} == {f"INT{room}"}
    assert all(len(t.raw_data) == np.prod(t.dims) * room // 8 for t in codes)
    floats = [t for t in tensors if t.data_type == onnx.TensorProto.FLOAT]
    assert max(np.prod(t.dims) for t in floats) <= 17 * 16  # position embeddings; no weight
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    values = np.concatenate([numpy_helper.to_array(t).astype(int).ravel() for t in codes])
    assert low <= values.min() and values.max() <= high and values.max() > 0


@needs_onnx
@pytest.mark.parametrize("bits", mostly_slow(["w4a8", "w4a4"], "w4a4"))
def test_attention_multiplies_uint8_by_int8_which_cpus_have_instructions_for(bits, tmp_path):
    model = deployed(bits, lambda: tiny_vit(depth=1))
    file = export_onnx(model, tmp_path / "model.onnx")
    graph = optimised_graph(file, tmp_path)
    kinds = {i.name: i.data_type for i in graph.initializer}
    byte, signed = onnx.TensorProto.UINT8, onnx.TensorProto.INT8
    found = {}
    for node in graph.node:
        if node.op_type in ("MatMulIntegerToFloat", "QLinearMatMul"):
            found |= {i: kinds[i] for i in node.input if i.endswith(("a_grid.zero_point", "b_grid.zero_point"))}
    assert found == {
        f"blocks.0.attn.{product}.{grid}_grid.zero_point": kind
        for product in ("qk", "av")
        for grid, kind in (("a", byte), ("b", signed))
    }
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) <= len(list(grids_of(model)))  # none is doubled


@needs_onnx
@pytest.mark.parametrize("build", mostly_slow({"vit": tiny_vit, "swin": partial(tiny_swin, depths=(1,))}, "vit"))
@pytest.mark.slow
def test_biases_are_added_inside_integer_products_and_not_by_a_pass_of_their_own(build, tmp_path):
    model = deployed("w4a4", partial(build, num_heads=2) if build is tiny_vit else build)
    graph = optimised_graph(export_onnx(model, tmp_path / "model.onnx"), tmp_path)
    biases = {i.name for i in graph.initializer if ".bias_" in i.name}
    added = [n.input[6] for n in graph.node if n.op_type == "MatMulIntegerToFloat" and len(n.input) > 6]
    assert set(added) == biases and len(added) == len(biases) > 0
    assert not {n.op_type for n in graph.node} & {"BiasGelu", "MatMulInteger", "SkipLayerNormalization"}


@needs_onnx
@pytest.mark.slow
def test_other_readers_get_floats_between_dequantize_linear(tmp_path):
    model = deployed()
    export(model, tmp_path / "model.onnx", "onnx", images_for(model), target="qdq")  # verified
    graph = onnx.load(tmp_path / "model.onnx").graph
    made = {output: node.op_type for node in graph.node for output in node.output}
    taken = {made[name] for node in graph.node if node.op_type == "MatMul" for name in node.input}
    assert taken == {"DequantizeLinear"} and "MatMulInteger" not in made.values()


def optimised_graph(file, folder):
    """The graph that ONNX Runtime runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath).graph


@pytest.mark.slow
@needs_onnx
def test_layers_that_stay_in_float_are_the_only_float_products(tmp_path):
    model = deployed("w4a4", tiny_vit, "quantization.first_last=float")
    file = export_onnx(model, tmp_path / "model.onnx")
    verify(file, model, images_for(model))
    assert products(file).in_float == 1  # the classifier


class Stem(nn.Module):
    """Convolutions with nothing but a ReLU between them, and patches by a linear layer whose input is not quantized."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1))
        self.again = self.second if shared else nn.Identity()
        self.patches = nn.Linear(128, 24)
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)
        self.head = nn.Linear(24, 5)
        self.pretrained_cfg = {"input_size": (3, 16, 16)}

    def forward(self, x):
        x = self.again(self.second(self.first(x).relu()).relu())
        x = self.patches(x.unflatten(3, (2, 4)).unflatten(2, (2, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(dim=1))


@needs_onnx
def test_weights_are_not_rounded_again_by_the_runtime(tmp_path):
    """ONNX Runtime rounds those of a convolution between two grids, and what is multiplied by coded weights."""
    torch.manual_seed(0)
    model = deployed("w6a6", lambda: Stem().eval(), 'quantization.rule={match="patches.input", bits="float"}')
    assert export(model, tmp_path / "model.onnx", "onnx", images_for(model, 2)).farthest < 1e-4


@needs_onnx
@pytest.mark.slow
def test_a_layer_that_runs_twice_is_verified_each_time(tmp_path):
    torch.manual_seed(0)
    once, twice = (deployed("w6a6", lambda shared=shared: Stem(shared=shared).eval()) for shared in (False, True))
    found = [export(model, tmp_path / "model.onnx", "onnx", images_for(model, 2)) for model in (once, twice)]
    assert found[0].sites == found[1].sites and found[0].codes < found[1].codes


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


def with_note(file, to, name, value):
    """An ONNX file with one of its notes replaced by these bytes, which need not be UTF-8."""
    proto = onnx.load(file)
    kept = [entry for entry in proto.metadata_props if entry.key != f"maskaq.{name}"]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=f"maskaq.{name}", value=len(value) * "?")
    to.write_bytes(proto.SerializeToString().replace(len(value) * b"?", value))
    return to


DAMAGED_NOTES = [
    ("sha256", b'"3f0a"'),
    ("labels", b"1234567"),
    ("labels", b"[[1, 2]]"),
    ("labels", 3000 * b"["),
    ("input_size", b"[3, 32, 3"),
    ("mean", b'"a half"'),
    ("classes", b"[10, 11]"),
    ("architecture", b'"a vit"'),
    ("architecture", b'{"name": 3}'),
    ("task", b"classi\xff\xfe"),
]


@needs_onnx
@pytest.mark.parametrize("name, value", DAMAGED_NOTES, ids=[f"{n}-{v[:9]!r}" for n, v in DAMAGED_NOTES])
@pytest.mark.parametrize("command", ["inspect", "bench-runtime"])
def test_a_file_whose_notes_are_damaged_is_named_and_refused(vit, tmp_path, command, name, value, capsys):
    file = with_note(vit[1], tmp_path / "m.onnx", name, value)
    assert main([command, str(file)]) == 1
    printed = capsys.readouterr().err
    assert f"{file} is damaged" in printed and "again" in printed and "Traceback" not in printed


@each_format
def test_a_file_with_one_bit_of_its_weights_turned_is_named_and_refused(format, tmp_path, capsys):
    model = deployed()
    file = tmp_path / f"model{SUFFIXES[format]}"
    export(model, file, format, images_for(model, 1))
    assert main(["inspect", str(file)]) == 0
    assert "not checked" not in capsys.readouterr().out
    weights = weights_of(file) if format == "openvino" else file
    kept = model.get_submodule("blocks.1.norm2").weight.numpy().tobytes()  # floats are the same bytes in every format
    data = bytearray(weights.read_bytes())
    data[data.index(kept) + 1] ^= 1
    weights.write_bytes(data)
    assert main(["inspect", str(file)]) == 1
    printed = capsys.readouterr().err
    assert f"{file} is damaged" in printed or f"cannot read {file}" in printed
    assert "sha256" in printed or "checksum" in printed
    assert "export it again" in printed
    if format != "pt2":
        from maskaq.artifact.export.runtimes import runnable

        with pytest.raises(ExportError, match="sha256"):
            runnable(file)
        assert main(["bench-runtime", str(file)]) == 1


@needs_onnx
def test_a_file_of_an_earlier_version_is_shown_without_a_check_of_its_weights(vit, tmp_path, capsys):
    def without_digest(tensors, proto):
        (digest,) = (entry for entry in proto.metadata_props if entry.key == "maskaq.sha256")
        proto.metadata_props.remove(digest)
        one_weight_code(tensors, proto)

    assert main(["inspect", str(changed(vit[1], tmp_path, without_digest))]) == 0
    assert "not checked" in capsys.readouterr().out


@needs_onnx
def test_a_file_that_another_tool_wrote_anew_has_the_same_digest(vit, tmp_path):
    def reordered(tensors, proto):
        kept = list(proto.graph.initializer)[::-1]
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(kept)

    file = changed(vit[1], tmp_path, reordered)
    assert file.read_bytes() != vit[1].read_bytes()
    assert metadata_of(file) == metadata_of(vit[1])


@needs_openvino
def test_openvino_can_convert_an_onnx_file_whose_digest_is_of_other_tensors(vit, tmp_path):
    import openvino

    from maskaq.artifact.export import runtimes

    openvino.save_model(openvino.Core().read_model(vit[1]), tmp_path / "converted.xml")
    assert runtimes.metadata_of(tmp_path / "converted.xml")["input_size"] == [3, 32, 32]


@pytest.mark.parametrize("part", range(4))
def test_a_pt2_program_that_is_damaged_is_read_or_refused(part, tmp_path):
    file = export_pt2(deployed(), tmp_path / "model.pt2")
    whole, outcomes = file.read_bytes(), {"read": 0, "refused": 0}
    first = whole.index(b"PK\x01\x02")  # the directory of the zip file
    for case in range(50):
        lots = random.Random(f"{part} {case}")
        data = bytearray(whole)
        data[lots.randrange(first, len(data))] ^= 1 << lots.randrange(8)
        file.write_bytes(data)
        try:
            pt2.metadata_of(file)
            outcomes["read"] += 1
        except ExportError as error:
            assert str(file) in str(error)
            outcomes["refused"] += 1
    assert all(outcomes.values()), outcomes


@needs_onnx
def test_a_failed_verification_leaves_no_file_and_the_old_one_untouched(vit, tmp_path, monkeypatch):
    file = tmp_path / "model.onnx"
    file.write_text("old")

    def damaged(model, path, metadata, layout):
        return Path(path).write_bytes(b"nonsense") and path

    monkeypatch.setattr("maskaq.artifact.export.onnx.export_onnx", damaged)
    with pytest.raises(ExportError):
        export(vit[0], file, "onnx", images_for(vit[0]))
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"] and file.read_text() == "old"


# ---- OpenVINO's own files


@pytest.fixture(scope="module")
def openvino_vit(vit, tmp_path_factory):
    """The tiny ViT as OpenVINO's two files."""
    from maskaq.artifact.export.openvino import export_openvino

    return vit[0], export_openvino(vit[0], tmp_path_factory.mktemp("openvino") / "vit.xml", {"recipe": {"a": 1}})


@needs_openvino
@pytest.mark.parametrize(
    "variant",
    mostly_slow(["registers, q/k norm, LayerScale, no bias", "parallel", "distilled", "swin, padded"], "distilled"),
)
@pytest.mark.slow
def test_unlike_models_compute_the_same_codes_in_openvino(variant, tmp_path):
    model = deployed("w4a4", VARIANTS[variant])
    found = export(model, tmp_path / "model.xml", "openvino", images_for(model))
    assert found.sites == sum(isinstance(m, FixedGrid) for m in model.modules())
    assert found.weights == sum(isinstance(m, CodedWeight) for m in model.modules())
    assert found.codes > 0 and found.turned <= 1e-4 * found.codes
    assert found.agreement >= 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.bin", "model.xml"]


@needs_openvino
@pytest.mark.parametrize("bits", mostly_slow(["w8a8", "w3a3", "w5a6", "w4a2"], "w4a2"))
@pytest.mark.slow
def test_unlike_bit_widths_compute_the_same_codes_from_small_weights_in_openvino(bits, tmp_path):
    from maskaq.artifact.export.openvino import read

    model = deployed(bits, lambda: tiny_vit(depth=1))
    export(model, tmp_path / "model.xml", "openvino", images_for(model))
    nodes = read(tmp_path / "model.xml").get_ops()
    codes = [node for node in nodes if node.get_friendly_name().endswith(".codes")]
    assert {node.get_element_type().to_string() for node in codes} == {"i8" if int(bits[1]) > 4 else "i4"}
    count = products(tmp_path / "model.xml")
    assert count.in_float == 0 < count.integer


def one_number(name, change):
    """The graph with one constant changed, saved again."""

    def changed(file, place):
        import openvino
        from openvino import opset13

        from maskaq.artifact.export.openvino import read

        program = read(file)
        node = next(node for node in program.get_ops() if node.get_friendly_name() == name)
        if node.get_type_name() == "FakeQuantize":
            node = node.input_value(2).get_node()  # the upper end of what comes in
        values = np.array(node.get_data())
        values.reshape(-1)[5 % values.size] = change(values.reshape(-1)[5 % values.size])
        raw = node.get_element_type() == openvino.Type.i4
        tensor = openvino.Tensor(values, list(node.get_output_shape(0)), node.get_element_type()) if raw else values
        new = opset13.constant(tensor)
        new.set_friendly_name(node.get_friendly_name())
        for reader in node.output(0).get_target_inputs():
            reader.replace_source_output(new.output(0))
        openvino.save_model(program, place, compress_to_fp16=False)

    return changed


@needs_openvino
@pytest.mark.parametrize(
    "change",
    [
        one_number("blocks.1.mlp.fc1.weight.codes", lambda code: code ^ 1),
        one_number("blocks.1.mlp.fc1.weight.scale", lambda scale: scale * np.float32(1.01)),
        one_number("blocks.1.attn.av.a_grid", lambda end: end * np.float32(1.01)),
    ],
    ids=["a weight's code", "a weight's scale", "a grid's end"],
)
@pytest.mark.slow
def test_openvino_files_with_one_number_changed_are_refused(openvino_vit, tmp_path, change):
    from maskaq.artifact.export.openvino import verify_openvino

    model, file = openvino_vit
    change(file, tmp_path / "changed.xml")
    with pytest.raises(ExportError, match="does not compute what the model computes"):
        verify_openvino(tmp_path / "changed.xml", model, images_for(model))


@needs_openvino
@pytest.mark.parametrize("end", [".xml", ".bin"])
def test_an_openvino_file_that_is_cut_or_gone_is_refused_by_name(openvino_vit, tmp_path, end):
    from maskaq.artifact.export.openvino import read

    for suffix in (".xml", ".bin"):
        (tmp_path / f"cut{suffix}").write_bytes(openvino_vit[1].with_suffix(suffix).read_bytes())
    (tmp_path / f"cut{end}").write_bytes((tmp_path / f"cut{end}").read_bytes()[:-1000])
    with pytest.raises(ExportError, match="cannot read .*cut.xml as an OpenVINO model: .*`maskaq export`"):
        read(tmp_path / "cut.xml")
    (tmp_path / f"cut{end}").unlink()
    with pytest.raises(ExportError, match="cannot read .*cut.xml as an OpenVINO model: .*`maskaq export`"):
        read(tmp_path / "cut.xml")


@pytest.mark.slow
@needs_openvino
def test_openvino_files_that_fail_leave_nothing_and_the_old_ones_untouched(openvino_vit, tmp_path, monkeypatch):
    model, images = openvino_vit[0], images_for(openvino_vit[0], 2)
    for name in ("model.xml", "model.bin"):
        (tmp_path / name).write_text(f"old {name}")

    def kept():
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    old = kept()
    with pytest.raises(ExportError, match="a name that ends in .xml"):
        export(model, tmp_path / "model.bin", "openvino", images)
    assert kept() == old
    with monkeypatch.context() as patch:
        patch.setattr("maskaq.artifact.export.verify.NEAR", -1.0)
        patch.setattr("maskaq.artifact.export.verify.LOGITS", -1.0)
        with pytest.raises(ExportError, match="does not compute"):
            export(model, tmp_path / "model.xml", "openvino", images)
    assert kept() == old
    with monkeypatch.context() as patch:  # the second of the two renames to their places fails
        real = os.replace
        patch.setattr(
            os, "replace", lambda a, b: real(a, b) if Path(b).name != "model.xml" or ".aside" in str(a) else fail()
        )
        with pytest.raises(MaskaqError, match="disk full"):
            export(model, tmp_path / "model.xml", "openvino", images)
    assert kept() == old


def fail():
    raise OSError(errno.ENOSPC, "no space")


@each_format
def test_a_full_disk_is_reported_of_the_file_that_was_asked_for(format, tmp_path, monkeypatch):
    model, file = deployed(), tmp_path / f"model{SUFFIXES[format]}"
    real = files._write_new
    monkeypatch.setattr(files, "_write_new", lambda path, data: fail() if path.parent == tmp_path else real(path, data))
    with pytest.raises(MaskaqError) as raised:
        export(model, file, format, images_for(model, 1))
    assert str(file) in str(raised.value) and "unproven" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_reported_of_the_folder_of_images_that_was_asked_for(tmp_path, monkeypatch):
    images = SyntheticSet(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), torch.tensor([0, 1]))
    monkeypatch.setattr(files, "_write_new", lambda path, data: fail())
    with pytest.raises(MaskaqError, match="disk full") as raised:
        write_pngs(images, tmp_path / "png", {})
    assert str(tmp_path / "png") in str(raised.value)
    assert not list(tmp_path.iterdir())


@needs_onnx
def test_a_file_that_no_runtime_takes_is_named(vit, tmp_path):
    def unknown_operator(tensors, proto):
        proto.graph.node[-1].op_type = "Nothing"

    with pytest.raises(ExportError, match="changed.onnx cannot be run: .*`maskaq export`"):
        list(bench_files({"a": changed(vit[1], tmp_path, unknown_operator)}, batches=(1,), repeats=1))


@needs_onnx
def test_speeds_are_ratios_to_the_first_file(vit):
    rows = list(bench_files({"a": vit[1], "b": vit[1]}, batches=(1, 2), threads=1, repeats=2))
    ours = [row for row in rows if row.runtime == "onnxruntime"]
    assert [(row.file, row.batch) for row in ours] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert ours[0].ratio == 1 and all(row.fastest <= row.milliseconds <= row.slowest for row in rows)


@pytest.mark.parametrize(
    "build", mostly_slow({"vit": tiny_vit, "swin": partial(tiny_swin, depths=(2,), num_heads=(2,))}, "vit")
)
@pytest.mark.slow
def test_a_pt2_program_gives_the_same_bits_for_any_number_of_images(build, tmp_path):
    model = deployed("w4a4", build)
    file = export_pt2(model, tmp_path / "model.pt2", {"model": "x"})
    for n in (1, 3, 8):
        verify_pt2(file, model, images_for(model, n))
    notes = {NOTES: ""}
    torch.export.load(file, extra_files=notes)
    assert json.loads(notes[NOTES])["model"] == "x"
    with torch.no_grad():
        model.head.get_submodule("fc" if "swin" in model.default_cfg["architecture"] else "").bias += 1
    with pytest.raises(ExportError, match="differ"):
        verify_pt2(file, model, images_for(model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny ViT at w4a4, saved; exports of a run are among the README's commands."""
    architecture = {"name": VIT, "args": VIT_ARGS}
    return maskaq.save_pretrained(deployed(), tmp_path_factory.mktemp("saved") / "tiny", architecture=architecture)


def data_of(folder, count):
    from PIL import Image

    for label in range(count):
        (folder / str(label)).mkdir(parents=True)
        Image.new("RGB", (40, 50), (20 * label, 0, 90)).save(folder / str(label) / "a.png")
    return folder


@needs_onnx
@pytest.mark.slow
def test_the_command_line_exports_verifies_and_measures(saved, tmp_path, capsys):
    file, figures = tmp_path / "m.onnx", tmp_path / "figures.json"
    assert main(["export", str(saved), "-o", str(file), "--data", str(data_of(tmp_path / "data", 4))]) == 0
    told = capsys.readouterr().out
    assert "verified on 16 images" in told and "17 matrix products in integers, 0 in float" in told
    assert "m.onnx" in told and "top-1" in told
    words = ["bench-runtime", str(file), "--batch", "1", "--repeats", "1", "--threads", "1", "--json", str(figures)]
    assert main(words) == 0
    assert "float32" in capsys.readouterr().out
    assert {row["file"] for row in json.loads(figures.read_text())["speeds"]} == {"float32", str(file)}
    assert main(["export", str(saved), "--format", "pt2", "-o", str(tmp_path / "m.pt2")]) == 0
    assert "bit for bit" in capsys.readouterr().out and (tmp_path / "m.pt2").exists()


EXAMPLE = Path(__file__).parent.parent / "examples" / "onnx_evaluate.py"


@needs_onnx
def test_the_example_evaluates_a_file_without_maskaq(vit, tmp_path):
    assert "import maskaq" not in EXAMPLE.read_text()
    words = [sys.executable, str(EXAMPLE), str(vit[1]), str(data_of(tmp_path / "data", 4))]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "of 4 images" in told


@needs_onnx
def test_the_example_refuses_what_it_cannot_evaluate(vit, tmp_path):
    empty, few = tmp_path / "empty", data_of(tmp_path / "few", 4)
    for folder in few.iterdir():
        (empty / folder.name).mkdir(parents=True)
        (empty / folder.name / ".DS_Store").touch()
    shutil.rmtree(next(few.iterdir()))
    for data, message in ((empty, "no images"), (few, "one for each is needed"), (tmp_path / "absent", "sub-folder")):
        told = subprocess.run([sys.executable, str(EXAMPLE), str(vit[1]), str(data)], capture_output=True, text=True)
        assert told.returncode == 1 and message in told.stderr and "Traceback" not in told.stderr


@pytest.mark.slow
@needs_openvino
def test_the_command_line_exports_to_openvino_and_measures_it(saved, tmp_path, capsys):
    file, figures = str(tmp_path / "m.xml"), tmp_path / "figures.json"
    data = str(data_of(tmp_path / "data", 4))
    assert main(["export", str(saved), "--format", "openvino", "-o", file, "--data", data]) == 0
    told = capsys.readouterr().out
    assert "verified on 16 images" in told and "0 in float" in told
    assert "m.xml and .bin" in told and "top-1" in told
    words = ["bench-runtime", file, "--batch", "1", "--repeats", "1", "--threads", "1", "--json", str(figures)]
    assert main(words) == 0
    found = {(row["file"], row["runtime"]) for row in json.loads(figures.read_text())["speeds"]}
    assert found == {("float32", "onnxruntime"), ("float32", "openvino"), (file, "openvino")}


class SignalStack(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def signal_stack():
    """Where this thread's signals are handled."""
    found = SignalStack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found)) == 0
    return found.start, found.flags, found.size


@needs_openvino
def test_openvinos_numbers_take_no_more_room_than_the_onnx_file(vit, openvino_vit):
    assert openvino_vit[1].with_suffix(".bin").stat().st_size <= vit[1].stat().st_size


@needs_openvino
@pytest.mark.skipif(sys.platform != "linux", reason="sigaltstack is asked in Linux's own way")
def test_openvino_models_that_go_in_any_order_leave_signals_a_stack(openvino_vit):
    from maskaq.artifact.export.openvino import OpenvinoModel

    first, second = (OpenvinoModel(openvino_vit[1]) for _ in range(2))
    before = signal_stack()
    del first
    gc.collect()
    del second
    gc.collect()
    assert signal_stack() == before


def without(monkeypatch, *packages):
    """Imports of them fail, and what of ours has imported them is imported again."""
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("maskaq.artifact.export.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(maskaq.artifact.export, name.rpartition(".")[2])


@pytest.mark.parametrize(
    ("words", "packages", "extra"),
    [
        (["bench-runtime", "model.onnx"], EXTRAS, "maskaq[onnx]"),
        (["export", "SAVED", "--format", "openvino"], ["openvino"], "maskaq[openvino]"),
    ],
)
def test_without_the_packages_the_command_says_what_to_install(words, packages, extra, saved, monkeypatch, capsys):
    without(monkeypatch, *packages)
    assert main([str(saved) if word == "SAVED" else word for word in words]) == 1
    assert f'pip install "{extra}"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "format", "named"),
    [
        ("m.xml", "onnx", "ends in .onnx"),
        ("m.onnx", "openvino", "ends in .xml"),
        ("m.onnx", "pt2", "ends in .pt2"),
        ("folder.onnx", "onnx", "is a folder"),
        ("file.txt/m.onnx", "onnx", "is not a folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_the_work(target, format, named, tmp_path):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(ExportError, match=named):
        export(None, tmp_path / target, format, None)  # no model is needed to see it
    assert sorted(x.name for x in tmp_path.iterdir()) == ["file.txt", "folder.onnx"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"format": "tflite"}, "format 'tflite'"),
        ({"format": "onnx", "target": "gpu"}, "target 'gpu'"),
        ({"format": "openvino", "precision": "f16"}, "precision 'f16'"),
    ],
)
def test_an_unknown_format_target_or_precision_is_refused_before_the_work(options, named, tmp_path):
    with pytest.raises(ExportError, match=named):
        export(None, tmp_path / "model.onnx", images=None, **options)
    assert not list(tmp_path.iterdir())


@needs_onnx
def test_speeds_of_two_models_are_not_compared(vit, tmp_path, capsys):
    one, other = tmp_path / "one.onnx", tmp_path / "other.onnx"
    for file in (one, other):
        proto = onnx.load(vit[1])
        notes = {entry.key: entry.value for entry in proto.metadata_props}
        notes |= {"maskaq.architecture": json.dumps({"name": file.stem, "args": {}}), "maskaq.model": file.stem}
        onnx.helper.set_model_props(proto, notes)
        onnx.save(proto, file)
    assert main(["bench-runtime", str(one), str(other)]) == 1
    told = capsys.readouterr().err
    assert "of two models" in told and f"{other} (other)" in told
    assert main(["bench-runtime", str(tmp_path)]) == 1
    assert str(tmp_path / "model.onnx") in capsys.readouterr().err
    assert main(["bench-runtime", str(one), "--threads", "100000"]) == 1
    assert "--threads 100000" in capsys.readouterr().err


CLASSIFY = EXAMPLE.parent / "deploy" / "classify.py"


@pytest.mark.slow
@needs_onnx
def test_the_small_program_names_five_classes_without_torch(tmp_path):
    from PIL import Image

    from maskaq import zoo
    from maskaq.models import hosts

    model = maskaq.load_model("cifar10_vit")
    recipe = maskaq.load_recipe("quick", bits="w8a8")
    teacher = maskaq.expose(model)
    student = maskaq.quantized_twin(teacher, recipe.quantization)
    maskaq.init_ranges_(student, maskaq.noise(teacher, n=32, seed=0), recipe.quantization)
    small = deploy(student)
    file = export_onnx(small, tmp_path / "m.onnx")
    pixels, _ = zoo.test_images()
    names = hosts.embedded_model("cifar10_vit").pretrained_cfg["label_names"]
    Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(tmp_path / "a.png")
    words = [sys.executable, "-X", "importtime", str(CLASSIFY), str(file), str(tmp_path / "a.png")]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    first, *rows = found.stdout.splitlines()
    assert first.endswith(" ms") and len(rows) == 5
    best = small(geometry(small).normalise(pixels[:1].float() / 255)).softmax(dim=1)[0]
    assert names[best.argmax()] in rows[0]
    assert float(rows[0].split()[0]) == pytest.approx(100 * best.max().item(), abs=2)
    assert "torch" not in {line.split("|")[-1].strip() for line in found.stderr.splitlines()}
    (tmp_path / "b.png").write_text("no image")
    told = subprocess.run([sys.executable, str(CLASSIFY), str(file), str(tmp_path / "b.png")], capture_output=True)
    assert told.returncode == 1 and b"Traceback" not in told.stderr
    told = subprocess.run([sys.executable, str(CLASSIFY), str(tmp_path / "b.png"), "x"], capture_output=True)
    assert told.returncode == 1 and b"Traceback" not in told.stderr


@needs_onnx
@pytest.mark.parametrize("name, value", [("labels", b"1234567"), ("labels", b'["a", "b"]'), ("mean", b"NaN")])
def test_the_small_program_refuses_a_file_whose_notes_are_damaged(vit, tmp_path, name, value):
    from PIL import Image

    file = with_note(vit[1], tmp_path / "m.onnx", name, value)
    Image.new("RGB", (40, 32)).save(tmp_path / "a.png")
    words = [sys.executable, str(CLASSIFY), str(file), str(tmp_path / "a.png")]
    found = subprocess.run(words, capture_output=True, text=True)
    assert found.returncode == 1 and not found.stdout
    assert str(file) in found.stderr and "damaged" in found.stderr and "Traceback" not in found.stderr
