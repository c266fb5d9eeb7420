"""maskaq.models.load: names, weights files, what follows from a file, and every way in which it can be wrong."""

import argparse
import json
import os
import re
import socket
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from helpers import mostly_slow
from safetensors.torch import save_file
from torch import nn

from maskaq.errors import CheckpointError, ModelError, first_line
from maskaq.models import data_config, expose, geometry, inferred, load
from maskaq.models.checkpoint import EMA_WRAPPERS, WRAPPERS, read_checkpoint
from maskaq.models.hub import _answers, hub_or_cache
from maskaq.models.load import load_model, load_shape
from maskaq.models.timm_models import RESERVED, create_timm

SWIN = "swin_tiny_patch4_window7_224"
SWIN_ARGS = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "img_size": 32}
DEIT_ARGS = {"embed_dim": 24, "depth": 1, "num_heads": 2}


def vit(**kwargs):
    return timm.create_model("test_vit", **kwargs)


def swin(**kwargs):
    return timm.create_model(SWIN, **{**SWIN_ARGS, "window_size": 4, **kwargs})


def saved(model, path):
    """The path, with the model's weights in it."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if Path(path).suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, path)
    else:
        torch.save(state, path)
    return path


def tensors(path):
    """The tensors of a weights file, without what is written down beside them."""
    return read_checkpoint(path)[0]


def same(a, b):
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def message(action, *args, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        action(*args)
    return str(caught.value)


def headless(model):
    return {key: value for key, value in model.state_dict().items() if not key.startswith("head")}


# --- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".safetensors", ".pth", ".pt", ".bin"])
def test_round_trip(tmp_path, ending):
    source = vit()
    model = load_model("test_vit", saved(source, tmp_path / f"w{ending}"))
    assert same(model, source)
    assert not model.training
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    images = torch.randn(2, 3, 160, 160)
    assert torch.equal(model(images), source.eval()(images))


def test_round_trip_swin_and_distilled(tmp_path):
    source = swin()
    assert same(load_model(SWIN, saved(source, tmp_path / "s.pth"), SWIN_ARGS), source)
    name = "deit_tiny_distilled_patch16_224"
    source = timm.create_model(name, **DEIT_ARGS, num_classes=7, img_size=64)
    model = load_model(name, str(saved(source, tmp_path / "d.safetensors")), DEIT_ARGS)
    assert same(model, source) and model.head_dist.out_features == 7


@pytest.mark.parametrize("key", [*WRAPPERS, *EMA_WRAPPERS])
def test_wrappers(tmp_path, key):
    state = {"a.weight": torch.ones(2)}
    assert tensors(saved({key: state, "epoch": 3, "loss": torch.zeros(())}, tmp_path / "w.pth")).keys() == {"a.weight"}


def test_nested_wrappers_and_configs_under_a_wrapper_name(tmp_path):
    state = {"a.weight": torch.ones(2)}
    held = {"model": {"name": "vit"}, "state_dict": {"module": state}}
    assert tensors(saved(held, tmp_path / "w.pth")).keys() == {"a.weight"}


def test_plain_weights_win_over_averaged(tmp_path):
    held = {"model_ema": {"a": torch.zeros(1)}, "state_dict_ema": {"a": torch.zeros(1)}, "model": {"a": torch.ones(1)}}
    assert tensors(saved(held, tmp_path / "w.pth"))["a"].item() == 1


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "module._orig_mod.", "model.module."])
def test_prefixes(tmp_path, prefix):
    state = {f"{prefix}{k}": torch.ones(1) for k in ("a.weight", "b")}
    assert tensors(saved(state, tmp_path / "w.pth")).keys() == {"a.weight", "b"}


def test_a_prefix_that_not_all_keys_carry_stays(tmp_path):
    state = {"module.a": torch.ones(1), "b": torch.ones(1)}
    assert tensors(saved(state, tmp_path / "w.safetensors")).keys() == set(state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_cast(tmp_path, dtype):
    source = vit().to(dtype)
    model = load_model("test_vit", saved(source, tmp_path / "w.safetensors"))
    assert same(model, source.float())


def test_integers_stay(tmp_path):
    path = saved({"count": torch.tensor(3), "w": torch.ones(1).half()}, tmp_path / "w.pth")
    assert {k: v.dtype for k, v in tensors(path).items()} == {"count": torch.int64, "w": torch.float32}


# --- what follows the file ---------------------------------------------------------------------------------------


def test_classes_channels_and_size_follow(tmp_path):
    source = vit(num_classes=7, img_size=96, in_chans=1)
    model = load_model("test_vit", saved(source, tmp_path / "w.pth"))
    assert same(model, source)
    assert model.num_classes == 7 and model.patch_embed.img_size == (96, 96)
    assert model(torch.randn(1, 1, 96, 96)).shape == (1, 7)


@pytest.mark.parametrize(
    "tokens",
    [
        {"reg_tokens": 4},
        {"reg_tokens": 4, "no_embed_class": True},
        {"no_embed_class": True},
        {"class_token": False, "global_pool": "avg"},
    ],
)
def test_size_with_other_prefix_tokens(tmp_path, tokens):
    source = vit(img_size=64, **tokens)
    model = load_model("test_vit", saved(source, tmp_path / "w.pth"), tokens)
    assert same(model, source) and model.patch_embed.img_size == (64, 64)


def test_swin_window_and_classes_follow(tmp_path):
    source = swin(num_classes=5, in_chans=4)
    model = load_model(SWIN, saved(source, tmp_path / "w.pth"), SWIN_ARGS)
    assert same(model, source) and model.num_classes == 5
    assert model.layers[0].blocks[0].window_size == (4, 4)
    assert model(torch.randn(1, 4, 32, 32)).shape == (1, 5)


def test_swin_windows_per_stage(tmp_path):
    args = {**SWIN_ARGS, "depths": (2, 2, 2), "num_heads": (2, 4, 8)}
    source = timm.create_model(SWIN, **args, window_size=(4, 2, 1))
    model = load_model(SWIN, saved(source, tmp_path / "w.pth"), args)
    assert same(model, source) and model.layers[1].blocks[1].shift_size == (1, 1)


def test_swin_window_no_larger_than_the_grid(tmp_path):
    args = {**SWIN_ARGS, "img_size": 24}  # grids of 6 and 3
    source = timm.create_model(SWIN, **args, window_size=4)
    model = load_model(SWIN, saved(source, tmp_path / "w.pth"), args)
    assert same(model, source)
    assert [layer.blocks[0].window_size for layer in model.layers] == [(4, 4), (3, 3)]


# Four stages of the shapes of SWIN, narrow and shallow.
SWIN4 = {"embed_dim": 8, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 2)}


def swin4(**kwargs):
    return timm.create_model(SWIN, **SWIN4, num_classes=3, **kwargs)


def with_masks(model):
    """The state dict as older timm and the original code save it, with the attention masks."""
    masks = {name: mask for name, mask in model.named_buffers() if name.endswith("attn_mask")}
    assert masks
    return {**model.state_dict(), **masks}


def size_of(model):
    return model.patch_embed.img_size


@pytest.mark.parametrize("size", [96, 128, 160, 192, 224])
def test_swin_image_size_follows_the_windows_that_its_grids_cut(tmp_path, size):
    source = swin4(img_size=size).eval()
    path = saved(source, tmp_path / "w.pth")
    model = load_model(SWIN, path, SWIN4)
    assert size_of(model) == (size, size) and same(model, source)
    images = torch.randn(1, 3, size, size)
    assert torch.equal(model(images), source(images))
    rebuilt = load.rebuild(load.architecture_of(model, SWIN, SWIN4))
    assert size_of(rebuilt) == (size, size)
    rebuilt.load_state_dict(source.state_dict())
    assert torch.equal(rebuilt.eval()(images), source(images))


@pytest.mark.parametrize(
    ("size", "window"), [(224, 7), (256, 7), (448, 7), (384, 12), (256, 8), (512, 8), ((128, 512), 7), ((448, 224), 7)]
)
def test_swin_image_size_follows_the_masks_of_older_files(tmp_path, size, window):
    source = swin4(img_size=size, window_size=window)
    model = load_model(SWIN, saved(with_masks(source), tmp_path / "w.pth"), SWIN4)
    pair = size if isinstance(size, tuple) else (size, size)
    assert size_of(model) == pair and same(model, source)
    assert size_of(load.rebuild(load.architecture_of(model, SWIN, SWIN4))) == pair


def test_swin_image_size_follows_the_files_own_record(tmp_path):
    state, record = swin4(img_size=448).state_dict(), {"input_size": [3, 448, 448]}
    save_file(state, tmp_path / "a.safetensors", {"pretrained_cfg": json.dumps(record)})
    save_file(state, tmp_path / "b.safetensors", {"input_size": "[3, 448, 448]", "format": "pt"})
    torch.save({"state_dict": state, "pretrained_cfg": record}, tmp_path / "c.pth")
    for name in ("a.safetensors", "b.safetensors", "c.pth"):
        assert size_of(load_model(SWIN, tmp_path / name, SWIN4)) == (448, 448)


def test_swin_image_size_is_the_names_where_the_file_has_its_windows(tmp_path):
    """Shapes cannot tell 224 from 448 pixels at windows of 7: the plan shows the size."""
    for size in (224, 448):
        path = saved(swin4(img_size=size), tmp_path / "w.pth")
        assert size_of(load_model(SWIN, path, SWIN4)) == (224, 224)
        assert size_of(load_model(SWIN, path, {**SWIN4, "img_size": 448})) == (448, 448)


@pytest.mark.parametrize(("window", "size"), [(8, 256), (12, 384)])
def test_swin_image_size_is_demanded_where_nothing_tells_it(tmp_path, window, size):
    source = swin4(img_size=size, window_size=window)
    path = saved(source, tmp_path / "w.pth")
    text = message(load_model, SWIN, path, SWIN4)
    assert "--img-size" in text and f"{size} is the usual one" in text and "w.pth" in text
    assert "has the shapes of" not in text  # the name is right
    model = load_model(SWIN, path, {**SWIN4, "img_size": size})
    assert size_of(model) == (size, size) and same(model, source)
    state = source.state_dict() | {"layers.0.blocks.1.attn_mask": torch.zeros(15, 64, 64)}  # of no square image
    assert "--img-size" in message(load_model, SWIN, saved(state, tmp_path / "m.pth"), SWIN4)


def test_swin_windows_of_8_that_the_last_grid_cuts_tell_224(tmp_path):
    source = swin4(img_size=224, window_size=8)
    model = load_model(SWIN, saved(source, tmp_path / "w.pth"), SWIN4)
    assert size_of(model) == (224, 224) and same(model, source)


def test_model_args_win(tmp_path):
    path = saved(vit(num_classes=7), tmp_path / "w.pth")
    model = load_model("test_vit", path, {"img_size": 96, "num_classes": None})
    assert model.patch_embed.img_size == (96, 96) and model.num_classes == 7
    assert model(torch.randn(1, 3, 96, 96)).shape == (1, 7)
    model = load_model("test_vit", path, {"patch_size": 8})
    assert model.patch_embed.patch_size == (8, 8) and model.patch_embed.img_size == (80, 80)
    text = message(load_model, "test_vit", path, {"num_classes": 3})
    assert "head.weight: model (3, 64), file (7, 64)" in text and "head.bias: model (3,), file (7,)" in text


# --- other names for the same weights ----------------------------------------------------------------------------


def test_original_swin_names_and_derived_buffers(tmp_path):
    source = swin(num_classes=5)
    state = {}
    for key, value in source.state_dict().items():
        key = key.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc.", "head.")
        state[key] = value
    state["layers.0.blocks.1.attn_mask"] = torch.full((4, 16, 16), float("-inf"))
    state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.long)
    model = load_model(SWIN, saved({"model": state}, tmp_path / "w.pth"), SWIN_ARGS)
    assert same(model, source)


def test_derived_buffers_beside_timm_names(tmp_path):
    state = {**swin().state_dict(), "layers.0.blocks.1.attn_mask": torch.zeros(4, 16, 16)}
    assert load_model(SWIN, saved(state, tmp_path / "w.safetensors"), SWIN_ARGS)


def test_original_deit3_layer_scale_names(tmp_path):
    source = timm.create_model("deit3_small_patch16_224", **DEIT_ARGS)
    state = {re.sub(r"ls([12])\.gamma", r"gamma_\1", key): value for key, value in source.state_dict().items()}
    assert any("gamma_1" in key for key in state)
    assert same(load_model("deit3_small_patch16_224", saved(state, tmp_path / "w.pth"), DEIT_ARGS), source)


def test_a_representation_layer_is_reported_not_dropped(tmp_path):
    state = {**vit().state_dict(), "pre_logits.fc.weight": torch.ones(64, 64)}
    assert "pre_logits.fc.weight" in message(load_model, "test_vit", saved(state, tmp_path / "w.pth"))


# --- what does not fit -------------------------------------------------------------------------------------------


def test_every_kind_of_difference_is_named(tmp_path):
    state = vit().state_dict()
    state["extra.weight"] = state.pop("norm.weight")
    state["blocks.0.mlp.fc1.bias"] = torch.zeros(5)
    text = message(load_model, "test_vit", saved(state, tmp_path / "w.pth"))
    assert "1 missing in the file:\n  norm.weight" in text
    assert "1 unexpected, not in the model:\n  extra.weight" in text
    assert "blocks.0.mlp.fc1.bias: model (192,), file (5,)" in text
    assert "w.pth" in text and "'test_vit'" in text and "--model-arg" in text


def test_long_lists_are_cut(tmp_path):
    path = saved(vit(), tmp_path / "w.pth")
    text = message(load_model, "test_vit", path, {"depth": 3})
    surplus = len(vit().state_dict()) - len(vit(depth=3).state_dict())
    assert f"{surplus} unexpected" in text and f"... and {surplus - 12} more" in text
    assert text.count("\n  blocks.") == 12


def test_plain_deit_into_distilled_and_back(tmp_path):
    plain, distilled = "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"
    path = saved(timm.create_model(plain, **DEIT_ARGS), tmp_path / "plain.pth")
    text = message(load_model, distilled, path, DEIT_ARGS)
    assert "dist_token" in text and "head_dist.weight" in text
    assert "pos_embed: model (1, 198, 24), file (1, 197, 24)" in text
    path = saved(timm.create_model(distilled, **DEIT_ARGS), tmp_path / "distilled.pth")
    text = message(load_model, plain, path, DEIT_ARGS)
    assert "dist_token" in text and "head_dist.weight" in text and "look like a distilled DeiT" in text


@pytest.mark.slow
def test_plain_into_distilled_fails_even_where_resampling_is_asked_for(tmp_path):
    path = saved(timm.create_model("deit_tiny_patch16_224", **DEIT_ARGS), tmp_path / "plain.pth")
    text = message(load_model, "deit_tiny_distilled_patch16_224", path, {**DEIT_ARGS, "img_size": 96})
    assert "dist_token" in text and "head_dist.weight" in text


def test_another_family(tmp_path):
    text = message(load_model, "test_vit", saved(swin(), tmp_path / "w.pth"))
    assert "Is this really a test_vit?" in text and "look like a Swin" in text and "cls_token" in text
    text = message(load_model, SWIN, saved(vit(), tmp_path / "v.pth"), SWIN_ARGS)
    assert "look like a ViT or DeiT" in text


def test_nothing_is_resized_unasked(tmp_path):
    state = vit().state_dict()
    state["pos_embed"] = torch.zeros(1, 51, 64)  # no square grid
    assert "pos_embed: model (1, 101, 64), file (1, 51, 64)" in message(
        load_model, "test_vit", saved(state, tmp_path / "w.pth")
    )
    state = vit().state_dict()
    state["patch_embed.proj.weight"] = torch.zeros(64, 3, 8, 8)
    for args in ({}, {"img_size": 96}):  # to ask for another image size is not to ask for other patches
        assert "patch_embed.proj.weight: model (64, 3, 16, 16), file (64, 3, 8, 8)" in message(
            load_model, "test_vit", saved(state, tmp_path / "w.pth"), args
        )


HUGGING_FACE = (
    "vit.embeddings.patch_embeddings.projection.weight",
    "deit.embeddings.patch_embeddings.projection.weight",
    "swin.embeddings.patch_embeddings.projection.weight",
    "dinov2.embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.projection.weight",
    "vision_model.embeddings.patch_embedding.weight",
)


@pytest.mark.parametrize("key", mostly_slow(HUGGING_FACE, HUGGING_FACE[0]))
def test_a_checkpoint_of_hugging_face_transformers_is_called_by_its_name(tmp_path, key):
    query = "vit.encoder.layer.0.attention.attention.query.weight"
    path = saved({key: torch.ones(8, 3, 4, 4), query: torch.ones(8, 8)}, tmp_path / "w.safetensors")
    for name in ("vit_base_patch16_224", SWIN):
        text = message(load_model, name, path)
        assert "Hugging Face transformers" in text and key in text and "w.safetensors" in text
        assert "missing in the file" not in text


@pytest.mark.parametrize(
    ("source", "given", "fits"),
    [
        ("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_tiny_patch16_224 or vit_tiny_patch16_224."),
        ("vit_tiny_patch16_384", "vit_small_patch16_224", "vit_tiny_patch16_384."),
        ("deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224."),
        pytest.param(SWIN, "swin_small_patch4_window7_224", f"{SWIN}.", marks=pytest.mark.slow),
        pytest.param(SWIN, "deit_tiny_patch16_224", f"{SWIN}.", marks=pytest.mark.slow),
        ("deit_tiny_patch16_224", SWIN, "deit_tiny_patch16_224 or "),
    ],
)
def test_the_model_whose_shapes_a_file_has_is_named(tmp_path, source, given, fits):
    path = saved(timm.create_model(source, num_classes=10), tmp_path / "w.safetensors")
    assert f"The file has the shapes of {fits}" in message(load_model, given, path)


@pytest.mark.slow
def test_a_file_of_other_windows_and_width_names_its_model_with_the_size_that_is_wanted(tmp_path):
    shapes = load_shape("swin_base_patch4_window12_384", {"num_classes": 2}).state_dict()
    path = saved({key: torch.zeros(value.shape) for key, value in shapes.items()}, tmp_path / "w.pth")
    assert "swin_base_patch4_window12_384" in message(load_model, "swin_tiny_patch4_window7_224", path)


def test_integer_codes_are_not_weights(tmp_path):
    state = vit().state_dict()
    state["head.weight"] = state["head.weight"].mul(100).to(torch.int8)
    text = message(load_model, "test_vit", saved(state, tmp_path / "w.pth"))
    assert "head.weight: model torch.float32, file torch.int8" in text


# --- files that are no weights -----------------------------------------------------------------------------------


def test_missing_directory_and_ending(tmp_path):
    assert "no such file" in message(tensors, tmp_path / "no.pth")
    assert "no such file" in message(load_model, "test_vit", str(tmp_path / "no.pth"))
    assert "a directory" in message(tensors, tmp_path)
    saved({"a": torch.ones(1)}, tmp_path / "inside.safetensors")
    assert "inside.safetensors" in message(tensors, tmp_path)
    (tmp_path / "w.npz").write_bytes(b"PK")
    text = message(tensors, tmp_path / "w.npz")
    assert "'.npz'" in text and ".safetensors, .pth, .pt, .bin" in text


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\n<!DOCTYPE html><html>404</html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"just some text", "damaged"),
        (bytes(range(256)) * 20, "damaged"),
    ],
)
def test_not_weights(tmp_path, ending, content, words):
    path = tmp_path / f"w{ending}"
    path.write_bytes(content)
    text = message(tensors, path)
    assert words in text and "expected" in text and "ownload" in text and str(path) in text


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize("part", [0.001, 0.5, 0.99])
def test_truncated(tmp_path, ending, part):
    whole = saved(vit(), tmp_path / f"whole{ending}").read_bytes()
    path = tmp_path / f"w{ending}"
    path.write_bytes(whole[: int(len(whole) * part)])
    assert "truncated" in message(tensors, path)


def test_truncated_legacy_file(tmp_path):
    torch.save(vit().state_dict(), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert tensors(tmp_path / "w.pth")
    os.truncate(tmp_path / "w.pth", 20000)
    assert "truncated" in message(tensors, tmp_path / "w.pth")


class Trap:
    """An object whose loading would leave a file behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, zipped):
    trace = tmp_path / "trace"
    held = {"model": {"w": torch.ones(1)}, "args": Trap(trace)}
    torch.save(held, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    text = message(tensors, tmp_path / "w.pth")
    assert not trace.exists()
    assert "open" in text and "refused" in text and "convert to safetensors" in text
    assert "weights_only" not in text  # torch's own advice is to load unsafely
    torch.load(tmp_path / "w.pth", weights_only=False)["args"].close()
    assert trace.exists()  # the trap would have worked


@pytest.mark.parametrize("held", [{"args": argparse.Namespace(lr=1)}, nn.Linear(2, 2)])
def test_harmless_objects_are_refused_too(tmp_path, held):
    torch.save(held, tmp_path / "w.pth")
    text = message(tensors, tmp_path / "w.pth")
    assert type(held if isinstance(held, nn.Module) else held["args"]).__name__ in text and "safetensors" in text


@pytest.mark.filterwarnings("ignore")
def test_torchscript(tmp_path):
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(str(tmp_path / "w.pt"))
    assert "TorchScript" in message(tensors, tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({}, "an empty dict"),
        ({"epoch": 3, "model": {}}, "'epoch', 'model'"),
        ([torch.ones(1)], "a list"),
        (torch.ones(1), "a Tensor"),
    ],
)
def test_no_tensors(tmp_path, held, words):
    text = message(tensors, saved(held, tmp_path / "w.pth"))
    assert words in text and "without tensors" in text and "state_dict()" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
