"""Images of a conditional generator in place of free pixels (GDFQ, Xu et al. 2020; Qimera; AdaDFQ).

A generator is trained against the same loss terms as pixels are; then it gives any number of images. Unlike pixels, the
images share its weights: they depend on the whole training and, during training, on their batch through batch norms.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq import randomness
from maskaq.errors import RecipeError
from maskaq.images.sets import SyntheticSet, Trajectory, to_bytes
from maskaq.losses.terms import SYNTHESIS_TERMS, Objective, SynthesisView
from maskaq.models import geometry
from maskaq.progress import Progress
from maskaq.quant.twin import frozen
from maskaq.recipe.schema import Generator as Settings
from maskaq.recipe.schema import Recipe
from maskaq.shapes import Geometry
from maskaq.tasks import task_of

_LOGGED_POINTS = 20


class ConditionalNorm(nn.Module):
    """Batch norm whose scale and shift are those of the classes, mixed by their shares."""

    def __init__(self, channels: int, classes: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, eps=eps, affine=False)
        self.scale = nn.Parameter(torch.ones(classes, channels))
        self.shift = nn.Parameter(torch.zeros(classes, channels))

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        scale, shift = (shares @ table for table in (self.scale, self.shift))
        return self.norm(x) * scale[..., None, None] + shift[..., None, None]


class Generator(nn.Module):
    """Latent vectors and shares of classes -> normalised images: a linear layer and three convolutions.

    Args:
        prototypes: (classes, D) what the latent vectors of the classes start from; by default random.
    """

    def __init__(self, settings: Settings, spec: Geometry, prototypes: Tensor | None = None) -> None:
        super().__init__()
        height, width = (-(-side // 4) for side in spec.image_size)
        self.size = spec.image_size
        self.start = (settings.channels, height, width)
        latent = settings.latent or (prototypes.shape[1] if prototypes is not None else 100)
        self.superposes = settings.superpose > 0
        self.latent = latent
        self.table = nn.Parameter(torch.zeros(spec.classes, latent))
        self.balance = nn.BatchNorm1d(latent, affine=False)
        self.first = nn.Linear(latent, math.prod(self.start))
        half = max(1, settings.channels // 2)
        self.norms = nn.ModuleList(
            [
                ConditionalNorm(settings.channels, spec.classes),
                ConditionalNorm(settings.channels, spec.classes, eps=0.8),
                ConditionalNorm(half, spec.classes, eps=0.8),
            ]
        )
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(settings.channels, settings.channels, 3, padding=1),
                nn.Conv2d(settings.channels, half, 3, padding=1),
                nn.Conv2d(half, spec.channels, 3, padding=1),
            ]
        )
        self.last = nn.BatchNorm2d(spec.channels, affine=False)

    @torch.no_grad()
    def initialise(self, seed: int, prototypes: Tensor | None = None) -> "Generator":
        """Weights as a function of the seed, as torch draws them: uniform, narrower the more inputs there are."""
        for name, parameter in self.named_parameters():
            if name.endswith((".scale", ".shift")):
                continue
            key = randomness.fold(randomness.image_keys(seed, torch.zeros(1, dtype=torch.int64)), f"generator {name}")
            if name == "table":
                drawn = randomness.normal(key, *parameter.shape)[0]
            else:
                owner = self.get_submodule(name.rpartition(".")[0])
                bound = 1 / math.sqrt(owner.weight[0].numel())  # type: ignore[index, union-attr, operator]
                drawn = (2 * randomness.uniform(key, *parameter.shape)[0] - 1) * bound
            parameter.copy_(drawn)
        if prototypes is not None and prototypes.shape == self.table.shape:
            self.table.copy_(prototypes)
        return self

    def forward(self, noise: Tensor, shares: Tensor) -> Tensor:
        own = shares @ self.table
        latent = self.balance(own + noise) if self.superposes else own * noise
        x = self.norms[0](self.first(latent).unflatten(1, self.start), shares)
        x = self.convs[0](F.interpolate(x, scale_factor=2))
        x = F.leaky_relu(self.norms[1](x, shares), 0.2)
        x = self.convs[1](F.interpolate(x, scale_factor=2))
        x = F.leaky_relu(self.norms[2](x, shares), 0.2)
        x = self.last(torch.tanh(self.convs[2](x)))
        return x[..., : self.size[0], : self.size[1]]


class GeneratorTraining:
    """A generator with its optimiser: one step at a time, each a function of its number."""

    def __init__(self, teacher: nn.Module, student: nn.Module, recipe: Recipe, seed: int) -> None:
        self.teacher, self.student, self.recipe, self.seed = teacher, student, recipe, seed
        self.config = recipe.synthesis
        self.settings = recipe.synthesis.generator
        self.device = next(teacher.parameters()).device
        self.geometry = geometry(teacher).to(self.device)
        self.task = task_of(teacher)
        if not self.geometry.classes:
            raise RecipeError("synthesis.generator: a generator makes images of classes, and this model has none")
        self.objective = Objective(SYNTHESIS_TERMS, self.task.terms(self.config.terms), "synthesis.terms")
        if too_much := self.objective.needs - {"student"}:
            raise RecipeError(
                f"synthesis.terms: a generator's loss sees outputs and pixels, no {', '.join(sorted(too_much))}: set "
                "the weights of terms that need them to 0"
            )
        head: Any = teacher.get_submodule(self.geometry.last[0])
        prototypes = None if self.settings.latent else head.weight.detach()
        self.model = Generator(self.settings, self.geometry, prototypes).initialise(
            seed, None if prototypes is None else prototypes.cpu()
        )
        self.model.to(self.device)
        betas = (self.config.beta1, self.config.beta2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), self.config.lr, betas=betas)
        self._weights: dict[nn.Module, Tensor] = {}

    def draw(self, numbers: Tensor, purpose: str, labels: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Noise, labels and shares of classes for these numbers; labels are random unless they are given."""
        keys = randomness.fold(randomness.image_keys(self.seed, numbers.to(self.device)), purpose)
        classes = self.geometry.classes
        if labels is None:
            labels = (randomness.uniform(randomness.fold(keys, "label")) * classes).long()
        shares = F.one_hot(labels, classes).float()
        if self.settings.superpose:
            count = min(self.settings.classes, classes)
            ranks = randomness.uniform(randomness.fold(keys, "mixed classes"), classes).argsort(dim=1)
            scores = randomness.normal(randomness.fold(keys, "class shares"), classes)
            mixed = torch.where(ranks < count, scores, -math.inf).softmax(dim=1)
            chosen = randomness.uniform(randomness.fold(keys, "superposed")) < self.settings.superpose
            shares = torch.where(chosen[:, None], mixed, shares)
        return randomness.normal(randomness.fold(keys, "latent"), self.model.latent), labels, shares

    def step(self, number: int) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
        """Train for one step; the batch that it saw: images, labels and shares, and the mean of each term."""
        size = self.settings.batch
        noise, labels, shares = self.draw(torch.arange(size) + number * size, "generator batch")
        self.model.train()
        images = self.model(noise, shares)
        with frozen(self.student, self._weights):
            outputs = self.task.run(self.teacher, images)
            view = SynthesisView(images, labels, outputs, self.geometry.layers, ())
            if "student" in self.objective.needs:
                view.student_outputs = self.task.run(self.student, images, outputs)
            view.shares = shares if self.settings.superpose else None
            total, parts = self.objective(view)
            self.optimizer.zero_grad(set_to_none=True)
            total.mean().backward()
        self.optimizer.step()
        return images.detach(), labels, shares, {name: float(value.mean()) for name, value in parts.items()}


