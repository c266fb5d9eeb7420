"""Dream up images: optimise pixels from noise until teacher and student say what the objective asks (Sec. 2.1-2.3)."""

import math
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from maskaq import masks, randomness
from maskaq.augment import jitter
from maskaq.config import Recipe
from maskaq.data import SyntheticSet, balanced_labels, to_bytes, to_pixels
from maskaq.losses.terms import SYNTHESIS_TERMS, Objective, SynthesisView
from maskaq.models import geometry
from maskaq.quant.twin import frozen
from maskaq.taps import Taps, taps
from maskaq.watch import Watch

_LOGGED_POINTS = 20  # loss curves have this many points per batch


class Synthesizer:
    """Makes synthetic images against a teacher and the student as it is now.

    Every random number depends on (seed, round, image number, attempt, step), and every loss is per image: an image
    comes out the same whatever batch it is made in.
    """

    def __init__(
        self, teacher: nn.Module, student: nn.Module, recipe: Recipe, *, seed: int = 0, watch: Watch | None = None
    ) -> None:
        self.teacher, self.student, self.recipe, self.seed = teacher, student, recipe, seed
        self.config = recipe.synthesis
        self.watch = watch or Watch()
        self.device = next(teacher.parameters()).device
        self.geometry = geometry(teacher).to(self.device)
        self.objective = Objective(SYNTHESIS_TERMS, self.config.terms, "synthesis.terms")
        self.batch = self.config.batch
        self.curves: list[dict[str, float]] = []
        """Mean of each term at some steps of the latest call."""

    def __call__(self, indices: Tensor, round: int = 0, start: SyntheticSet | None = None) -> SyntheticSet:
        """Images of the given numbers. From noise, or from `start`, the same images of the round before.

        Images that end in NaN or Inf are made once more from other randomness; those lost again are left out.
        """
        indices = indices.to(self.device)
        images, finite = self._make(indices, round, start, attempt=0)
        if not finite.all():
            ill = ~finite
            self.watch.note(
                f"images {indices[ill].tolist()} of round {round} became NaN or Inf: made again from another seed"
            )
            images[ill], finite[ill] = self._make(indices[ill], round, None, attempt=1)
        if not finite.all():
            self.watch.note(f"images {indices[~finite].tolist()} of round {round} are lost: NaN or Inf twice")
        pixels = self.geometry.pixels(images[finite])
        kept = indices[finite]
        return SyntheticSet(to_bytes(pixels), balanced_labels(kept, self.geometry.classes), kept).to("cpu")

    def _make(self, indices: Tensor, round: int, start: SyntheticSet | None, attempt: int) -> tuple[Tensor, Tensor]:
        """Normalised images and which of them are finite; halves the batch when the GPU's memory does not hold it."""
        while True:
            try:
                made = []
                for part in indices.split(self.batch):
                    made.append(self._make_part(part, round, start, attempt))
                images = torch.cat(made)
                return images, torch.isfinite(images).flatten(1).all(dim=1)
            except torch.OutOfMemoryError:
                if self.batch == 1:
                    raise
                self.batch = max(1, min(self.batch, len(indices)) // 2)
                torch.cuda.empty_cache()
                self.watch.note(f"out of GPU memory: synthesis goes on with batches of {self.batch}")

    def _make_part(self, indices: Tensor, round: int, start: SyntheticSet | None, attempt: int) -> Tensor:
        keys = randomness.fold(randomness.fold(randomness.image_keys(self.seed, indices), round), attempt)
        images = randomness.normal(randomness.fold(keys, "start"), self.geometry.channels, *self.geometry.image_size)
        if start is not None:
            before = start.to(self.device)
            row, column = (indices[:, None] == before.indices).nonzero(as_tuple=True)  # an image lost before has no row
            images[row] = self.geometry.normalise(to_pixels(before.images[column]))
        labels = balanced_labels(indices, self.geometry.classes)
        return self._optimise(images, labels, keys, self.recipe.steps_in_round(round), self.recipe.lr_in_round(round))

    def _optimise(self, images: Tensor, labels: Tensor, keys: Tensor, steps: int, lr: float) -> Tensor:
        """Algorithm 1, lines 2-6."""
        low = self.geometry.normalise(torch.zeros_like(images[:1]))
        high = self.geometry.normalise(torch.ones_like(images[:1]))
        images = images.clamp(low, high).requires_grad_()
        adam = torch.optim.Adam([images], lr=lr, betas=(self.config.beta1, self.config.beta2))
        logged = {round(i * (steps - 1) / (_LOGGED_POINTS - 1)) for i in range(_LOGGED_POINTS)}
        self.curves = []
        with ExitStack() as stack:
            stack.enter_context(frozen(self.student))
            seen = stack.enter_context(taps(self.teacher, self.config.map))  # type: ignore[arg-type]
            seen_student = stack.enter_context(taps(self.student, self.config.map))  # type: ignore[arg-type]
            for step in range(steps):
                adam.param_groups[0]["lr"] = lr * cosine(step / steps, self.config.lr_final)
                view = self._view(
                    images, labels, randomness.fold(keys, step), step / max(1, steps - 1), seen, seen_student
                )
                total, parts = self.objective(view)
                (images.grad,) = torch.autograd.grad(total.sum(), images)
                adam.step()
                with torch.no_grad():
                    images.clamp_(low, high)
                if step in logged:
                    self.curves.append({"step": step, **{name: value.item() for name, value in parts.items()}})
                self.watch.advance(len(images))
        return images.detach()

    def _view(
        self, images: Tensor, labels: Tensor, keys: Tensor, progress: float, seen: Taps, seen_student: Taps
    ) -> SynthesisView:
        config, layers = self.config, self.geometry.layers
        roll = round(config.roll * min(self.geometry.image_size)) * (1 if progress < 0.5 else 2)
        jittered = jitter(images, keys, roll=roll, noise=config.noise * (1 - progress), colour=config.colour)
        view = SynthesisView(images, labels, self.teacher(jittered), layers, list(seen[config.map]))
        if "student" in self.objective.needs:
            self.student(jittered)
            view.student_maps = list(seen_student[config.map])
        if "masks" in self.objective.needs:
            view.masks = self._masks(view, progress, keys)
        return view

    @torch.no_grad()
    def _masks(self, view: SynthesisView, progress: float, keys: Tensor) -> dict[tuple[int, int], Tensor]:
        """m' of every patch grid: the most attended patches over the grid's layers, thinned (Eqs. 11-13)."""
        config, found = self.config.mask, {}
        for grid in {layer.grid: None for layer in view.layers}:
            rows = [
                layer.patch_attention(raw)
                for layer, raw in zip(view.layers, view.maps, strict=True)
                if layer.grid == grid
            ]
            alpha = torch.stack(rows).mean(dim=0)  # (B, N)
            k = masks.mask_size(alpha.shape[1], progress, config.start, config.end)
            keep = masks.kept_size(k, config.drop, config.keep_at_least)
            found[grid] = masks.thin(masks.top_patches(alpha, k), keep, randomness.fold(keys, f"mask {grid}"))
        return found


def synthesize(
    teacher: nn.Module, student: nn.Module, recipe: Recipe, *, seed: int = 0, watch: Watch | None = None
) -> SyntheticSet:
    """All synthetic images of one round, in memory."""
    synthesizer = Synthesizer(teacher, student, recipe, seed=seed, watch=watch)
    shards = torch.arange(recipe.synthesis.images).split(recipe.synthesis.batch)
    synthesizer.watch.stage("synthesize", recipe.synthesis.images * recipe.synthesis.steps)
    return SyntheticSet.concatenate(synthesizer(shard) for shard in shards)


def cosine(progress: float, final: float) -> float:
    """Factor of the learning rate: 1 at progress 0, `final` at progress 1."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
