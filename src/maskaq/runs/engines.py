"""Which engine a run uses."""

import torch

from maskaq.engine import Engine, pick_engine
from maskaq.progress import Progress
from maskaq.tasks import task_named


def engine_of_run(task: str, device: torch.device, fast: bool | None, progress: Progress | None) -> Engine:
    """The fast engine where it runs; the plain one where `fast` is False, and for dense tasks unless it is True.

    On an H200 the fast engine calibrated detectors and segmenters to NaN. The probable cause is a fault of torch 2.11's
    compiler that is avoided now, but that has not been seen on a GPU yet (docs/PERFORMANCE.md).
    """
    if fast is None and task_named(task).has_layouts and device.type == "cuda":
        (progress or Progress()).note(f"{task} runs on the plain engine: the fast one is not reliable for it yet")
        fast = False
    return pick_engine(device, fast, progress)
