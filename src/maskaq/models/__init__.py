"""Put a model into one common form. No other package knows about architectures.

In that form every attention is an `AttentionProducts` whose products can be tapped and quantized, and a `Geometry`
says how tokens lie on the image. `seam` does so for any model; a family whose arithmetic is special, or that can be
rotated, has a file with `ROOT`, `takes`, `expose_` and `streams`, listed in `FAMILIES`.
"""

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from timm.data import ImageNetInfo, resolve_model_data_config
from timm.layers import DropPath
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from maskaq.errors import ModelError
from maskaq.models import names, seam, swin, vit
from maskaq.models.hf import adopted, class_name
from maskaq.models.names import (
    classifier_tags,
    embedding_width,
    has_classifier,
    pretrained_tags,
    supported_names,
)
from maskaq.models.probe import WANTED, probe_image
from maskaq.models.products import AttentionProducts, Matmul
from maskaq.models.structure import Stream
from maskaq.shapes import Geometry

FAMILIES = (vit, swin)

__all__ = [
    "AttentionProducts",
    "Matmul",
    "adopted",
    "class_names",
    "classifier_tags",
    "data_config",
    "embedding_width",
    "expose",
    "geometry",
    "has_classifier",
    "in_float",
    "parts",
    "pretrained_tags",
    "refuse_zero_weights",
    "streams_of",
    "supported_names",
    "task_name",
]

_QUANTIZED = (nn.Linear, nn.Conv2d)


_WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Classes around a model, of torch.compile and torch.nn.parallel -> where the model is."""


def expose(model: nn.Module, task: str | None = None) -> nn.Module:
    """A copy of the model in the common form: frozen, eval mode, float32, same outputs, same state-dict keys.

    Args:
        task: a name of `maskaq.tasks`; by default what the model itself says (`task_name`).
    """
    if isinstance(model, str):
        raise ModelError(f"expected a model, got its name: maskaq.load_model({model!r}) loads it")
    model = adopted(model)
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a model, an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("expected a model in Python, got a TorchScript module: give the model it was made from")
    for wrapper, inside in _WRAPPERS.items():
        if type(model).__name__ == wrapper:
            raise ModelError(f"expected the model itself, got {wrapper} around it: give model.{inside}")
    if isinstance(getattr(model, "_maskaq_geometry", None), Geometry):
        return copy.deepcopy(model).float().eval().requires_grad_(False)
    _refuse_altered_layers(model)
    _refuse_without_pooling(model)
    exposed = copy.deepcopy(model).float().eval().requires_grad_(False)
    _drop_nothing(exposed)
    config = data_config(model)
    channels, *size = config["input_size"]
    image = probe_image(exposed, channels, (size[0], size[1]))
    task = task or task_name(model)
    family = family_of(exposed)
    if family is not None and task in ("segmentation", "detection"):
        raise ModelError(f"this {class_name(model)} gives one row for each image: expected {WANTED[task]}")
    found = seam.expose_(exposed, image, task) if family is None else family.expose_(exposed, image)
    _refuse_unknown_layers(exposed)
    if not found.blocks and (family is not None or not _is_transformer(model)):
        raise ModelError(
            f"this {class_name(model)} has no attention layer that maskaq can see: expected a vision transformer, one "
            "of timm's (`maskaq list models`), of transformers, or your own with methods that call "
            "scaled_dot_product_attention or nn.MultiheadAttention, or multiply q @ k and take a softmax"
        )
    if getattr(exposed, "num_classes", None) is None:
        exposed.num_classes = found.outputs  # type: ignore[assignment]
    exposed._maskaq_geometry = Geometry(  # type: ignore[assignment]
        layers=found.layers,
        image_size=(size[0], size[1]),
        channels=channels,
        task=task,
        classes=0 if task == "features" else int(exposed.num_classes),  # type: ignore[arg-type]
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        first=found.first,
        last=found.last,
        blocks=found.blocks,
        left_out=found.left_out,
        backbone=getattr(exposed, "backbone_path", ""),
    )
    return exposed


def family_of(model: nn.Module) -> ModuleType | None:
    """The file of a model's family, if it has one of its own."""
    return next((f for f in FAMILIES if isinstance(model, f.ROOT) and f.takes(model)), None)


def streams_of(model: nn.Module) -> tuple[Stream, ...] | str:
    """The residual streams of an exposed model; or, in words, why they are not known or cannot be rotated."""
    family = family_of(model)
    if family is None:
        return f"the residual streams of a {type(model).__name__} are not known"
    found: tuple[Stream, ...] | str = family.streams(model)
    return found


def _is_transformer(model: nn.Module) -> bool:
    """Whether it is of timm's families, though it has no attention: the smallest of a family may have none."""
    return names.record_of(model).get("architecture") in names.supported_names()


def _drop_nothing(model: nn.Module) -> None:
    """Remove dropout and drop path. They do nothing in eval mode, but their rates would make equal blocks differ."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (DropPath, nn.Dropout)):
                setattr(module, name, nn.Identity())


def data_config(model: Any) -> dict[str, Any]:
    """timm's data config of a model (size, mean, std, crop, interpolation), with the size it was built for."""
    exposed = getattr(model, "_maskaq_geometry", None)  # of a model whose layers may have been replaced since
    config = resolve_model_data_config(model)
    size = exposed.image_size if exposed else getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = size or config["input_size"][1:]
    channels = exposed.channels if exposed else _channels(model, config["input_size"][0])
    config["input_size"] = (channels, int(height), int(width))
    for key in ("mean", "std"):  # timm keeps three of each whatever `in_chans` is
        if len(config[key]) != channels:
            config[key] = (sum(config[key]) / len(config[key]),) * channels
    return config


