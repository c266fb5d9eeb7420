"""Weights of a file into a model: whole or not at all.

Keys that the two do not share are listed, with what to do about it. Other names of the same weights, as in the files
that the authors of DeiT and Swin published, are converted.
"""

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from timm.models import swin_transformer, vision_transformer
from torch import Tensor, nn

from maskaq.errors import CheckpointError
from maskaq.models.checkpoint import DERIVED, State
from maskaq.models.inferred import fitting_names, layers_named, looks_like
from maskaq.models.names import classifier_tags

_log = logging.getLogger(__name__)

SHOWN = 12  # keys of a kind in a message


@dataclass
class Misfit:
    """What a file and a model do not share."""

    missing: list[str]
    unexpected: list[str]
    different: list[str]

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.different)


def fill_(model: nn.Module, state: State, name: str, path: Path, resizable: tuple[str, ...]) -> None:
    """Puts the file's weights into the model; CheckpointError naming every key that does not fit."""
    own = model.state_dict()
    given = state
    misfit = _compare(own, state)
    if misfit:
        renamed = _renamed(model, state, resizable)
        if len(second := _compare(own, renamed)) < len(misfit):
            state, misfit = renamed, second
    if misfit:
        raise CheckpointError(_report(misfit, own, state, name, path, layers_named(model, "classifier")))
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
        with warnings.catch_warnings():  # timm's and torch's, of how they resample; `fill_` reports that they did
            warnings.simplefilter("ignore", UserWarning)
            if isinstance(model, swin_transformer.SwinTransformer):
                renamed = swin_transformer.checkpoint_filter_fn(dict(state), model)
            elif isinstance(model, vision_transformer.VisionTransformer):
                renamed = vision_transformer.checkpoint_filter_fn(dict(state), model, adapt_layer_scale=True)
            else:
                return state
    except Exception:  # a file of another family: the plain comparison says more than the filter's error
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
    headless = bool(heads) and set(heads) <= set(misfit.missing) and looks_like(state) == looks_like(own) != ""
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
    theirs = looks_like(state)
    if theirs and theirs != looks_like(own):
        lines.append(f"Is this really a {name}? Its weights look like {theirs}: check the model name.")
    fitting = fitting_names(state, own, name)
    if fitting:
        lines.append(f"The file has the shapes of {' or '.join(fitting)}.")
    elif theirs == looks_like(own) and not headless:
        lines.append(
            "Check the model name, or pass --img-size N or HxW, or --model-arg KEY=VALUE (such as num_classes)."
        )
    return "\n".join(lines)


def _without_classifier(name: str) -> str:
    """What to do with weights that have no classifier, or where one can come from."""
    architecture = name.split(".")[0]
    tags = classifier_tags(name)
    other = f"take {' or '.join(f'{architecture}.{tag}' for tag in tags[:3])}, or give" if tags else "give"
    return (
        "To quantize it for its features, add --model-arg num_classes=0; to classify, "
        f"{other} weights that have a classifier with --checkpoint FILE."
    )