def test_nan_is_named(tmp_path, value, ending):
    state = vit().state_dict()
    state["blocks.1.mlp.fc1.weight"][3, 5] = value
    text = message(load_model, "test_vit", saved(state, tmp_path / f"w{ending}"))
    assert "'blocks.1.mlp.fc1.weight'" in text and "NaN" in text


def test_sparse_and_meta_tensors(tmp_path):
    assert "'s'" in message(tensors, saved({"s": torch.eye(3).to_sparse()}, tmp_path / "s.pth"))
    assert "'m'" in message(tensors, saved({"m": torch.ones(3, device="meta")}, tmp_path / "m.pth"))


# --- names and arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("deit_tiny_patch16_225", "deit_tiny_patch16_224"),
        ("ViT-Tiny-Patch16-224", "vit_tiny_patch16_224"),
        ("vit_tiny", "vit_tiny_patch16_224"),
        ("swin_tiny_patch4_window7", "swin_tiny_patch4_window7_224"),
        ("dinov2", "vit_base_patch14_dinov2"),
        ("dinov2_vits14", "vit_base_patch14_dinov2"),
        ("zzz", "swin_tiny_patch4_window7_224"),
        ("", "vit_tiny_patch16_224"),
    ],
)
def test_unknown_name(tmp_path, name, near):
    for checkpoint in (None, tmp_path / "no.pth"):
        text = message(load_model, name, checkpoint, kind=ModelError)
        assert f"unknown model {name!r}" in text and near in text and "maskaq list models" in text
        assert text.count("_patch") < 10 and "swinv2" not in text


