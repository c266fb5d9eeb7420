"""Fit the student to the teacher on synthetic images (masked calibration, Sec. 2.3, Eq. 16)."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from maskaq import randomness
from maskaq.engine import PLAIN, Engine
from maskaq.errors import CalibrationError
from maskaq.images import masks
from maskaq.images.augment import REACH, mix, simclr
from maskaq.images.sets import SyntheticSet, to_pixels
from maskaq.losses.distill import mean_relative_error
from maskaq.losses.terms import CALIBRATION_TERMS, CalibrationView, Objective, possible
from maskaq.models import geometry
from maskaq.models.taps import Taps, taps
from maskaq.progress import Progress
from maskaq.quant.quantizers import Quantizer
from maskaq.quant.twin import quantizers
from maskaq.ranks import ALONE, Ranks
from maskaq.recipe.schema import Recipe
from maskaq.schedules import cosine
from maskaq.tasks import task_of

_T = TypeVar("_T")
_MOST_HALVINGS = 12


class Calibrator:
    """The stage that fits all layers at once, end to end. Owns the student's optimiser."""

    name = "calibrate"
    parallel = True

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        recipe: Recipe,
        *,
        seed: int = 0,
        progress: Progress | None = None,
        engine: Engine = PLAIN,
    ) -> None:
        self.ranks: Ranks = ALONE
        """The processes that share its batches, and sum their gradients."""
        self.teacher = teacher
        self.student = student
        self.config = recipe.calibration
        self.epochs = recipe.stages.get(self.name, range(self.config.epochs))
        self.seed = seed
        self.progress = progress or Progress()
        self.engine = engine
        self.device = next(teacher.parameters()).device
        self.geometry = geometry(teacher).to(self.device)
        self.task = task_of(teacher)
        weights = possible(self.task.terms(self.config.terms), CALIBRATION_TERMS, self.geometry)
        self.objective = Objective(CALIBRATION_TERMS, weights, "calibration.terms")
        self.points = tuple(need for need in ("heads", "blocks") if need in self.objective.needs)
        self.activations = [q for q in quantizers(student).values() if q.site.role == "activation"]
        self.optimizer = self._optimizer()
        self.micro_batch = self.config.batch
        self._buffers: dict[int, BatchBuffers] = {}
        self._data: SyntheticSet | None = None
        self._data_on_device: SyntheticSet
        self._looked = -math.inf  # when the loss was last read back
        self._labels: Tensor | None = None  # of the images of a step
        self._shares: Tensor | None = None

    def epoch(self, data: SyntheticSet, epoch: int) -> dict[str, float]:
        """One pass over the images, in a new order and with new augmentations; returns the mean of each loss term.

        Order and views depend on the epoch's number alone, not on what ran before: a resumed run repeats nothing and
        skips nothing. The first epoch sets the pace, where the recipe asks for one.
        """
        data = self._on_device(data)
        self._begin(data, epoch)
        batches = randomness.permutation(self.seed, epoch, len(data)).to(data.labels.device).split(self.config.batch)
        sums: dict[str, Tensor] = {}
        unseen: list[dict[str, Tensor]] = []  # the sums of each step since the last look
        with ExitStack() as stack:
            for model in (self.teacher, self.student):
                stack.enter_context(self.engine.applied(model))
            stack.enter_context(self._running(epoch))
            for step, chosen in enumerate(batches):
                self._set_lr(epoch + step / len(batches))
                for name, value in self._step(data, chosen, epoch).items():
                    sums[name] = sums.get(name, 0) + value * len(chosen)
                unseen.append(dict(sums))
                metrics = {}
                if step == len(batches) - 1 or time.monotonic() - self._looked > self.engine.seconds_between_looks:
                    loss = float(sums["loss"]) / min((step + 1) * self.config.batch, len(data))
                    self._looked = time.monotonic()
                    if not math.isfinite(loss):
                        what = f"the calibration loss became {loss} in epoch {epoch}, step {step}"
                        blamed = self.objective.blame(_first_non_finite(unseen))
                        raise CalibrationError(f"{what}; {blamed}") if blamed else self.diverged(what)
                    unseen.clear()
                    metrics["loss"] = loss
                self.progress.advance(len(chosen), **metrics)
        self._end(epoch)
        means = {name: float(total) / len(data) for name, total in sums.items()}
        return means | {"lr": float(self.optimizer.param_groups[0]["lr"])}

    @torch.no_grad()
    def start_error(self, data: SyntheticSet, images: int = 32) -> float:
        """Relative error of the student's blocks, sqrt(block_error): 0 if equal, 1 if as bad as a constant output."""
        errors = []
        with taps(self.teacher, "blocks") as seen, taps(self.student, "blocks") as seen_student:
            for part in data.images[:images].split(8):
                pixels = self.geometry.normalise(to_pixels(part.to(self.device)))
                expected = self.task.run(self.teacher, pixels)
                found = self.task.run(self.student, pixels, expected)
                outputs = [expected[self.task.output]], [found[self.task.output]]
                pairs = (seen["blocks"], seen_student["blocks"]) if self.geometry.blocks else outputs
                errors.append(mean_relative_error(*pairs))
        return float(torch.cat(errors).mean().sqrt())

    def diverged(self, what: str) -> CalibrationError:
        """The error for a student that is no longer finite, with what to do about it."""
        advice = f"lower {self._rate()} or set calibration.clip_grad, in a new run folder"
        if self.objective.own:
            advice += f"; or the gradient of {' or '.join(self.objective.own)} is NaN or Inf"
        return CalibrationError(f"{what}; {advice}")

    def state_dict(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        state |= {"param_groups": [group | {"lr": float(group["lr"])} for group in state["param_groups"]]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=self.device)

    def _begin(self, data: SyntheticSet, epoch: int) -> None:
        """Called before the steps of every epoch: the first one sets the pace."""
        if epoch > self.epochs.start or self.config.pace == "fixed":
            return
        self._set_pace(self.ranks.agreed(self.start_error(data)))
        if self.config.pace == "first_step":
            self._within_memory(lambda: self._shorten_first_step(data, epoch), self.config.batch)

    def _shorten_first_step(self, data: SyntheticSet, epoch: int) -> None:
        """Halve the pace until the first step lowers the loss of its own images. The student is as before then.

        AdamW moves every weight by the same amount, and how far outputs move with it depends on the model: on its
        width and on its largest channels. Steps that are too long make a student of 8 bits worse than it starts.
        """
        batch, share = self._first_batch(data, epoch)
        buffers = BatchBuffers(batch.to(self.device), share)
        buffers.epoch.fill_(epoch)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        weights = [p.detach().clone() for p in parameters]
        with self._running(epoch):
            loss = self._differentiated_loss(buffers)
            gradients = [p.grad for p in parameters]
            for _ in range(_MOST_HALVINGS):
                self._set_lr(epoch)
                self._descend(buffers)
                stepped = self._differentiated_loss(buffers)
                self.optimizer.state.clear()
                with torch.no_grad():
                    for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
                        parameter.copy_(weight)
                        parameter.grad = gradient
                if stepped < loss:
                    return
                for group in self.optimizer.param_groups:
                    group["pace"] /= 2

    def _first_batch(self, data: SyntheticSet, epoch: int) -> tuple[SyntheticSet, "Share"]:
        """What this rank takes of the first batch of an epoch."""
        chosen = randomness.permutation(self.seed, epoch, len(data))[: self.config.batch].to(data.labels.device)
        share = Share.of(self.ranks, len(chosen))
        return data[share.rows(chosen)], share

    def _differentiated_loss(self, buffers: "BatchBuffers") -> float:
        """The loss of a whole batch; its gradients are left in the parameters."""
        self._differentiate(buffers)
        self._sum(buffers)
        return float(buffers.parts["loss"])

    @contextmanager
    def _running(self, epoch: int) -> Iterator[None]:
        """Context for the steps of an epoch: taps on both models."""
        with (
            taps(self.teacher, *self.points) as self.seen,  # type: ignore[arg-type]
            taps(self.student, *self.points) as self.seen_student,  # type: ignore[arg-type]
        ):
            yield

    def _end(self, epoch: int) -> None:
        """Called after the steps of every epoch."""

    def _rate(self) -> str:
        """The setting to lower if the student diverges, for the error message."""
        return f"calibration.lr (now {self.config.lr})"

    def _on_device(self, data: SyntheticSet) -> SyntheticSet:
        """The images on the device, if they fit; the same set is used for many epochs."""
        if self._data is not data:
            bytes_needed = data.images.numel()
            fits = self.device.type != "cuda" or bytes_needed < torch.cuda.mem_get_info(self.device)[0] // 4
            self._data = data
            self._data_on_device = data.to(self.device) if fits else data
        return self._data_on_device

    def _step(self, data: SyntheticSet, chosen: Tensor, epoch: int) -> dict[str, Tensor]:
        """One optimiser step; the mean of each loss term. Of several ranks, each takes its part of the batch."""
        share = Share.of(self.ranks, len(chosen))
        batch = data[share.rows(chosen)]

        def step() -> dict[str, Tensor]:
            buffers = self._buffers.get(len(chosen)) or self._new_buffers(batch, share)
            buffers.fill(batch, epoch)
            buffers.advance()
            return buffers.parts

        with self.engine.once() if len(chosen) != self.config.batch else nullcontext():  # the last batch of an epoch
            return self._within_memory(step, len(batch))

    def _within_memory(self, step: Callable[[], _T], images: int) -> _T:
        """The result of a step, in smaller parts if the GPU's memory is not enough for so many images."""
        while True:
            try:
                return step()
            except torch.OutOfMemoryError:
                self._buffers.clear()
                if self.micro_batch == 1:
                    raise
                self.micro_batch = max(1, min(self.micro_batch, images) // 2)
                torch.cuda.empty_cache()
                self.progress.note(f"out of GPU memory: calibration goes on in parts of {self.micro_batch} images")

    def _new_buffers(self, batch: SyntheticSet, share: "Share") -> "BatchBuffers":
        buffers = self._buffers[share.count] = BatchBuffers(batch.to(self.device), share)
        if self.ranks.in_graphs:
            buffers.advance = self.engine.repeated(partial(self._update, buffers))
        else:
            steps = [self.engine.repeated(partial(part, buffers)) for part in (self._differentiate, self._descend)]

            def advance() -> None:
                steps[0]()
                self._sum(buffers)
                steps[1]()

            buffers.advance = advance
        return buffers

    def _update(self, buffers: "BatchBuffers") -> None:
        """One optimiser step on the buffered batch. Nothing here waits for the device."""
        self._differentiate(buffers)
        self._sum(buffers)
        self._descend(buffers)

    def _differentiate(self, buffers: "BatchBuffers") -> None:
        """Gradients of this rank's part of the batch, in parts that fit the memory."""
        share = buffers.share
        mine = slice(share.before, share.before + share.own)
        views = self._augmented(buffers)[mine]
        self.optimizer.zero_grad(set_to_none=True)
        means: dict[str, Tensor] = {}
        made_for = buffers.batch.labels[mine].split(self.micro_batch)
        for part, labels in zip(views.split(self.micro_batch), made_for, strict=True):
            self._labels = labels
            for quantizer in self.activations:
                quantizer.share = len(part) / share.count
            total, parts = self._losses(part)
            self.objective.check_gradient(total, "the student")
            share.of_mean(total).backward()
            for name, value in ({"loss": total.detach()} | parts).items():
                means[name] = means.get(name, 0) + share.of_mean(value)
        buffers.parts = means
        if self.ranks.size > 1:
            buffers.gradients = [p.grad for p in self.student.parameters() if p.grad is not None]

    def _sum(self, buffers: "BatchBuffers") -> None:
        """The gradients and losses of the whole batch, from those of all ranks."""
        if self.ranks.size > 1:
            self.ranks.sum_([*buffers.gradients, *buffers.parts.values()])

    def _descend(self, buffers: "BatchBuffers") -> None:
        if self.config.clip_grad:
            nn.utils.clip_grad_norm_(self.student.parameters(), self.config.clip_grad)
        self.optimizer.step()

    def _losses(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(B,) totals and, detached, (B,) of each term."""
        return self.objective(self._view(images))

    def _augmented(self, buffers: "BatchBuffers") -> Tensor:
        keys = randomness.fold(randomness.image_keys(self.seed, buffers.batch.indices), "view")
        settings = asdict(self.config.augment)
        mixing = {name: settings.pop(name) for name in ("cutmix", "mixup")}
        pixels = self.engine.compiled(_views)(
            buffers.batch.images, randomness.fold(keys, buffers.epoch), settings, mixing
        )
        return self.geometry.normalise(pixels)

    def _view(self, images: Tensor) -> CalibrationView:
        with self.engine.precision():
            with torch.no_grad():
                outputs = self.task.run(self.teacher, images)
            student_outputs = self.task.run(self.student, images, outputs)
        seen, seen_student = self.seen, self.seen_student
        return CalibrationView(
            layers=self.geometry.layers,
            outputs={name: x.float() for name, x in outputs.items()},
            student_outputs={name: x.float() for name, x in student_outputs.items()},
            heads=seen.get("heads", ()),
            student_heads=seen_student.get("heads", ()),
            blocks=seen.get("blocks", ()),
            student_blocks=seen_student.get("blocks", ()),
            patch_weights=self._patch_weights(seen),
            labels=self._labels,
            shares=self._shares,
            temperature=self.config.temperature,
            run=self.engine.losses,
        )

    @torch.no_grad()
    def _patch_weights(self, seen: Taps) -> list[Tensor]:
        """w_l = 1 + m^c_l (w - 1): the patches with the teacher's strongest head outputs count w times (Eq. 16)."""
        if "heads" not in seen:
            return []
        layers = list(zip(self.geometry.layers, seen["heads"], strict=True))
        strengths = [self.engine.compiled(_strength)(layer.patch_heads(raw)) for layer, raw in layers]
        weights = list(strengths)
        for patches in {strength.shape[1] for strength in strengths}:  # layers of one size are ranked together
            alike = [i for i, strength in enumerate(strengths) if strength.shape[1] == patches]
            k = masks.mask_size(patches, 0.0, self.config.mask_ratio, self.config.mask_ratio)
            top = masks.top_patches(torch.cat([strengths[i] for i in alike]), k)
            for i, mask in zip(alike, top.chunk(len(alike)), strict=True):
                weights[i] = 1 + mask * (self.config.mask_weight - 1)
        return weights

    def _optimizer(self) -> torch.optim.Optimizer:
        ranges, others = ranges_and_others([self.student])
        groups = [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": self.config.weight_decay, "lr_factor": 1.0},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "lr_factor": 1.0},
            {"params": ranges, "weight_decay": 0.0, "lr_factor": self.config.range_lr},
        ]
        groups = [group for group in groups if group["params"]]
        for group in groups:
            group["lr"] = torch.zeros((), device=self.device)  # a tensor, so that a replayed step sees it change
            group["pace"] = 1.0
        if self.config.optimizer == "adamw":
            return torch.optim.AdamW(groups, fused=True, capturable=self.device.type == "cuda")
        return torch.optim.SGD(groups, momentum=self.config.momentum, nesterov=self.config.momentum > 0, fused=True)

    def _set_pace(self, error: float) -> None:
        """Scale the learning rate by the student's initial error, at most 1.

        Kept with the optimiser's state, for a resumed run can no longer measure it.
        """
        for group in self.optimizer.param_groups:
            group["pace"] = min(1.0, error)

    def _set_lr(self, epoch: float) -> None:
        """The cosine over all epochs, at one of them and a part of it."""
        fraction = (epoch - self.epochs.start) / max(1, len(self.epochs))
        for group in self.optimizer.param_groups:
            rate = self.config.lr * group["lr_factor"] * group["pace"]
            group["lr"].fill_(rate * cosine(fraction, self.config.lr_final))


def ranges_and_others(modules: list[nn.Module]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of some modules: those of quantizers, and the weights."""
    found = [module for root in modules for module in root.modules() if isinstance(module, Quantizer)]
    ranges = [parameter for module in found for parameter in module.parameters()]
    known = {id(parameter) for parameter in ranges}
    return ranges, [p for module in modules for p in module.parameters() if id(p) not in known]


def _first_non_finite(sums: list[dict[str, Tensor]]) -> list[str]:
    """Names of the loss terms that became non-finite first, from their sums after each step."""
    for step in sums:
        if non_finite := [name for name, value in step.items() if name != "loss" and not torch.isfinite(value)]:
            return non_finite
    return []


def _strength(heads: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N)."""
    return heads.float().abs().mean(dim=(1, 3))


def _views(images: Tensor, keys: Tensor, settings: dict[str, Any], mixing: dict[str, float]) -> Tensor:
    return mix(simclr(to_pixels(images), keys, **settings), keys, **mixing)


@dataclass(frozen=True)
class Share:
    """What one rank takes of a batch: its own images, and others that they are mixed with."""

    count: int
    """Images of the whole batch."""
    own: int
    """Images that are its own; one also where there are fewer than ranks, but then that one does not count."""
    before: int
    """Images in front of them that are taken along."""
    first: int
    """Place in the batch of the first image that is taken."""
    counts: bool = True

    @classmethod
    def of(cls, ranks: Ranks, count: int) -> "Share":
        part = ranks.part(count)
        own = max(1, len(part))
        if own + REACH >= count:
            return cls(count, own, part.start, 0, len(part) > 0)
        return cls(count, own, REACH, part.start - REACH, len(part) > 0)

    def rows(self, chosen: Tensor) -> Tensor:
        """The images of a batch that are taken. Mixing goes round: in front of the first is the last."""
        return chosen if self.own + REACH >= self.count else chosen.roll(-self.first)[: self.before + self.own]

    def of_mean(self, values: Tensor) -> Tensor:
        """What the values of some of its images add to the mean over the batch."""
        return values.sum() / self.count if self.counts else values.sum() * 0


class BatchBuffers:
    """Fixed buffers for the batch of a step, so that a captured step can be replayed."""

    advance: Callable[[], None]
    """One optimiser step."""

    def __init__(self, batch: SyntheticSet, share: Share | None = None) -> None:
        self.share = share or Share.of(ALONE, len(batch))
        self.gradients: list[Tensor] = []
        """Those of the latest step, where they are summed over ranks."""
        self.batch = SyntheticSet(batch.images.clone(), batch.labels.clone(), batch.indices.clone())
        self.epoch = torch.zeros(1, dtype=torch.int64, device=batch.labels.device)
        self.parts: dict[str, Tensor] = {}
        """Mean of each loss term at the latest step."""

    def fill(self, batch: SyntheticSet, epoch: int) -> None:
        self.batch.images.copy_(batch.images)
        self.batch.labels.copy_(batch.labels)
        self.batch.indices.copy_(batch.indices)
        self.epoch.fill_(epoch)
