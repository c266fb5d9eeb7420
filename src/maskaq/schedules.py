"""Schedules over steps: the learning rate, and which steps are logged."""

import math
from collections.abc import Sequence

_LOGGED = 20  # points of a loss curve


def cosine(fraction: float, final: float) -> float:
    """Factor of the learning rate: 1 at fraction 0, `final` at fraction 1."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * fraction))


def spread(items: Sequence[int], count: int) -> list[int]:
    """At most `count` items, evenly spaced, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def logged_steps(steps: int) -> set[int]:
    """The steps at which the loss terms of the images are recorded."""
    return set(spread(range(steps), _LOGGED))