def test_bad_arguments(tmp_path):
    text = message(load_model, "test_vit", saved(vit(), tmp_path / "w.pth"), {"foo": 1}, kind=ModelError)
    assert "'test_vit'" in text and "foo=1" in text and "--model-arg" in text
    assert "tag" in message(create_timm, "test_vit.no_such_tag", kind=ModelError)
    for key in RESERVED:
        assert repr(key) in message(load_model, "test_vit", None, {key: "x"}, kind=ModelError)


# --- pretrained weights ------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A function that says what asking timm for pretrained weights does: return the model, or raise."""
    real = timm.create_model

    def set_hub(error=None):
        def create(name, pretrained=False, **kwargs):
            if pretrained and error:
                raise error
            return real(name, **kwargs)

        monkeypatch.setattr(timm, "create_model", create)
        monkeypatch.setattr("maskaq.models.hub._answers", lambda endpoint: True)

    return set_hub


@pytest.mark.parametrize("error", [OSError("no route\nmore"), RuntimeError("No pretrained weights exist."), KeyError()])
def test_no_download(hub, error):
    hub(error)
    text = message(load_model, "test_vit")
    assert "could not download" in text and "'test_vit'" in text and "--checkpoint FILE" in text
    assert "\n" not in text and "more" not in text


def test_of_a_foreign_error_one_short_line_without_full_stop_is_told():
    assert first_line(OSError("\n no route. \nmore")) == "no route"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(OSError("x" * 9999)).startswith("x" * 200) and len(first_line(OSError("x" * 9999))) < 250


