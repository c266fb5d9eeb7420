"""Set torch's global modes as the method needs them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_torch_modes() -> Iterator[None]:
    """Enable gradients and float32, overriding the caller's `torch.no_grad`, `torch.autocast` and default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.set_default_dtype(before)
