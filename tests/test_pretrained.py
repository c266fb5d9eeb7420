"""What a saved model promises: the same outputs to the bit, the bytes its codes need, no silent damage, no pickle."""

import errno
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from helpers import SWIN, SWIN_ARGS, VIT, VIT_ARGS, content, hook, in_process, mostly_slow, tiny_swin, tiny_vit
from torch import nn

import maskaq
from maskaq import zoo
from maskaq.artifact import saved as pretrained
from maskaq.artifact.saved import from_pretrained, save_pretrained
from maskaq.cli.main import main
from maskaq.errors import MaskaqError, ModelError, PretrainedError, RunFolderError
from maskaq.models import data_config, expose, geometry
from maskaq.quant.inspection import inspect_deployed, inspect_model
from maskaq.quant.twin import deploy, init_ranges_, quantized_twin
from maskaq.recipe.schema import Quantization
from maskaq.runs import quantize as run
from maskaq.storage import files

FILES = {"config.json", "model.safetensors", "README.md"}
NAMED = {"name": VIT, "args": VIT_ARGS}


def student_of(model, **scheme):
    """A student whose ranges came from noise."""
    teacher, scheme = expose(model), Quantization(**{"range_images": 2, "activation_range": "minmax", **scheme})
    student = quantized_twin(teacher, scheme)
    init_ranges_(student, run.noise(teacher, 2, 0), scheme)
    return student


def assert_same_outputs(a, b):
    images = run.noise(b, 3, seed=5)
    with torch.no_grad():
        assert torch.equal(a(images), b(images))


