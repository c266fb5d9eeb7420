"""How the arithmetic is run: plainly, as the oracle of all tests, or fast on CUDA. Both engines run the same code."""

import torch

from maskaq.engine.reference import PLAIN, Engine
from maskaq.progress import Progress

__all__ = ["PLAIN", "Engine", "pick_engine"]


def pick_engine(device: torch.device, fast: bool | None = None, progress: Progress | None = None) -> Engine:
    """The fast engine where it can run, else the plain one; `fast` False asks for the plain one."""
    if fast is False or device.type != "cuda":
        return PLAIN
    try:
        from maskaq.engine.fast import FastEngine

        engine = FastEngine(device)
        engine.compiled(_probe)(torch.ones(2, device=device))
        return engine
    except Exception as error:  # no Triton, no C compiler, an old GPU: each fails in its own way
        reason = str(error).strip().splitlines() or [type(error).__name__]
        (progress or Progress()).note(f"the fast engine cannot run here, the plain one does: {reason[0]}")
        return PLAIN


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1
