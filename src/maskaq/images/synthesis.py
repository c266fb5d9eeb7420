"""Synthesise images: optimise pixels, from noise or dead leaves, for an objective of P and Q (Sec. 2.1-2.3)."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq import randomness
from maskaq.engine import PLAIN, Engine
from maskaq.images import masks
from maskaq.images.augment import jitter, quarter, simclr, zoomed
from maskaq.images.dead_leaves import dead_leaves
from maskaq.images.sets import SyntheticSet, Trajectory, to_bytes, to_pixels
from maskaq.losses.targets import regions
from maskaq.losses.terms import SYNTHESIS_TERMS, Objective, SynthesisView, possible
from maskaq.models import geometry
from maskaq.models.taps import taps
from maskaq.progress import Progress
from maskaq.quant.twin import frozen
from maskaq.recipe.schema import Recipe
from maskaq.schedules import cosine, logged_steps
from maskaq.shapes import Geometry
from maskaq.tasks import task_of
from maskaq.tasks.task import Layout

_LOOKED_AT = 4  # lost images whose steps are repeated to find the term that caused the loss
_LARGEST_BATCH = 256  # of a GPU: more images together are no faster

GridMasks = dict[tuple[int, int], Tensor]
"""(B, N) for each grid of patches."""


class Synthesizer:
    """Makes synthetic images against a teacher and the student as it is now.

    Every random number depends on (seed, round, image number, attempt, step), and every loss is per image: an image
    comes out the same whatever batch it is made in.
    """

    stage = "synthesize"
    fingerprint: str | None = None
    """Images depend on nothing besides the student and the seed."""

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
        self.teacher = teacher
        self.student = student
        self.recipe = recipe
        self.seed = seed
        self.config = recipe.synthesis
        self.progress = progress or Progress()
        self.engine = engine
        self.device = next(teacher.parameters()).device
        self.geometry = geometry(teacher).to(self.device)
        self.task = task_of(teacher)
        weights = possible(self.task.terms(self.config.terms), SYNTHESIS_TERMS, self.geometry)
        self.objective = Objective(SYNTHESIS_TERMS, weights, "synthesis.terms")
        self.batch = self.config.batch
        """Images optimised together."""
        self.curves: list[dict[str, float]] = []
        """Mean of each term at some steps of the latest batch."""
        self.trajectory: Trajectory | None = None
        """The first image of the latest call, at its start and after some of its steps; None if it was lost."""
        self.blamed: str | None = None
        """What to do about a term that lost images, once some are lost; empty if it was not a single term."""
        self._room: int | None = None
        self._expected = 0
        self._buffers: _StepBuffers | None = None
        self._weight_cache: dict[nn.Module, Tensor] = {}

    def __call__(self, indices: Tensor, round_index: int = 0, start: SyntheticSet | None = None) -> SyntheticSet:
        """Synthesise the images of these numbers, from scratch or from `start`, the same images of the round before.

        Images that become NaN or Inf are made once more with another seed; those that fail again are left out.
        """
        indices = indices.to(self.device)
        images, finite = self._make(indices, round_index, start, attempt=0)
        if not finite.all():
            non_finite = ~finite
            trajectory = self.trajectory
            self.progress.note(
                f"images {indices[non_finite].tolist()} of round {round_index} became NaN or Inf: made again from "
                "another seed"
            )
            images[non_finite], finite[non_finite] = self._make(indices[non_finite], round_index, None, attempt=1)
            if not non_finite[0]:
                self.trajectory = trajectory
            elif not finite[0]:
                self.trajectory = None
        if not finite.all():
            if self.blamed is None:
                self.blamed = self._blame(indices[~finite][:_LOOKED_AT], round_index)
            why = f"; {self.blamed}" if self.blamed else ""
            self.progress.note(
                f"images {indices[~finite].tolist()} of round {round_index} are lost: NaN or Inf twice{why}"
            )
        pixels = self.geometry.pixels(images[finite])
        kept = indices[finite]
        return SyntheticSet(to_bytes(pixels), self._targets(kept), kept).to("cpu")

    def shards_at_once(self, missing: int) -> int:
        """How many of the missing shards to make together, in batches as equal as can be."""
        calls = -(-missing * self.config.batch // self.images_at_once())
        return -(-missing // calls)

    def images_at_once(self) -> int:
        """Images in whole shards that are optimised together: one shard, or on a fast GPU as many as fit its memory."""
        if self._room is None:
            grows = self.engine.captures and self.recipe.most_steps
            self._room = min(_LARGEST_BATCH, self._fitting()) if grows else self.config.batch
            self.batch = max(1, self._room // self.config.batch) * self.config.batch
        return self.batch

    def expect(self, images: int) -> None:
        """Announce the largest number of images in a call.

        A captured step has buffers for that many, even in a smaller call. So the GPU runs the same kernels, and an
        image is the same to the bit, whichever worker makes it and together with which others.
        """
        if self._expected != images:
            self._room = self.batch = self._expected = images
            if self._buffers is not None and len(self._buffers.labels) != images:
                self._buffers = None  # these were for a forecast

    def _fitting(self) -> int:
        """Images that fit three quarters of the GPU's free memory, estimated from one eager step of four images."""
        count = 4
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with self.engine.once():
            self.trial(count, steps=1)
        self._buffers = None
        used = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0] * 0.75 / max(1, used / count))

    def seconds_per_image_step(self) -> float | None:
        """Seconds per image and step after the set-up, from a few timed steps; None if there are no steps."""
        if not self.recipe.most_steps:
            return None
        shards = -(-self.config.images // self.config.batch)
        count = min(self.config.images, self.shards_at_once(shards) * self.config.batch)
        if self.device.type == "cpu":  # a few images are enough: 4 of 224 px, 16 of 32 px
            count = min(count, max(4, min(16, 50_000 // math.prod(self.geometry.image_size))))
        seconds = 0.0
        steps = min(5 if self.engine.captures else 3, self.recipe.most_steps)
        for _ in range(2):  # the first time pays for the set-up
            began = time.monotonic()
            self.trial(count, steps)
            seconds = time.monotonic() - began
        return seconds / (count * steps)

    def trial(self, count: int, steps: int) -> None:
        """Run some steps on throw-away images, to measure their time or memory."""
        progress = self.progress
        self.progress = Progress()
        try:
            indices = torch.arange(count, device=self.device)
            images = torch.zeros(count, self.geometry.channels, *self.geometry.image_size, device=self.device)
            self._optimise(images, self._targets(indices), indices, self._layouts(indices), steps, lr=0.1)
        finally:
            self.progress = progress

    def _make(
        self, indices: Tensor, round_index: int, start: SyntheticSet | None, attempt: int
    ) -> tuple[Tensor, Tensor]:
        """Normalised images and which of them are finite; halves the batch when the GPU's memory does not hold it."""
        while True:
            try:
                parts, trajectories = [], []
                for part in indices.split(self.batch):
                    parts.append(self._make_part(part, round_index, start, attempt))
                    trajectories.append(self.trajectory)
                images = torch.cat(parts)
                self.trajectory = trajectories[0]
                return images, torch.isfinite(images).flatten(1).all(dim=1)
            except torch.OutOfMemoryError:
                self._buffers = None
                if self.batch == 1:
                    raise
                self.batch = max(1, min(self.batch, len(indices)) // 2)
                torch.cuda.empty_cache()
                self.progress.note(f"out of GPU memory: synthesis goes on with batches of {self.batch}")

    def _make_part(self, indices: Tensor, round_index: int, start: SyntheticSet | None, attempt: int) -> Tensor:
        keys = self._keys(indices, round_index, attempt)
        images = self._start(randomness.fold(keys, "start"))
        if start is not None:
            before = start.to(self.device)
            row, column = (indices[:, None] == before.indices).nonzero(as_tuple=True)  # an image lost before has no row
            images[row] = self.geometry.normalise(to_pixels(before.images[column]))
        steps = self.recipe.steps_in_round(round_index)
        snapshots = {0: images[0]}
        if steps:
            labels = self._targets(indices)
            lr = self._lr(round_index)
            images, snapshots = self._optimise(images, labels, keys, self._layouts(indices), steps, lr)
        else:  # nothing to optimise: the start images are the result
            self.curves = []
            self.progress.advance(len(images))
        frames = to_bytes(self.geometry.pixels(torch.stack(list(snapshots.values())))).cpu()
        self.trajectory = Trajectory(int(indices[0]), frames, list(snapshots))
        return images

    def _lr(self, round_index: int) -> float:
        """Adam's learning rate in a round, at its first step, in units of the model's input."""
        lr = self.recipe.lr_in_round(round_index)
        if self.config.lr_unit == "input":
            return lr
        return lr * statistics.mean(IMAGENET_DEFAULT_STD) / statistics.mean(self.geometry.std)

    def _targets(self, indices: Tensor) -> Tensor:
        return self.task.targets(indices, self.geometry.classes)

    def _layouts(self, indices: Tensor) -> Layout:
        """What these images are made for, besides a class; the same in every round."""
        return self.task.layouts(randomness.fold(randomness.image_keys(self.seed, indices), "layout"), self.geometry)

    @torch.no_grad()
    def _relabel(self, buffers: "_StepBuffers") -> None:
        """Update the layouts from the teacher's predictions; between steps, because a captured step cannot branch."""
        outputs = self.task.run(self.teacher, buffers.images.detach(), buffers.layout)
        for name, value in self.task.relabelled(buffers.layout, outputs).items():
            buffers.layout[name].copy_(value)

    def _keys(self, indices: Tensor, round_index: int, attempt: int) -> Tensor:
        """(B,) random keys of these images in this round."""
        return randomness.fold(randomness.fold(randomness.image_keys(self.seed, indices), round_index), attempt)

    def _start(self, keys: Tensor) -> Tensor:
        """The initial images, normalised."""
        shape = self.geometry.channels, *self.geometry.image_size
        if self.config.start == "dead_leaves":
            return self.geometry.normalise(dead_leaves(keys, *shape))
        return randomness.normal(keys, *shape)

    def _optimise(
        self, images: Tensor, labels: Tensor, keys: Tensor, layout: Layout, steps: int, lr: float
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Algorithm 1, lines 2-6. Returns the images, and snapshots of the first one by number of steps."""
        buffers = self._buffers_for(len(images))
        buffers.fill(images, labels, keys, self._schedule(steps, lr), layout)
        logged = logged_steps(steps)
        points = []
        snapshots = {0: buffers.images.detach()[0].clone()}
        with self._models_ready():
            for step in range(steps):
                if self.task.has_layouts and step and step % self.config.relabel == 0:
                    self._relabel(buffers)
                buffers.advance()
                if step in logged:
                    snapshots[step + 1] = buffers.images.detach()[0].clone()
                    points.append((step, {name: x[: len(images)].mean() for name, x in buffers.parts.items()}))
                self.progress.advance(len(images))
        self.curves = [
            {"step": step, **{name: value.item() for name, value in parts.items()}} for step, parts in points
        ]
        return buffers.images.detach()[: len(images)].clone(), snapshots

    @contextmanager
    def _models_ready(self) -> Iterator[None]:
        """Context for steps: the student frozen, both models on the engine, with taps on their attention."""
        with ExitStack() as stack:
            stack.enter_context(frozen(self.student, self._weight_cache))
            for model in (self.teacher, self.student):
                stack.enter_context(self.engine.applied(model))
            received = f"{self.config.map}_received"
            needs = self.objective.needs
            more = {"heads": "heads", "received": "probs_received"}
            points = dict.fromkeys((self.config.map, received, *(more[need] for need in more if need in needs)))
            self.seen = stack.enter_context(taps(self.teacher, *points))  # type: ignore[arg-type]
            of_student = (self.config.map,) if "student_maps" in needs else ()
            self.seen_student = stack.enter_context(taps(self.student, received, *of_student))  # type: ignore[arg-type]
            yield

    def _blame(self, indices: Tensor, round_index: int) -> str:
        """Advice about user-defined terms that make these images non-finite, found by repeating their steps."""
        steps = self.recipe.steps_in_round(round_index)
        keys = self._keys(indices, round_index, attempt=1)
        if not self.objective.own or not steps:
            return ""
        schedule = self._schedule(steps, self._lr(round_index))
        layout = self._layouts(indices)
        buffers = self._new_buffers(len(indices), schedule, layout)
        start = self._start(randomness.fold(keys, "start"))
        buffers.fill(start, self._targets(indices), keys, schedule, layout)
        with self.engine.once(), self._models_ready():
            for _ in range(steps):
                now = buffers.now()
                values = self.objective.weighted(self._view(buffers, randomness.fold(buffers.keys, buffers.step), now))
                non_finite = [name for name, value in values.items() if not torch.isfinite(value).all()]
                gradients = {
                    name: torch.autograd.grad(value.sum(), buffers.images, retain_graph=True)[0]
                    for name, value in values.items()
                    if value.requires_grad
                }
                non_finite = non_finite or [
                    name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()
                ]
                if non_finite:
                    return self.objective.blame(non_finite)
                buffers.images.grad = torch.stack(list(gradients.values())).sum(dim=0)
                buffers.descend(now["lr"])
        return ""

    def _buffers_for(self, count: int) -> "_StepBuffers":
        """Buffers for this many images. A captured step reuses its buffers for every later batch that fits."""
        buffers = self._buffers
        if self.engine.captures:
            count = max(count, min(self._expected, self.batch))
        room = 0 if buffers is None else len(buffers.labels)
        if buffers is None or room < count or (room > count and not self.engine.captures):
            self._buffers = None  # frees its memory before the next one is allocated
            longest = self._schedule(self.recipe.most_steps, lr=0.0)
            layout = self._layouts(torch.zeros(1, dtype=torch.int64, device=self.device))
            buffers = self._new_buffers(count, longest, layout)
            buffers.advance = self.engine.repeated(partial(self._step, buffers))
            self._buffers = buffers
        return buffers

    def _new_buffers(self, count: int, schedule: dict[str, list[float]], layout: Layout) -> "_StepBuffers":
        betas = self.config.beta1, self.config.beta2
        return _StepBuffers(count, self.geometry, schedule, betas, layout, self.device)

    def _schedule(self, steps: int, lr: float) -> dict[str, list[float]]:
        """Name -> value at every step, of everything that changes over the steps."""
        config = self.config
        grids = {grid: math.prod(grid) for grid in self._grids}
        roll = 0 if self.task.has_layouts else round(config.roll * min(self.geometry.image_size))
        schedule: dict[str, list[float]] = defaultdict(list)
        for step in range(steps):
            fraction = step / max(1, steps - 1)
            schedule["lr"].append(lr * cosine(step / steps, config.lr_final))
            schedule["noise"].append(config.noise * (1 - fraction))
            schedule["zoom"].append(1 - (1 - config.zoom) * fraction)
            schedule["roll"].append(roll if fraction < 0.5 else 2 * roll)
            for grid, patches in grids.items():
                k = masks.mask_size(patches, fraction, config.mask.start, config.mask.end)
                schedule[f"k {grid}"].append(k)
                schedule[f"keep {grid}"].append(masks.kept_size(k, config.mask.drop, config.mask.keep_at_least))
        return schedule

    def _step(self, buffers: "_StepBuffers") -> None:
        """One step of all images in the buffers. It never waits for the device, so a CUDA graph can capture it."""
        now = buffers.now()
        keys = randomness.fold(buffers.keys, buffers.step)
        total, parts = self.objective(self._view(buffers, keys, now))
        self.objective.check_gradient(total, "the images")
        (gradient,) = torch.autograd.grad(total.sum(), buffers.images)
        buffers.images.grad = gradient.contiguous()  # the fused Adam ignores strides
        buffers.descend(now["lr"])
        buffers.parts = parts

    def _view(self, buffers: "_StepBuffers", keys: Tensor, now: Mapping[str, Tensor]) -> SynthesisView:
        config = self.config
        needs = self.objective.needs
        images = buffers.images
        # Before the images themselves: the taps keep the attention of the latest forward pass.
        region = self._region(buffers, keys, now) if "regions" in needs else {}
        jittered = self._jittered(images, keys, now)
        with self.engine.precision():
            found = self.task.run(self.teacher, jittered, buffers.layout)
            found_by_student = self.task.run(self.student, jittered, buffers.layout) if "student" in needs else {}
        layers, losses = self.geometry.layers, self.engine.losses
        outputs = {name: x.float() for name, x in found.items()}
        view = SynthesisView(images, buffers.labels, outputs, layers, self.seen[config.map], run=losses, **region)
        view.keys, view.layout = buffers.keys, buffers.layout
        received = f"{config.map}_received"
        view.attention = self.geometry.patch_attention(self.seen[received])
        if "student" in needs:
            view.student_outputs = {name: x.float() for name, x in found_by_student.items()}
            view.student_attention = self.geometry.patch_attention(self.seen_student[received])
        if "student_maps" in needs:
            view.student_maps = self.seen_student[config.map]
        if "masks" in needs:
            view.masks = self._masks(view.attention, now, keys, buffers.layout.get("foreground"))
        if "heads" in needs:
            view.heads = self.seen["heads"]
        if "received" in needs:
            view.received = self.seen["probs_received"]
        return view

    def _jittered(self, images: Tensor, keys: Tensor, now: Mapping[str, Tensor]) -> Tensor:
        """What the models see of the images. Where a layout says what is where, nothing moves."""
        config, moves = self.config, not self.task.has_layouts
        if config.views == "simclr" and moves:
            settings = asdict(self.recipe.calibration.augment)
            settings = {name: settings[name] for name in settings if name not in ("cutmix", "mixup")}
            pixels = self.engine.compiled(simclr)(self.geometry.pixels(images), keys, **settings)
            return self.geometry.normalise(pixels)
        if config.zoom < 1 and moves:
            images = self.engine.compiled(zoomed)(images, keys, now["zoom"])
        jittered: Tensor = self.engine.compiled(jitter)(
            images,
            keys,
            roll=now["roll"].long() if config.roll and moves else 0,
            noise=now["noise"] if config.noise else 0.0,
            colour=config.colour,
            flip=config.flip if moves else 0.0,
        )
        return jittered

    def _region(self, buffers: "_StepBuffers", keys: Tensor, now: Mapping[str, Tensor]) -> dict[str, Any]:
        """The region fields of a view: a random region of each image, enlarged and classified by the teacher."""
        found = regions(buffers.keys, buffers.labels, self.geometry.classes)
        keys = randomness.fold(keys, "region")
        chosen = (randomness.uniform(keys) * found.count).long()
        cells = found.cells.gather(1, chosen[:, None]).squeeze(1)
        enlarged = self._jittered(quarter(buffers.images, cells), keys, now)
        with self.engine.precision():
            logits = self.teacher(enlarged)
        return {"regions": found, "region": chosen, "region_logits": logits.float()}

    def last_masks(
        self, attention: Sequence[Tensor], indices: Tensor, round_index: int
    ) -> tuple[GridMasks, GridMasks, GridMasks]:
        """Informative region, mask m and thinned mask m' of the images of these numbers, at the last step of a round.

        Sizes and random numbers are those of that step. `attention` is P's attention to each patch, for example over
        the finished images, which are not jittered. Images that were not optimised have the masks of a first step.
        """
        steps = max(1, self.recipe.steps_in_round(round_index))
        now = {name: torch.tensor(values[-1]) for name, values in self._schedule(steps, lr=0.0).items()}
        whole = now | {f"keep {grid}": torch.tensor(math.prod(grid)) for grid in self._grids}  # keeps all that m has
        region = dict(whole)
        for grid in self._grids:
            k_ir = masks.mask_size(math.prod(grid), 0.0, self.config.mask.region, self.config.mask.region)
            region[f"k {grid}"] = whole[f"k {grid}"].clamp(min=k_ir)
        keys = randomness.fold(self._keys(indices, round_index, attempt=0), torch.tensor([steps - 1]))
        foreground = self._layouts(indices).get("foreground")
        informative, mask, thinned = (self._masks(attention, sizes, keys, foreground) for sizes in (region, whole, now))
        return informative, mask, thinned

    @property
    def _grids(self) -> list[tuple[int, int]]:
        return list({layer.grid: None for layer in self.geometry.layers})

    @torch.no_grad()
    def _masks(
        self,
        attention: Sequence[Tensor],
        now: Mapping[str, Tensor],
        keys: Tensor,
        foreground: Tensor | None = None,
    ) -> GridMasks:
        """m' of every patch grid: the most attended patches over the grid's layers, thinned (Eqs. 11-13).

        Args:
            foreground: (B, H, W) in [0, 1], the objects of a layout: patches that they cover by half belong to m too.
        """
        layers = self.geometry.layers
        found = {}
        for grid in self._grids:
            rows = [alpha for layer, alpha in zip(layers, attention, strict=True) if layer.grid == grid]
            alpha = torch.stack(rows).mean(dim=0)  # (B, N)
            mask = masks.top_patches(alpha, now[f"k {grid}"])
            if foreground is not None:
                covered = F.adaptive_avg_pool2d(foreground[:, None].to(mask.dtype), grid).flatten(1)
                mask = torch.maximum(mask, (covered >= 0.5).to(mask.dtype))
            found[grid] = masks.thin(mask, now[f"keep {grid}"], randomness.fold(keys, f"mask {grid}"))
        return found


class _StepBuffers:
    """The tensors that a step reads and writes, at fixed addresses, so that a captured step can be replayed.

    Args:
        schedule: the longest schedule of the run; its names are those of all schedules.
        layout: of any image, for its names, shapes and types.
    """

    advance: Callable[[], None]
    """One step of all images."""

    def __init__(
        self,
        count: int,
        geometry: Geometry,
        schedule: Mapping[str, list[float]],
        betas: tuple[float, float],
        layout: Layout,
        device: torch.device,
    ) -> None:
        shape = (count, geometry.channels, *geometry.image_size)
        self.images = torch.zeros(shape, device=device, requires_grad=True)
        self.low = geometry.normalise(torch.zeros_like(self.images[:1]))
        self.high = geometry.normalise(torch.ones_like(self.images[:1]))
        self.labels = torch.zeros(count, dtype=torch.int64, device=device)
        self.keys = torch.zeros(count, dtype=torch.int64, device=device)
        self.layout = {
            name: torch.zeros(count, *x.shape[1:], dtype=x.dtype, device=device) for name, x in layout.items()
        }
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.names = list(schedule)
        self.schedule = torch.zeros(len(schedule), len(schedule["lr"]), device=device)
        lr = torch.zeros((), device=device)  # a tensor, so that a replayed step sees it change
        self.adam = torch.optim.Adam([self.images], lr, betas, fused=True, capturable=device.type == "cuda")
        self.parts: dict[str, Tensor] = {}
        """(B,) of each loss term at the latest step."""

    @torch.no_grad()
    def fill(
        self, images: Tensor, labels: Tensor, keys: Tensor, schedule: Mapping[str, list[float]], layout: Layout
    ) -> None:
        """Start a new batch. If the buffers hold more images than given, the last one is repeated."""
        places = torch.arange(len(self.labels), device=images.device).clamp(max=len(images) - 1)
        self.images.copy_(images[places].clamp(self.low, self.high))
        self.labels.copy_(labels[places])
        self.keys.copy_(keys[places])
        for name, value in layout.items():
            self.layout[name].copy_(value[places])
        table = torch.tensor([schedule[name] for name in self.names])
        self.schedule[:, : table.shape[1]] = table.to(self.schedule.device)
        self.step.zero_()
        for state in self.adam.state.values():
            for tensor in state.values():
                tensor.zero_()

    def now(self) -> dict[str, Tensor]:
        """The schedule's values at this step."""
        return dict(zip(self.names, self.schedule.index_select(1, self.step).squeeze(1).unbind(), strict=True))

    @torch.no_grad()
    def descend(self, lr: Tensor) -> None:
        """One Adam step, clamped to the range of pixels."""
        self.adam.param_groups[0]["lr"].copy_(lr)
        self.adam.step()
        self.images.clamp_(self.low, self.high)
        self.step += 1


def synthesize(
    teacher: nn.Module, student: nn.Module, recipe: Recipe, *, seed: int = 0, progress: Progress | None = None
) -> SyntheticSet:
    """All synthetic images of one round, in memory."""
    synthesizer = Synthesizer(teacher, student, recipe, seed=seed, progress=progress)
    shards = torch.arange(recipe.synthesis.images).split(recipe.synthesis.batch)
    synthesizer.progress.stage("synthesize", recipe.synthesis.images * max(1, recipe.synthesis.steps))
    return SyntheticSet.concatenate(synthesizer(shard) for shard in shards)
