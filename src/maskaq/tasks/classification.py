"""Accuracy on labelled images: sums and counts, divided once."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from maskaq.errors import DataError
from maskaq.progress import Progress
from maskaq.quant.twin import frozen


@dataclass(frozen=True)
class EvalResult:
    """Top-1 and top-5 accuracy in percent, over n images."""

    top1: float
    top5: float
    n: int

    @property
    def standard_error(self) -> float:
        """Of top-1, in points."""
        return 100 * math.sqrt(self.top1 / 100 * (1 - self.top1 / 100) / self.n)

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"standard_error": self.standard_error}


FULL_PRECISION, NEAREST, SEARCHED, CALIBRATED = "full precision", "round to nearest", "searched ranges", "maskaq"
"""What is compared with each other."""


def lost_to_rounding(full: EvalResult, nearest: EvalResult) -> tuple[float, float]:
    """Points of top-1, and their standard error."""
    return full.top1 - nearest.top1, math.hypot(full.standard_error, nearest.standard_error)


def won_back(full: EvalResult, nearest: EvalResult, ours: EvalResult) -> float | None:
    """Share of the top-1 that rounding to nearest loses and `ours` has again.

    None where nothing measurable is lost: a share of nothing would be a random number.
    """
    lost, noise = lost_to_rounding(full, nearest)
    return (ours.top1 - nearest.top1) / lost if lost > noise else None


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], progress: Progress | None = None
) -> EvalResult:
    """Accuracy of a model, full precision or quantized, over batches of (images, labels)."""
    progress = progress or Progress()
    weight = next(model.parameters())  # images follow its device and its dtype
    hits1 = hits5 = n = 0
    was_training = model.training
    model.eval()
    try:
        with frozen(model):
            for images, labels in batches:
                logits, labels = model(images.to(weight.device, weight.dtype)), labels.to(weight.device)
                if not torch.isfinite(logits).all():
                    raise DataError("the model's predictions contain NaN or Inf; its weights or ranges are damaged")
                hit = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
                hits1, hits5, n = hits1 + int(hit[:, 0].sum()), hits5 + int(hit.sum()), n + len(labels)
                progress.advance(len(labels))
    finally:
        model.train(was_training)
    if not n:
        raise DataError("there are no images to evaluate on")
    return EvalResult(top1=100 * hits1 / n, top5=100 * hits5 / n, n=n)
