"""Fit the student block after block, each through the later blocks of the teacher (not in the paper).

The quantized blocks before give the block's input; the teacher's blocks behind it, in full precision, carry its error
on to what the classifier reads. So a block learns what matters in the end, and not from later blocks that are still
wrong (GLF-Q). A block's loss is the error of the class feature plus that of the block's output, each over its value at
the block's first step. Other errors and AdaRound (BRECQ, QDrop, APHQ-ViT) are settings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from maskaq import randomness
from maskaq.calibrate.calibrator import BatchBuffers, Calibrator, ranges_and_others
from maskaq.calibrate.evolve import refuse_following_weights
from maskaq.errors import RecipeError
from maskaq.images.sets import SyntheticSet
from maskaq.losses import distill
from maskaq.models import geometry, parts
from maskaq.models.structure import replace_module
from maskaq.models.taps import Taps, taps
from maskaq.quant.layers import QuantWeightMixin
from maskaq.quant.quantizers import Quantizer
from maskaq.schedules import cosine


class Reconstructor(Calibrator):
    """The stage that fits one block at a time, front to back, with the batches and views of the end-to-end stage."""

    name = "reconstruct"

    def __init__(self, teacher: nn.Module, student: nn.Module, recipe: Any, **kwargs: Any) -> None:
        self.units, self.tail = units(teacher)
        self.unit = 0
        self.roundings: list[Rounding] = []
        self._drop_keys = self._step_keys = torch.zeros(0, dtype=torch.int64)
        self.own = recipe.calibration.reconstruct
        # Ranks sum the gradients of the student's own parameters, and would draw and weigh values differently.
        self.parallel = self.own.rounding == "straight" and not self.own.drop and self.own.error != "hessian"
        super().__init__(teacher, student, recipe, **kwargs)
        if len(self.epochs) < len(self.units):
            raise RecipeError(
                f"calibration.reconstruct.epochs: expected at least {len(self.units)}, one for each block of the "
                f"model, got {len(self.epochs)}"
            )
        blocks = self.geometry.blocks
        self.blocks = [blocks.index(unit[-1]) for unit in self.units]  # where the tap has the output of each
        self.first = torch.ones(2, device=self.device)  # both errors at the unit's first step
        self.importance: Tensor | None = None  # of each value of the unit's output

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"unit": self.unit, "first": self.first.clone()}
        state |= (
            {"rounding": [rounding.alpha.detach().clone() for rounding in self.roundings]} if self.roundings else {}
        )
        return state | ({} if self.importance is None else {"importance": self.importance.clone()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.unit = int(state["unit"])
        self.optimizer = self._optimizer()
        self.first.copy_(state["first"])
        if "rounding" not in state:  # the unit was done: its weights are on their levels
            self.roundings = []
        with torch.no_grad():
            for rounding, alpha in zip(self.roundings, state.get("rounding", ()), strict=True):
                rounding.alpha.copy_(alpha)
        found = state.get("importance")
        self.importance = None if found is None else found.to(self.device)
        super().load_state_dict(state)

    def epochs_of(self, unit: int) -> range:
        """The epochs of one unit; all units have about as many."""
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
        views = self._augmented(buffers).split(self.micro_batch)
        if self.own.error == "hessian":
            self.importance = torch.cat([self._sensitivity(part) for part in views]).mean(dim=0)
        self._set_beta(epoch)
        with torch.no_grad(), self._running(epoch):
            pairs = [torch.stack(self._errors(part)) for part in views]
        self.first.copy_(torch.cat(pairs, dim=1).mean(dim=1).clamp(min=1e-12))

    def _end(self, epoch: int) -> None:
        if epoch == self.epochs_of(self.unit).stop - 1:
            for rounding in self.roundings:
                rounding.harden_()
            self.roundings = []
        if epoch == self.epochs.stop - 1:
            self._buffers.clear()  # the next stage needs the memory

    @contextmanager
    def _running(self, epoch: int) -> Iterator[None]:
        """The student, followed by the teacher's parts behind the unit; only the unit is trained."""
        points = ("blocks", "class_features")
        with (
            self._alone(),
            self._float_suffix(),
            self._dropping(),
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

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Context in which random values of the unit's activations stay in float (QDrop), drawn anew at each step."""
        inside = [self.student.get_submodule(name) for name in self.units[self.unit]] if self.own.drop else []
        found = [
            m for part in inside for m in part.modules() if isinstance(m, Quantizer) and m.site.role == "activation"
        ]
        numbers = torch.arange(len(found), device=self.device)
        self._drop_keys = randomness.image_keys(self.seed, numbers)
        if len(self._step_keys) != len(found):
            self._step_keys = self._drop_keys.clone()
        self._step_keys.copy_(self._drop_keys)  # in place: a replayed step reads this tensor
        try:
            for quantizer, key in zip(found, self._step_keys.split(1) if found else (), strict=True):
                quantizer.drop, quantizer.drop_key = self.own.drop, key
            yield
        finally:
            for quantizer in found:
                quantizer.drop, quantizer.drop_key = 0.0, None

    def _losses(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        feature, block = self._errors(images)
        if self.own.error == "feature":
            total = feature / self.first[0] + self.own.block_weight * block / self.first[1]
        else:
            total = self.own.block_weight * block / self.first[1]
        parts = {"class_feature": feature.detach(), "block_error": block.detach()}
        if self.roundings:
            pull = torch.stack([rounding.pull(self.beta) for rounding in self.roundings]).sum()
            total = total + self.own.rounding_weight * pull
            parts["rounding"] = pull.detach().expand_as(block)
        return total, parts

    def _errors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) each: relative squared error of the class feature, and of the block's output."""
        with self.engine.precision():
            with torch.no_grad():
                expected = self._seen(self.seen, self.teacher(images))  # read before the student runs the same parts
            for rounding in self.roundings:
                rounding.hold()
            try:
                found = self._seen(self.seen_student, self.student(images))
            finally:
                for rounding in self.roundings:
                    rounding.release()
        run = self.engine.losses
        pairs = [(p.float(), q.float()) for p, q in zip(expected, found, strict=True)]
        if self.importance is None:
            block = run(distill.relative_error, *pairs[-1])
        else:
            block = run(distill.weighted_error, *pairs[-1], self.importance)
        return torch.stack([run(distill.relative_error, *pair) for pair in pairs[:-1]]).mean(dim=0), block

    def _seen(self, seen: Taps, output: Tensor) -> list[Tensor]:
        """What the classifiers read, or without one the model's output; and the unit's output."""
        return [*(seen["class_features"] or [output]), seen["blocks"][self.blocks[self.unit]]]

    def _sensitivity(self, images: Tensor) -> Tensor:
        """(1, ...): how much each value of the unit's output moves the predictions, mean over images (APHQ-ViT).

        |g(X + e) - g(X - e)|, g the gradient of KL at T = 20 between the prediction from X and that from the moved X.
        Ours: e is a thousandth of X's standard deviation, where theirs is 1e-6, below float32's own rounding; and its
        signs are random. Behind a LayerNorm, the same number added to all channels changes nothing.
        """
        block = self.teacher.get_submodule(self.units[self.unit][-1])
        with torch.no_grad():
            expected = self.teacher(images)
        gradients = []
        for sign in (1, -1):
            moved: list[Tensor] = []

            def move(module: nn.Module, inputs: Any, output: Tensor, sign: int = sign, to: list = moved) -> Tensor:
                x = output.detach()
                to.append((x + sign * 1e-3 * x.std() * self._signs(x)).requires_grad_())
                return to[0]

            with block.register_forward_hook(move):
                loss = distill.logit_kl(expected, self.teacher(images), 20.0).sum()
            gradients.append(torch.autograd.grad(loss, moved[0])[0])
        found = (gradients[0] - gradients[1]).abs().mean(dim=0, keepdim=True)
        return found / found.mean().clamp(min=1e-30)

    def _signs(self, x: Tensor) -> Tensor:
        """(1, ...): 1 or -1 for each value of an image, the same for all images."""
        key = randomness.fold(randomness.image_keys(self.seed, torch.tensor([self.unit])), "importance")
        return torch.where(randomness.uniform(key, *x.shape[1:]) < 0.5, -1.0, 1.0).to(x)

    def _set_beta(self, epoch: float) -> None:
        """Adaround's beta: from 20 to 2 after the first fifth of a unit, in which nothing is pulled."""
        epochs = self.epochs_of(self.unit)
        done = ((epoch - epochs.start) / len(epochs) - 0.2) / 0.8
        self.beta.fill_(20 - 18 * done if done > 0 else 0.0)

    def _optimizer(self) -> torch.optim.Optimizer:
        inside = [self.student.get_submodule(name) for name in self.units[self.unit]]
        ranges, others = ranges_and_others(inside)
        self.roundings = []
        self.beta = torch.zeros((), device=self.device)
        if self.own.rounding == "adaround":
            refuse_following_weights(self.student, f"{self.name} with adaround")
            layers = [m for part in inside for m in part.modules() if isinstance(m, QuantWeightMixin)]
            self.roundings = [Rounding(m) for m in layers if isinstance(m.weight_quantizer, Quantizer)]
            of_weights = {id(p) for m in layers for p in m.weight_quantizer.parameters()}
            ranges = [p for p in ranges if id(p) not in of_weights]  # codes are learned, their steps stay
            others = [rounding.alpha for rounding in self.roundings]
        factor = self.own.rounding_lr / self.own.lr if self.roundings and self.own.lr else 1.0
        groups = [{"params": others, "lr_factor": factor}, {"params": ranges, "lr_factor": self.own.range_lr}]
        groups = [group | {"lr": torch.zeros((), device=self.device)} for group in groups if group["params"]]
        return torch.optim.AdamW(groups, weight_decay=0.0, fused=True, capturable=self.device.type == "cuda")

    def _set_lr(self, epoch: float) -> None:
        """Each unit has a cosine of its own."""
        epochs = self.epochs_of(self.unit)
        fraction = (epoch - epochs.start) / len(epochs)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(self.own.lr * group["lr_factor"] * cosine(fraction, self.config.lr_final))
        self._set_beta(epoch)
        self._step_keys.copy_(randomness.fold(self._drop_keys, round(epoch * 65536)))

    def _rate(self) -> str:
        return f"calibration.reconstruct.lr (now {self.own.lr})"


class Rounding:
    """AdaRound (Nagel et al. 2020): whether each weight of a layer is rounded up, learned as a soft number h first.

    h = clip(1.2 sigmoid(alpha) - 0.1, 0, 1); it starts where the soft weight is the weight itself.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        quantizer: Quantizer = layer.weight_quantizer
        with torch.no_grad():
            scale, _ = quantizer.step(layer.weight.numel())
            self.scale = scale.detach().reshape(-1, *[1] * (layer.weight.dim() - 1))
            steps = layer.weight.detach() / self.scale
            self.floor = steps.floor()
            share = (steps - self.floor).clamp(1e-4, 1 - 1e-4)
            self.alpha = nn.Parameter(-torch.log(1.2 / (share + 0.1) - 1))
        self.low, self.high = quantizer.low, quantizer.high

    @property
    def h(self) -> Tensor:
        return (1.2 * self.alpha.sigmoid() - 0.1).clamp(0, 1)

    def hold(self) -> None:
        """The layer uses the soft weight."""
        self.layer.held_weight = (self.floor + self.h).clamp(self.low, self.high) * self.scale

    def release(self) -> None:
        self.layer.held_weight = None

    def pull(self, beta: Tensor) -> Tensor:
        """sum of 1 - |2h - 1|^beta: 0 where every h is 0 or 1. Nothing at beta = 0."""
        return (1 - (2 * self.h - 1).abs().clamp(min=1e-6).pow(beta)).sum()

    @torch.no_grad()
    def harden_(self) -> None:
        """Round the layer's weights to the chosen levels, which its quantizer leaves as they are."""
        codes = (self.floor + (self.h >= 0.5)).clamp(self.low, self.high)
        self.layer.weight.copy_(codes * self.scale)


def units(teacher: nn.Module) -> tuple[list[list[str]], list[str]]:
    """Each block with what is computed between the block before and it; and what comes behind the last block."""
    blocks = set(geometry(teacher).blocks)
    found: list[list[str]] = [[]]
    for name in parts(teacher):
        found[-1].append(name)
        if name in blocks:
            found.append([])
    return found[:-1], found[-1]
