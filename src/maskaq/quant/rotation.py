"""Rotate a model's channels before they are quantized: the outputs stay the same, and values use their grids better.

A few channels of a transformer are far larger than the others and determine the range of the whole tensor. An
orthogonal matrix M spreads them: W x = (W M^T)(M x). `quantization.rotate` selects from three places:

    heads       q, k, v and the input of `proj`, inside each head; folded into the weights, at no cost
    residual    the residual stream, and so the input of every layer behind a norm; folded into the weights, at no cost
    hidden      the input of the second layer of an MLP; online, in blocks of at most 32 channels, in the student alone

The matrices are fixed and never learned. Teacher and student have the same rotated heads and residual stream, so they
are always compared in one basis. Nothing is compared inside an MLP, and the teacher has no grid there, so it does
without the online rotation.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.errors import ModelError, RecipeError, unknown
from maskaq.models import expose, geometry, streams_of
from maskaq.models.probe import probe_image
from maskaq.models.structure import Stream, is_absent, mlps, outputs_again, replace_module, tensors_of
from maskaq.quant.kinds import refuse_quantized
from maskaq.randomness import image_keys, uniform
from maskaq.recipe.schema import ROTATIONS, Quantization

BLOCK = 32
"""Most channels that an online rotation mixes: larger blocks gain little, and their cost grows with their size."""


@dataclass(frozen=True)
class Rotated:
    """The rotations of a model."""

    names: tuple[str, ...] = ()
    """Those that were asked for."""
    sites: Mapping[str, str] = field(default_factory=dict)
    """Site name -> the rotation of its values."""
    left_out: tuple[str, ...] = ()
    """What the model's structure does not allow, and why."""
    online: Mapping[str, int] = field(default_factory=dict)
    """MLP -> channels of a block: rotations that `rotate_online_` has yet to insert."""
    added: tuple[str, ...] = ()
    """New keys of the state dict."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """New prefix of keys of the state dict -> the prefix before."""

    def original_keys(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict with the keys of the model before rotation, without the new ones."""
        kept = {key: value for key, value in state.items() if key not in self.added}
        for now, before in self.moved.items():
            kept = {before + key.removeprefix(now) if key.startswith(now) else key: v for key, v in kept.items()}
        return kept


class Rotation(nn.Module):
    """M x for every block of channels of the size of M."""

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix.T.to(torch.float32, copy=True))  # multiplied from the right

    def forward(self, x: Tensor) -> Tensor:
        size = len(self.matrix)
        return x @ self.matrix if x.shape[-1] == size else (x.unflatten(-1, (-1, size)) @ self.matrix).flatten(-2)

    def extra_repr(self) -> str:
        return f"blocks of {len(self.matrix)}"


def teacher_of(model: nn.Module, scheme: Quantization, task: str | None = None) -> nn.Module:
    """The full-precision model of a run: a copy of the user's in the common form, rotated as the recipe says."""
    return rotate(expose(model, task), scheme.rotate)


def rotated(model: nn.Module) -> Rotated:
    """The rotations of a teacher, a student or a deployed model."""
    found = getattr(model, "_maskaq_rotated", None)
    return found if isinstance(found, Rotated) else Rotated()


@torch.no_grad()
def rotate(model: nn.Module, names: Iterable[str], blank: bool = False) -> nn.Module:
    """A rotated copy of an exposed model, with the same outputs; the model itself if there is nothing to do.

    Rotations of `hidden` are only recorded; `rotate_online_` inserts them.

    Args:
        names: some of `ROTATIONS`.
        blank: only insert the additional modules and leave the weights as they are, because others will be loaded.
    """
    asked = tuple(names)
    for name in asked:
        if name not in ROTATIONS:
            raise RecipeError(f"quantization.rotate: {unknown('rotation', str(name), ROTATIONS)}")
    names = tuple(name for name in ROTATIONS if name in asked)
    if (before := rotated(model).names) == names:
        return model
    if before:
        raise ModelError(f"this model is rotated already ({', '.join(before)}): give the one it was made from")
    refuse_quantized(model)
    rotator = _Rotator(_untied(model), blank)
    for name in names:
        getattr(rotator, name)()
    found = Rotated(
        names, rotator.sites, tuple(rotator.left_out), rotator.online, tuple(rotator.added), dict(rotator.moved)
    )
    rotator.model._maskaq_rotated = found  # type: ignore[assignment]
    if names and not blank:
        _check_equal(model, rotate_online_(copy.deepcopy(rotator.model)) if rotator.online else rotator.model)
    return rotator.model


