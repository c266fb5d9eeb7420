"""Where the tokens of an attention lie on the image, found out by experiment.

A block is run on inputs in which some places were changed, and the queries tell which token saw the change. With the
places numbered in binary and one input for each digit, a handful of inputs tell where every token is from, whatever
shifts, windows, grids and padding lie between. Where a token sees several places, as behind a convolution or a
pooling, there is no such layout.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.models.products import AttentionProducts
from maskaq.randomness import fold, image_keys, normal


@dataclass(frozen=True)
class Layout:
    """How the tokens of one attention lie on the image; see `maskaq.shapes.Layer`."""

    grid: tuple[int, int]
    windows: int
    prefix_tokens: int
    raster: Tensor | None
    form: str
    """How the block's input holds the places, of which it is not known yet that they go over the image row by row."""


class _Reached(Exception):
    """The queries and keys that a watched attention was called with."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.pair = q, k


def queries_and_keys(products: AttentionProducts, run: Callable[[], Any]) -> tuple[Tensor, Tensor] | None:
    """(B*W, H, T, D) of both; what comes behind them is not computed. None if the attention is not reached."""

    def stop(q: Tensor, k: Tensor) -> None:
        raise _Reached(q, k)

    products.watched = stop
    try:
        with torch.no_grad():
            run()
    except _Reached as reached:
        return reached.pair
    finally:
        products.watched = None
    return None


def find_layout(
    module: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    products: AttentionProducts,
    grids: Iterable[tuple[int, int]],
) -> Layout | None:
    """The layout of an attention inside a module, which was called with `inputs`; None if there is none."""
    args, kwargs = inputs
    for form in _forms(args, grids):
        patterns, digits = form.coded(args[0])
        try:
            found = queries_and_keys(products, lambda x=patterns: module(x, *args[1:], **kwargs))  # type: ignore[misc]
        except Exception:  # other arguments are for one image: whatever the module's own code says to that
            continue
        if found is not None and (tokens := _decode(found[0], form, digits)) is not None:
            keys = _decode(found[1], form, digits)
            return form.layout(tokens) if keys is not None and torch.equal(keys, tokens) else None
    return None


@dataclass(frozen=True)
class _Form:
    """Which axes of a module's input are places: rows and columns, or one axis behind some prefix tokens."""

    grid: tuple[int, int]
    axis: int
    """The first of the places' axes."""
    prefix: int = 0
    sequence: bool = False

    @property
    def places(self) -> int:
        return self.grid[0] * self.grid[1]

    def coded(self, x: Tensor) -> tuple[Tensor, int]:
        """The input as it is, then for each binary digit with the places changed whose number has it; and how many."""
        digits = self.places.bit_length()
        numbers = torch.arange(1, self.places + 1, device=x.device)
        bits = (numbers >> torch.arange(digits, device=x.device)[:, None]) & 1  # (digits, places)
        bits = torch.cat([bits.new_zeros(1, self.places), bits])
        if self.sequence:
            bits = torch.nn.functional.pad(bits, (self.prefix, 0))
        shape = [len(bits)] + [1] * (x.dim() - 1)
        shape[self.axis : self.axis + 2 - self.sequence] = [bits.shape[1]] if self.sequence else self.grid
        key = fold(image_keys(0, torch.zeros(1, dtype=torch.int64)), "layout")
        change = normal(key, x.numel()).view(x.shape).to(x) * (x.std() + 1)  # not constant: a norm would not see it
        return x + change * bits.view(shape).to(x.dtype), digits

    def layout(self, tokens: Tensor) -> Layout:
        """From (W, T): the place of each token, counted from 1; 0 for prefix tokens and padding."""
        prefix = self.prefix if len(tokens) == 1 else 0
        places = tokens[:, prefix:].flatten()
        raster = torch.where(places > 0, places, self.places + 1).argsort(stable=True)[: self.places]
        in_order = len(raster) == len(places) and bool((raster[1:] > raster[:-1]).all())
        return Layout(self.grid, len(tokens), prefix, None if in_order else raster, f"{self.axis} {self.sequence}")


def _forms(args: tuple[Any, ...], grids: Iterable[tuple[int, int]]) -> list[_Form]:
    """The ways in which what a module was called with, for one image, may hold the places of the image."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or len(x) != 1:
        return []
    if x.dim() == 4:
        sides = {1: (x.shape[1], x.shape[2]), 2: (x.shape[2], x.shape[3])}
        return [_Form(grid, axis) for axis, grid in sides.items() if grid in set(grids)]
    fitting = [grid for grid in grids if x.dim() == 3 and 0 <= x.shape[1] - grid[0] * grid[1] < 32]
    largest = sorted(fitting, key=lambda grid: -grid[0] * grid[1])[:1]
    return [_Form(g, axis=1, prefix=x.shape[1] - g[0] * g[1], sequence=True) for g in largest]


def _decode(q: Tensor, form: _Form, digits: int) -> Tensor | None:
    """(W, T): the place of each token, counted from 1, or 0; None unless every place has exactly one."""
    if q.dim() != 4 or len(q) % (digits + 1):
        return None
    q = q.unflatten(0, (digits + 1, -1))  # (inputs, W, H, T, D)
    difference = (q[1:] - q[:1]).abs().amax(dim=-1)  # (digits, W, H, T)
    changed = difference > 1e-3 * difference.max()
    weights = 2 ** torch.arange(digits, device=q.device)
    numbers = (changed * weights.view(-1, 1, 1, 1)).sum(dim=0)  # (W, H, T): 0 for what is no place
    if not (numbers == numbers[:, :1]).all():
        return None
    tokens = numbers[:, 0]  # (W, T)
    prefix = form.prefix if len(tokens) == 1 else 0
    if tokens[:, :prefix].any():
        return None
    places = tokens[tokens > 0].sort().values
    return tokens if torch.equal(places, torch.arange(1, form.places + 1, device=q.device)) else None


def is_in_raster_order(model: nn.Module, products: AttentionProducts, image: Tensor, layout: Layout) -> bool:
    """Whether a sequence of places goes over the image row by row: seen on images changed in one half.

    Behind convolutions every token may see all of the image: it sees most of the half that it lies in.
    """
    height, width = image.shape[2:]
    change = normal(fold(image_keys(0, torch.zeros(1, dtype=torch.int64)), "half"), *image.shape[1:]).to(image) * 3
    half = torch.zeros(5, 1, height, width, device=image.device)
    half[1, :, : height // 2] = half[2, :, height // 2 :] = 1
    half[3, :, :, : width // 2] = half[4, :, :, width // 2 :] = 1
    found = queries_and_keys(products, lambda: model(image + change * half))
    places = layout.grid[0] * layout.grid[1]
    if found is None or found[0].dim() != 4 or len(found[0]) % 5:
        return False
    q = found[0].unflatten(0, (5, -1)).transpose(2, 3)[:, :, layout.prefix_tokens :].flatten(1, 2)  # (5, W*Q, H, D)
    q = q if layout.raster is None else q[:, layout.raster]
    if q.shape[1] != places:
        return False
    upper, lower, left, right = (q[1:] - q[:1]).flatten(2).norm(dim=2).unflatten(1, layout.grid)
    return _is_first_half(upper > lower) and _is_first_half((left > right).T)


def _is_first_half(there: Tensor) -> bool:
    """(n, m): whether the first lines are there and the last are not, but for a few places."""
    quarter = max(1, len(there) // 4)
    return bool(there[:quarter].float().mean() > 0.9 and there[-quarter:].float().mean() < 0.1)
