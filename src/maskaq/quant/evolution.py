"""Tournament selection as in Evol-Q: a search without gradients, and a function of its random key."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from maskaq.randomness import fold, uniform

_Candidate = TypeVar("_Candidate")


def evolved(
    population: list[tuple[float, _Candidate]],
    key: Tensor,
    cycles: int,
    tournament: int,
    child_of: Callable[[_Candidate, Tensor], tuple[float, _Candidate] | None],
) -> tuple[float, _Candidate]:
    """The best candidate with its cost, after so many cycles. Changes the population in place.

    In each cycle the best of some candidates, drawn at random, has a child, which replaces the worst candidate of all
    if it is better.

    Args:
        key: (1,) random key of the search.
        child_of: parent and key of the cycle -> cost and child; None for no child in this cycle.
    """
    for cycle in range(cycles):
        key_of_cycle = fold(key, f"cycle {cycle}")
        drawn = uniform(key_of_cycle, len(population))[0].argsort(stable=True)[:tournament]
        _, parent = min((population[n] for n in drawn.tolist()), key=lambda found: found[0])
        child = child_of(parent, key_of_cycle)
        worst = max(range(len(population)), key=lambda n: population[n][0])
        if child is not None and child[0] < population[worst][0]:
            population[worst] = child
    return min(population, key=lambda found: found[0])
