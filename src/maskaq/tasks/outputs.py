"""A model's outputs over batches of images."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.errors import DataError, ModelError
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


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
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


def _labelled(batch: Any) -> tuple[Tensor, Tensor]:
    """The images and labels of a batch. DataError for others, which torch would take and count something else."""
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        raise DataError(f"batches: expected pairs of tensors (images, labels), got {_kind(batch)}")
    images, labels = batch
    if not images.is_floating_point() or not images.ndim:
        raise DataError(f"images: expected normalised floats, as maskaq.image_folder gives, got {_kind(images)}")
    if labels.dtype not in _WHOLE or labels.shape != images.shape[:1]:
        raise DataError(f"labels: expected whole numbers, one for each of {len(images)} images, got {_kind(labels)}")
    return images, labels


def annotated(batch: Any) -> tuple[Tensor, Sequence[Mapping[str, Any]]]:
    """The images of a batch and their annotations; DataError if it is something else."""
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[0], Tensor)
    if not is_pair or not isinstance(batch[1], list | tuple) or not all(isinstance(x, Mapping) for x in batch[1]):
        raise DataError(f"batches: expected pairs (images, a list of their annotations), got {_kind(batch)}")
    return batch[0], batch[1]


def _kind(value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(type(part).__name__ for part in value[:4]) or 'nothing'}"
    return type(value).__name__


@torch.no_grad()
def outputs(model: nn.Module, batches: Batches, progress: Progress | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """(outputs, labels) of each batch, on the model's device; DataError where an output is not finite."""
    progress = progress or Progress()
    device, dtype = device_of(model), next((weight.dtype for weight in model.parameters()), torch.float32)
    with evaluating(model):
        for images, labels in map(_labelled, batches):
            found = model(images.to(device, dtype))
            if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
                raise ModelError(
                    f"outputs: expected a tensor with a row for each of {len(images)} images, got {_kind(found)}"
                )
            refuse_not_finite(found)
            yield found, labels.to(device)
            progress.advance(len(labels))
