"""Quantizers: small modules that own a range. To add one, write a class and give it a name.

    @quantizer("mine")
    class Mine(Quantizer): ...

A quantizer refuses to run until its range has been set by `set_range` or loaded from a state dict.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from maskaq import randomness
from maskaq.errors import RangeError, RecipeError, unknown
from maskaq.quant import grid, ranges
from maskaq.quant.site import Role, Site

QUANTIZERS: dict[str, type["Quantizer"]] = {}

_OBSERVED = 1 << 14  # values kept of an observed tensor: enough for a range, few enough for a fast search


class Quantizer(nn.Module):
    """Base class: a uniform grid with a scale and, for signed activations, an integer zero point.

    Weights are symmetric on signed codes. Activations use unsigned codes, with a zero point where they can be negative;
    at a symmetric site that is the middle code.
    """

    roles: ClassVar[tuple[Role, ...]] = ("weight", "activation")
    derived: ClassVar[tuple[str, ...]] = ()
    """Buffers that every forward pass recomputes; they are not part of a student's state."""
    scale: Tensor
    zero_point: Tensor

    def __init__(self, site: Site) -> None:
        super().__init__()
        if site.role not in self.roles:
            raise RecipeError(
                f"quantizer {type(self).__name__} cannot serve {site.name}: it is for {self.roles[0]}s only"
            )
        self.site = site
        is_weight = site.role == "weight"
        self.symmetric = is_weight or (site.symmetric and site.signed)
        self.low, self.high = grid.code_range(site.bits, signed=is_weight)
        self.middle = 0 if is_weight else 1 << site.bits - 1
        self.narrow = is_weight and site.symmetric and site.bits == 8  # fewer bits are far from -128
        if self.narrow:
            self.low = -self.high
        self.ready = False
        self.observed: list[Tensor] | None = None
        self.share = 1.0
        """Share of the batch in this micro-batch; keeps the LSQ gradient scale constant."""
        self.drop = 0.0
        """Probability that a value is left in float (QDrop); 1: all values."""
        self.drop_key: Tensor | None = None
        """(1,) the random key that decides which values."""

    def forward(self, x: Tensor) -> Tensor:
        if self.observed is not None:
            self.observed.append(self._seen(x.detach()))
            return x
        if self.drop >= 1:
            return x
        self._check_ready()
        values = self.fake_quantize(x)
        if self.drop and self.drop_key is not None:
            values = torch.where(randomness.uniform(self.drop_key, x.numel()).view(x.shape) < self.drop, x, values)
        return values

    def fake_quantize(self, x: Tensor) -> Tensor:
        scale, zero_point = self._grid(x)
        return grid.fake_quantize(x, scale, zero_point, self.low, self.high)

    def codes(self, x: Tensor) -> Tensor:
        """The integer codes of x: `dequantize(codes(x))` equals the forward pass exactly."""
        self._check_ready()
        scale, zero_point = self._grid(x)
        return grid.quantize(x, scale, zero_point, self.low, self.high)

    def dequantize(self, codes: Tensor) -> Tensor:
        scale, zero_point = self._grid(codes)
        return grid.dequantize(codes, scale, zero_point)

    def set_range(
        self, values: Tensor, method: str, percentile: float = 1.0, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Set scale and zero point for these values by a method of `maskaq.quant.ranges`; returns (C,) low and high."""
        of_values = None if weights is None else self._rows(weights)
        low, high = ranges.RANGES[method](self._rows(values), self.site.bits, self.symmetric, percentile, of_values)
        if self.symmetric:
            self._store(self._symmetric_scale(torch.maximum(-low, high)), torch.full_like(low, self.middle))
        else:
            self._store(*ranges.affine(low if self.site.signed else torch.zeros_like(low), high, self.site.bits))
        self.ready = True
        return low, high

    def _symmetric_scale(self, bound: Tensor) -> Tensor:
        return ranges.symmetric(bound, self.site.bits, self.narrow)

    def _rows(self, values: Tensor) -> Tensor:
        """(C, M): the values of each range."""
        if not torch.isfinite(values).all():
            raise RangeError(f"{self.site.name}: values with NaN or Inf cannot set a range; are the weights sound?")
        if self.site.heads:
            return values.movedim(-3, 0).flatten(1)
        return values.flatten(1) if self.site.channels else values.reshape(1, -1)

    def _seen(self, x: Tensor) -> Tensor:
        """A sample of an observed tensor's values and, for relative errors, their weights."""
        if self.site.range != "relative":
            return self.sample(x, _OBSERVED)[None]
        weights = ranges.importance(x, axis=-2 if self.site.slot == "b" else -1)
        return self.sample(x, _OBSERVED, weights)

    def set_observed_range(self, percentile: float) -> None:
        """Choose the range for what was observed."""
        values, *weights = torch.cat(self.observed or [], dim=-1)
        self.set_range(values, self.site.range, percentile, *weights)

    def sample(self, x: Tensor, most: int, *others: Tensor) -> Tensor:
        """About `most` values of an activation: (M,) or (heads, 1, M); with `others`: (1 + others, ...)."""
        if not self.site.heads:
            return ranges.sample(x, most, *others)
        heads = zip(*(tensor.movedim(-3, 0) for tensor in (x, *others)), strict=True)
        parts = [ranges.sample(head, most // self.site.heads, *rest)[..., None, :] for head, *rest in heads]
        return torch.stack(parts, dim=1 if others else 0)

    def _store(self, scale: Tensor, zero_point: Tensor) -> None:
        """Set scale and zero point to these values, in place."""
        self.scale.data.copy_(scale.reshape(self.scale.shape))
        self.zero_point.data.copy_(zero_point.reshape(self.zero_point.shape))

    def _grid(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point, shaped to broadcast over x."""
        scale, zero_point = self.step(x.numel())
        shape = (-1,) + (1,) * (x.dim() - 1) if self.site.channels else (-1, 1, 1) if self.site.heads else ()
        return scale.reshape(shape), zero_point.reshape(shape)

    def step(self, values: int) -> tuple[Tensor, Tensor]:
        """The (C,) scale and zero point for a tensor of this many values."""
        return self._step(round(values / len(self.scale) / self.share))

    def _step(self, values_per_range: int) -> tuple[Tensor, Tensor]:
        """The (C,) scale and integer zero point in use, with gradients if they are learned."""
        return self.scale, self.zero_point

    def _check_ready(self) -> None:
        if not self.ready:
            raise RangeError(
                f"{self.site.name} has no range yet: first call maskaq.init_ranges_(student, images, scheme)"
            )

    def _load_from_state_dict(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super()._load_from_state_dict(*args, **kwargs)
        self.ready = not bool(torch.isnan(self.scale).any())

    def extra_repr(self) -> str:
        where = f"per {self.site.granularity}" + (f" ({self.site.ranges})" if self.site.ranges > 1 else "")
        return f"{self.site.bits} bits, {where}, codes {self.low}..{self.high}"


def quantizer(name: str) -> Callable[[type[Quantizer]], type[Quantizer]]:
    """Class decorator that registers a quantizer under a recipe name."""

    def register(cls: type[Quantizer]) -> type[Quantizer]:
        if name in QUANTIZERS:
            raise ValueError(f"quantizer {name!r} is already {QUANTIZERS[name].__name__}")
        QUANTIZERS[name] = cls
        return cls

    return register


def make_quantizer(name: str, site: Site) -> Quantizer:
    """The quantizer of a recipe name for a site."""
    if name not in QUANTIZERS:
        raise RecipeError(unknown("quantizer", name, QUANTIZERS))
    return QUANTIZERS[name](site)


@quantizer("lsq")
class LSQ(Quantizer):
    """Learned step size, and a learned zero point where activations are signed (LSQ, LSQ+).

    Gradients of both are scaled by 1 / sqrt(values per range * largest code), as in LSQ.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        unset = torch.full((site.ranges,), math.nan)
        self.scale = nn.Parameter(unset.clone())
        if site.signed and not self.symmetric:
            self.zero_point = nn.Parameter(unset.clone())
        else:
            self.register_buffer("zero_point", torch.zeros_like(unset))

    def _step(self, values_per_range: int) -> tuple[Tensor, Tensor]:
        return grid.learned_grid(self.scale, self.zero_point, self.low, self.high, self._factor(values_per_range))

    def _factor(self, values_per_range: int) -> float:
        return 1.0 / math.sqrt(max(1, values_per_range) * self.high)


@quantizer("static")
class Static(Quantizer):
    """A range that is set once and never learned."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.register_buffer("scale", torch.full((site.ranges,), math.nan))
        self.register_buffer("zero_point", torch.zeros(site.ranges))


@quantizer("minmax")
class MinMax(Static):
    """Symmetric weights whose range follows them while they are trained: the largest magnitude of each channel."""

    roles = ("weight",)
    derived = ("scale",)

    def set_range(
        self, values: Tensor, method: str, percentile: float = 1.0, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Set the range by clipping the weights in place, as the range always follows the weights."""
        low, high = super().set_range(values, method, percentile, weights)
        bound = torch.maximum(-low, high).reshape((-1,) + (1,) * (values.dim() - 1))
        values.detach().clamp_(-bound, bound)
        return low, high

    def fake_quantize(self, x: Tensor) -> Tensor:
        self._follow(x)
        return super().fake_quantize(x)

    def codes(self, x: Tensor) -> Tensor:
        self._check_ready()
        self._follow(x)
        return super().codes(x)

    def _follow(self, x: Tensor) -> None:
        bound = x.detach().abs().flatten(1).amax(dim=1) if self.site.channels else x.detach().abs().amax()[None]
        self.scale.copy_(self._symmetric_scale(bound))

    def _step(self, values_per_range: int) -> tuple[Tensor, Tensor]:
        return self.scale.clone(), self.zero_point  # the next forward overwrites the buffer before this backward


@quantizer("minmax_full")
class MinMaxFull(MinMax):
    """As `minmax`, but no weight lies half way between two codes, and every weight has a gradient.

    With `minmax` the largest magnitude is (2^b - 1) / 2 steps, half way between two codes: the last bit of a float
    decides, and may differ on another device. Here the step is slightly smaller, so that the code is always the outer
    one. Because the range follows the weights, none is outside it, and gradients pass straight through to all.
    """

    def fake_quantize(self, x: Tensor) -> Tensor:
        return super().fake_quantize(x).detach() + (x - x.detach())

    def _follow(self, x: Tensor) -> None:
        super()._follow(x)
        self.scale.mul_(1 - 2e-6)  # more than the rounding error of a division by the scale


@quantizer("lsq_free")
class LSQFree(LSQ):
    """As `lsq`, but the zero point's gradient is not scaled, as in the paper's release, so that it moves far more."""

    def _step(self, values_per_range: int) -> tuple[Tensor, Tensor]:
        scale, _ = super()._step(values_per_range)
        _, zero_point = grid.learned_grid(self.scale.detach(), self.zero_point, self.low, self.high, 1.0)
        return scale, zero_point


@quantizer("log")
class Log(LSQ):
    """A logarithmic grid for the softmax and for the outputs of GELU, with integer levels and a learned scale.

    Levels are integers from 0 to 255 in equal ratios. They are chosen by least squared error with the first range and
    stay fixed. A signed site has a learned zero point too, in 8 bits as the levels. The learned parameters are the step
    and the zero point that LSQ has for the same range, so that both learn at the same rate.
    """

    roles = ("activation",)
    levels: Tensor

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        if site.signed and (site.slot != "input" or site.rotation):
            raise RecipeError(
                f"quantizer Log cannot serve {site.name}, negative as often as positive: it is for the softmax "
                "(*.av.a) and the outputs of GELU (*.fc2.input), unless they are rotated"
            )
        if self.symmetric:
            raise RecipeError(
                f"quantizer Log cannot serve {site.name}: it needs a zero point there, which quantization.target = "
                "symmetric forbids; set quantization.gelu to same"
            )
        self.register_buffer("levels", torch.full((1 << site.bits,), math.nan))

    def fake_quantize(self, x: Tensor) -> Tensor:
        scale, zero_point = self._grid(x)
        return grid.log_fake_quantize(x, scale, self.levels, zero_point)

    def codes(self, x: Tensor) -> Tensor:
        self._check_ready()
        scale, zero_point = self._grid(x)
        return grid.log_quantize(x, scale, self.levels, zero_point)

    def dequantize(self, codes: Tensor) -> Tensor:
        scale, zero_point = self._grid(codes)
        return grid.log_dequantize(codes, scale, self.levels, zero_point)

    def set_range(
        self, values: Tensor, method: str, percentile: float = 1.0, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        of_values = None if weights is None else self._rows(weights)
        signed = self.site.signed
        levels, low, high = ranges.log_grid(self._rows(values), self.site.bits, method, percentile, of_values, signed)
        self.levels.copy_(levels)
        scale, _ = ranges.affine(low, high, self.site.bits)
        self._store(scale, low.abs() / scale)
        self.ready = True
        return low, high

    def _step(self, values_per_range: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point of the levels: the largest level is 255, not the largest code."""
        zero_point = self.zero_point * (grid.LARGEST_LEVEL / self.high)
        factor = self._factor(values_per_range)
        scale, zero_point = grid.learned_grid(self.scale, zero_point, 0, grid.LARGEST_LEVEL, factor)
        return scale * (self.high / grid.LARGEST_LEVEL), zero_point
