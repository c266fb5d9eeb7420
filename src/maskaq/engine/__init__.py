"""Engines run the same code in two ways: plainly (eager float32, the reference in all tests), or fast on CUDA."""

import torch

from maskaq.engine.reference import PLAIN, Engine
from maskaq.errors import first_line
from maskaq.progress import Progress

__all__ = ["PLAIN", "Engine", "pick_engine"]


def pick_engine(device: torch.device, fast: bool | None = None, progress: Progress | None = None) -> Engine:
    """The fast engine on a GPU where it works, else the plain one. `fast=False` always gives the plain one."""
    if fast is False or device.type != "cuda":
        return PLAIN
    note = (progress or Progress()).note
    try:
        from maskaq.engine.fast import FastEngine

        engine = FastEngine(device, note=note)
        engine.compiled(_probe)(torch.ones(2, device=device))
        return engine
    except Exception as error:  # no Triton, no C compiler, an old GPU: each fails in its own way
        note(f"the fast engine cannot run here, the plain one does: {first_line(error)}")
        return PLAIN


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1
