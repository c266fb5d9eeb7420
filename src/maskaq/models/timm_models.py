"""timm's models by name: with random weights, as shapes alone, and with the weights that timm has."""

import re
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.models import get_pretrained_cfg
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from maskaq import zoo
from maskaq.errors import CheckpointError, ModelError, first_line, unknown
from maskaq.models import expose
from maskaq.models.checkpoint import SUFFIXES
from maskaq.models.hub import hub_or_cache
from maskaq.models.names import embedding_width, record_of, supported_names, update_record_

# Arguments of timm.create_model that choose weights: here that is the checkpoint's business alone.
RESERVED = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")
LARGEST_SIDE = 4096  # pixels; the attention of a ViT/16 over one such image takes tens of gigabytes
ADVICE = "Give the weights with --checkpoint FILE."


def create_timm(name: str, **kwargs: Any) -> nn.Module:
    """A timm model with random weights; ModelError for an unknown name or impossible arguments."""
    _check_name(name)
    try:
        model = _created(name, pretrained=False, **kwargs)
    except Exception as error:  # timm asserts, raises TypeError, RuntimeError and others for the same kind of mistake
        raise _unbuildable(name, kwargs, error) from error
    if kwargs.get("num_classes") and embedding_width(record_of(model)):  # a classifier was asked for: no CLIP tower
        update_record_(model, tag="")
    return model


def timm_shape(name: str, **kwargs: Any) -> nn.Module:
    """The same model in eval mode, on the meta device where it can be built there: its shapes alone."""
    try:
        with torch.device("meta"), _WithoutValues():  # not every timm can build every model there
            model = create_timm(name, **kwargs)
    except ModelError:
        model = create_timm(name, **kwargs)
    return model.eval()


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


def checked_args(args: dict[str, Any]) -> dict[str, Any]:
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


def pretrained_timm(name: str, args: dict[str, Any]) -> nn.Module:
    """A timm model with the weights that timm downloads (or has in its cache)."""
    _check_weights(name, args)
    try:
        with hub_or_cache():
            model = _created(name, pretrained=True, **args)
    except Exception as error:  # hub, URL, TLS, disk, "no pretrained weights": many classes, one remedy
        if _out_of_memory(error):
            raise _unbuildable(name, args, error) from error
        raise CheckpointError(
            f"could not download the pretrained weights of {name!r}: {first_line(error)}. {ADVICE}"
        ) from error
    return model


def _check_weights(name: str, args: dict[str, Any]) -> None:
    """ModelError, before a download, for a wrong argument, an unsupported model, or weights that will not do."""
    shape = timm_shape(name, **args)
    known = get_pretrained_cfg(name)
    expose(shape)
    if known and not known.has_weights:
        raise ModelError(f"timm has no weights of {name!r}. {ADVICE}")
    _check_head(name, shape, args)


def _check_head(name: str, model: nn.Module, args: dict[str, Any]) -> None:
    """ModelError where timm dropped the trained head because another number of classes was asked for."""
    trained = record_of(model).get("num_classes")
    asked = args.get("num_classes", trained)
    if asked and asked != trained:
        raise ModelError(
            f"the pretrained weights of {name!r} have {trained} classes, so num_classes={asked} would be an untrained "
            f"head. {ADVICE}"
        )


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
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = (record_of(model).get("input_size") or (3, 0, 0))[0]
        update_record_(model, input_size=(channels, height, width))
    return model


def _unbuildable(name: str, args: Mapping[str, Any], error: BaseException) -> ModelError:
    given = ", ".join(f"{k}={v!r}" for k, v in args.items()) or "no arguments"
    if _out_of_memory(error):
        return ModelError(
            f"there is not enough memory to build {name!r} with {given}: check --img-size and --model-arg"
        )
    return ModelError(
        f"timm cannot build {name!r} with {given}: {first_line(error)}. Check the name's tag and --model-arg."
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
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelError(f"{name} is no name of timm's: for a transformers model, give hf:{name}")
    if not timm.is_model(name):
        raise ModelError(f"{unknown('model', name, _near(name))}, ... (`maskaq list models` prints every name)")


def weights_in_place_of_name(file: str) -> str:
    """The message for a weights file where a model is named."""
    return (
        f"{file} is a weights file: expected the name of a model (`maskaq list models`); weights go to --checkpoint, "
        f"as in MODEL --checkpoint {shlex.quote(file)}"
    )


def _near(name: str) -> list[str]:
    """A few supported names that start with a wrong one, have it in them or are close to it; else some small ones."""
    wanted = re.sub(r"[^a-z0-9]+", "_", name.split(".")[0].lower())
    known = zoo.embedded_names() + supported_names()
    found = [n for n in known if wanted and n.startswith(wanted)] or [n for n in known if wanted and wanted in n]
    found = found[:6] or get_close_matches(wanted, known, n=6)
    found = found or [n for n in known if any(len(word) > 3 and word in n for word in wanted.split("_"))][:6]
    return found or ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"]
