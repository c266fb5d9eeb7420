"""Fit MLPs with ReLU in place of GELU to the model's own, one by one, in float (APHQ-ViT's MLP reconstruction).

What leaves a ReLU is never negative and needs no zero point; what leaves a GELU has a long tail on one side and a short
one on the other. The layers before and behind learn to give what the model's MLP gives, on its own inputs. A second
pass, which counts twice, has values above a percentile cut off: so the range that a grid has to cover becomes smaller.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq import randomness
from maskaq.calibrate.stage import GradientFree
from maskaq.errors import RecipeError
from maskaq.images.sets import SyntheticSet, to_pixels
from maskaq.images.stored import range_images
from maskaq.models.structure import gelu_mlps
from maskaq.quant.twin import init_ranges_, set_weight_ranges_
from maskaq.schedules import cosine

_TOKENS = 2048  # of a step


class Rectifier(GradientFree):
    """The stage that fits the MLPs; afterwards all ranges are found again."""

    name = "relu"

    def __init__(self, teacher: nn.Module, student: nn.Module, recipe: Any, **kwargs: Any) -> None:
        super().__init__(teacher, student, recipe, **kwargs)
        if recipe.quantization.mlp != "relu":
            raise RecipeError(
                "calibration.stages: relu fits MLPs with ReLU in place of GELU: set quantization.mlp to relu, or leave "
                f"the stage out (now {recipe.quantization.mlp})"
            )

    def epoch(self, data: SyntheticSet, epoch: int) -> dict[str, float]:
        own = self.recipe.calibration.relu
        device = next(self.teacher.parameters()).device
        images = self.geometry.normalise(to_pixels(data.images[: own.images].to(device)))
        self._left = len(data)
        errors = [self._fit(name, images) for name in self.each(gelu_mlps(self.teacher))]
        set_weight_ranges_(self.student, self.scheme)
        init_ranges_(self.student, range_images(self.teacher, data, self.recipe), self.scheme)
        before, after = (sum(found) / len(errors) for found in zip(*errors, strict=True))
        return {"error_before": before, "error": after}

    def _fit(self, name: str, images: Tensor) -> tuple[float, float]:
        """Relative squared error of one MLP before and after."""
        own = self.recipe.calibration.relu
        inputs, wanted = self._seen(name, images)
        mlp: Any = self.student.get_submodule(name)
        power = (wanted - wanted.mean(dim=0)).square().mean().clamp(min=1e-12)
        parameters = [p for layer in (mlp.fc1, mlp.fc2) for p in (layer.weight, layer.bias) if p is not None]
        with torch.no_grad():
            hidden = F.relu(F.linear(inputs, mlp.fc1.weight, mlp.fc1.bias))
            positive = hidden[hidden > 0]
            some = positive[:: max(1, len(positive) // 65536)]  # enough for a percentile
            top = some.quantile(own.clip) if len(some) else hidden.new_ones(())

        def error(x: Tensor, y: Tensor, limit: Tensor | None = None) -> Tensor:
            hidden = F.relu(F.linear(x, mlp.fc1.weight, mlp.fc1.bias))
            hidden = mlp.norm(hidden if limit is None else hidden.clamp(max=limit))
            return (F.linear(hidden, mlp.fc2.weight, mlp.fc2.bias) - y).square().mean() / power

        with torch.no_grad():
            before = error(inputs, wanted).item()
        optimizer = torch.optim.Adam(parameters)
        key = randomness.fold(randomness.image_keys(self.seed, torch.arange(1)), f"relu {name}")
        for step in range(own.steps):
            optimizer.param_groups[0]["lr"] = own.lr * cosine(step / own.steps, 0.0)
            rows = randomness.uniform(randomness.fold(key, step), min(_TOKENS, len(inputs)))[0]
            chosen = (rows * len(inputs)).long().to(inputs.device)
            optimizer.zero_grad(set_to_none=True)
            (error(inputs[chosen], wanted[chosen]) + 2 * error(inputs[chosen], wanted[chosen], top)).backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            return before, error(inputs, wanted).item()

    @torch.no_grad()
    def _seen(self, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the teacher's MLP takes and gives, token by token."""
        pairs: list[tuple[Tensor, Tensor]] = []
        module = self.teacher.get_submodule(name)
        with module.register_forward_hook(lambda _, inputs, output: pairs.append((inputs[0], output))):
            for part in images.split(32):
                self.teacher(part)
        taken, given = (torch.cat([x.flatten(0, -2) for x in found]) for found in zip(*pairs, strict=True))
        return taken, given
