"""A full-precision model from a timm name and, optionally, a weights file of the user's.

Weights are taken whole or not at all: what the file and the model do not share is named key by key, and nothing is
filled in with random numbers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from timm.models import swin_transformer
from torch import Tensor, nn

from maskaq import zoo
from maskaq.errors import CheckpointError, ModelError
from maskaq.models import data_config, embedding_width, hf, hosts, openmmlab, pretrained_tags, task_name
from maskaq.models.checkpoint import State, read_checkpoint
from maskaq.models.fill import fill_
from maskaq.models.inferred import (
    inferred_arguments,
    noted_classes,
    noted_size,
    short_size,
    size_of,
    size_wanted,
    swin_size,
)
from maskaq.models.names import update_record_
from maskaq.models.timm_models import ADVICE, checked_args, create_timm, pretrained_timm, timm_shape

Numbers = float | Sequence[float]

# How Hugging Face transformers names the patch embedding of its ViT, DeiT, DINOv2, Swin, BEiT and CLIP.
TRANSFORMERS = r"(^|\.)embeddings\.patch_embeddings?\.(projection\.)?weight$"
# What timm may resample to the model where the user asked for a geometry that may not be the file's.
RESIZED_FOR = {
    "img_size": ("pos_embed", "relative_position_bias_table"),
    "window_size": ("relative_position_bias_table",),
    "patch_size": ("patch_embed.proj.weight",),
}
LIMITS = {"mean": (-1, 2), "std": (0, 10)}  # of pixels from 0 to 1


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
    args = checked_args(model_args or {})
    if name in zoo.embedded_names():
        if checkpoint is not None or args or mean is not None or std is not None:
            raise ModelError(
                f"{name} is embedded with its weights: it takes no checkpoint, model arguments, image size, mean or std"
            )
        return set_task(hosts.embedded_model(name), task)
    _check_numbers(mean, std)
    if _is_of_transformers(name):
        _refuse_for_hf(name, checkpoint, args)
        model: nn.Module = hf.load(name.removeprefix(hf.PREFIX))
    elif host := hosts.named(name, args):
        model = _host_from_file(name, checkpoint, *host)
    else:
        model = pretrained_timm(name, args) if checkpoint is None else _from_file(name, Path(checkpoint), args)
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
        raise ModelError(f"this {hf.class_name(model)} has no classifier (num_classes is 0): its task is features")
    update_record_(model, task=task)
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
    update_record_(model, **{key: values * channels if len(values) == 1 else values for key, values in given.items()})
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
    args = checked_args(model_args or {})
    if name in zoo.embedded_names() or (_is_of_transformers(name) and "config" not in args):
        return load_model(name, None, args, mean, std, task)
    return set_task(set_normalization(_unfilled(name, args, timm_shape), mean, std), task)


def rebuild(architecture: Mapping[str, Any]) -> nn.Module:
    """The model that `architecture_of` described, with random weights: no weights file is read."""
    name, args = architecture["name"], checked_args(architecture["args"])
    if name not in zoo.embedded_names():
        return _unfilled(name, args, create_timm)
    if args:
        raise ModelError(f"{name} is embedded as it is: it takes no model arguments")
    return hosts.embedded_shape(name)


def _unfilled(name: str, args: dict[str, Any], timm_model: Callable[..., nn.Module]) -> nn.Module:
    """A model that is not embedded, without its weights: of transformers, a detector or segmenter, or timm's."""
    if _is_of_transformers(name):
        return hf.build(name, **args)
    if host := hosts.named(name, args):
        return hosts.build(*host)
    return timm_model(name, **args).eval()


def _is_of_transformers(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(hf.PREFIX)


def architecture_of(model: nn.Module, name: str, model_args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Name and arguments that build a loaded model again without its weights file."""
    if isinstance(model, hf.HuggingFace):
        return hf.described(model)
    if name not in zoo.embedded_names() and isinstance(found := getattr(model, "architecture", None), dict):
        return dict(found)
    return architecture_of_state(model.state_dict(), name, model_args, size_of(model))


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
    found = inferred_arguments(shape, dict(state))
    if image_size is not None:  # the shapes of a Swin do not always tell
        found.pop("img_size", None)
        found |= {"img_size": short_size(image_size)} if image_size != size_of(shape) else {}
    return {"name": name, "args": {**found, **(model_args or {})}}


def _from_file(name: str, path: Path, args: dict[str, Any]) -> nn.Module:
    """The model, shaped after the file where `args` leave it open, with the file's weights.

    CheckpointError where neither `args` nor the file say the image size of a Swin.
    """
    model = create_timm(name, **args)
    state, notes = read_checkpoint(path)
    _refuse_other_formats(state, name, path)
    follow = {key: value for key, value in inferred_arguments(model, state).items() if key not in args}
    if "img_size" not in args and isinstance(model, swin_transformer.SwinTransformer):
        size = swin_size(model, state, noted_size(notes))
        if size is None:
            raise CheckpointError(size_wanted(model, state, name, path))
        follow.pop("img_size", None)
        follow |= {"img_size": short_size(size)} if size != size_of(model) else {}
    if follow:
        model = create_timm(name, **checked_args(follow), **args)
    resizable = tuple(key for arg, keys in RESIZED_FOR.items() if arg in args for key in keys)
    fill_(model, state, name, path, resizable)
    if "num_classes" not in args and (tag := _tower_tag(name, int(model.num_classes))):  # type: ignore[arg-type]
        update_record_(model, tag=tag)  # `task_name` then sees that it is an image tower of CLIP
    return model


def _host_from_file(name: str, checkpoint: str | Path | None, kind: str, args: dict[str, Any]) -> nn.Module:
    """A detector or segmenter with the weights of a file: of mmdetection, of mmsegmentation, or with our own names."""
    if checkpoint is None:
        raise ModelError(f"there are no weights of {name!r} to download. {ADVICE}")
    path = Path(checkpoint)
    state, notes = read_checkpoint(path)
    theirs = openmmlab.architecture_in(state)
    if theirs and theirs != kind:
        raise CheckpointError(f"{path}: expected weights of {kind}, found those of {theirs}. Give {theirs}_SWIN.")
    if theirs:
        args = {**args, "num_classes": openmmlab.classes_in(state)}
        state = openmmlab.converted(state)
    elif classes := hosts.classes_in(kind, state):
        args = {**args, "num_classes": classes}
    model: Any = hosts.build(kind, args)
    fill_(model, state, name, path, ())
    if labels := noted_classes(notes, model.num_classes):
        update_record_(model, label_names=labels)
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
            f"{kind}_{name if name.startswith('swin_') else 'SWIN'} in place of {name}."
        )
