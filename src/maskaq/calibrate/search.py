"""Look for ranges layer by layer, by the error of what the layer gives (AdaLog's criterion, Wu et al. 2024).

A layer's scales are judged by its output and not by its input: an input that no weight reads may be wrong. Weights and
inputs in turn, three times over; each time the scale is multiplied by candidates, first coarse, then fine around the
best, and zero points are moved. A grid in equal ratios (`log`) keeps its smallest value, as AdaLog does the shift of
GELU's outputs, and tries all its ratios.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.calibrate.stage import GradientFree
from maskaq.models.products import Matmul
from maskaq.quant import grid
from maskaq.quant.kinds import layers
from maskaq.quant.quantizers import Log, MinMax, Quantizer
from maskaq.quant.ranges import OCTAVES
from maskaq.quant.twin import float_inputs, in_float

ROUNDS = 3
COARSE = [0.3 + 0.06 * n for n in range(16)]  # 0.3 to 1.2
FINE = [1 + 0.0075 * n for n in range(-8, 9)]
_ROWS = 1024  # of a linear layer's input
_WINDOWS = 64  # of a product


class Searcher(GradientFree):
    """The stage that searches the ranges of every quantized layer, on the inputs it has in the float model."""

    name = "search"

    @torch.no_grad()
    def fit(self, images: Tensor, epoch: int) -> dict[str, float]:
        before = after = 0.0
        for name, (module, _) in self.each([*layers(self.student).items()]):
            parts = [part for part in module.children() if isinstance(part, Quantizer)]
            if not parts:
                continue
            operands = self._operands(name, module, images)
            error = _error(module, operands)
            before += error().mean().item()
            for _ in range(ROUNDS):
                for part in parts:
                    _improve(part, error)
            after += error().mean().item()
        return {"error_before": before, "error": after}

    def _operands(self, name: str, module: nn.Module, images: Tensor) -> list[Tensor]:
        """Some rows of what the layer reads in the float model."""
        joined = float_inputs(self.student, images, [name])[name]
        if isinstance(module, Matmul):
            stride = -(-len(joined[0]) // _WINDOWS)
            return [x[::stride] for x in joined]
        if isinstance(module, nn.Conv2d):
            return [joined[0][:16]]
        rows = joined[0].flatten(0, -2)
        return [rows[:: -(-len(rows) // _ROWS)]]


def _error(module: Any, operands: list[Tensor]) -> Callable[[], Tensor]:
    """A function that gives the squared error of each output channel, or of each head, with the layer as it is."""
    with in_float(module):
        expected = module(*operands)
    axis = 1 if isinstance(module, Matmul | nn.Conv2d) else expected.dim() - 1

    def error() -> Tensor:
        difference = (module(*operands) - expected).square()
        return difference.movedim(axis, 0).flatten(1).mean(dim=1)

    return error


def _improve(part: Quantizer, error: Callable[[], Tensor]) -> None:
    """Leave the quantizer with the best candidate; never worse than it was."""
    if isinstance(part, MinMax):
        return  # its range follows the weights
    for factors in (COARSE, FINE):
        best, scale = error(), part.scale.detach().clone()
        found = scale.clone()
        for factor in factors:
            _set_scale(part, scale * factor)
            now = error()
            if len(now) == len(scale):  # each range by its own channels or heads
                better = now < best
                found, best = torch.where(better, scale * factor, found), torch.where(better, now, best)
            elif now.mean() < best.mean():
                found, best = scale * factor, now
        _set_scale(part, found)
    for restore, change in _other_settings(part):
        least = error().mean()
        change()
        if not error().mean() < least:
            restore()


def _set_scale(part: Quantizer, scale: Tensor) -> None:
    """Set the scale of a grid; a logarithmic one keeps its smallest value."""
    if isinstance(part, Log):
        part.zero_point.data.mul_(part.scale.detach() / scale)
    part.scale.data.copy_(scale)


def _other_settings(part: Quantizer) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    """(undo, do) of zero points one code further, and of other ratios of a log grid."""

    def set_to(tensor: Tensor, value: Tensor) -> Callable[[], Any]:
        return lambda: tensor.data.copy_(value)

    if isinstance(part, Log):
        for octaves in OCTAVES:
            levels = grid.log_levels(part.site.bits, octaves).to(part.levels.device)
            yield set_to(part.levels, part.levels.clone()), set_to(part.levels, levels)
    elif part.site.role == "activation" and part.site.signed:
        for step in (-1, 1, -1, 1):
            moved = (part.zero_point.detach() + step).clamp(part.low, part.high)
            yield set_to(part.zero_point, part.zero_point.detach().clone()), set_to(part.zero_point, moved)