def test_a_wrong_argument_is_not_a_failed_download(hub):
    hub(TypeError("unexpected"))
    assert "foo=1" in message(load_model, "test_vit", None, {"foo": 1}, kind=ModelError)


def test_pretrained(hub):
    hub()
    model = load_model("test_vit")
    assert not model.training and model.num_classes == 1000
    assert "untrained head" in message(load_model, "test_vit", None, {"num_classes": 3}, kind=ModelError)


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [("resnet18", {}, "ResNet has no attention layer"), ("test_vit", {"global_pool": ""}, "has no pooling")],
)
def test_what_cannot_be_quantized_is_refused_before_anything_is_downloaded(hub, name, args, words):
    hub(AssertionError("downloaded"))
    assert words in message(load_model, name, None, args, kind=ModelError)


@pytest.mark.parametrize("size", [100_000, (224, 100_000), 0, -224])
@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", SWIN])
def test_an_absurd_image_size_is_told_before_anything_is_built_or_downloaded(hub, tmp_path, name, size):
    hub(AssertionError("downloaded"))
    for checkpoint in (None, saved(vit(), tmp_path / "w.pth")):
        text = message(load_model, name, checkpoint, {"img_size": size}, kind=ModelError)
        assert "img_size" in text and "4096" in text and "download" not in text
    assert "4096" in message(load.load_shape, name, {"img_size": size}, kind=ModelError)


