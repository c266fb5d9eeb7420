"""Listen to a model's attention without changing it: hooks that live in a `with`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

from maskaq.models import geometry

Point = Literal["scores", "probs", "heads", "blocks"]

_MODULE = {"scores": "{attention}.qk", "probs": "{attention}.softmax", "heads": "{attention}.av", "blocks": "{block}"}


class Taps(dict[str, list[Tensor]]):
    """point -> one tensor per layer, of the model's latest forward pass."""


@contextmanager
def taps(model: nn.Module, *points: Point) -> Iterator[Taps]:
    """Record what passes the named points: scores QK^T, softmax probs, head outputs, block outputs.

    with taps(model, "scores", "heads") as seen:
        logits = model(images)
        seen["scores"][0]      # (B*W, H, T, T) of the first layer
    """
    layers = geometry(model).layers
    seen = Taps({point: [Tensor()] * len(layers) for point in points})
    handles = []

    def recorder(point: str, index: int) -> Callable[[nn.Module, tuple, Tensor], None]:
        def record(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            seen[point][index] = output

        return record

    try:
        for point in points:
            for index, layer in enumerate(layers):
                path = _MODULE[point].format(attention=layer.attention, block=layer.block)
                handles.append(model.get_submodule(path).register_forward_hook(recorder(point, index)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        seen.clear()
