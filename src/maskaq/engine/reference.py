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
    """Seconds between two readings of the loss, each of which waits for the device."""
    captures = False
    """Whether steps are captured and replayed: then a step may use only fixed buffers and must not synchronise."""

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which the model runs on this engine; afterwards the model is unchanged."""
        return nullcontext()

    def precision(self) -> AbstractContextManager[Any]:
        """Context for forward passes, with the engine's precision (autocast)."""
        return nullcontext()

    def repeated(self, step: Step) -> Step:
        """Prepare a step that will be called many times: a fast engine captures and replays it."""
        return step

    def once(self) -> AbstractContextManager[Any]:
        """Context for work with shapes that will not recur, for which compiling is not worth while."""
        return nullcontext()

    def compiled(self, function: Callable) -> Callable:
        """Compile a function of tensors that will be called many times with the same shapes."""
        return function


PLAIN = Engine()