@torch.no_grad()
def rotate_online_(model: nn.Module, blank: bool = False) -> nn.Module:
    """Insert the online rotations into a rotated model, in place: M in front of fc2, which undoes it."""
    found = rotated(model)
    if not found.online:
        return model
    rotator = _Rotator(model, blank)
    for name, size in found.online.items():
        rotator.turn_hidden(name, hadamard(size))
    added, moved = (*found.added, *rotator.added), {**found.moved, **rotator.moved}
    model._maskaq_rotated = replace(found, online={}, added=added, moved=moved)  # type: ignore[assignment]
    return model


def _untied(model: nn.Module) -> nn.Module:
    """A copy in which no two layers share a module or a parameter: each is rotated by itself."""
    copied = copy.deepcopy(model)
    modules: set[int] = set()
    for name, module in list(copied.named_modules(remove_duplicate=False)):
        if id(module) in modules:
            replace_module(copied, name, copy.deepcopy(module))
        modules.add(id(module))
    parameters: set[int] = set()
    for module in copied.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in parameters:
                setattr(module, name, nn.Parameter(parameter.clone(), requires_grad=parameter.requires_grad))
            parameters.add(id(parameter))
    return copied


def _check_equal(model: nn.Module, turned: nn.Module) -> None:
    """ModelError if rotation changed the outputs: then the model's structure is not what this code assumes."""
    image = probe_image(model, geometry(model).channels, geometry(model).image_size)
    if image.is_meta:
        return
    before = model(image)
    pairs = zip(tensors_of(before), outputs_again(turned, image, before), strict=True)
    if not all((found - expected).norm() <= 1e-3 * expected.norm() for expected, found in pairs):
        raise ModelError(
            f"rotation changes the outputs of this {type(model).__name__}, which must not be: leave it out with "
            "quantization.rotate=[]"
        )


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix, for a power of two, with rows of length 1: all entries have the same magnitude.

    >>> hadamard(2) * 2**0.5
    tensor([[ 1.,  1.],
            [ 1., -1.]], dtype=torch.float64)
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def mean_keeping(size: int) -> Tensor:
    """An orthogonal matrix R with R 1 = 1 that mixes all channels: LayerNorm(R x) = R LayerNorm(x), exactly.

    R = C^T S C, where C is the discrete cosine transform, whose first row is constant, and S are fixed random signs,
    the first of them +. R preserves the mean of x and its distance from the mean, which is all that a norm divides by.
    """
    k, n = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    cosine = torch.cos(math.pi * k * (2 * n + 1) / (2 * size)) * math.sqrt(2 / size)
    cosine[0] /= math.sqrt(2)
    signs = torch.where(uniform(image_keys(0, torch.arange(size)), 1)[:, 0] < 0.5, -1.0, 1.0).double()
    signs[0] = 1
    return cosine.T @ (signs[:, None] * cosine)


def _mixing(size: int) -> Tensor:
    return hadamard(size) if size & (size - 1) == 0 else mean_keeping(size)


