"""The tensors of a weights file, from whatever training scripts wrap them in.

Pickled files are read with ``weights_only=True`` and never in any other way.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from maskaq.errors import CheckpointError, first_line

State = dict[str, Tensor]

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
# The averaged (EMA) weights come last: a file that also holds the plain ones is read for the plain ones.
WRAPPERS = ("model", "state_dict", "model_state", "model_state_dict", "net", "module", "teacher")
EMA_WRAPPERS = ("model_ema", "state_dict_ema")
PREFIXES = ("module.", "model.", "_orig_mod.")
# Buffers that old files store and that every current model computes by itself.
DERIVED = ("attn_mask", "relative_position_index")


def read_checkpoint(path: Path) -> tuple[State, Any]:
    """The tensors of a weights file by key, and all that is written down beside them.

    The tensors are unwrapped, without common prefixes, fp32 and all finite. Raises CheckpointError for a file that is
    missing, damaged, not weights, or not readable without running code.
    """
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
        raise CheckpointError(f"{path}: cannot be opened: {first_line(error)}. Check its permissions.") from error
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
            f"{path}: expected a safetensors file, found one that is truncated or damaged: {first_line(error)}. "
            "Copy or download it again."
        ) from error


def _read_torch(path: Path) -> Any:
    """What a .pth/.pt/.bin file holds, read without running any code in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251 (weights_only runs no code)
    except Exception as error:
        raise CheckpointError(f"{path}: {_why_not(error)}") from error


def _why_not(error: Exception) -> str:
    """What is wrong with a file that torch.load refused, without torch's own message, which advises unsafe loading."""
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