class GeneratedImages:
    """An image source: trains a generator once, against the student as it is, and gives images by number."""

    stage = "generate"
    fingerprint: str | None = None

    def __init__(
        self, teacher: nn.Module, student: nn.Module, recipe: Recipe, *, seed: int = 0, progress: Progress | None = None
    ) -> None:
        self.teacher, self.student = teacher, student
        self.recipe = recipe
        self.seed = seed
        self.progress = progress or Progress()
        self.training = GeneratorTraining(teacher, student, recipe, seed)
        self.curves: list[dict[str, float]] = []
        self.trajectory: Trajectory | None = None
        self.blamed: str | None = None

    @cached_property
    def _trained(self) -> Generator:
        steps = self.recipe.synthesis.generator.steps
        logged = {round(i * (steps - 1) / (_LOGGED_POINTS - 1)) for i in range(_LOGGED_POINTS)}
        self.progress.stage("train the generator", steps)
        for number in range(steps):
            *_, parts = self.training.step(number)
            self.progress.advance(1)
            if number in logged:
                self.curves.append({"step": number, **parts})
        return self.training.model.eval()

    @torch.no_grad()
    def __call__(self, indices: Tensor, round_index: int = 0, start: SyntheticSet | None = None) -> SyntheticSet:
        work = max(1, self.recipe.steps_in_round(round_index))
        begins = "_trained" not in vars(self)
        with torch.enable_grad():
            model = self._trained
        if begins:  # the stage that the generator's interrupted
            self.progress.stage(self.stage, len(indices) * work)
        device = self.training.device
        labels = self.training.task.targets(indices.to(device), self.training.geometry.classes)
        noise, _, shares = self.training.draw(indices, "generated image", labels)
        images = torch.cat([model(n, s) for n, s in zip(noise.split(64), shares.split(64), strict=True)])
        self.progress.advance(len(indices) * work)
        pixels = self.training.geometry.pixels(images).clamp(0, 1)
        finite = torch.isfinite(pixels).flatten(1).all(dim=1)
        return SyntheticSet(to_bytes(pixels[finite]), labels[finite], indices.to(device)[finite]).to("cpu")

    def shards_at_once(self, missing: int) -> int:
        return missing

    def expect(self, images: int) -> None:
        """Images of a trained generator are the same in any call."""

    def seconds_per_image_step(self) -> float | None:
        return None
