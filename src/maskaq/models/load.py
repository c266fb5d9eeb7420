"""A full-precision model from a timm name and, optionally, a weights file of the user's.

Weights are taken whole or not at all: what the file and the model do not share is named key by key, and nothing is
filled in with random numbers. Pickled files are read with ``weights_only=True`` and never in any other way.
"""

import json
import logging
import os
import re
import shlex
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import isfinite, isqrt
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import safetensors.torch
import timm
import torch
from safetensors import safe_open
from timm.models import get_pretrained_cfg, swin_transformer, vision_transformer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from maskaq import zoo
from maskaq.errors import CheckpointError, ModelError, unknown
from maskaq.models import (
    classifier_tags,
    data_config,
    embedding_width,
    expose,
    hf,
    hosts,
    openmmlab,
    pretrained_tags,
    supported_names,
    task_name,
)

_log = logging.getLogger(__name__)

State = dict[str, Tensor]
Numbers = float | Sequence[float]

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
# The averaged (EMA) weights come last: a file that also holds the plain ones is read for the plain ones.
WRAPPERS = ("model", "state_dict", "model_state", "model_state_dict", "net", "module", "teacher")
EMA_WRAPPERS = ("model_ema", "state_dict_ema")
PREFIXES = ("module.", "model.", "_orig_mod.")
# How Hugging Face transformers names the patch embedding of its ViT, DeiT, DINOv2, Swin, BEiT and CLIP.
TRANSFORMERS = r"(^|\.)embeddings\.patch_embeddings?\.(projection\.)?weight$"
# Buffers that old files store and that every current model computes by itself.
DERIVED = ("attn_mask", "relative_position_index")
# Arguments of timm.create_model that choose weights: here that is the checkpoint's business alone.
RESERVED = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")
# What timm may resample to the model where the user asked for a geometry that may not be the file's.
RESIZED_FOR = {
    "img_size": ("pos_embed", "relative_position_bias_table"),
    "window_size": ("relative_position_bias_table",),
    "patch_size": ("patch_embed.proj.weight",),
}
SHOWN = 12
LIMITS = {"mean": (-1, 2), "std": (0, 10)}  # of pixels from 0 to 1
LARGEST_SIDE = 4096  # pixels; the attention of a ViT/16 over one such image takes tens of gigabytes
ADVICE = "Give the weights with --checkpoint FILE."


def load_model(
    name: str,
    checkpoint: str | Path | None = None,
    model_args: dict[str, Any] | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    task: str | None = None,
) -> nn.Module:
    """The named model in eval mode and fp32, with timm's pretrained weights or those of `checkpoint`.

    `hf:DIR_OR_NAME` is a model of transformers, from a folder or the hub, with the weights that are there.

    `model_args` go to timm.create_model and win over what the checkpoint's shapes say. `mean` and `std`, one number or
    one per channel, replace those of the model's data config, `task` what the model is taken for.

    Raises ModelError for a name or an argument that timm does not know, or a pretrained model that cannot be quantized
    (before it is downloaded), CheckpointError for weights that cannot be had or do not fit.
    """
    if checkpoint is not None and not isinstance(checkpoint, str | Path):
        raise CheckpointError(f"checkpoint: expected the path of a weights file, got {checkpoint!r}")
    args = _checked_args(model_args or {})
    if name in zoo.embedded_names():
        if checkpoint is not None or args or mean is not None or std is not None:
            raise ModelError(
                f"{name} is embedded with its weights: it takes no checkpoint, model arguments, image size, mean or std"
            )
        return hosts.embedded_model(name)
    _check_numbers(mean, std)
    if isinstance(name, str) and name.startswith(hf.PREFIX):
        _refuse_for_hf(name, checkpoint, args)
        with hub_or_cache():
            model: nn.Module = hf.load(name.removeprefix(hf.PREFIX))
    elif host := hosts.named(name, args):
        model = _host_from_file(name, checkpoint, *host)
    else:
        model = _pretrained(name, args) if checkpoint is None else _from_file(name, Path(checkpoint), args)
    return set_task(set_normalization(model, mean, std), task).float().eval()


def _refuse_for_hf(name: str, checkpoint: Any, args: Mapping[str, Any]) -> None:
    if checkpoint is not None or args:
        given = "--checkpoint" if checkpoint is not None else f"model argument {next(iter(args))!r}"
        raise ModelError(f"{name} has its weights and its config beside it: it takes no {given}")


def set_task(model: nn.Module, task: str | None = None) -> nn.Module:
    """The model, taken for another task than its own record says; `task_name` reads it."""
    if task is None:
        return model
    own = task_name(model)
    if task not in ("classification", "features") or own in ("segmentation", "detection"):
        if task == own:
            return model
        raise ModelError(f"task: expected {_other_tasks(own)}, got {task!r}")
    if task == "classification" and not getattr(model, "num_classes", 1):
        raise ModelError(f"this {type(model).__name__} has no classifier (num_classes is 0): its task is features")
    record: Any = getattr(model, "pretrained_cfg", None) or {}
    model.pretrained_cfg = model.default_cfg = {**record, "task": task}  # type: ignore[assignment]
    return model


def _other_tasks(own: str) -> str:
    return "classification or features" if own in ("classification", "features") else f"{own}, which this model is for"


def set_normalization(model: nn.Module, mean: Numbers | None = None, std: Numbers | None = None) -> nn.Module:
    """The model, with another mean or standard deviation in its `pretrained_cfg`, where `data_config` reads them."""
    given = _check_numbers(mean, std)
    if not given:
        return model
    channels = data_config(model)["input_size"][0]
    for key, values in given.items():
        if len(values) not in (1, channels):
            raise ModelError(f"{key}: expected one number, or one for each of {channels} channels, got {len(values)}")
    record: Any = getattr(model, "pretrained_cfg", None) or {}
    full = {key: values * channels if len(values) == 1 else values for key, values in given.items()}
    model.pretrained_cfg = model.default_cfg = {**record, **full}  # type: ignore[assignment]
    return model