def check_round_trip(model, folder, architecture=None, **scheme):
    student = student_of(model, **scheme)
    save_pretrained(student, folder, architecture=architecture)
    loaded = from_pretrained(folder)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert_same_outputs(loaded, student)
    return loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model, not to be written to."""
    return save_pretrained(student_of(tiny_vit()), tmp_path_factory.mktemp("saved") / "model", architecture=NAMED)


@pytest.fixture
def folder(saved, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(saved, tmp_path / "model")


# ---- the same outputs


@pytest.mark.parametrize("bits", ["w2a2", "w3a3", "w4a4", "w5a5", "w6a6", "w7a7", "w8a8", "w4a8", "w3a6"])
def test_outputs_are_the_same_to_the_bit_at_every_width(tmp_path, bits):
    check_round_trip(tiny_vit(), tmp_path / "model", NAMED, bits=bits)


VARIANTS = {
    "average pooling": (VIT, VIT_ARGS | dict(global_pool="avg", class_token=False, fc_norm=True)),
    "registers": (VIT, VIT_ARGS | dict(reg_tokens=3)),
    "q/k norm": (VIT, VIT_ARGS | dict(qk_norm=True)),
    "LayerScale": (VIT, VIT_ARGS | dict(init_values=0.1)),
    "one channel": (VIT, VIT_ARGS | dict(in_chans=1)),
    "not square": (VIT, VIT_ARGS | dict(img_size=(32, 48))),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT_ARGS),
    "shifted windows": (SWIN, SWIN_ARGS),
}


@pytest.mark.parametrize(("name", "args"), VARIANTS.values(), ids=VARIANTS.keys())
def test_outputs_are_the_same_to_the_bit_of_every_kind_of_model(tmp_path, name, args):
    torch.manual_seed(1)
    model = timm.create_model(name, **args)
    loaded = check_round_trip(model, tmp_path / "model", {"name": name, "args": args}, bits="w3a5")
    assert data_config(loaded) == data_config(model)


@pytest.mark.parametrize("first_last", ["same", "8", "float"])
@pytest.mark.parametrize("weight", ["minmax", "lsq", "static"])
@pytest.mark.parametrize("activation", ["lsq", "static"])
def test_outputs_are_the_same_to_the_bit_with_every_quantizer_and_rule_for_the_ends(
    tmp_path, first_last, weight, activation
):
    scheme = dict(bits="w3a4", first_last=first_last, weight=weight, activation=activation)
    loaded = check_round_trip(tiny_vit(), tmp_path / "model", NAMED, **scheme)
    exceptions = loaded.maskaq_config["quantization_config"]["exceptions"]
    at_ends = {"same": {}, "8": {"weight_bits": 8, "input_bits": 8}, "float": {"weight_bits": None, "input_bits": None}}
    first = {**at_ends[first_last], "input_bits": None}  # the image is never quantized
    last = {"head": at_ends[first_last]} if at_ends[first_last] else {}
    assert exceptions == {"patch_embed.proj": first, **last}


@pytest.mark.parametrize("name", zoo.CLASSIFIERS)
def test_embedded_models_come_back_with_their_labels_and_without_their_float_weights(tmp_path, monkeypatch, name):
    student = student_of(maskaq.load_model(name), bits="w4a4")
    save_pretrained(student, tmp_path / "model")
    monkeypatch.setattr(zoo, "weights", lambda _: pytest.fail("float weights were read"))
    loaded = from_pretrained(tmp_path / "model")
    assert_same_outputs(loaded, student)
    labels = json.loads((tmp_path / "model" / "config.json").read_text())["id2label"]
    assert (
        labels["0"] == "airplane" and len(labels) == 10 and loaded.pretrained_cfg["label_names"] == [*labels.values()]
    )


def test_a_model_calibrated_with_large_steps_comes_back_as_it_is(tmp_path):
    student = student_of(tiny_swin(), bits="w4a4", weight="lsq")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():  # scales change their sign, zero points leave the grid
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.abs().mean())
    save_pretrained(student, tmp_path / "model", architecture={"name": SWIN, "args": SWIN_ARGS})
    assert_same_outputs(from_pretrained(tmp_path / "model"), student)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_and_generator_play_no_part_and_are_left_alone(saved, dtype):
    expected = from_pretrained(saved)
    state = torch.get_rng_state()
    torch.set_default_dtype(dtype)
    try:
        loaded = from_pretrained(saved)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_outputs(loaded, expected)


def test_saving_changes_nothing_in_the_model(tmp_path):
    student = student_of(tiny_vit()).train()
    before = {name: value.clone() for name, value in student.state_dict().items()}
    save_pretrained(student, tmp_path / "model", architecture=NAMED)
    assert student.training and all(p.requires_grad for p in student.parameters())
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_what_was_loaded_is_saved_to_the_same_bytes(saved, tmp_path):
    save_pretrained(from_pretrained(saved), tmp_path / "again")
    assert content(tmp_path / "again") == content(saved)


def test_a_deployed_model_is_saved_like_the_student_it_came_from(saved, tmp_path):
    save_pretrained(deploy(student_of(tiny_vit())), tmp_path / "model", architecture=NAMED)
    assert content(tmp_path / "model") == content(saved)


# ---- sizes


LIMITS = {"w3a3": 2.8e6, "w4a4": 3.5e6, "w8a8": 6.5e6}  # bytes


@pytest.mark.parametrize(
    ("bits", "limit"), mostly_slow({bits: (bits, limit) for bits, limit in LIMITS.items()}, "w4a4")
)
def test_a_deit_tiny_is_as_small_as_promised(tmp_path, bits, limit):
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224")
    student = student_of(model, bits=bits)
    save_pretrained(student, tmp_path / "model")
    size = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    tensors = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    held = sum(value.numel() * value.element_size() for value in tensors.values())
    assert size < limit and size <= 1.05 * held + 100_000
    quantized = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and n.split(".")[-1] == "weight")
    assert (
        held < quantized * int(bits[1]) / 8 + 4.3 * (sum(p.numel() for p in model.parameters()) - quantized) + 100_000
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["timm"] == {"name": "deit_tiny_patch16_224", "args": {}}
    assert config["id2label"]["0"] == "tench, Tinca tinca" and len(config["id2label"]) == 1000
    assert config["weights"]["float32_bytes"] == 4 * sum(p.numel() for p in model.parameters())


def test_what_the_inspection_foretells_is_what_a_saved_model_has():
    model, scheme = tiny_swin(), Quantization(bits="w3a4", first_last="8")
    foretold = inspect_model(model, maskaq.load_recipe("paper", "quantization.first_last=8", bits="w3a4"))
    assert inspect_deployed(deploy(student_of(model, bits=scheme.bits, first_last="8"))) == foretold


# ---- the folder


def test_a_folder_holds_three_files_and_none_of_them_is_a_pickle(saved):
    assert {path.name for path in saved.iterdir()} == FILES
    data = (saved / "model.safetensors").read_bytes()
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # safetensors: a JSON header, then numbers
    assert not any(path.read_bytes().startswith((b"\x80", b"PK")) for path in saved.iterdir())


def test_codes_are_packed_and_all_else_is_float32(saved):
    tensors = safetensors.torch.load_file(saved / "model.safetensors")
    codes = {name for name in tensors if name.endswith(".codes")}
    assert {tensors[name].dtype for name in codes} == {torch.uint8}
    assert {tensors[name].dtype for name in tensors.keys() - codes} == {torch.float32}
    assert tensors["blocks.0.mlp.fc1.weight.codes"].numel() == 16 * 64 // 2
    assert not [name for name in tensors if name.endswith(("relative_position_index", "attn_mask"))]


def test_the_config_says_what_the_model_is(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["model_type"] == "maskaq" and config["format_version"] == 1
    assert config["architectures"] == ["VisionTransformer"] and config["timm"]["name"] == VIT
    assert config["num_labels"] == 4 and config["input_size"] == [3, 32, 32] and "id2label" not in config
    scheme = config["quantization_config"]
    assert (scheme["quant_method"], scheme["weight_bits"], scheme["activation_bits"]) == ("maskaq", 4, 4)
    assert scheme["weights"]["symmetric"] and not scheme["activations"]["symmetric"]
    assert scheme["sites"]["blocks.0.attn.av"] == {"a_bits": 4, "b_bits": 4}
    assert scheme["sites"]["patch_embed.proj"] == {"weight_bits": 4, "input_bits": None}


def test_labels_of_more_than_ten_classes_are_kept(tmp_path):
    labels = [f"thing {number}" for number in range(12)]
    named = {"name": NAMED["name"], "args": {**NAMED["args"], "num_classes": 12}}
    save_pretrained(student_of(tiny_vit(num_classes=12)), tmp_path / "m", architecture=named, labels=labels)
    loaded = from_pretrained(tmp_path / "m")
    assert loaded.maskaq_config["label2id"] == {name: number for number, name in enumerate(labels)}
    assert loaded.pretrained_cfg["label_names"] == labels


@pytest.fixture(scope="module")
def student():
    return student_of(tiny_vit())


NAMES = ["a", "b", "c", "d"]
ODD = [
    *(
        {"labels": odd}
        for odd in ("abcd", b"abcd", 5, True, [], NAMES[:3], [*NAMES[:3], None], range(4), [[x] for x in NAMES])
    ),
    *({"labels": odd} for odd in (dict(enumerate(NAMES)), set(NAMES), torch.arange(4), 4 * [math.nan])),
    *({"made": odd} for odd in (5, [], "text")),
    *({"architecture": odd} for odd in (5, [], VIT, True)),
]


@pytest.mark.parametrize("odd", ODD)  # by number: a set is written in another order in each process
def test_an_argument_of_another_kind_is_refused_by_name(student, tmp_path, odd):
    ((name, _),) = odd.items()
    with pytest.raises(ModelError, match=f"{name}: expected"):
        save_pretrained(student, tmp_path / "m", **{"architecture": NAMED, **odd})
    assert not list(tmp_path.iterdir())


def test_labels_may_be_any_names_in_order(student, tmp_path):
    for labels in (4 * ["crane"], tuple(NAMES), np.array(NAMES), (name for name in NAMES)):
        save_pretrained(student, tmp_path / "m", architecture=NAMED, labels=labels)


@pytest.mark.parametrize("folder", ["", 5, None, b"folder"])
def test_what_is_not_a_path_is_refused(student, folder):
    for call in (partial(save_pretrained, student, architecture=NAMED), from_pretrained):
        with pytest.raises(PretrainedError, match="expected the path of a folder"):
            call(folder)


@pytest.mark.parametrize("like", [5, VIT, nn.Linear])
def test_a_model_to_load_like_is_a_model(student, tmp_path, like):
    save_pretrained(student, tmp_path / "m", architecture=NAMED)
    with pytest.raises(PretrainedError, match="like: expected"):
        from_pretrained(tmp_path / "m", like)


def test_labels_and_the_story_of_the_model_are_kept(tmp_path):
    made = {"seed": 3, "commit": "abc", "command": "maskaq quantize mine", "versions": {"torch": "2.9"}}
    labels = ["apple", "bread", "cherry", "date"]
    save_pretrained(student_of(tiny_vit()), tmp_path / "m", architecture=NAMED, labels=labels, made=made)
    loaded = from_pretrained(tmp_path / "m")
    assert loaded.maskaq_config["made"] == made and loaded.maskaq_config["label2id"]["date"] == 3
    card = (tmp_path / "m" / "README.md").read_text()
    assert all(words in card for words in ("seed: 3", "commit: abc", "maskaq quantize mine", "torch 2.9", "w4a4"))
    save_pretrained(loaded, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "m")
    with pytest.raises(ModelError, match="labels: expected 4, one for each class, got 2"):
        save_pretrained(loaded, tmp_path / "again", labels=labels[:2])


def relabelled(config):
    config["id2label"]["2"] = "plum"


LABEL_EDITS = {
    "a label": (relabelled, "id2label.2"),
    "all labels": (lambda config: config.pop("id2label"), "id2label"),
    "the way back": (lambda config: config["label2id"].update(date=0), "label2id.date"),
}


@pytest.mark.parametrize(("edit", "key"), LABEL_EDITS.values(), ids=LABEL_EDITS.keys())
def test_edited_labels_are_refused_with_their_key_and_saving_again_changes_them(tmp_path, edit, key):
    labels = ["apple", "bread", "cherry", "date"]
    save_pretrained(student_of(tiny_vit()), tmp_path / "m", architecture=NAMED, labels=labels)
    loaded = from_pretrained(tmp_path / "m")
    save_pretrained(loaded, tmp_path / "other", labels=["a", "b", "c", "d"])
    assert from_pretrained(tmp_path / "other").maskaq_config["id2label"]["2"] == "c"
    change(tmp_path / "m", edit)
    assert f"config.json was changed after the model was saved: {key}" in refused(tmp_path / "m")


def test_labels_that_were_never_saved_cannot_be_put_in(folder):
    change(folder, lambda config: config.update(id2label={str(i): "x" for i in range(4)}))
    assert "config.json was changed after the model was saved: id2label" in refused(folder)


def test_a_folder_whose_weights_do_not_repeat_its_labels_still_loads(tmp_path):
    labels = ["apple", "bread", "cherry", "date"]
    save_pretrained(student_of(tiny_vit()), tmp_path / "m", architecture=NAMED, labels=labels)
    held, metadata = files.read_tensors(tmp_path / "m" / "model.safetensors")
    described = json.loads(metadata["config"])
    del described["id2label"]  # as maskaq 0.1.0 wrote it
    data = files.seal(held, {"config": json.dumps(described)})
    (tmp_path / "m" / "model.safetensors").write_bytes(data)
    change(tmp_path / "m", setter("weights/sha256", sha256(data).hexdigest()))
    assert from_pretrained(tmp_path / "m").maskaq_config["id2label"]["3"] == "date"


def test_measured_accuracy_enters_the_config_and_the_card(folder):
    row = {"top1": 57.4, "top5": 80.0, "n": 1000, "standard_error": 1.56}
    before = from_pretrained(folder)
    pretrained.add_metrics(folder, {"data": "/home/me/val", "accuracy": {"maskaq": row, "full precision": "no file"}})
    card = (folder / "README.md").read_text()
    assert "| maskaq | 57.40 | 1.56 | 80.00 | 1000 |" in card and "`val`" in card and "/home" not in card
    loaded = from_pretrained(folder)
    assert loaded.maskaq_config["made"]["metrics"]["accuracy"]["maskaq"] == row
    assert_same_outputs(loaded, before)


def test_the_card_starts_with_front_matter_and_its_python_runs(saved):
    card = (saved / "README.md").read_text()
    front, body = card.removeprefix("---\n").split("---\n", 1)
    assert {"library_name: timm", "pipeline_tag: image-classification", "- quantization"} <= set(front.splitlines())
    (snippet,) = re.findall(r"```python\n(.*?)```", body, flags=re.S)
    names: dict = {}
    exec(snippet.replace("FOLDER", str(saved)), names)
    assert geometry(names["model"]).classes == 4


def test_preparation_of_images_is_the_models_own_and_not_that_of_its_name(tmp_path):
    model = tiny_vit()
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "mean": (0.1, 0.2, 0.3),
        "crop_pct": 0.5,
        "interpolation": "bilinear",
    }
    save_pretrained(student_of(model), tmp_path / "model", architecture=NAMED)
    assert data_config(from_pretrained(tmp_path / "model")) == data_config(model)
    assert data_config(model)["mean"] == (0.1, 0.2, 0.3)


# ---- what builds the model


def test_the_architecture_of_a_model_that_timm_knows_needs_no_words(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=64, in_chans=1)
    save_pretrained(student_of(model), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["timm"] == {
        "name": "vit_tiny_patch16_224",
        "args": {"num_classes": 7, "in_chans": 1, "img_size": 64},
    }


def test_an_architecture_that_cannot_be_known_is_asked_for_and_nothing_is_written(tmp_path):
    with pytest.raises(ModelError, match=r'give architecture=\{"name": ..., "args": \{...\}\}'):
        save_pretrained(student_of(tiny_vit()), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": VIT, "args": VIT_ARGS | {"depth": 3}}, r"blocks.2.norm1.weight would be \(16,\) and is absent"),
        ({"name": VIT, "args": VIT_ARGS | {"num_heads": 4}}, "its shapes fit, its outputs differ"),
        ({"name": "vit_of_mine", "args": {}}, "unknown model 'vit_of_mine'"),
        ({"name": VIT, "args": VIT_ARGS | {"colour": "red"}}, "timm cannot build"),
        ({"name": VIT, "args": {"pretrained": True}}, "'pretrained' cannot be set"),
        ({"args": {}}, "expected name and args"),
        ({"name": VIT, "args": 3}, "expected name and args"),
        ({"name": SWIN, "args": SWIN_ARGS}, "would be"),
    ],
)
def test_an_architecture_that_does_not_build_the_model_is_refused(tmp_path, wrong, words):
    with pytest.raises(ModelError, match="does not build this model: .*" + words):
        save_pretrained(student_of(tiny_vit()), tmp_path / "model", architecture=wrong)
    assert not (tmp_path / "model").exists()


def test_a_folder_without_an_architecture_loads_around_a_model_like_it(tmp_path):
    student = student_of(tiny_vit())
    pretrained.write(deploy(student), tmp_path / "model", None)
    with pytest.raises(PretrainedError, match=r"names no architecture: .*from_pretrained\(folder, like=model\)"):
        from_pretrained(tmp_path / "model")
    like = tiny_vit(seed=4).train()
    assert_same_outputs(from_pretrained(tmp_path / "model", like=like), student)
    assert like.training
    for other in (tiny_vit(depth=3), tiny_vit(embed_dim=32), tiny_swin(), student):
        with pytest.raises(PretrainedError, match="cannot be loaded"):
            from_pretrained(tmp_path / "model", like=other)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (tiny_vit(), "is not quantized"),
        (expose(tiny_vit()), "is not quantized"),
        ("cifar10_vit", "expected a quantized model to save, got str"),
        (quantized_twin(expose(tiny_vit()), Quantization()), "has no range yet"),
        (quantized_twin(expose(tiny_vit()), Quantization(weight="static", first_last="float")), "has no range yet"),
    ],
    ids=range(5),
)
def test_what_is_not_a_quantized_model_is_not_saved(tmp_path, model, words):
    with pytest.raises(MaskaqError, match=words):
        save_pretrained(model, tmp_path / "model", architecture=NAMED)
    assert not (tmp_path / "model").exists()


def test_a_model_in_another_precision_or_with_nan_is_not_saved(tmp_path):
    deployed = deploy(student_of(tiny_vit()))
    with pytest.raises(ModelError, match="expected float32, found torch.float16"):
        save_pretrained(deploy(student_of(tiny_vit())).half(), tmp_path / "model", architecture=NAMED)
    deployed.pos_embed.data[0, 0, 0] = torch.nan
    with pytest.raises(ModelError, match="pos_embed has NaN or Inf"):
        save_pretrained(deployed, tmp_path / "model", architecture=NAMED)


# ---- damage


def refused(folder):
    """The message, one line, with which a folder is refused."""
    with pytest.raises(PretrainedError) as raised:
        from_pretrained(folder)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000
    return str(raised.value)


def test_every_truncation_of_every_file_is_noticed(folder):
    for name in ("config.json", "model.safetensors"):
        whole = (folder / name).read_bytes()
        places = [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 8, len(whole) - 3]
        for length in [*places, *random.Random(0).sample(range(len(whole)), 20)]:
            (folder / name).write_bytes(whole[:length])
            assert name in refused(folder), length
        (folder / name).write_bytes(whole)
    from_pretrained(folder)


def test_every_flipped_bit_of_the_weights_is_noticed(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for place in [0, 7, 8, 9, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 60)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert "model.safetensors is not the file that was saved: config.json expects sha256" in refused(folder)


def test_a_flipped_bit_of_the_config_is_noticed_or_changes_no_output(folder, saved):
    expected, path = from_pretrained(saved), folder / "config.json"
    whole, noticed = path.read_bytes(), 0
    for place in random.Random(1).sample(range(len(whole)), 150):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 7]) + whole[place + 1 :])
        try:
            loaded = from_pretrained(folder)
        except MaskaqError as error:
            assert "\n" not in str(error)
            noticed += 1
        else:
            assert_same_outputs(loaded, expected)
    assert noticed > 50


def change(folder, edit, *, sealed=False, tensors=None):
    """Edit the config; sealed: as a program would that also updates all digests, with these tensors if given."""
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    if sealed:
        held, metadata = files.read_tensors(folder / "model.safetensors")
        described = {key: config.get(key) for key in json.loads(metadata["config"])}
        data = files.seal(held if tensors is None else tensors, {"config": json.dumps(described)})
        (folder / "model.safetensors").write_bytes(data)
        config["weights"]["sha256"] = sha256(data).hexdigest()
    (folder / "config.json").write_text(json.dumps(config))


def setter(path, value):
    def edit(config):
        *parents, last = path.split("/")
        for key in parents:
            config = config[key]
        config[last] = value

    return edit


QKV = "quantization_config/sites/blocks.0.attn.qkv"
EDITS = {
    "bits of a site": (f"{QKV}/weight_bits", 3),
    "bits beyond": (f"{QKV}/weight_bits", 9),
    "bits below": (f"{QKV}/weight_bits", 1),
    "bits as text": (f"{QKV}/weight_bits", "4"),
    "bits as truth": (f"{QKV}/weight_bits", True),
    "bits with a point": (f"{QKV}/weight_bits", 4.0),
    "weights in float": (f"{QKV}/weight_bits", None),
    "input bits": (f"{QKV}/input_bits", 5),
    "input in float": (f"{QKV}/input_bits", None),
    "a site of another kind": (QKV, {"a_bits": 4, "b_bits": 4}),
    "a site that is a number": (QKV, 4),
    "no sites": ("quantization_config/sites", {}),
    "sites in a list": ("quantization_config/sites", [1]),
    "a site too many": ("quantization_config/sites/blocks.9.attn.qkv", {"weight_bits": 4, "input_bits": 4}),
    "no scheme": ("quantization_config", None),
    "stated bits": ("quantization_config/weight_bits", 2),
    "exceptions": ("quantization_config/exceptions", {}),
    "classes": ("num_labels", 5),
    "classes as text": ("num_labels", "4"),
    "mean": ("mean", [0.1, 0.1, 0.1]),
    "mean of two": ("mean", [0.1, 0.1]),
    "mean of words": ("mean", "white"),
    "no std": ("std", None),
    "size": ("input_size", [3, 64, 64]),
    "class": ("architectures", ["SwinTransformer"]),
    "depth": ("timm/args/depth", 1),
    "width": ("timm/args/embed_dim", 32),
    "name": ("timm/name", "vit_small_patch16_224"),
    "unknown name": ("timm/name", "../../etc/passwd"),
    "name of a number": ("timm/name", 3),
    "an argument that loads weights": ("timm/args/checkpoint_path", "weights.pth"),
    "an unknown argument": ("timm/args/colour", "red"),
    "arguments in a list": ("timm/args", [1, 2]),
    "no architecture": ("timm", None),
    "architecture of text": ("timm", "vit"),
    "an embedded name": ("timm", {"name": "cifar10_vit", "args": {}}),
}


@pytest.mark.parametrize(("path", "value"), EDITS.values(), ids=EDITS.keys())
def test_an_edited_config_is_refused_with_the_key_that_was_edited(folder, path, value):
    change(folder, setter(path, value))
    message = refused(folder)
    assert "config.json was changed after the model was saved: " in message
    assert f": {path.split('/')[0]}" in message and "expected" in message and "found" in message


HARMLESS = ("mean", "name")  # no weight says which mean it was trained with, and all sizes of a name were overridden


@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit not in HARMLESS])
def test_a_config_that_contradicts_the_weights_is_refused_even_with_right_digests(folder, edit):
    change(folder, setter(*EDITS[edit]), sealed=True)
    assert str(folder) in refused(folder)


@pytest.mark.parametrize(
    "path",
    ["timm/args/depth", "timm/args/embed_dim", "timm/args/num_classes", "timm/args/reg_tokens", "timm/args/img_size"],
)
@pytest.mark.parametrize("value", [100_000, 2**40, [1] * 100_000])
def test_a_config_that_asks_for_more_than_the_weights_hold_is_refused_before_it_is_built(
    folder, monkeypatch, path, value
):
    change(folder, setter(path, value), sealed=True)
    monkeypatch.setattr(pretrained, "rebuild", lambda *_: pytest.fail("was built"))
    assert str(folder) in refused(folder)


@pytest.mark.parametrize("depths", [[100_000, 2], [1] * 100_000])
def test_a_swin_of_more_blocks_than_the_weights_hold_is_refused_before_it_is_built(tmp_path, monkeypatch, depths):
    architecture = {"name": SWIN, "args": SWIN_ARGS}
    save_pretrained(student_of(tiny_swin()), tmp_path / "m", architecture=architecture)
    change(tmp_path / "m", setter("timm/args/depths", depths), sealed=True)
    monkeypatch.setattr(pretrained, "load_shape", lambda *_: pytest.fail("was built"))
    assert "depths" in refused(tmp_path / "m")


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0, [1]])
def test_another_format_version_is_refused_by_name(folder, version):
    change(folder, setter("format_version", version), sealed=True)
    message = refused(folder)
    assert f"has format_version {json.dumps(version)}" in message and "reads 1" in message and "maskaq" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "\x00", "[" * 100_000, '{"model_type": "vit"}', "{}"])
def test_a_foreign_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json is not" in refused(folder)


@pytest.mark.parametrize("key", ["weights", "timm", "quantization_config", "mean", "architectures", "num_labels"])
def test_a_config_without_one_of_its_keys_is_refused(folder, key):
    change(folder, lambda config: config.pop(key))
    refused(folder)


def test_a_config_without_a_key_is_refused_even_where_the_weights_do_not_name_it(folder):
    held, metadata = files.read_tensors(folder / "model.safetensors")
    keys = json.loads(metadata["config"]).keys() - {"id2label"}  # a model need not have labels
    for key, others in [(key, json.loads(metadata["config"])) for key in sorted(keys)]:
        del others[key]
        data = files.seal(held, {"config": json.dumps(others)})
        (folder / "model.safetensors").write_bytes(data)
        (folder / "config.json").write_text(json.dumps(others | {"weights": {"sha256": sha256(data).hexdigest()}}))
        assert str(folder) in refused(folder), key


@pytest.mark.parametrize("made", [[], "by hand", None, 3])
def test_a_story_that_is_no_object_is_refused(folder, made):
    change(folder, setter("made", made))
    assert "config.json: expected made to be an object, found" in refused(folder)


STORIES = {
    "gone": "gone",
    "empty": {},
    "of wrong kinds": {"metrics": [1], "versions": 2},
    "with an empty row": {"metrics": {"accuracy": {"a": {}}}},
}


@pytest.mark.parametrize("made", mostly_slow(STORIES, "of wrong kinds"))
def test_a_story_that_is_gone_or_edited_takes_nothing_from_the_model(folder, tmp_path, made):
    change(folder, lambda config: config.pop("made") if made == "gone" else config.update(made=made))
    save_pretrained(from_pretrained(folder), tmp_path / "again")
    assert "Not measured yet" in (tmp_path / "again" / "README.md").read_text()
    assert main(["export", str(folder), "--format", "pt2", "-o", str(tmp_path / "m.pt2")]) == 0


def test_a_damaged_folder_is_refused_by_every_command_in_one_line(folder, tmp_path, capsys):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    for words in (["export"], ["inspect"], ["evaluate", "--data", "cifar10-demo"]):
        assert main([words[0], str(folder), *words[1:]]) == 1
        told = capsys.readouterr().err
        assert "model.safetensors is not the file that was saved" in told and "Traceback" not in told
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def tampered():
    """Name -> what is done to the tensors of a file."""

    def drop(held):
        del held["blocks.0.norm1.weight"]

    def add(held):
        held["extra"] = torch.zeros(1)

    def other_shape(held):
        held["pos_embed"] = held["pos_embed"][:, :-1]

    def other_dtype(held):
        held["pos_embed"] = held["pos_embed"].half()

    def fewer_codes(held):
        held["head.weight.codes"] = held["head.weight.codes"][:-1]

    def whole_codes(held):
        held["head.weight.codes"] = held["head.weight.codes"].to(torch.int8)

    def nan(held):
        held["head.grid.scale"] = torch.tensor(torch.nan)

    def nothing(held):
        held.clear()

    return [drop, add, other_shape, other_dtype, fewer_codes, whole_codes, nan, nothing]


@pytest.mark.parametrize("tamper", tampered(), ids=lambda f: f.__name__)
def test_tensors_that_are_missing_too_many_or_other_than_expected_are_named(folder, tamper):
    held, _ = files.read_tensors(folder / "model.safetensors")
    tamper(held)
    change(folder, lambda config: None, sealed=True, tensors=held)
    message = refused(folder)
    assert "model.safetensors" in message and "expected" in message
    assert tamper.__name__ == "nan" or "found" in message


def test_weights_of_another_save_are_noticed(folder, tmp_path):
    save_pretrained(student_of(tiny_vit(seed=8)), tmp_path / "other", architecture=NAMED)
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    assert "is not the file that was saved" in refused(folder)


def test_a_foreign_weights_file_is_refused_even_with_its_right_digest(folder):
    path = folder / "model.safetensors"
    foreign = {"plain safetensors": safetensors.torch.save(tiny_vit().state_dict()), "text": b"hello", "none": b""}
    foreign["sealed by a run"] = files.seal({"a": torch.zeros(1)}, {})
    foreign["a config of text"] = files.seal({"a": torch.zeros(1)}, {"config": '"x"'})
    foreign["no JSON"] = files.seal({"a": torch.zeros(1)}, {"config": "x"})
    for data in foreign.values():
        path.write_bytes(data)
        change(folder, setter("weights/sha256", sha256(data).hexdigest()))
        assert str(path) in refused(folder)


def test_places_without_a_saved_model_are_named(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert "does not exist: expected a folder of maskaq.save_pretrained" in refused(tmp_path / "nowhere")
    assert "config.json is missing: expected" in refused(tmp_path / "empty")
    assert "is a file: expected" in refused(tmp_path / "file")
    for name in ("model.safetensors", "config.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        assert f"{name} is missing" in refused(folder)
        (folder / name).mkdir()
        assert f"{name} cannot be read" in refused(folder)
        (folder / name).rmdir()
        (folder / name).write_bytes(kept)
    (folder / "README.md").unlink()  # nothing hangs on the card
    from_pretrained(folder)


@pytest.mark.parametrize("folder", [None, 5, b"model", ["model"]])
def test_a_folder_that_is_no_path_is_told(folder, saved):
    for call in (from_pretrained, lambda folder: save_pretrained(from_pretrained(saved), folder)):
        with pytest.raises(PretrainedError, match="expected the path of a folder, got"):
            call(folder)


# ---- writing


def test_an_earlier_model_is_replaced_whole(saved, tmp_path):
    save_pretrained(student_of(tiny_swin()), tmp_path / "m", architecture={"name": SWIN, "args": SWIN_ARGS})
    save_pretrained(from_pretrained(saved), tmp_path / "m")
    assert content(tmp_path / "m") == content(saved) and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_link_to_a_folder_stays_a_link(saved, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_pretrained(from_pretrained(saved), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and content(tmp_path / "real") == content(saved)


@pytest.mark.parametrize(
    "what", ["a file", "other files", "another model", "notes beside the model", "a broken config"]
)
def test_what_is_not_a_saved_model_is_not_replaced(saved, folder, what):
    if what == "a file":
        shutil.rmtree(folder)
        folder.write_text("precious")
    elif what == "other files":
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "thesis.txt").write_text("precious")
    elif what == "another model":
        (folder / "config.json").write_text('{"model_type": "vit"}')
    elif what == "notes beside the model":
        (folder / "notes.txt").write_text("precious")
    else:
        (folder / "config.json").write_text("{")
    before = content(folder) if folder.is_dir() else folder.read_text()
    with pytest.raises(PretrainedError, match="is not a saved maskaq model alone.*choose another folder"):
        save_pretrained(from_pretrained(saved), folder)
    assert (content(folder) if folder.is_dir() else folder.read_text()) == before


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_old_folder_whole_and_nothing_beside_it(saved, folder, monkeypatch, call):
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    other, before = deploy(student_of(tiny_vit(seed=2))), content(folder)
    with monkeypatch.context() as patch:
        hook(patch.setattr, "os:fsync", call, full)
        if call < 4:
            with pytest.raises(RunFolderError, match=r"disk full: \d+ bytes needed"):
                save_pretrained(other, folder, architecture=NAMED)
            assert content(folder) == before
        else:  # the folder itself is synced where that is possible, and that is no condition
            save_pretrained(other, folder, architecture=NAMED)
    from_pretrained(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def save_and_die(folder: Path, where: str, n: int, after: bool) -> None:
    student = student_of(tiny_vit(seed=2))
    hook(setattr, where, n, lambda: os.kill(os.getpid(), signal.SIGKILL), after)
    save_pretrained(student, folder, architecture=NAMED)


KILLS = {
    "before the first file": ("os:fsync", 1, False, False),
    "after the second file": ("os:fsync", 2, True, False),
    "before the exchange": ("maskaq.storage.files:_exchange", 1, False, False),
    "after the exchange": ("maskaq.storage.files:_exchange", 1, True, True),
}


@pytest.mark.parametrize(("where", "n", "after", "is_new"), mostly_slow(KILLS, "before the exchange"))
@pytest.mark.slow
def test_a_kill_leaves_the_old_folder_or_the_new_one(folder, where, n, after, is_new):
    before = content(folder)
    assert in_process(save_and_die, folder, where, n, after) == -signal.SIGKILL
    assert (content(folder) != before) == is_new
    from_pretrained(folder)


def test_folders_change_places_also_where_the_system_cannot_do_it_at_once(saved, folder, monkeypatch):
    def cannot(*_):
        raise OSError

    monkeypatch.setattr(files.ctypes, "CDLL", cannot)
    save_pretrained(student_of(tiny_vit(seed=2)), folder, architecture=NAMED)
    assert content(folder) != content(saved) and [path.name for path in folder.parent.iterdir()] == ["model"]
    before = content(folder)
    with monkeypatch.context() as patch, pytest.raises(RunFolderError):
        real, calls = os.replace, iter(range(9))
        patch.setattr(os, "replace", lambda a, b: cannot() if next(calls) == 1 else real(a, b))
        save_pretrained(from_pretrained(saved), folder)
    assert content(folder) == before and [path.name for path in folder.parent.iterdir()] == ["model"]


# ---- loading needs nothing of the training


@pytest.mark.slow
def test_loading_imports_no_training_code(saved):
    code = (
        "import sys, maskaq\n"
        "maskaq.from_pretrained(sys.argv[1])\n"
        "ours = {'images', 'calibrate', 'runs', 'losses', 'engine', 'models.taps', 'report'}\n"
        "assert not [n for n in ours if f'maskaq.{n}' in sys.modules]\n"
    )
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(maskaq.__file__).parents[1])]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code, str(saved)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
