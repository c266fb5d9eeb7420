"""How the arithmetic is run. The plain engine runs every step as it is written: eager, float32, on any device.

`maskaq.engine.fast` is the other one. Both run the same code; the plain one is what the fast one is tested against.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ContextManager

import torch
from torch import nn

from maskaq.losses.terms import LossRunner
from maskaq.watch import Watch

Step = Callable[[], None]


class Engine:
    """The plain way, and the face of every engine."""

    name = "plain"
    losses = LossRunner()
    seconds_between_looks = 0.0
    """How often the loss is read back from the device, which waits for it."""
    captures = False
    """Whether a step is replayed: then it may touch only tensors that stay where they are, and never wait for them."""

    def applied(self, model: nn.Module) -> ContextManager[None]:
        """While it lasts the model's blocks run the engine's way; afterwards it is as it was."""
        return nullcontext()

    def precision(self) -> ContextManager[Any]:
        """Around forward passes."""
        return nullcontext()

    def repeated(self, step: Step) -> Step:
        """A step that will be called many times."""
        return step

    def once(self) -> ContextManager[Any]:
        """Around work of a shape that will not come again: not worth a set-up."""
        return nullcontext()

    def compiled(self, function: Callable) -> Callable:
        """A function of tensors that will be called many times with the same shapes."""
        return function


PLAIN = Engine()


def pick_engine(device: torch.device, fast: bool | None = None, watch: Watch | None = None) -> Engine:
    """The fast engine where it can run, else the plain one; `fast` False asks for the plain one."""
    if fast is False or device.type != "cuda":
        return PLAIN
    try:
        from maskaq.engine.fast import FastEngine

        engine = FastEngine()
        engine.compiled(_probe)(torch.ones(2, device=device))
        return engine
    except Exception as error:  # no Triton, no C compiler, an old GPU: each fails in its own way
        reason = str(error).strip().splitlines() or [type(error).__name__]
        (watch or Watch()).note(f"the fast engine cannot run here, the plain one does: {reason[0]}")
        return PLAIN


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1
