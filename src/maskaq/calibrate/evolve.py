"""Weight scales by evolution, block by block, without gradients (CLAMP-ViT's second stage, on Evol-Q's scheme).

A candidate is the scales of a block's weights. The best of some candidates has a mutated child, which replaces the
worst of all. Candidates are ranked by their loss on the images: contrast between each patch of Q and P's patches around
it in the block's output, plus the mean absolute difference of the outputs. Evol-Q ranks them by validation accuracy.
"""

from typing import Any

import torch
from torch import Tensor, nn

from maskaq import randomness
from maskaq.calibrate.stage import GradientFree
from maskaq.errors import RecipeError
from maskaq.losses.distill import neighbour_contrast
from maskaq.models.taps import taps
from maskaq.quant.evolution import evolved
from maskaq.quant.layers import QuantWeightMixin
from maskaq.quant.quantizers import MinMax, Quantizer

Scales = list[Tensor]


class Evolver(GradientFree):
    name = "evolve"

    def __init__(self, teacher: nn.Module, student: nn.Module, recipe: Any, **kwargs: Any) -> None:
        super().__init__(teacher, student, recipe, **kwargs)
        refuse_following_weights(student, self.name)
        self.own = recipe.calibration.evolve
        self.blocks = list({layer.block: None for layer in self.geometry.layers})

    @torch.no_grad()
    def fit(self, images: Tensor, epoch: int) -> dict[str, float]:
        loss = 0.0
        for place in self.each(range(len(self.blocks))[::-1]):
            loss = self._evolve(images, place, epoch)
        return {"fitness": loss}

    def _evolve(self, images: Tensor, place: int, epoch: int) -> float:
        """Leave the block with the best scales found; their loss."""
        block = self.student.get_submodule(self.blocks[place])
        layers = [module for module in block.modules() if isinstance(module, QuantWeightMixin)]
        owners: list[Any] = [m.weight_quantizer for m in layers if isinstance(m.weight_quantizer, Quantizer)]
        if not owners:
            return self._loss(images, place)
        root = randomness.fold(randomness.image_keys(self.seed, torch.tensor([place])), f"evolve {epoch}")
        start = [owner.scale.detach().clone() for owner in owners]

        def judged(scales: Scales) -> tuple[float, Scales]:
            for owner, scale in zip(owners, scales, strict=True):
                owner.scale.data.copy_(scale)
            return self._loss(images, place), scales

        first = [start, *(self._mutated(start, randomness.fold(root, n)) for n in range(1, self.own.population))]
        population = [judged(scales) for scales in first]
        _, best = evolved(
            population,
            root,
            self.own.cycles,
            self.own.tournament,
            lambda parent, key: judged(self._mutated(parent, key)),
        )
        return judged(best)[0]

    def _mutated(self, scales: Scales, key: Tensor) -> Scales:
        """Each scale moved by up to the spread; never below a thousandth of it, so that it stays a step."""
        found = []
        for n, scale in enumerate(scales):
            change = randomness.uniform(randomness.fold(key, n), len(scale))[0].to(scale.device) * 2 - 1
            found.append((scale + self.own.spread * change).abs().clamp(min=1e-3 * self.own.spread + 1e-12))
        return found

    def _loss(self, images: Tensor, place: int) -> float:
        row = self.geometry.blocks.index(self.blocks[place])
        layer = next(layer for layer in self.geometry.layers if layer.block == self.blocks[place])
        total = 0.0
        with taps(self.teacher, "blocks") as p, taps(self.student, "blocks") as q:
            for part in images.split(32):
                gap = (self.teacher(part) - self.student(part)).abs().mean(dim=1)
                own, found = (_patches(seen["blocks"][row], layer.prefix_tokens, layer.grid) for seen in (p, q))
                total += (neighbour_contrast(own, found) + gap).sum().item()
        return total / len(images)


def _patches(tokens: Tensor, prefix: int, grid: tuple[int, int]) -> Tensor:
    """A block's output -> (B, rows, columns, C): Swin's is in this form already."""
    return tokens if tokens.dim() == 4 else tokens[:, prefix:].unflatten(1, grid)


def refuse_following_weights(student: nn.Module, stage: str) -> None:
    """RecipeError where the range of a weight follows the weight: then there is no scale of its own to learn."""
    for module in student.modules():
        if isinstance(module, MinMax):
            raise RecipeError(
                f"calibration.stages: {stage} needs weights with a scale of their own, and {module.site.name} has "
                f"{module.site.quantizer}, which follows the weights: set quantization.weight to static or lsq"
            )