def test_too_little_memory_is_not_a_failed_download(hub):
    hub(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    text = message(load_model, "test_vit", None, {"img_size": 320}, kind=ModelError)
    assert "memory" in text and "img_size=320" in text and "download" not in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit_giant_patch14_224", ["timm has no weights", "--checkpoint FILE"]),
    ],
)
def test_a_name_without_weights_is_refused_before_they_are_downloaded(hub, name, words):
    hub(AssertionError("downloaded"))
    text = message(load_model, name, kind=ModelError)
    assert [word for word in words if word not in text] == []


def test_a_clip_architecture_takes_a_classifier_of_the_users(tmp_path):
    name, small = "vit_base_patch16_clip_224.openai", {"depth": 1, "embed_dim": 48, "num_heads": 3, "img_size": 32}
    own = timm.create_model(name, num_classes=7, **small)
    model = load_model(name, saved(own, tmp_path / "own.pth"), small)
    assert same(model, own) and geometry(expose(model)).classes == 7
    tower = saved(timm.create_model(name, **small), tmp_path / "tower.pth")
    for given in (name, "vit_base_patch16_clip_224"):  # without the tag it is a name of fine-tuned weights
        found = load_model(given, tower, small)
        assert found.num_classes == 512 and geometry(expose(found)).task == "features"
        asked = load_model(given, tower, {**small, "num_classes": 512})
        assert geometry(expose(asked)).classes == 512


