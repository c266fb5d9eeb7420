"""How a family describes a model: its attention layers, its MLPs, and its residual streams with the layers that write
to them and read from them.

`streams(model)` of a family gives names of modules, so that code which changes weights is independent of the family.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from timm.layers import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from maskaq.shapes import Layer


@dataclass(frozen=True)
class Exposed:
    """Description of a model whose attention is exposed."""

    layers: tuple[Layer, ...]
    """Attention over patches of the image, first to last."""
    blocks: tuple[str, ...]
    """Module paths of the blocks with attention."""
    first: tuple[str, ...]
    """The convolutions that read the image."""
    last: tuple[str, ...]
    """The linear layers that the outputs come from; none where they are the pooled tokens."""
    outputs: int = 0
    """Number of outputs for an image."""
    left_out: tuple[str, ...] = ()
    """Attention layers that are quantized but not used by the losses, and why."""

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[Layer]) -> "Exposed":
        """Of a ViT or Swin: all its convolutions embed patches, and all its attention is over patches."""
        return cls(
            layers=tuple(layers),
            blocks=tuple(dict.fromkeys(layer.block for layer in layers)),
            first=tuple(n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)),
            last=tuple(n for n, m in model.named_modules() if _is_head(n) and type(m) is nn.Linear),
        )


def _is_head(name: str) -> bool:
    return name.split(".")[0] in ("head", "head_dist")


MLPS = (Mlp, GluMlp, SwiGLU)
"""In each, `fc2` reads the output of `norm`, mostly an Identity, whatever gates come before."""


@dataclass(frozen=True)
class Reader:
    """Linear layers that read a stream through a norm."""

    layers: tuple[str, ...]
    norm: str = ""
    """Empty: they read the stream as it is."""


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


def main_output(output: Any) -> Tensor:
    """What a block gives: of several tensors the first with one row for each image."""
    if isinstance(output, Tensor):
        return output
    tensors = [value for value in output if isinstance(value, Tensor)]
    return min(tensors, key=len) if tensors else Tensor()


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors that a model gives: its one output, or all that it gives by name."""
    return [output] if isinstance(output, Tensor) else list(output.values())


def outputs_again(model: nn.Module, image: Tensor, before: Any) -> list[Tensor]:
    """A model's outputs for an image, to compare with the outputs `before` of another model.

    A detector uses the boxes that the other chose: by rounding alone it could choose others among equal ones.
    """
    return tensors_of(model(image) if isinstance(before, Tensor) else model(image, before["boxes"]))


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def is_absent(module: Any) -> bool:
    return module is None or isinstance(module, nn.Identity)
