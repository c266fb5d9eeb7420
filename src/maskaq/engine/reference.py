"""Reference engine (eager, float32, any device) and base class of all engines."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from maskaq.losses.terms import LossRunner

Step = Callable[[], None]


class Engine:
    """Reference engine, and base class of all engines."""

    name = "plain"
    losses = LossRunner()
    seconds_between_looks = 0.0
    """How often the loss is read back from the device, which waits for it."""
    captures = False
    """Whether a step is replayed: then it may touch only tensors that stay where they are, and never wait for them."""

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """While it lasts the model's blocks run the engine's way; afterwards it is as it was."""
        return nullcontext()

    def precision(self) -> AbstractContextManager[Any]:
        """Around forward passes."""
        return nullcontext()

    def repeated(self, step: Step) -> Step:
        """A step that will be called many times."""
        return step

    def once(self) -> AbstractContextManager[Any]:
        """Around work of a shape that will not come again: not worth a set-up."""
        return nullcontext()

    def compiled(self, function: Callable) -> Callable:
        """A function of tensors that will be called many times with the same shapes."""
        return function


PLAIN = Engine()