def _channels(model: nn.Module, usual: int) -> int:
    """Channels of the images: what the first convolution reads, where there is one."""
    return next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), usual)


def geometry(exposed: nn.Module) -> Geometry:
    """The geometry of a model that went through `expose`."""
    found = getattr(exposed, "_maskaq_geometry", None)
    if not isinstance(found, Geometry):
        raise ModelError(f"{type(exposed).__name__} has no geometry: pass it through maskaq.expose first")
    return found


def parts(exposed: nn.Module) -> list[str]:
    """Module paths of the blocks and of all else with parameters beside them, in the order they are computed.

    That is the patch embedding, in Swin the merging of patches, the last norm and the classifier.
    """
    blocks = set(geometry(exposed).blocks)
    around = {block[:end] for block in blocks for end, letter in enumerate(block) if letter == "."}

    def walk(module: nn.Module, path: str) -> Iterator[str]:
        for name, child in module.named_children():
            if path + name in around:
                yield from walk(child, f"{path}{name}.")
            elif next(child.parameters(), None) is not None:
                yield path + name

    return list(walk(exposed, ""))


def task_name(model: Any) -> str:
    """What a model is for: `features` where its outputs are an embedding and not classes, else `classification`.

    Detectors and segmenters say so in their record. What was asked for (`maskaq.models.load.set_task`) counts first.
    Features are the outputs of a model without a classifier (num_classes is 0) and of an image tower. A tower with
    another number of outputs than its own is a user's classifier.
    """
    record = names.record_of(model)
    if record.get("task"):
        return str(record["task"])
    width = embedding_width(record)
    outputs = getattr(model, "num_classes", None)
    return "features" if outputs == 0 or (width and width == outputs) else "classification"


def _refuse_without_pooling(model: Any) -> None:
    if getattr(model, "global_pool", "some") == "":
        wanted = "logits" if task_name(model) == "classification" else "features"
        raise ModelError(
            f"this {class_name(model)} has no pooling (global_pool is ''): expected one output for each image, {wanted}"
        )


def _refuse_altered_layers(model: nn.Module) -> None:
    """ModelError for a layer that computes something else than its class and its parameters say: a copy would lose it.

    Pruning, weight norm and spectral norm of `torch.nn.utils` compute a weight in a hook or a parametrization.
    """
    for name, module in model.named_modules():
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        patched = [
            key for key in vars(module) if callable(vars(module)[key]) and callable(getattr(type(module), key, 0))
        ]
        found = remedy = ""
        if is_parametrized(module):
            found = "has a parametrization"
            remedy = "torch.nn.utils.parametrize.remove_parametrizations"
        elif any(getattr(module, kind) for kind in hooks):
            found = "has a hook"
            remedy = "its handle's remove(), or torch.nn.utils.prune.remove after pruning"
        elif patched:
            found = f"has a {patched[0]} of its own"
            remedy = f"del layer.{patched[0]}"
        elif type(module) in (nn.Linear, nn.Conv2d) and not isinstance(module.weight, nn.Parameter):
            found = "has a weight that is not a parameter"
            remedy = "layer.weight = nn.Parameter(...)"
        if found:
            where = f"layer {name!r}" if name else "the model"
            raise ModelError(
                f"{where} ({type(module).__name__}) {found}: expected a plain layer; undo it with {remedy}"
            )


def refuse_zero_weights(exposed: nn.Module) -> None:
    """ModelError for a model that predicts the same for every image: an untrained classifier, or weights never set."""
    weights = {n: m.weight for n, m in exposed.named_modules() if type(m) in (nn.Linear, nn.Conv2d)}
    zero = [name for name, weight in weights.items() if not weight.any()]
    heads = geometry(exposed).last or tuple(weights)
    if set(heads) <= set(zero):
        what = "every linear layer" if len(zero) == len(weights) else "the classifier"
        raise ModelError(f"layer {heads[0]!r}: all weights of {what} are 0, so it is not trained; load trained weights")


def _refuse_unknown_layers(model: nn.Module) -> None:
    """ModelError for a layer that computes something else with its weight than the class it is made from."""
    for name, module in model.named_modules():
        known = type(module) in _QUANTIZED or isinstance(module, seam.FloatLinear | seam.FloatConv2d)
        if isinstance(module, _QUANTIZED) and not known:
            raise ModelError(
                f"layer {name!r} ({type(module).__name__}) cannot be quantized: expected plain Linear and Conv2d layers"
            )


def in_float(exposed: nn.Module) -> dict[str, int]:
    """What of a model stays in float: kind of its layers or parameters -> how many numbers.

    Biases of quantized layers are not counted: they are in float in every model.
    """
    found: dict[str, int] = {}
    for module in exposed.modules():
        if type(module) in _QUANTIZED:
            continue
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own:
            kind = "parameters of its own" if module is exposed else type(module).__name__
            found[kind] = found.get(kind, 0) + own
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def class_names(model: nn.Module) -> list[str] | None:
    """Names of the classes, where known: the model's own, or ImageNet's where timm's tag says so."""
    record = names.record_of(model)
    classes = geometry(model).classes
    labels = record.get("label_names")
    if not labels and classes == 1000 and "in1k" in str(record.get("tag")):  # the data of the last training
        imagenet = ImageNetInfo("imagenet-1k")
        labels = [imagenet.index_to_description(i) for i in range(classes)]
    return [str(label) for label in labels] if labels and classes and len(labels) == classes else None