def _check_numbers(mean: Numbers | None, std: Numbers | None) -> dict[str, tuple[float, ...]]:
    """The given ones of mean and std as tuples; ModelError for what cannot be one."""
    found = {}
    for key, value in (("mean", mean), ("std", std)):
        if value is None:
            continue
        values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        sound = values and all(isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v) for v in values)
        if not sound or (key == "std" and min(values) <= 0):  # type: ignore[type-var]
            kind = "finite numbers" if key == "mean" else "finite numbers above 0"
            raise ModelError(f"{key}: expected {kind}, one or one per channel, got {value!r}")
        found[key] = tuple(float(v) for v in values)  # type: ignore[arg-type]
        low, high = LIMITS[key]
        if not low <= min(found[key]) <= max(found[key]) <= high:
            scaled = ",".join(f"{v / 255:.4g}" for v in found[key])
            raise ModelError(
                f"{key}: expected numbers from {low} to {high}, for pixels from 0 to 1, got "
                f"{','.join(f'{v:g}' for v in found[key])}. If that is for pixels from 0 to 255, give {scaled}"
            )
    return found


def load_shape(
    name: str,
    model_args: dict[str, Any] | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    task: str | None = None,
) -> nn.Module:
    """The named model for its shapes alone, without weights and without a download (an embedded one has its own).

    A model of transformers has its shapes in a config, which its weights lie beside: it is loaded as it is.
    """
    if name in zoo.embedded_names():
        return load_model(name, None, model_args, mean, std, task)
    args = _checked_args(model_args or {})
    if isinstance(name, str) and name.startswith(hf.PREFIX):
        built = hf.build(name, args["config"]) if "config" in args else load_model(name, None, args)
        return set_task(set_normalization(built, mean, std), task)
    if host := hosts.named(name, args):
        return set_task(set_normalization(hosts.build(*host), mean, std), task)
    try:
        with torch.device("meta"), _WithoutValues():  # not every timm can build every model there
            model = create_timm(name, **args)
    except ModelError:
        model = create_timm(name, **args)
    return set_task(set_normalization(model, mean, std), task).eval()


