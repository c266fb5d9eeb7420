"""A model's outputs over batches of images."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.errors import DataError
from maskaq.progress import Progress
from maskaq.quant.twin import frozen
from maskaq.tasks.task import Batches, Outputs


def joined(parts: Sequence[Outputs]) -> dict[str, Tensor]:
    """The outputs for several batches as those of one."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def rows(found: Outputs, which: slice) -> dict[str, Tensor]:
    """The outputs for some of the images."""
    return {name: values[which] for name, values in found.items()}


def on_cpu(found: Outputs) -> dict[str, Tensor]:
    """In float32, where they take no memory of the device."""
    return {name: values.float().cpu() for name, values in found.items()}


def measured(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of an evaluation with None for what could not be measured: JSON has no NaN."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in figures.items()}


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its images; a deployed one may have no parameters."""
    found = next((x.device for x in (*model.parameters(), *model.buffers())), None)
    return torch.device("cpu") if found is None else found


_DAMAGED = "contain NaN or Inf; its weights or ranges are damaged"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model is evaluated: in eval mode, and frozen."""
    was_training = model.training
    model.eval()
    try:
        with frozen(model):
            yield
    finally:
        model.train(was_training)


def refuse_damaged(model: nn.Module) -> None:
    """DataError for weights that are not finite: a detector would find nothing, and say no more."""
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise DataError(f"the model's {name} {_DAMAGED}")


def refuse_not_finite(outputs: Tensor) -> None:
    """DataError for outputs with NaN or Inf."""
    if not torch.isfinite(outputs).all():
        raise DataError(f"the model's outputs {_DAMAGED}")


@torch.no_grad()
def outputs(model: nn.Module, batches: Batches, progress: Progress | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """(outputs, labels) of each batch, on the model's device; DataError where an output is not finite."""
    progress = progress or Progress()
    device, dtype = device_of(model), next((weight.dtype for weight in model.parameters()), torch.float32)
    with evaluating(model):
        for images, labels in batches:
            found = model(images.to(device, dtype))
            refuse_not_finite(found)
            yield found, labels.to(device)
            progress.advance(len(labels))
