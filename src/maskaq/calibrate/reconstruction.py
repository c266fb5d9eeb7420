"""Fit the student block after block, each through the later blocks of the teacher (not in the paper).

The quantized blocks before give the block's input; the teacher's blocks behind it, in full precision, carry its error
on to what the classifier reads. So a block learns what matters in the end, and not from later blocks that are still
wrong (GLF-Q). A block's loss is the error of the class feature plus that of the block's output, each over its value at
the block's first step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from maskaq import randomness
from maskaq.calibrate.calibrator import BatchBuffers, Calibrator, ranges_and_others
from maskaq.errors import RecipeError
from maskaq.images.sets import SyntheticSet
from maskaq.images.synthesis import cosine
from maskaq.losses import distill
from maskaq.models import geometry, parts
from maskaq.models.taps import Taps, taps
from maskaq.quant.kinds import replace_module


class Reconstructor(Calibrator):
    """The stage that fits one block at a time, front to back. Takes batches and views as the end-to-end stage does."""

    name = "reconstruct"

    def __init__(self, teacher: nn.Module, student: nn.Module, recipe: Any, **kwargs: Any) -> None:
        self.units, self.tail = units(teacher)
        self.unit = 0
        self.own = recipe.calibration.reconstruct
        super().__init__(teacher, student, recipe, **kwargs)
        if len(self.epochs) < len(self.units):
            raise RecipeError(
                f"calibration.reconstruct.epochs: expected at least {len(self.units)}, one for each block of the "
                f"model, got {len(self.epochs)}"
            )
        blocks = self.geometry.blocks
        self.blocks = [blocks.index(unit[-1]) for unit in self.units]  # where the tap has the output of each
        self.first = torch.ones(2, device=self.device)  # both errors at the unit's first step

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"unit": self.unit, "first": self.first.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.unit = int(state["unit"])
        self.optimizer = self._optimizer()
        self.first.copy_(state["first"])
        super().load_state_dict(state)

    def epochs_of(self, unit: int) -> range:
        """The epochs are shared evenly."""
        ends = (-(-len(self.epochs) * n // len(self.units)) for n in (unit, unit + 1))
        return range(*(self.epochs.start + end for end in ends))

    def _begin(self, data: SyntheticSet, epoch: int) -> None:
        unit = next(unit for unit in range(len(self.units)) if epoch in self.epochs_of(unit))
        if epoch != self.epochs_of(unit).start:
            return
        self.unit = unit
        self.optimizer = self._optimizer()
        self._buffers.clear()  # a replayed step would go on with the block before
        chosen = randomness.permutation(self.seed, epoch, len(data))[: self.config.batch]
        buffers = BatchBuffers(data[chosen.to(data.labels.device)].to(self.device))
        buffers.epoch.fill_(epoch)
        with torch.no_grad(), self._running(epoch):
            pairs = [torch.stack(self._errors(part)) for part in self._augmented(buffers).split(self.micro_batch)]
        self.first.copy_(torch.cat(pairs, dim=1).mean(dim=1).clamp(min=1e-12))

    def _end(self, epoch: int) -> None:
        if epoch == self.epochs.stop - 1:
            self._buffers.clear()  # the next stage needs the memory

    @contextmanager
    def _running(self, epoch: int) -> Iterator[None]:
        """The student with the teacher's parts behind the unit, of which only the unit is trained."""
        points = ("blocks", "class_features")
        with (
            self._alone(),
            self._float_suffix(),
            taps(self.teacher, *points) as self.seen,  # type: ignore[arg-type]
            taps(self.student, *points) as self.seen_student,  # type: ignore[arg-type]
        ):
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            self.student.requires_grad_(False)  # so that nothing is kept of the passes before the unit
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.requires_grad_(True)
            yield
        finally:
            self.student.requires_grad_(True)

    @contextmanager
    def _float_suffix(self) -> Iterator[None]:
        behind = [name for unit in self.units[self.unit + 1 :] for name in unit] + self.tail
        own = {name: self.student.get_submodule(name) for name in behind}
        try:
            for name in behind:
                replace_module(self.student, name, self.teacher.get_submodule(name))
            yield
        finally:
            for name, module in own.items():
                replace_module(self.student, name, module)

    def _losses(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        feature, block = self._errors(images)
        total = feature / self.first[0] + self.own.block_weight * block / self.first[1]
        return total, {"class_feature": feature.detach(), "block_error": block.detach()}

    def _errors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) each: relative squared error of the class feature, and of the block's output."""
        with self.engine.precision():
            with torch.no_grad():
                expected = self._seen(self.seen, self.teacher(images))  # read before the student runs the same parts
            found = self._seen(self.seen_student, self.student(images))
        run = self.engine.losses
        errors = [run(distill.relative_error, p.float(), q.float()) for p, q in zip(expected, found, strict=True)]
        return torch.stack(errors[:-1]).mean(dim=0), errors[-1]

    def _seen(self, seen: Taps, output: Tensor) -> list[Tensor]:
        """What the classifiers read, or without one the model's output; and the unit's output."""
        return [*(seen["class_features"] or [output]), seen["blocks"][self.blocks[self.unit]]]

    def _optimizer(self) -> torch.optim.Optimizer:
        ranges, others = ranges_and_others([self.student.get_submodule(name) for name in self.units[self.unit]])
        groups = [{"params": others, "lr_factor": 1.0}, {"params": ranges, "lr_factor": self.own.range_lr}]
        groups = [group | {"lr": torch.zeros((), device=self.device)} for group in groups if group["params"]]
        return torch.optim.AdamW(groups, weight_decay=0.0, fused=True, capturable=self.device.type == "cuda")

    def _set_lr(self, epoch: float) -> None:
        """A cosine for each unit."""
        epochs = self.epochs_of(self.unit)
        fraction = (epoch - epochs.start) / len(epochs)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(self.own.lr * group["lr_factor"] * cosine(fraction, self.config.lr_final))

    def _rate(self) -> str:
        return f"calibration.reconstruct.lr (now {self.own.lr})"


def units(teacher: nn.Module) -> tuple[list[list[str]], list[str]]:
    """Each block with what is computed between the block before and it; and what comes behind the last block."""
    blocks = set(geometry(teacher).blocks)
    found: list[list[str]] = [[]]
    for name in parts(teacher):
        found[-1].append(name)
        if name in blocks:
            found.append([])
    return found[:-1], found[-1]
