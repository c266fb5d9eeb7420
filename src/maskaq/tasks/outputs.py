"""A model's outputs over batches of images."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from maskaq.errors import DataError
from maskaq.progress import Progress
from maskaq.quant.twin import frozen
from maskaq.tasks.task import Batches


@torch.no_grad()
def outputs(model: nn.Module, batches: Batches, progress: Progress | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """(outputs, labels) of each batch, on the model's device; DataError where an output is not finite."""
    progress = progress or Progress()
    weight = next(model.parameters())  # images follow its device and its dtype
    was_training = model.training
    model.eval()
    try:
        with frozen(model):
            for images, labels in batches:
                found = model(images.to(weight.device, weight.dtype))
                if not torch.isfinite(found).all():
                    raise DataError("the model's outputs contain NaN or Inf; its weights or ranges are damaged")
                yield found, labels.to(weight.device)
                progress.advance(len(labels))
    finally:
        model.train(was_training)
