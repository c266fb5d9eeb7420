"""What a weights file reveals about its model: arguments of timm, image size, classes, names that fit.

Almost all of it follows from shapes: rows of a classifier, channels of a convolution, positions, windows.
"""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from timm.models import swin_transformer
from torch import Tensor, nn

from maskaq.errors import ModelError
from maskaq.models.checkpoint import State
from maskaq.models.names import record_of, supported_names
from maskaq.models.timm_models import LARGEST_SIDE, timm_shape


def inferred_arguments(model: nn.Module, state: State) -> dict[str, Any]:
    """The timm arguments in which the file differs from the model, as far as shapes tell."""
    found = {
        "num_classes": _num_classes(model, state),
        "in_chans": _in_chans(model, state),
        "img_size": _img_size(model, state),
        "window_size": _window_size(model, state),
    }
    return {key: value for key, value in found.items() if value is not None}


def layers_named(model: nn.Module, entry: str) -> list[str]:
    """The layer names under an entry of timm's config, which holds a string, a tuple or nothing."""
    value = record_of(model).get(entry) or ()
    return [value] if isinstance(value, str) else list(value)


def _num_classes(model: nn.Module, state: State) -> int | None:
    """The rows of the file's classifier where they differ from the model's classes."""
    for layer in [*layers_named(model, "classifier"), "head"]:  # "head" too: so Swin's own files call it
        weight = state.get(f"{layer}.weight")
        if weight is not None and weight.dim() == 2:
            return None if weight.shape[0] == getattr(model, "num_classes", None) else weight.shape[0]
    return None


def _in_chans(model: nn.Module, state: State) -> int | None:
    """The input channels of the file's first convolution where they differ from the model's."""
    own = model.state_dict()
    for layer in layers_named(model, "first_conv") or ["patch_embed.proj"]:
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
        return None if stored is None or stored == size_of(model) else short_size(stored)
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


def size_of(model: nn.Module) -> tuple[int, int] | None:
    """The image size that a model was built for, where its patch embedding says so."""
    size: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = size or (record_of(model).get("input_size") or (None,))[1:]
    return (int(size[0]), int(size[1])) if size else None


def short_size(size: tuple[int, int]) -> int | tuple[int, int]:
    """An image size as users give it: one number for a square."""
    return size[0] if size[0] == size[1] else size


def noted_size(notes: Any) -> tuple[int, int] | None:
    """The image size in timm's `pretrained_cfg` of a file, or in its `input_size`."""
    record = notes.get("pretrained_cfg") if isinstance(notes, Mapping) else None
    size = (record if isinstance(record, Mapping) else notes if isinstance(notes, Mapping) else {}).get("input_size")
    if not isinstance(size, list | tuple) or len(size) != 3 or not all(type(side) is int for side in size):
        return None
    return (size[1], size[2]) if all(1 <= side <= LARGEST_SIDE for side in size) else None


def noted_classes(notes: Any, count: int) -> list[str]:
    """The names of so many classes that mmdetection or mmsegmentation writes down in a file; empty if it does not."""
    for part in ("meta", "dataset_meta"):
        notes = notes.get(part, notes) if isinstance(notes, Mapping) else {}
    found = next((notes[key] for key in ("CLASSES", "classes") if key in notes), ())
    sound = isinstance(found, list | tuple) and len(found) == count and all(isinstance(name, str) for name in found)
    return list(found) if sound else []


# --- a Swin's windows ------------------------------------------------------------------------------------------


def swin_size(model: nn.Module, state: State, noted: tuple[int, int] | None) -> tuple[int, int] | None:
    """The image size of a Swin's file, which is the one that

    1. the attention masks stored in older files have windows for,
    2. the bias tables tell, where a stage has windows smaller than the others because its grid is,
    3. the file's own `pretrained_cfg` says (`noted_size`),
    4. the name says, if the file has the windows that the name has at that size.

    None if the file does not determine it.
    """
    stored = _size_of_masks(model, state) or _size_of_windows(model, state) or noted
    if stored is not None or any(key.endswith("attn_mask") for key in state):
        return stored
    mine = _windows(model.state_dict())
    theirs = _windows(state)
    comparable = len(mine) == len(theirs) and None not in theirs  # else it does not fit, which is said later
    return None if comparable and mine != theirs else size_of(model)


def size_wanted(model: nn.Module, state: State, name: str, path: Path) -> str:
    """The message for a Swin's file that does not tell its image size."""
    windows = [size for size in _windows(state) if size]
    fitting = fitting_names(state, model.state_dict(), name)
    other = f" The file has the shapes of {' or '.join(fitting)}." if fitting else ""
    return (
        f"{path}: expected the windows of {name!r} at {short_size(size_of(model) or (0, 0))} pixels, found others "
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


# --- names that fit a file -------------------------------------------------------------------------------------


def fitting_names(state: State, own: Mapping[str, Tensor], name: str, most: int = 3) -> list[str]:
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
        shape = timm_shape(name, num_classes=1).state_dict()
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


def looks_like(state: Mapping[str, Tensor]) -> str:
    """The family that the keys of a state dict point to; empty if none."""
    if any(key.endswith("relative_position_bias_table") and key.startswith("layers.") for key in state):
        return "a Swin"
    if "dist_token" in state:
        return "a distilled DeiT"
    return "a ViT or DeiT" if "pos_embed" in state and "blocks.0.attn.qkv.weight" in state else ""
