"""Classification: logits, made for one class an image, judged by top-1 and top-5 accuracy."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.errors import DataError
from maskaq.progress import Progress
from maskaq.tasks.outputs import outputs
from maskaq.tasks.task import Batches, Column, Outputs, Task


@dataclass(frozen=True)
class EvalResult:
    """Top-1 and top-5 accuracy in percent, over n images."""

    task: ClassVar[str] = "classification"
    top1: float
    top5: float
    n: int

    @property
    def headline(self) -> float:
        return self.top1

    @property
    def standard_error(self) -> float:
        """Of top-1, in points."""
        return 100 * math.sqrt(self.top1 / 100 * (1 - self.top1 / 100) / self.n)

    def as_full(self) -> "EvalResult":
        return self

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"standard_error": self.standard_error}


def kl(expected: Tensor, found: Tensor) -> Tensor:
    """KL(P || Q) of logits (B, C, ...) over the classes, in double precision: (B, ...)."""
    log_p, log_q = (logits.double().log_softmax(dim=1) for logits in (expected, found))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)


class Classification(Task):
    """A model that gives logits, one for each class."""

    name = "classification"
    output = "logits"
    columns: ClassVar[Mapping[str, Column]] = {
        "top1": Column("top-1 %"),
        "standard_error": Column("± s.e."),
        "top5": Column("top-5 %"),
        "n": Column("n", "d"),
    }
    distance_name = "KL to the full-precision model"
    loss_name = "points of top-1"
    agreement_name = "same class as the full-precision model"

    def targets(self, indices: Tensor, classes: int) -> Tensor:
        """Every class in turn."""
        return indices % classes

    def distance(self, expected: Outputs, found: Outputs) -> Tensor:
        """KL(P || Q) of the predictions, in double precision."""
        return kl(expected[self.output], found[self.output])

    def agreement(self, expected: Outputs, found: Outputs) -> Tensor:
        """Whether both predict the same class."""
        return (found[self.output].argmax(dim=1) == expected[self.output].argmax(dim=1)).float()

    def show_agreement(self, value: float) -> str:
        return f"{100 * value:.0f} %"

    def describe(self, expected: Outputs, found: Outputs, label: int) -> dict[str, Any]:
        """Both predictions, and how sure the models are of the label, or without one of what P says."""
        p, q = (outputs[self.output][0].float().softmax(dim=0) for outputs in (expected, found))
        teacher, student = int(p.argmax()), int(q.argmax())
        sure_of = label if label >= 0 else teacher
        described = {"teacher": teacher, "confidence": p[sure_of].item()}
        return described | {
            "student": student,
            "student_confidence": q[sure_of].item(),
            "agree": teacher == student,
        }

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, batches: Batches, progress: Progress | None = None, full: Any = None
    ) -> EvalResult:
        hits1 = hits5 = n = 0
        for logits, labels in outputs(model, batches, progress):
            classes = logits.shape[1]
            if len(odd := labels[(labels < 0) | (labels >= classes)]):
                raise DataError(f"labels: expected classes from 0 to {classes - 1}, got {int(odd[0])}")
            hit = logits.topk(min(5, classes), dim=1).indices == labels[:, None]
            hits1 += int(hit[:, 0].sum())
            hits5 += int(hit.sum())
            n += len(labels)
        if not n:
            raise DataError("there are no images to evaluate on")
        return EvalResult(top1=100 * hits1 / n, top5=100 * hits5 / n, n=n)