class _WithoutValues(TorchFunctionMode):
    """Initialises nothing on meta, where tensors have no values: that is most of the time that building takes."""

    _FILL = (
        Tensor.uniform_,
        Tensor.normal_,
        Tensor.erfinv_,
        Tensor.clamp_,
        Tensor.mul_,
        Tensor.add_,
        Tensor.fill_,
        Tensor.zero_,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._FILL and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def rebuild(architecture: Mapping[str, Any]) -> nn.Module:
    """The model that `architecture_of` described, with random weights: no weights file is read."""
    name = architecture["name"]
    if isinstance(name, str) and name.startswith(hf.PREFIX):
        return hf.build(name, architecture["args"]["config"])
    args = _checked_args(architecture["args"])
    if host := hosts.named(name, args):
        return hosts.build(*host)
    if name not in zoo.embedded_names():
        return create_timm(name, **args).eval()
    if args:
        raise ModelError(f"{name} is embedded as it is: it takes no model arguments")
    return hosts.embedded_shape(name)


def architecture_of(model: nn.Module, name: str, model_args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Name and arguments that build a loaded model again without its weights file."""
    if isinstance(model, hf.HuggingFace):
        return hf.described(model)
    if name not in zoo.embedded_names() and isinstance(found := getattr(model, "architecture", None), dict):
        return dict(found)
    return architecture_of_state(model.state_dict(), name, model_args, _size_of(model))


def architecture_of_state(
    state: Mapping[str, Tensor],
    name: str,
    model_args: Mapping[str, Any] | None = None,
    image_size: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The same from tensors that have the names and shapes of the model's, and its image size."""
    if name in zoo.embedded_names():
        return {"name": name, "args": {}}
    shape = load_shape(name, dict(model_args or {}))
    found = _inferred(shape, dict(state))
    if image_size is not None:  # the shapes of a Swin do not always tell
        found.pop("img_size", None)
        found |= {"img_size": _short_size(image_size)} if image_size != _size_of(shape) else {}
    return {"name": name, "args": {**found, **(model_args or {})}}


def _size_of(model: nn.Module) -> tuple[int, int] | None:
    """The image size that a model was built for, where its patch embedding says so."""
    size: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    record: Any = getattr(model, "pretrained_cfg", None) or {}
    size = size or (record.get("input_size") or (None,))[1:]
    return (int(size[0]), int(size[1])) if size else None


def _short_size(size: tuple[int, int]) -> int | tuple[int, int]:
    return size[0] if size[0] == size[1] else size


def _one_line(error: BaseException) -> str:
    """The first line of an error's message without its full stop and not too long; its class name if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rstrip(".") if len(text) <= 240 else text[:240] + " ..."


# --- the model -------------------------------------------------------------------------------------------------


def create_timm(name: str, **kwargs: Any) -> nn.Module:
    """A timm model with random weights; ModelError for an unknown name or impossible arguments."""
    _check_name(name)
    try:
        model = _created(name, pretrained=False, **kwargs)
    except Exception as error:  # timm asserts, raises TypeError, RuntimeError and others for the same kind of mistake
        raise _unbuildable(name, kwargs, error) from error
    record: Any = getattr(model, "pretrained_cfg", None) or {}
    if kwargs.get("num_classes") and embedding_width(record):  # a classifier was asked for: no CLIP image tower
        model.pretrained_cfg = model.default_cfg = {**record, "tag": ""}
    return model


def _created(name: str, **kwargs: Any) -> Any:
    """timm's model, which remembers the image size that was asked for; not every one has an argument for it."""
    size = kwargs.get("img_size")
    try:
        model = timm.create_model(name, **kwargs)
    except TypeError as error:
        if size is None or "img_size" not in str(error):
            raise
        model = timm.create_model(name, **{key: value for key, value in kwargs.items() if key != "img_size"})
    if size is not None:
        record: Any = getattr(model, "pretrained_cfg", None) or {}
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = (record.get("input_size") or (3, 0, 0))[0]
        model.pretrained_cfg = model.default_cfg = {**record, "input_size": (channels, height, width)}
    return model


def _unbuildable(name: str, args: Mapping[str, Any], error: BaseException) -> ModelError:
    given = ", ".join(f"{k}={v!r}" for k, v in args.items()) or "no arguments"
    if _out_of_memory(error):
        return ModelError(
            f"there is not enough memory to build {name!r} with {given}: check --img-size and --model-arg"
        )
    return ModelError(
        f"timm cannot build {name!r} with {given}: {_one_line(error)}. Check the name's tag and --model-arg."
    )


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(
        word in str(error) for word in ("DefaultCPUAllocator", "out of memory")
    )


def _check_name(name: str) -> None:
    """ModelError with the closest names unless timm has this one."""
    if not isinstance(name, str):
        raise ModelError(f"model: expected the name of a model such as deit_tiny_patch16_224, got {name!r}")
    if name.lower().endswith(SUFFIXES):
        raise ModelError(weights_in_place_of_name(name))
    if not timm.is_model(name):
        raise ModelError(f"{unknown('model', name, _near(name))}, ... (`maskaq list models` prints every name)")


def weights_in_place_of_name(file: str) -> str:
    """The message for a weights file where a model is named."""
    return (
        f"{file} is a weights file: expected the name of a model (`maskaq list models`); weights go to --checkpoint, "
        f"as in MODEL --checkpoint {shlex.quote(file)}"
    )


def _near(name: str) -> list[str]:
    """A few embedded, ViT, DeiT and Swin names close to a wrong one; the smallest of each family if none is close."""
    wanted = re.sub(r"[^a-z0-9]+", "_", name.split(".")[0].lower())
    known = zoo.embedded_names() + supported_names()
    found = [n for n in known if wanted and n.startswith(wanted)][:6] or get_close_matches(wanted, known, n=6)
    return found or ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"]


def _checked_args(args: dict[str, Any]) -> dict[str, Any]:
    """The model arguments without None values (timm drops those too), lists (as a record in JSON has them) as tuples.

    ModelError for one that chooses weights.
    """
    if not isinstance(args, Mapping):
        raise ModelError(f"model_args: expected a dict such as {{'num_classes': 10}}, got {args!r}")
    for key in RESERVED:
        if key in args:
            raise ModelError(f"model argument {key!r} cannot be set: it chooses weights. {ADVICE}")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
    size = plain.get("img_size")
    for side in size if isinstance(size, tuple) else (size,):
        if isinstance(side, int) and not 1 <= side <= LARGEST_SIDE:
            raise ModelError(
                f"img_size {side}: expected 1 to {LARGEST_SIDE} pixels a side; for a larger one no memory would do"
            )
    return {key: value for key, value in plain.items() if value is not None}


# --- timm's own weights ----------------------------------------------------------------------------------------


def _pretrained(name: str, args: dict[str, Any]) -> nn.Module:
    """The model with the weights timm downloads (or has in its cache)."""
    _check_weights(name, args)
    try:
        with hub_or_cache():
            model = _created(name, pretrained=True, **args)
    except Exception as error:  # hub, URL, TLS, disk, "no pretrained weights": many classes, one remedy
        if _out_of_memory(error):
            raise _unbuildable(name, args, error) from error
        raise CheckpointError(
            f"could not download the pretrained weights of {name!r}: {_one_line(error)}. {ADVICE}"
        ) from error
    return model


def _check_weights(name: str, args: dict[str, Any]) -> None:
    """ModelError, before a download, for a wrong argument, an unsupported model, or weights that will not do."""
    shape = load_shape(name, args)
    known = get_pretrained_cfg(name)
    expose(shape)
    if known and not known.has_weights:
        raise ModelError(f"timm has no weights of {name!r}. {ADVICE}")
    _check_head(name, shape, args)


def _without_classifier(name: str) -> str:
    """What to do with weights that have no classifier, or where one can come from."""
    architecture = name.split(".")[0]
    tags = classifier_tags(name)
    other = f"take {' or '.join(f'{architecture}.{tag}' for tag in tags[:3])}, or give" if tags else "give"
    return (
        "To quantize it for its features, add --model-arg num_classes=0; to classify, "
        f"{other} weights that have a classifier with --checkpoint FILE."
    )


def _check_head(name: str, model: nn.Module, args: dict[str, Any]) -> None:
    """ModelError where timm dropped the trained head because another number of classes was asked for."""
    trained = (getattr(model, "pretrained_cfg", None) or {}).get("num_classes")
    asked = args.get("num_classes", trained)
    if asked and asked != trained:
        raise ModelError(
            f"the pretrained weights of {name!r} have {trained} classes, so num_classes={asked} would be an untrained "
            f"head. {ADVICE}"
        )


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Context in which the Hugging Face hub's local cache is used if the hub cannot be reached.

    huggingface_hub tries each file six times with growing pauses, which takes most of a minute without a network.
    """
    try:
        from huggingface_hub import constants
    except ImportError:  # timm then takes the plain URLs
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers(endpoint: str, seconds: float = 10.0) -> bool:
    """Whether a host accepts a connection within `seconds`; True unasked behind a proxy, which a socket would miss."""
    if any(key != "no" for key in getproxies()):
        return True
    url = urlsplit(endpoint)
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    opened = threading.Event()

    def knock() -> None:
        with suppress(OSError, ValueError):
            socket.create_connection(address, timeout=3).close()
            opened.set()

    # A thread, because neither the name lookup nor a host with many dead addresses keeps to a socket's timeout.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return opened.is_set()


# --- a weights file --------------------------------------------------------------------------------------------


def read_checkpoint(path: str | Path) -> State:
    """The tensors of a weights file by key: unwrapped, without common prefixes, fp32, all finite.

    Raises CheckpointError for a file that is missing, damaged, not weights, or not readable without running code.
    """
    return _read(Path(path))[0]


def _read(path: Path) -> tuple[State, Any]:
    """The tensors of a weights file, and all that is written down beside them."""
    _check_file(path)
    is_torch = path.suffix.lower() != ".safetensors"
    held = _read_torch(path) if is_torch else _read_safetensors(path)
    state = _strip(_unwrap(held))
    if not state:
        raise CheckpointError(
            f"{path}: expected a state dict (names to tensors), found {_summary(held)} without tensors. "
            "Give a file saved from model.state_dict()."
        )
    notes = held if is_torch else _metadata(path)
    return {key: _plain(path, key, value) for key, value in state.items()}, notes


def _metadata(path: Path) -> dict[str, Any]:
    """The metadata of a .safetensors file, with what is JSON in it parsed."""
    with safe_open(path, framework="pt") as file:
        notes: dict[str, Any] = dict(file.metadata() or {})
    for key, text in notes.items():
        with suppress(ValueError, RecursionError):
            notes[key] = json.loads(text)
    return notes


def _noted_size(notes: Any) -> tuple[int, int] | None:
    """The image size in timm's `pretrained_cfg` of a file, or in its `input_size`."""
    record = notes.get("pretrained_cfg") if isinstance(notes, Mapping) else None
    size = (record if isinstance(record, Mapping) else notes if isinstance(notes, Mapping) else {}).get("input_size")
    if not isinstance(size, list | tuple) or len(size) != 3 or not all(type(side) is int for side in size):
        return None
    return (size[1], size[2]) if all(1 <= side <= LARGEST_SIDE for side in size) else None


def _noted_classes(notes: Any, count: int) -> list[str]:
    """The names of so many classes that mmdetection or mmsegmentation writes down in a file; empty if it does not."""
    for part in ("meta", "dataset_meta"):
        notes = notes.get(part, notes) if isinstance(notes, Mapping) else {}
    found = next((notes[key] for key in ("CLASSES", "classes") if key in notes), ())
    sound = isinstance(found, list | tuple) and len(found) == count and all(isinstance(name, str) for name in found)
    return list(found) if sound else []


def _check_file(path: Path) -> None:
    """CheckpointError unless the path is a readable, non-empty file of a known kind."""
    if os.path.isdir(path):
        inside = sorted(p.name for p in path.iterdir() if p.suffix.lower() in SUFFIXES)[:3]
        hint = f" such as {', '.join(inside)}" if inside else f" ({', '.join(SUFFIXES[:4])})"
        raise CheckpointError(f"{path}: expected a weights file, found a directory. Give a file{hint}.")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: expected a weights file, found no such file. Check the path.")
    if path.suffix.lower() not in SUFFIXES:
        raise CheckpointError(
            f"{path}: expected a file named {', '.join(SUFFIXES)}, found {path.suffix or 'no ending'!r}. "
            "Convert it to .safetensors."
        )
    try:
        with path.open("rb") as file:
            head = file.read(512).lstrip().lower()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {_one_line(error)}. Check its permissions.") from error
    _check_opening(path, head)


def _check_opening(path: Path, head: bytes) -> None:
    """CheckpointError for the files that failed downloads leave behind."""
    found = ""
    if not path.stat().st_size:
        found = "an empty file (0 bytes)"
    elif head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        found = "a web page (HTML)"
    elif head.startswith(b"version https://git-lfs"):
        found = "a Git LFS pointer"
    if found:
        raise CheckpointError(f"{path}: expected weights, found {found}. Download the file itself again.")


def _read_safetensors(path: Path) -> State:
    """The tensors of a .safetensors file."""
    try:
        return safetensors.torch.load_file(path, device="cpu")
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected a safetensors file, found one that is truncated or damaged: {_one_line(error)}. "
            "Copy or download it again."
        ) from error


def _read_torch(path: Path) -> Any:
    """What a .pth/.pt/.bin file holds, read without running any code in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251 (weights_only runs no code)
    except Exception as error:
        raise CheckpointError(f"{path}: {_why_not(error)}") from error


def _why_not(error: Exception) -> str:
    """What is wrong with a file torch.load refused. Its own words are left out: they tell to load unsafely."""
    text = str(error)
    if named := re.search(r"GLOBAL (\S+)", text):
        return (
            f"expected tensors only, found a pickle with the object {named[1]}, which runs code when loaded and was "
            "refused. Where you trust the file, save its state dict with safetensors.torch.save_file (convert to "
            "safetensors) and give that."
        )
    if "TorchScript" in text:
        return "expected a state dict, found a TorchScript archive. Save model.state_dict() and convert to safetensors."
    return (
        "expected a file written by torch.save, found one that is truncated, damaged or of another kind. "
        "Copy or download it again, or convert it to safetensors."
    )


def _unwrap(held: Any, depth: int = 3) -> State:
    """The state dict in what a file holds, under the usual names training scripts give it; empty if there is none."""
    if not isinstance(held, Mapping):
        return {}
    if depth:
        for key in (*WRAPPERS, *EMA_WRAPPERS):
            if found := _unwrap(held.get(key), depth - 1):
                return found
    return {str(key): value for key, value in held.items() if isinstance(value, Tensor)}


def _strip(state: State) -> State:
    """The state dict without the prefixes that every key carries (wrappers of DDP, torch.compile, Lightning)."""
    for prefix in PREFIXES:
        if state and all(key.startswith(prefix) for key in state):
            return _strip({key[len(prefix) :]: value for key, value in state.items()})
    return state


def _summary(held: Any) -> str:
    """What a file holds, in a few words."""
    if not isinstance(held, Mapping):
        return f"a {type(held).__name__}"
    keys = ", ".join(repr(key) for key in list(held)[:5])
    return f"a dict with {keys}" if keys else "an empty dict"


def _plain(path: Path, key: str, value: Tensor) -> Tensor:
    """A tensor as dense fp32 (integers stay as they are); CheckpointError for one without finite, plain numbers."""
    if value.is_meta or value.is_quantized or value.layout != torch.strided:
        raise CheckpointError(f"{path}: expected dense tensors, found another kind at {key!r}. Save plain weights.")
    value = value.detach()
    if not value.is_floating_point():
        return value
    value = value.float()
    if not key.endswith(DERIVED) and not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{path}: expected finite weights, found NaN or Inf in {key!r}. The file is not usable.")
    return value


# --- what the file says about the model ------------------------------------------------------------------------


def _from_file(name: str, path: Path, args: dict[str, Any]) -> nn.Module:
    """The model, shaped after the file where `args` leave it open, with the file's weights.

    A ViT's position embedding tells its image size. For a Swin that `args` give no size, it is the one that

    1. the attention masks stored in older files have windows for,
    2. the bias tables tell, where a stage has windows smaller than the others because its grid is,
    3. the file's own `pretrained_cfg` says,
    4. the name says, if the file has the windows that the name has at that size.

    Else the size is demanded: CheckpointError.
    """
    model = create_timm(name, **args)
    state, notes = _read(path)
    _refuse_other_formats(state, name, path)
    follow = {key: value for key, value in _inferred(model, state).items() if key not in args}
    if "img_size" not in args and isinstance(model, swin_transformer.SwinTransformer):
        size = _swin_size(model, state, _noted_size(notes))
        if size is None:
            raise CheckpointError(_size_wanted(model, state, name, path))
        follow.pop("img_size", None)
        follow |= {"img_size": _short_size(size)} if size != _size_of(model) else {}
    if follow:
        model = create_timm(name, **_checked_args(follow), **args)
    resizable = tuple(key for arg, keys in RESIZED_FOR.items() if arg in args for key in keys)
    _fill(model, state, name, path, resizable)
    if "num_classes" not in args and (tag := _tower_tag(name, int(model.num_classes))):  # type: ignore[arg-type]
        record: Any = model.pretrained_cfg
        model.pretrained_cfg = model.default_cfg = {**record, "tag": tag}  # type: ignore[assignment]  # an image tower of CLIP, as `task_name` sees
    return model


def _host_from_file(name: str, checkpoint: str | Path | None, kind: str, args: dict[str, Any]) -> nn.Module:
    """A detector or segmenter with the weights of a file: of mmdetection, of mmsegmentation, or with our own names."""
    if checkpoint is None:
        raise ModelError(f"there are no weights of {name!r} to download. {ADVICE}")
    path = Path(checkpoint)
    state, notes = _read(path)
    theirs = openmmlab.architecture_in(state)
    if theirs and theirs != kind:
        raise CheckpointError(f"{path}: expected weights of {kind}, found those of {theirs}. Give {theirs}_SWIN.")
    if theirs:
        args = {**args, "num_classes": openmmlab.classes_in(state)}
        state = openmmlab.converted(state)
    model: Any = hosts.build(kind, args)
    _fill(model, state, name, path, ())
    if labels := _noted_classes(notes, model.num_classes):
        model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "label_names": labels}
    return model


def _tower_tag(name: str, width: int) -> str | None:
    """The first tag of an architecture whose weights are a CLIP image tower with an embedding of this width."""
    records = ({"architecture": name.split(".")[0], "tag": tag} for tag in pretrained_tags(name))
    return next((record["tag"] for record in records if width and embedding_width(record) == width), None)


def _refuse_other_formats(state: State, name: str, path: Path) -> None:
    """CheckpointError for weights that other libraries name in other ways."""
    if key := next((key for key in state if re.search(TRANSFORMERS, key)), None):
        raise CheckpointError(
            f"{path}: expected timm's names of the weights, found a checkpoint of Hugging Face transformers "
            f"({key!r}). Give its folder in place of the timm name, as in maskaq quantize hf:{path.parent}, or take "
            f"timm's version of these weights (without --checkpoint {name} gets timm's own)."
        )
    if kind := openmmlab.architecture_in(state):
        raise CheckpointError(
            f"{path}: expected timm's names of the weights, found a checkpoint of OpenMMLab's {kind}. Give "
            f"{kind}_{name} in place of {name}."
        )


def _inferred(model: nn.Module, state: State) -> dict[str, Any]:
    """The timm arguments in which the file differs from the model, as far as shapes tell."""
    found = {
        "num_classes": _num_classes(model, state),
        "in_chans": _in_chans(model, state),
        "img_size": _img_size(model, state),
        "window_size": _window_size(model, state),
    }
    return {key: value for key, value in found.items() if value is not None}


def _names(model: nn.Module, entry: str) -> list[str]:
    """The layer names under an entry of timm's config, which holds a string, a tuple or nothing."""
    value = (getattr(model, "pretrained_cfg", None) or {}).get(entry) or ()
    return [value] if isinstance(value, str) else list(value)


def _num_classes(model: nn.Module, state: State) -> int | None:
    """The rows of the file's classifier where they differ from the model's classes."""
    for layer in [*_names(model, "classifier"), "head"]:  # "head" too: so Swin's own files call it
        weight = state.get(f"{layer}.weight")
        if weight is not None and weight.dim() == 2:
            return None if weight.shape[0] == getattr(model, "num_classes", None) else weight.shape[0]
    return None


def _in_chans(model: nn.Module, state: State) -> int | None:
    """The input channels of the file's first convolution where they differ from the model's."""
    own = model.state_dict()
    for layer in _names(model, "first_conv") or ["patch_embed.proj"]:
        mine, theirs = own.get(f"{layer}.weight"), state.get(f"{layer}.weight")
        if mine is not None and theirs is not None and mine.dim() == theirs.dim() == 4:
            return None if mine.shape[1] == theirs.shape[1] else theirs.shape[1]
    return None


def _img_size(model: nn.Module, state: State) -> int | tuple[int, int] | None:
    """The image size of the file's position embedding where it differs from the model's and its grid is a square.

    Of a Swin the one that its windows tell, if they do and it is not the model's.
    """
    if isinstance(model, swin_transformer.SwinTransformer):
        stored = _size_of_masks(model, state) or _size_of_windows(model, state)
        return None if stored is None or stored == _size_of(model) else _short_size(stored)
    mine = getattr(model, "pos_embed", None)
    theirs = state.get("pos_embed")
    patch: Any = getattr(model, "patch_embed", None)
    if mine is None or theirs is None or not hasattr(patch, "num_patches") or hasattr(patch, "backbone"):  # of a hybrid
        return None
    if theirs.dim() != 3 or theirs.shape[1] == mine.shape[1]:
        return None
    prefix = mine.shape[1] - patch.num_patches  # class, register and distillation tokens, if they have a position
    patches = theirs.shape[1] - prefix
    side = isqrt(max(patches, 0))
    if not side or side * side != patches:
        return None
    height, width = (side * size for size in patch.patch_size)
    return height if height == width else (height, width)


def _swin_size(model: nn.Module, state: State, noted: tuple[int, int] | None) -> tuple[int, int] | None:
    """The image size of a Swin's file, by the rule of `_from_file`; None if the file does not determine it."""
    stored = _size_of_masks(model, state) or _size_of_windows(model, state) or noted
    if stored is not None or any(key.endswith("attn_mask") for key in state):
        return stored
    mine = _windows(model.state_dict())
    theirs = _windows(state)
    comparable = len(mine) == len(theirs) and None not in theirs  # else it does not fit, which `_fill` says
    return None if comparable and mine != theirs else _size_of(model)


def _size_wanted(model: nn.Module, state: State, name: str, path: Path) -> str:
    """The message for a Swin's file that does not tell its image size."""
    windows = [size for size in _windows(state) if size]
    fitting = _fitting_names(state, model.state_dict(), name)
    other = f" The file has the shapes of {' or '.join(fitting)}." if fitting else ""
    return (
        f"{path}: expected the windows of {name!r} at {_short_size(_size_of(model) or (0, 0))} pixels, found others "
        f"({', '.join(map(str, windows))} patches wide), and nothing in the file tells its image size. Give it with "
        f"--img-size N or HxW (or model_args={{'img_size': N}}){_usual(model, windows)}.{other}"
    )


def _usual(model: nn.Module, windows: list[int]) -> str:
    """The image sizes that timm gives such windows at, as the end of a sentence; empty if there are none."""
    largest = max(windows, default=0)
    unit = _reduction(model, 0)[0]
    if not windows:
        return ""
    if set(windows) == {largest}:  # the last stage is one window, or more of them
        return f"; {largest * _reduction(model, len(windows) - 1)[0]} is the usual one for these windows"
    fits = [
        tokens
        for tokens in range(1, LARGEST_SIDE // unit + 1)
        if all(min(largest, tokens >> stage) == size for stage, size in enumerate(windows))
    ]
    filled = [tokens for tokens in fits if not any((tokens >> i) % size for i, size in enumerate(windows))]
    if len(filled or fits) == 1:
        return f"; {(filled or fits)[0] * unit} is the usual one for these windows"
    return f"; images of {fits[0] * unit} to {fits[-1] * unit} pixels have such windows" if fits else ""


def _reduction(model: Any, stage: int) -> tuple[int, int]:
    """Pixels per token of a Swin's stage, down and across."""
    height, width = model.patch_embed.patch_size
    return height << stage, width << stage


def _size_of_masks(model: nn.Module, state: State) -> tuple[int, int] | None:
    """The image size that the attention masks of older Swin files, (windows, N, N), are for; None if they differ."""
    counts: dict[int, tuple[tuple[int, int], int]] = {}
    for key, mask in state.items():
        if (found := re.fullmatch(r"layers\.(\d+)\.blocks\.\d+\.attn_mask", key)) and mask.dim() == 3:
            layout = _layout(mask)
            window = isqrt(mask.shape[1])
            if layout is not None and window * window == mask.shape[1]:
                counts[int(found[1])] = layout, window
    if not counts:
        return None
    stages = len(_windows(state))
    sides = [
        _side(
            {
                stage: (layout[axis], window, _reduction(model, stage)[axis])
                for stage, (layout, window) in counts.items()
            },
            _reduction(model, stages - 1)[axis],
        )
        for axis in (0, 1)
    ]
    return None if None in sides else (sides[0], sides[1])  # type: ignore[return-value]


def _layout(mask: Tensor) -> tuple[int, int] | None:
    """Rows and columns of a mask's windows, two or more of each; None if it does not tell.

    Only windows of the last row and column have regions to keep apart; a mask without such windows is a square.
    """
    windows = mask.shape[0]
    masked = mask.flatten(1).ne(0).any(dim=1)
    fits = []
    for rows in (rows for rows in range(2, windows // 2 + 1) if windows % rows == 0):
        expected = torch.zeros(rows, windows // rows, dtype=torch.bool)
        expected[-1] = True
        expected[:, -1] = True
        if torch.equal(expected.flatten(), masked):
            fits.append((rows, windows // rows))
    side = isqrt(windows)
    if len(fits) == 1:
        return fits[0]
    return (side, side) if side > 1 and side * side == windows else None


def _side(counts: Mapping[int, tuple[int, int, int]], unit: int) -> int | None:
    """The pixels of a side from (windows along it, window, pixels per token) of stages.

    The one that windows fill exactly, else the only multiple of `unit` that they cover with padding.
    """
    filled = {number * window * pixels for number, window, pixels in counts.values()}
    if len(filled) == 1:
        return filled.pop()
    fits = [
        side
        for side in range(unit, max(filled) + 1, unit)
        if all(-(-(side // pixels) // window) == number for number, window, pixels in counts.values())
    ]
    return fits[0] if len(fits) == 1 else None


def _size_of_windows(model: nn.Module, state: State) -> tuple[int, int] | None:
    """The image size that a Swin's bias tables tell: a window is no larger than its stage's grid."""
    mine = _windows(model.state_dict())
    theirs = _windows(state)
    if len(mine) != len(theirs) or None in mine or None in theirs:
        return None
    largest = max((size for size in theirs if size is not None), default=0)
    for full in (mine, [largest] * len(theirs)):
        cut = [stage for stage, size in enumerate(theirs) if size < full[stage]]  # type: ignore[operator]
        if not cut:
            continue
        tokens = theirs[cut[-1]] << cut[-1]  # type: ignore[operator]  # along a side of the first stage
        if all(min(size, tokens >> stage) == theirs[stage] for stage, size in enumerate(full)):  # type: ignore[type-var]
            height, width = _reduction(model, 0)
            return tokens * height, tokens * width
    return None


def _window_size(model: nn.Module, state: State) -> int | tuple[int, ...] | None:
    """The window of each Swin stage in the file where one differs from the model's; one number if that says it."""
    mine = _windows(model.state_dict())
    theirs = _windows(state)
    if mine == theirs or len(mine) != len(theirs) or None in theirs:
        return None
    sizes = tuple(size for size in theirs if size is not None)
    # timm reads two numbers as height and width, and makes a window no larger than its stage's grid by itself.
    return max(sizes) if len(set(sizes)) == 1 or len(sizes) == 2 else sizes


def _windows(state: Mapping[str, Tensor]) -> list[int | None]:
    """The window size of each stage, from the (2w - 1)^2 rows of its bias table; None for any other number of rows."""
    sizes: list[int | None] = []
    while (table := state.get(f"layers.{len(sizes)}.blocks.0.attn.relative_position_bias_table")) is not None:
        side = isqrt(table.shape[0])
        sizes.append((side + 1) // 2 if side % 2 and side * side == table.shape[0] else None)
    return sizes


# --- the file into the model -----------------------------------------------------------------------------------


@dataclass
class Misfit:
    """What a file and a model do not share."""

    missing: list[str]
    unexpected: list[str]
    different: list[str]

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.different)


def _fill(model: nn.Module, state: State, name: str, path: Path, resizable: tuple[str, ...]) -> None:
    """Puts the file's weights into the model; CheckpointError naming every key that does not fit."""
    own = model.state_dict()
    given = state
    misfit = _compare(own, state)
    if misfit:
        renamed = _renamed(model, state, resizable)
        if len(second := _compare(own, renamed)) < len(misfit):
            state, misfit = renamed, second
    if misfit:
        raise CheckpointError(_report(misfit, own, state, name, path, _names(model, "classifier")))
    model.load_state_dict({key: state[key] for key in own}, strict=True)
    if resized := _resized(given, state):
        _log.warning("%s: resized to the geometry that was asked for: %s", path, ", ".join(resized))


def _resized(given: State, state: State) -> list[str]:
    """What was resampled, with its shape before and after: one entry for all tensors of a kind and a shape."""
    found: dict[str, list[str]] = {}
    for key, value in given.items():
        if key in state and state[key].dim() == value.dim() and state[key].shape != value.shape:
            kind = key.rpartition(".")[2] if key.endswith("relative_position_bias_table") else key
            shapes = (" x ".join(map(str, tensor.shape)) for tensor in (value, state[key]))
            found.setdefault(f"{kind} from {' to '.join(shapes)}", []).append(key)
    return [text if len(keys) == 1 else f"{len(keys)} tables {text}" for text, keys in found.items()]


def _compare(own: Mapping[str, Tensor], state: State) -> Misfit:
    """The keys and shapes in which a file's tensors differ from a model's."""
    return Misfit(
        missing=[key for key in own if key not in state],
        unexpected=[key for key in state if key not in own and not key.endswith(DERIVED)],
        different=[text for key in own if key in state and (text := _difference(key, own[key], state[key]))],
    )


def _difference(key: str, mine: Tensor, theirs: Tensor) -> str:
    """How a tensor of the file differs from the model's; empty if it does not."""
    if mine.shape != theirs.shape:
        return f"{key}: model {tuple(mine.shape)}, file {tuple(theirs.shape)}"
    if mine.is_floating_point() != theirs.is_floating_point():  # integer codes of a quantized file are not weights
        return f"{key}: model {mine.dtype}, file {theirs.dtype}"
    return ""


def _renamed(model: nn.Module, state: State, resizable: tuple[str, ...]) -> State:
    """The file's tensors under timm's names, by timm's own filter for original DeiT, Swin, ... files.

    The filter also resizes weights to the model and drops `pre_logits`. Both change what the model computes, so both
    are undone and thereby reported, but for the sizes of keys that end as one of `resizable` does.
    """
    try:
        with warnings.catch_warnings():  # timm's and torch's, of how they resample; `_fill` reports that they did
            warnings.simplefilter("ignore", UserWarning)
            if isinstance(model, swin_transformer.SwinTransformer):
                renamed = swin_transformer.checkpoint_filter_fn(dict(state), model)
            elif isinstance(model, vision_transformer.VisionTransformer):
                renamed = vision_transformer.checkpoint_filter_fn(dict(state), model, adapt_layer_scale=True)
            else:
                return state
    except Exception:  # a file of another family: the plain comparison says more than the filter's stumble
        return state
    kept = {key: value for key, value in state.items() if "pre_logits" in key}
    for key, value in state.items():
        if key in renamed and renamed[key].numel() != value.numel() and not key.endswith(resizable):
            kept[key] = value
    return {**renamed, **kept}


def _report(
    misfit: Misfit, own: Mapping[str, Tensor], state: State, name: str, path: Path, classifiers: Sequence[str]
) -> str:
    """The message for weights that do not fit: every kind of difference with its keys, then what to do."""
    heads = [key for key in own if key.rpartition(".")[0] in classifiers]
    headless = bool(heads) and set(heads) <= set(misfit.missing) and _looks_like(state) == _looks_like(own) != ""
    headless &= not any(re.match(r"(head|heads|fc|classifier)\.", key) for key in misfit.unexpected)  # by another name
    lacks = f"this file has no classifier (no {heads[0]})" if headless else ""
    if headless and len(misfit) == len(heads):
        return f"{path}: {lacks}. {_without_classifier(name)}"
    lines = [f"{path}: the weights do not fit the model {name!r}."]
    for title, keys in (
        ("missing in the file", misfit.missing),
        ("unexpected, not in the model", misfit.unexpected),
        ("of another shape or type", misfit.different),
    ):
        if keys:
            lines.append(f"{len(keys)} {title}:")
            lines += [f"  {key}" for key in keys[:SHOWN]]
            lines += [f"  ... and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    if headless:
        lines.append(f"{lacks[0].upper()}{lacks[1:]}. {_without_classifier(name)}")
    theirs = _looks_like(state)
    if theirs and theirs != _looks_like(own):
        lines.append(f"Is this really a {name}? Its weights look like {theirs}: check the model name.")
    fitting = _fitting_names(state, own, name)
    if fitting:
        lines.append(f"The file has the shapes of {' or '.join(fitting)}.")
    elif theirs == _looks_like(own) and not headless:
        lines.append(
            "Check the model name, or pass --img-size N or HxW, or --model-arg KEY=VALUE (such as num_classes)."
        )
    return "\n".join(lines)


def _fitting_names(state: State, own: Mapping[str, Tensor], name: str, most: int = 3) -> list[str]:
    """A few supported names whose blocks have the shapes of a file's, those of the given name's family first.

    None where the model's own blocks have them: then another name is not what is wrong.
    """
    outline = _outline(state)
    if outline is None or outline == _outline(own):
        return []
    family = name.split("_")[0]
    given = name.split(".")[0]
    extent = _extent(state)
    patch = f"patch{outline['patch']}_"
    names = supported_names("swin" if "depths" in outline else "vit")
    near = [n for n in names if n != given and (patch in n or "_patch" not in n)]
    near = [n for n in near if ("distilled" in n) == ("dist_token" in outline.get("tokens", ()))]
    found: list[tuple[bool, str]] = []
    other_width: set[str] = set()
    for n in sorted(near, key=lambda n: (n.split("_")[0] != family, n)):
        kind = "_".join(n.split("_")[:2])  # names of one kind, such as vit_base, have one width
        if kind in other_width or len(found) >= 4 * most:
            continue
        built, size = _outline_of(n)
        if built is None or built["width"] != outline["width"]:
            other_width.add(kind)
        elif built == outline:
            found.append((size != extent, n))
    same_size = [n for other, n in found if not other]
    return (same_size or [n for _, n in found])[:most]


@cache
def _outline_of(name: str) -> tuple[dict[str, Any] | None, list[int | None]]:
    with suppress(ModelError):
        shape = load_shape(name, {"num_classes": 1}).state_dict()
        return _outline(shape), _extent(shape)
    return None, []


def _outline(state: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """What shapes tell of an architecture whatever its classes, channels and image size; None without any blocks."""
    patch = state.get("patch_embed.proj.weight")
    first = state.get("patch_embed.proj.bias")
    if patch is None or patch.dim() != 4:
        return None
    outline: dict[str, Any] = {"width": patch.shape[0], "patch": patch.shape[-1], "bias": first is not None}
    blocks = {tuple(map(int, m.groups())) for key in state if (m := re.match(r"layers\.(\d+)\.blocks\.(\d+)\.", key))}
    if blocks:
        counts = Counter(stage for stage, _ in blocks)
        return outline | {"depths": tuple(counts[stage] for stage in sorted(counts))}
    depth = len({key.split(".")[1] for key in state if re.match(r"blocks\.\d+\.", key)})
    if not depth:
        return None
    tokens = tuple(key for key in ("cls_token", "dist_token", "reg_token") if key in state)
    extra = (
        "norm_pre.weight",
        "norm.weight",
        "fc_norm.weight",
        "blocks.0.attn.qkv.bias",
        "blocks.0.attn.q_norm.weight",
    )
    hidden = state.get("blocks.0.mlp.fc1.weight")
    return outline | {
        "depth": depth,
        "tokens": tokens,
        "layers": tuple(key for key in extra if key in state),
        "layer scale": "blocks.0.ls1.gamma" in state or "blocks.0.gamma_1" in state,
        "hidden": None if hidden is None else hidden.shape[0],
    }


def _extent(state: Mapping[str, Tensor]) -> list[int | None]:
    """What depends on the image size: the positions of a ViT, the windows of a Swin."""
    return [state["pos_embed"].shape[1]] if "pos_embed" in state else _windows(state)


def _looks_like(state: Mapping[str, Tensor]) -> str:
    """The family that the keys of a state dict point to; empty if none."""
    if any(key.endswith("relative_position_bias_table") and key.startswith("layers.") for key in state):
        return "a Swin"
    if "dist_token" in state:
        return "a distilled DeiT"
    return "a ViT or DeiT" if "pos_embed" in state and "blocks.0.attn.qkv.weight" in state else ""