# --- mean and standard deviation ---------------------------------------------------------------------------------


def test_mean_and_std_replace_those_of_the_data_config(tmp_path):
    path = saved(vit(), tmp_path / "w.pth")
    before = data_config(load_model("test_vit", path))
    config = data_config(load_model("test_vit", path, mean=0.25, std=[0.1, 0.2, 0.3]))
    assert config["mean"] == (0.25,) * 3 and config["std"] == (0.1, 0.2, 0.3)
    assert data_config(load_model("test_vit", path, std=1))["mean"] == before["mean"]
    assert data_config(load_model("test_vit", path)) == before  # timm's own record is as it was
    path = saved(vit(in_chans=5), tmp_path / "five.pth")
    facts = geometry(expose(load_model("test_vit", path, mean=0.5, std=(1, 2, 3, 4, 5))))
    assert facts.mean == (0.5,) * 5 and facts.std == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mean": (0.5, 0.5)}, ["mean", "3 channels", "got 2"]),
        ({"std": (1.0,) * 4}, ["std", "3 channels", "got 4"]),
        ({"std": 0.0}, ["std", "above 0"]),
        ({"std": (0.5, -0.5, 0.5)}, ["std", "above 0"]),
        ({"mean": float("nan")}, ["mean", "finite"]),
        ({"mean": (0.5, float("inf"), 0.5)}, ["mean", "finite"]),
        ({"mean": "0.5"}, ["mean", "finite"]),
        ({"mean": ()}, ["mean", "finite"]),
    ],
)
def test_a_mean_or_std_that_cannot_be_is_refused(tmp_path, given, words):
    path = saved(vit(), tmp_path / "w.pth")
    text = message(partial(load_model, **given), "test_vit", path, kind=ModelError)
    assert [word for word in words if word not in text] == []
    assert "embedded" in message(partial(load_model, mean=0.5), "cifar10_vit", kind=ModelError)


