"""Record a model's attention without changing the model, inside a `with` block."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

from torch import Tensor, nn

from maskaq.models import AttentionProducts, geometry
from maskaq.models.structure import main_output

Point = Literal["scores", "probs", "scores_received", "probs_received", "heads", "blocks", "class_features"]

_IN_ATTENTION = ("scores", "probs", "scores_received", "probs_received", "heads")


class Taps(Mapping[str, list[Tensor]]):
    """point -> one tensor per layer, of the model's latest forward pass."""

    def __init__(self, read: dict[str, list[Callable[[], Tensor]]]) -> None:
        self._read = read

    def __getitem__(self, point: str) -> list[Tensor]:
        return [read() for read in self._read[point]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


@contextmanager
def taps(model: nn.Module, *points: Point) -> Iterator[Taps]:
    """Record what passes the named points: scores QK^T, softmax probs, head and block outputs, what classifiers read.

    All are one tensor per layer, but for `blocks`, one per block, and `class_features`, one per classifier.
    `scores_received` and `probs_received` are the rows of the class token, or else the mean over the patches' rows.

    with taps(model, "scores", "heads") as seen:
        logits = model(images)
        seen["scores"][0]      # (B*W, H, T, T) of the first layer
    """
    layers, classifiers = geometry(model).layers, geometry(model).last
    attentions: list[AttentionProducts] = [model.get_submodule(layer.attention) for layer in layers]  # type: ignore[misc]
    outputs: dict[str, Tensor] = {}  # of blocks, by their names
    read_by: dict[str, Tensor] = {}  # classifiers, by their names
    read: dict[str, list[Callable[[], Tensor]]] = {}
    before = [attention.listened for attention in attentions]
    handles = []

    def reader(attention: AttentionProducts, point: str) -> Callable[[], Tensor]:
        return lambda: attention.passed[point]

    def recorder(block: str) -> Callable[[nn.Module, tuple, Tensor], None]:
        return lambda module, inputs, output: outputs.update({block: main_output(output)})

    def reading(classifier: str) -> Callable[[nn.Module, tuple], None]:
        return lambda module, inputs: read_by.update({classifier: inputs[0]})

    try:
        for point in points:
            if point in _IN_ATTENTION:
                for attention in attentions:
                    attention.listened = (*attention.listened, point)
                read[point] = [reader(attention, point) for attention in attentions]
            elif point == "blocks":
                for block in geometry(model).blocks:
                    handles.append(model.get_submodule(block).register_forward_hook(recorder(block)))
                read[point] = [partial(outputs.__getitem__, block) for block in geometry(model).blocks]
            elif point == "class_features":
                for name in classifiers:
                    handles.append(model.get_submodule(name).register_forward_pre_hook(reading(name)))
                read[point] = [partial(read_by.__getitem__, name) for name in classifiers]
            else:
                raise KeyError(point)
        yield Taps(read)
    finally:
        for attention, listened in zip(attentions, before, strict=True):
            attention.listened = listened
            attention.passed = {}
        for handle in handles:
            handle.remove()
        read.clear()
