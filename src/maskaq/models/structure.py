"""Where a model may be rotated: its residual streams, with all that writes to them and reads from them, and its MLPs.

A family says so in its `streams(model)`: modules by name, so that whoever changes weights needs no family's names.
"""

from dataclasses import dataclass
from typing import Any

from timm.layers import GluMlp, Mlp, SwiGLU
from torch import nn

MLPS = (Mlp, GluMlp, SwiGLU)
"""Each multiplies by `fc2` what leaves its `norm`, mostly an Identity, whatever gates come before."""


@dataclass(frozen=True)
class Reader:
    """Linear layers that read a stream through a norm."""

    layers: tuple[str, ...]
    norm: str = ""
    """Empty: they read the stream as it is."""
    copies: int = 1
    """Tokens side by side that the norm sees as one (the merging of patches)."""


@dataclass(frozen=True)
class Stream:
    """A residual stream of one width: x = what starts it + what the writers add."""

    width: int
    writers: tuple[tuple[str, str], ...]
    """Linear layer or convolution, and the LayerScale behind it or an empty name."""
    readers: tuple[Reader, ...]
    tokens: tuple[str, ...] = ()
    """Parameters of the model that are added to the stream or are tokens of it; channels come last."""
    entry: str = ""
    """A norm with a scale and a shift of its own whose output starts the stream, if there is one."""


def mlps(model: nn.Module) -> list[str]:
    """Names of the MLPs."""
    return [name for name, module in model.named_modules() if type(module) in MLPS]


def gelu_mlps(model: nn.Module) -> list[str]:
    """Names of the plain MLPs with a GELU between their two layers."""
    return [name for name, module in model.named_modules() if type(module) is Mlp and isinstance(module.act, nn.GELU)]


def put_relu_(model: nn.Module) -> nn.Module:
    """Put ReLU in the place of these GELUs, and note it."""
    for name in gelu_mlps(model):
        model.get_submodule(name).act = nn.ReLU()
    model._maskaq_relu = True  # type: ignore[assignment]
    return model


def has_relu(model: nn.Module) -> bool:
    """Whether `put_relu_` was applied to a model, or to what it was made from."""
    return getattr(model, "_maskaq_relu", False) is True


def branch(path: str, module: nn.Module, norm: str, scale: str = "") -> tuple[tuple[str, str], Reader]:
    """The writer and the reader of an attention or an MLP: its last layer, and all other linear layers."""
    layers = tuple(f"{path}.{name}" for name, child in module.named_children() if type(child) is nn.Linear)
    return (layers[-1], scale), Reader(layers[:-1], norm)


def is_absent(module: Any) -> bool:
    return module is None or isinstance(module, nn.Identity)
