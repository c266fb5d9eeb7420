"""Fit the student to the teacher on synthetic images (masked calibration, Sec. 2.3, Eq. 16)."""

import math
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from maskaq import masks, randomness
from maskaq.augment import mix, simclr
from maskaq.config import Recipe
from maskaq.data import SyntheticSet, to_pixels
from maskaq.errors import CalibrationError
from maskaq.losses.terms import CALIBRATION_TERMS, CalibrationView, Objective
from maskaq.models import geometry
from maskaq.quant.quantizers import Quantizer
from maskaq.quant.twin import quantizers
from maskaq.synthesis import cosine
from maskaq.taps import Taps, taps
from maskaq.watch import Watch


class Calibrator:
    """Owns the student's optimiser. One call of `epoch` is one pass over the images."""

    def __init__(
        self, teacher: nn.Module, student: nn.Module, recipe: Recipe, *, seed: int = 0, watch: Watch | None = None
    ) -> None:
        self.teacher, self.student, self.config, self.seed = teacher, student, recipe.calibration, seed
        self.watch = watch or Watch()
        self.device = next(teacher.parameters()).device
        self.geometry = geometry(teacher).to(self.device)
        self.objective = Objective(CALIBRATION_TERMS, self.config.terms, "calibration.terms")
        self.points = tuple(need for need in ("heads", "blocks") if need in self.objective.needs)
        self.activations = [q for q in quantizers(student).values() if q.site.role == "activation"]
        self.optimizer = self._optimizer()
        self.micro_batch = self.config.batch

    def epoch(self, data: SyntheticSet, epoch: int) -> dict[str, float]:
        """One pass over the images, shuffled and augmented anew; returns the mean of each loss term.

        Depends on the epoch's number alone, not on what ran before: a resumed run repeats nothing and skips nothing.
        """
        order = randomness.permutation(self.seed, epoch, len(data))
        sums: dict[str, float] = defaultdict(float)
        batches = order.split(self.config.batch)
        for step, chosen in enumerate(batches):
            self._set_lr((epoch + step / len(batches)) / max(1, self.config.epochs))
            parts = self._step(data[chosen].to(self.device), epoch)
            for name, value in parts.items():
                sums[name] += value * len(chosen)
            if not math.isfinite(parts["loss"]):
                raise self.diverged(f"the calibration loss became {parts['loss']} in epoch {epoch}, step {step}")
            self.watch.advance(len(chosen), loss=parts["loss"])
        return {name: total / len(data) for name, total in sums.items()} | {"lr": self.optimizer.param_groups[0]["lr"]}

    def diverged(self, what: str) -> CalibrationError:
        """The error for a student that is no longer finite, with what to do about it."""
        return CalibrationError(
            f"{what}; lower calibration.lr (now {self.config.lr}) or set calibration.clip_grad, in a new run folder"
        )

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def _step(self, batch: SyntheticSet, epoch: int) -> dict[str, float]:
        """One optimiser step, in parts that fit the memory."""
        views = self._augmented(batch, epoch)  # of the whole batch: mixing takes from all of it
        while True:
            try:
                self.optimizer.zero_grad(set_to_none=True)
                sums: dict[str, float] = defaultdict(float)
                for part in views.split(self.micro_batch):
                    for quantizer in self.activations:
                        quantizer.share = len(part) / len(batch)
                    total, parts = self.objective(self._view(part))
                    (total.sum() / len(batch)).backward()
                    for name, value in ({"loss": total.detach().mean()} | parts).items():
                        sums[name] += value.item() * len(part) / len(batch)
                break
            except torch.OutOfMemoryError:
                if self.micro_batch == 1:
                    raise
                self.micro_batch = max(1, min(self.micro_batch, len(batch)) // 2)
                torch.cuda.empty_cache()
                self.watch.note(f"out of GPU memory: calibration goes on in parts of {self.micro_batch} images")
        if self.config.clip_grad:
            nn.utils.clip_grad_norm_(self.student.parameters(), self.config.clip_grad)
        self.optimizer.step()
        return sums

    def _augmented(self, batch: SyntheticSet, epoch: int) -> Tensor:
        keys = randomness.fold(randomness.fold(randomness.image_keys(self.seed, batch.indices), "view"), epoch)
        settings = asdict(self.config.augment)
        mixing = {"cutmix": settings.pop("cutmix"), "mixup": settings.pop("mixup")}
        return self.geometry.normalise(mix(simclr(to_pixels(batch.images), keys, **settings), keys, **mixing))

    def _view(self, images: Tensor) -> CalibrationView:
        with ExitStack() as stack:
            seen = stack.enter_context(taps(self.teacher, *self.points))  # type: ignore[arg-type]
            seen_student = stack.enter_context(taps(self.student, *self.points))  # type: ignore[arg-type]
            with torch.no_grad():
                logits = self.teacher(images)
            student_logits = self.student(images)
            return CalibrationView(
                layers=self.geometry.layers,
                logits=logits,
                student_logits=student_logits,
                heads=list(seen.get("heads", ())),
                student_heads=list(seen_student.get("heads", ())),
                blocks=list(seen.get("blocks", ())),
                student_blocks=list(seen_student.get("blocks", ())),
                patch_weights=self._patch_weights(seen),
                temperature=self.config.temperature,
            )

    @torch.no_grad()
    def _patch_weights(self, seen: Taps) -> list[Tensor]:
        """w_l = 1 + m^c_l (w - 1): the patches with the teacher's strongest head outputs count w times (Eq. 16)."""
        weights = []
        for layer, raw in zip(self.geometry.layers, seen.get("heads", ()), strict=False):
            strength = layer.patch_heads(raw).abs().mean(dim=(1, 3))  # (B, N)
            k = masks.mask_size(strength.shape[1], 0.0, self.config.mask_ratio, self.config.mask_ratio)
            weights.append(1 + masks.top_patches(strength, k) * (self.config.mask_weight - 1))
        return weights

    def _optimizer(self) -> torch.optim.Optimizer:
        ranges = [p for m in self.student.modules() if isinstance(m, Quantizer) for p in m.parameters()]
        known = {id(p) for p in ranges}
        others = [p for p in self.student.parameters() if id(p) not in known]
        groups = [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": self.config.weight_decay, "lr_factor": 1.0},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "lr_factor": 1.0},
            {"params": ranges, "weight_decay": 0.0, "lr_factor": self.config.range_lr},
        ]
        groups = [group for group in groups if group["params"]]
        if self.config.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=self.config.lr)
        nesterov = self.config.momentum > 0
        return torch.optim.SGD(groups, lr=self.config.lr, momentum=self.config.momentum, nesterov=nesterov)

    def _set_lr(self, progress: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * group["lr_factor"] * cosine(progress, self.config.lr_final)