class _Rotator:
    """One model, rotated in place; all arithmetic is in float64."""

    def __init__(self, model: nn.Module, blank: bool) -> None:
        self.model, self.blank = model, blank
        self.sites: dict[str, str] = {}
        self.left_out: list[str] = []
        self.online: dict[str, int] = {}
        self.added: list[str] = []
        self.moved: dict[str, str] = {}

    def heads(self) -> None:
        """q' = M q and k' = M k have the products of q and k; proj undoes v' = M v. All heads of a layer share M."""
        reasons: dict[str, list[str]] = {}
        for name in (layer.attention for layer in geometry(self.model).layers):
            attention: Any = self.model.get_submodule(name)
            if not hasattr(attention, "qkv"):
                reasons.setdefault("heads: which layers q, k and v come from is not known", []).append(name)
                continue
            for_qk, for_v = _obstacle(attention, "q_norm", "k_norm"), _obstacle(attention, "norm", "gate")
            for what, reason in (("q and k", for_qk), ("v", for_v)):
                reasons.setdefault(f"heads, {what}: {reason}", []).extend([name] if reason else [])
            matrix = _mixing(attention.qkv.out_features // (3 * attention.num_heads))
            same = torch.eye(len(matrix), dtype=torch.float64)
            each = torch.stack([same if reason else matrix for reason in (for_qk, for_qk, for_v)])
            self.change(attention.qkv.weight, _rows_of_heads, each)
            self.change(attention.qkv.bias, _rows_of_heads, each)
            if not for_qk:
                self.sites |= dict.fromkeys((f"{name}.qk.a", f"{name}.qk.b"), "heads")
            if not for_v:
                self.change(attention.proj.weight, _columns, matrix)
                self.sites |= dict.fromkeys((f"{name}.av.b", f"{name}.proj.input"), "heads")
        self.left_out += [f"{reason} ({names[0]}, {len(names)} in all)" for reason, names in reasons.items() if names]

    def residual(self) -> None:
        """Every stream x becomes R x: layers that write to it are multiplied by R, layers that read it by R^T.

        A norm's own scale and shift do not commute with R, so they are folded into the layers that read it.
        """
        streams = streams_of(self.model)
        if isinstance(streams, str):
            self.left_out.append(f"residual: {streams}")
            return
        for stream in streams:
            self._turn(stream, mean_keeping(stream.width))

    def _turn(self, stream: Stream, matrix: Tensor) -> None:
        for reader in stream.readers:
            norm: Any = self.model.get_submodule(reader.norm) if reader.norm else None
            scale, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
            for name in reader.layers:
                linear: Any = self.model.get_submodule(name)
                if shift is not None:
                    self._ensure_bias(name, linear)
                    self.change(linear.bias, torch.addmv, linear.weight, shift)
                if scale is not None:
                    self.change(linear.weight, torch.mul, scale)
                self.change(linear.weight, _columns, matrix)
                self.sites[f"{name}.input"] = "residual"
            self.change(scale, torch.ones_like)
            self.change(shift, torch.zeros_like)
        for name, behind in stream.writers:
            writer: Any = self.model.get_submodule(name)
            gamma: Any = self.model.get_submodule(behind).gamma if behind else None
            for tensor in (writer.weight, writer.bias):
                if gamma is not None:
                    self.change(tensor, _scaled_rows, gamma)
                self.change(tensor, _rows, matrix)
            self.change(gamma, torch.ones_like)
        for name in stream.tokens:
            self.change(getattr(self.model, name), torch.matmul, matrix.T)
        if stream.entry:
            self._append(stream.entry, Rotation(matrix))

    def hidden(self) -> None:
        """Record how the input of every fc2 is to be rotated."""
        for name in mlps(self.model):
            mlp: Any = self.model.get_submodule(name)
            width = mlp.fc2.in_features
            if (size := math.gcd(width, BLOCK)) == 1:
                self.left_out.append(f"hidden: {name} has {width} channels, an odd number")
                continue
            self.online[name] = size
            self.sites[f"{name}.fc2.input"] = "hidden"

    def turn_hidden(self, name: str, matrix: Tensor) -> None:
        mlp: Any = self.model.get_submodule(name)
        self._append(f"{name}.norm", Rotation(matrix))
        self.change(mlp.fc2.weight, _columns, matrix)

    def change(self, tensor: Tensor | None, function: Callable[..., Tensor], *others: Tensor) -> None:
        """tensor <- function(tensor, *others)."""
        if tensor is not None and not self.blank and not tensor.is_meta:
            doubles = (other.to(tensor.device, torch.float64) for other in (tensor, *others))
            tensor.copy_(function(*doubles).reshape(tensor.shape))

    def _ensure_bias(self, name: str, linear: nn.Linear) -> None:
        if linear.bias is None:
            linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features), requires_grad=False)
            self.added.append(f"{name}.bias")

    def _append(self, name: str, rotation: Rotation) -> None:
        """Rotate the output of a module, which is a norm or an Identity in place of one."""
        module, where = self.model.get_submodule(name), name
        rotation.to(next(self.model.parameters()).device)
        if not is_absent(module):
            self.moved[f"{name}.0."] = f"{name}."
            module, where = nn.Sequential(module, rotation), f"{name}.1"
        else:
            module = rotation
        replace_module(self.model, name, module)
        self.added.append(f"{where}.matrix")


def _columns(weight: Tensor, matrix: Tensor) -> Tensor:
    """W M^T, for every block of columns of the size of M."""
    return weight.unflatten(1, (-1, len(matrix))) @ matrix.T


def _rows(weight: Tensor, matrix: Tensor) -> Tensor:
    """M W, of a weight or a bias."""
    return torch.tensordot(matrix, weight, dims=1)


def _scaled_rows(weight: Tensor, factors: Tensor) -> Tensor:
    return weight * factors.view(-1, *[1] * (weight.dim() - 1))


def _rows_of_heads(weight: Tensor, matrices: Tensor) -> Tensor:
    """M W, for the weight or the bias of q, k and v: one matrix for each of the three, the same for all heads."""
    found: Tensor = torch.einsum("kde,khe...->khd...", matrices, weight.unflatten(0, (3, -1, matrices.shape[1])))
    return found


def _obstacle(attention: Any, *names: str) -> str:
    """Why values cannot be rotated in front of these modules; empty if the attention has none of them."""
    there = [name for name in names if not is_absent(getattr(attention, name, None))]
    return f"{there[0]} works channel by channel" if there else ""
