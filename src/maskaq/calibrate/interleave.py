"""A generator and the student in turn, one step each (GDFQ, Qimera, AdaDFQ): every step sees new images."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.calibrate.calibrator import Calibrator
from maskaq.images.generator import GeneratorTraining
from maskaq.images.sets import SyntheticSet


class Interleaver(Calibrator):
    """The stage that trains both. Its generator starts anew: the images of the run only set the first ranges.

    In the first epochs only the generator is trained.
    """

    name = "interleave"
    parallel = False

    def __init__(self, teacher: nn.Module, student: nn.Module, recipe: Any, **kwargs: Any) -> None:
        super().__init__(teacher, student, recipe, **kwargs)
        self.own = recipe.calibration.interleave
        self.generator = GeneratorTraining(teacher, student, recipe, self.seed)

    def epoch(self, data: SyntheticSet, epoch: int) -> dict[str, float]:
        sums: dict[str, float] = {}
        learns = epoch - self.epochs.start >= self.own.warm_up
        with self._running(epoch):
            for iteration in range(self.own.iterations):
                images, labels, shares, parts = self.generator.step(
                    (epoch - self.epochs.start) * self.own.iterations + iteration
                )
                found = {f"generator_{name}": value for name, value in parts.items()}
                if learns:
                    self._set_lr(epoch + iteration / self.own.iterations)
                    found |= self._learn(images, labels, shares)
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + value / self.own.iterations
                if not all(math.isfinite(value) for value in found.values()):
                    raise self.diverged(f"a loss became NaN or Inf in epoch {epoch}, step {iteration}")
        self.progress.advance(len(data))
        return sums | {"lr": float(self.optimizer.param_groups[0]["lr"])}

    def _learn(self, images: Tensor, labels: Tensor, shares: Tensor) -> dict[str, float]:
        self._labels = labels
        self._shares = shares if self.generator.settings.superpose else None
        self.optimizer.zero_grad(set_to_none=True)
        total, parts = self._losses(images)
        total.mean().backward()
        if self.config.clip_grad:
            nn.utils.clip_grad_norm_(self.student.parameters(), self.config.clip_grad)
        self.optimizer.step()
        return {"loss": float(total.detach().mean())} | {name: float(value.mean()) for name, value in parts.items()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "generator": dict(self.generator.model.state_dict()),
            "generator_optimizer": self.generator.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            self.generator.model.load_state_dict(state["generator"])
        self.generator.optimizer.load_state_dict(state["generator_optimizer"])

    def _rate(self) -> str:
        return f"calibration.lr or synthesis.lr (now {self.config.lr} and {self.generator.config.lr})"