@pytest.mark.parametrize("args", [{}, {"img_size": 32, "depth": 2}])
def test_a_shape_is_the_model_without_its_weights(hub, args):
    hub(AssertionError("downloaded"))
    shape, whole = load.load_shape("test_vit", args), vit(**args)
    assert {k: v.shape for k, v in shape.state_dict().items()} == {k: v.shape for k, v in whole.state_dict().items()}
    assert "foo=1" in message(load.load_shape, "test_vit", {"foo": 1}, kind=ModelError)


@pytest.mark.parametrize("reachable", [True, False])
def test_unreachable_hub_means_cache_only(monkeypatch, reachable):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("maskaq.models.hub._answers", lambda endpoint: reachable)
    with pytest.raises(ZeroDivisionError), hub_or_cache():
        assert constants.HF_HUB_OFFLINE is not reachable
        raise ZeroDivisionError
    assert constants.HF_HUB_OFFLINE is False


def test_answers(monkeypatch):
    monkeypatch.setattr("maskaq.models.hub.getproxies", lambda: {"no": "localhost"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert _answers(url)
    assert not _answers(url)
    assert not _answers("https://no-such-host.invalid", seconds=0.5)
    monkeypatch.setattr("maskaq.models.hub.getproxies", lambda: {"https": "http://proxy"})
    assert _answers("https://no-such-host.invalid")


# --- geometry that was asked for, and what goes to the wrong place -------------------------------------------------


def test_a_swin_file_with_cut_windows_gets_a_size_that_has_them(tmp_path):
    args = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)}
    path = saved(timm.create_model(SWIN, img_size=112, **args), tmp_path / "w.pth")
    windows = inferred._windows(tensors(path))
    assert windows in ([7, 7, 7, 3], [7, 7, 7, 4])  # by the release of timm: 7 patches are merged to 3, or to 4
    if windows[-1] == 3:
        text = message(load_model, SWIN, path, args)
        assert "112" in text and "224 is the usual" not in text and "N or HxW" in text
    else:  # images of 128 pixels have these windows too, and halve evenly
        assert inferred._windows(load_model(SWIN, path, args).state_dict()) == windows
    built = load_model(SWIN, path, {**args, "img_size": 112})
    assert inferred._windows(built.state_dict()) == windows


@pytest.mark.parametrize(
    ("windows", "number"),
    [
        ([7, 7, 7, 7], "224"),
        ([12, 12, 12, 12], "384"),
        ([7, 7, 7, 3], "112"),
        ([7, 7, 5, 2], "80 to 92"),
        ([3, 7, 7, 1], ""),
    ],
)
def test_the_size_that_windows_suggest_has_them(windows, number):
    shape = load.load_shape(SWIN)
    assert re.findall(r"\d+(?: to \d+)?", inferred._usual(shape, windows)) == ([number] if number else [])


def test_tables_that_are_resized_because_another_geometry_was_asked_for_are_told_once(tmp_path, caplog, recwarn):
    path = saved(swin(), tmp_path / "w.pth")
    with caplog.at_level("WARNING", "maskaq"):
        load_model(SWIN, path, {**SWIN_ARGS, "window_size": 4})
        assert not caplog.messages
        load_model(SWIN, path, {**SWIN_ARGS, "img_size": 64, "window_size": 7})
    (note,) = caplog.messages
    assert "relative_position_bias_table from 49 x 2 to 169 x 2" in note and "49 x 4 to 169 x 4" in note
    assert str(path) in note and "\n" not in note
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]


def test_a_position_embedding_that_is_resized_is_told(tmp_path, caplog):
    path = saved(vit(), tmp_path / "w.pth")
    with caplog.at_level("WARNING", "maskaq"):
        load_model("test_vit", path, {"img_size": 224})
    (note,) = caplog.messages
    assert "pos_embed from 1 x 101 x 64 to 1 x 197 x 64" in note


@pytest.mark.parametrize(
    ("given", "scaled"),
    [(dict(mean=127.5), "0.5"), (dict(mean=(123.675, 116.28, 103.53)), "0.485,0.456,0.406"), (dict(std=58.4), "0.229")],
)
def test_mean_and_std_of_pixels_up_to_255_are_refused_with_the_ones_up_to_1(tmp_path, given, scaled):
    path = saved(vit(), tmp_path / "w.pth")
    text = message(partial(load_model, "test_vit", path, **given), kind=ModelError)
    assert text.startswith(f"{next(iter(given))}: expected") and text.endswith(scaled)


@pytest.mark.parametrize("given", [dict(mean=-1), dict(mean=2), dict(std=10), dict(mean=0, std=1 / 255)])
def test_unusual_means_and_stds_are_taken(tmp_path, given):
    config = data_config(load_model("test_vit", saved(vit(), tmp_path / "w.pth"), **given))
    assert all(config[key] == (float(value),) * 3 for key, value in given.items())


@pytest.mark.parametrize("file", ["deit.safetensors", "/x/deit.PTH", "weights.bin"])
def test_a_weights_file_in_place_of_a_name_is_sent_to_checkpoint(file):
    text = message(load_model, file, kind=ModelError)
    assert f"--checkpoint {file}" in text and "unknown model" not in text


@pytest.mark.parametrize("name", ["test_vit", SWIN])
def test_a_file_without_a_classifier_is_told(tmp_path, name):
    model, args = (vit(), {}) if name == "test_vit" else (swin(), SWIN_ARGS)
    text = message(load_model, name, saved(headless(model), tmp_path / "w.pth"), args)
    assert "this file has no classifier" in text and "head." in text and "--checkpoint" in text and "\n" not in text
    extra = {**headless(model), "decoder_embed.weight": torch.zeros(1)}
    text = message(load_model, name, saved(extra, tmp_path / "w.pth"), args)
    assert "This file has no classifier" in text and "decoder_embed.weight" in text


def test_a_classifier_under_another_name_is_not_called_missing(tmp_path):
    other = {**headless(vit()), "classifier.weight": torch.zeros(10, 64)}
    text = message(load_model, "test_vit", saved(other, tmp_path / "w.pth"))
    assert "no classifier" not in text and "classifier.weight" in text


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((5,), ModelError, "got 5"),
        ((None,), ModelError, "got None"),
        ((Path("deit"),), ModelError, r"Path\('deit'\)"),
        (("test_vit", 5), CheckpointError, "checkpoint: .*got 5"),
        (("test_vit", None, 5), ModelError, "model_args: .*got 5"),
        (("test_vit", None, "num_classes=3"), ModelError, "model_args"),
    ],
)
def test_arguments_of_a_wrong_kind_are_told(arguments, kind, words):
    assert re.search(words, message(load_model, *arguments, kind=kind))
