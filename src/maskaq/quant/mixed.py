"""Mixed precision: choose the bit width of each layer's weights, given an average, by measured cost.

A layer's weights are quantized alone, at each width, and the predictions compared with the teacher's on synthetic
images. Bits then go where they save most, one layer at a time, until the average is reached.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from maskaq import randomness
from maskaq.errors import RecipeError
from maskaq.progress import Progress
from maskaq.quant.evolution import evolved
from maskaq.quant.kinds import layers
from maskaq.quant.layers import QuantWeightMixin, holding
from maskaq.quant.plan import QuantPlan, has_own_bits
from maskaq.quant.rotation import rotate_online_
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.recipe.schema import Quantization

WIDTHS = (2, 3, 4, 5, 6, 8)
"""Widths to choose from."""

Costs = dict[str, dict[int, float]]
"""Weight site -> width -> mean distance of P with these weights quantized to P."""


class Judge(Protocol):
    """How the outputs of two models are compared: a task."""

    def run(self, model: nn.Module, images: Tensor, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]: ...

    def distance(self, expected: Any, found: Any) -> Tensor: ...


def choose_bits(
    teacher: nn.Module,
    plan: QuantPlan,
    scheme: Quantization,
    average: float,
    images: Tensor,
    task: Judge,
    progress: Progress | None = None,
) -> QuantPlan:
    """The plan with other widths for weights: at most `average` bits over all weights that the plan quantizes.

    Sites whose bits a rule or `first_last` sets keep them, and count. `task` compares outputs.
    """
    weights = [site.name for site in plan if site.role == "weight"]
    fixed = {name for name in weights if has_own_bits(teacher, scheme, name)}
    free = [name for name in weights if name not in fixed]
    modules = {name: module for name, (module, kind) in layers(teacher).items() if "weight" in kind.slots}
    sizes: dict[str, int] = {f"{name}.weight": module.weight.numel() for name, module in modules.items()}  # type: ignore[operator, union-attr, misc]
    budget = average * sum(sizes[name] for name in weights)
    budget -= sum(plan.sites[name].bits * sizes[name] for name in fixed)
    if not free or budget < min(WIDTHS) * sum(sizes[name] for name in free):
        raise RecipeError(
            f"quantization.bits {scheme.bits!r}: the average cannot be reached with the bits that rules and first_last "
            "give to some weights; raise it, or take rules away"
        )
    costs = measure_costs(teacher, plan, scheme, free, images, task, progress)
    found = allocate(costs, sizes, budget)
    if scheme.mixed == "evolve":
        together = _Together(teacher, plan, scheme, free, images, task)
        found = evolve(found, {name: sizes[name] for name in free}, budget, together)
    return plan.with_bits(found)


def _of_width(
    bits: int, teacher: nn.Module, plan: QuantPlan, scheme: Quantization, sites: list[str], images: Tensor
) -> nn.Module:
    """A student with these weights alone quantized, all at one width."""
    student = quantized_twin(teacher, scheme, QuantPlan({name: replace(plan.sites[name], bits=bits) for name in sites}))
    init_ranges_(student, images[:1], scheme)
    return student


@torch.no_grad()
def measure_costs(
    teacher: nn.Module,
    plan: QuantPlan,
    scheme: Quantization,
    sites: list[str],
    images: Tensor,
    task: Judge,
    progress: Progress | None = None,
) -> Costs:
    """What each width of each site's weights costs alone."""
    progress = progress or Progress()
    progress.stage("measure layers for mixed precision", len(WIDTHS) * len(sites) * len(images))
    expected = task.run(teacher, images)
    unrounded = rotate_online_(copy.deepcopy(teacher))  # what a student's weights are before they are rounded
    costs: Costs = {name: {} for name in sites}
    for bits in WIDTHS:
        student = _of_width(bits, teacher, plan, scheme, sites, images)
        for name in sites:
            with _only(student, unrounded, name.removesuffix(".weight")):
                found = task.run(student, images, expected)
            costs[name][bits] = task.distance(expected, found).mean().item()
            progress.advance(len(images))
    return costs


def _only(student: nn.Module, unrounded: nn.Module, layer: str) -> AbstractContextManager[None]:
    """Context in which the weights of one layer are quantized and all others are not."""
    others = {n: m for n, m in student.named_modules() if isinstance(m, QuantWeightMixin) and n != layer}
    return holding({module: unrounded.get_submodule(name).weight.detach() for name, module in others.items()})  # type: ignore[union-attr, operator]


def allocate(costs: Costs, sizes: dict[str, int], budget: float) -> dict[str, int]:
    """Site -> width: from the smallest width up, always the step that saves most cost for its bits, within the budget.

    >>> allocate({"a": {2: 9.0, 4: 1.0}, "b": {2: 2.0, 4: 1.0}}, {"a": 10, "b": 10}, budget=60)
    {'a': 4, 'b': 2}
    """
    chosen = dict.fromkeys(costs, min(WIDTHS))
    left = budget - sum(bits * sizes[name] for name, bits in chosen.items())
    while True:
        steps = [
            ((costs[name][chosen[name]] - costs[name][wider]) / ((wider - chosen[name]) * sizes[name]), name, wider)
            for name in costs
            for wider in costs[name]
            if wider > chosen[name] and (wider - chosen[name]) * sizes[name] <= left
        ]
        if not steps:
            return chosen
        _, name, wider = max(steps)
        left -= (wider - chosen[name]) * sizes[name]
        chosen[name] = wider


POPULATION, TOURNAMENT, CYCLES = 15, 10, 100
"""Of `evolve`; the first two are Evol-Q's."""


def evolve(
    start: dict[str, int], sizes: dict[str, int], budget: float, cost: Callable[[dict[str, int]], float]
) -> dict[str, int]:
    """Site -> width, by evolution from a start: never a larger cost, within the budget (after CLAMP-ViT).

    A child has one layer at the next larger width and, where the budget asks for it, others at a smaller one.
    """
    names = sorted(start)
    root = randomness.image_keys(0, torch.arange(1))
    mutants = (_mutated(start, names, sizes, budget, randomness.fold(root, n)) for n in range(1, POPULATION))
    population = [(cost(found), found) for found in (start, *mutants)]

    def child_of(parent: dict[str, int], key: Tensor) -> tuple[float, dict[str, int]] | None:
        child = _mutated(parent, names, sizes, budget, key)
        return None if child in (known for _, known in population) else (cost(child), child)

    return evolved(population, root, CYCLES, TOURNAMENT, child_of)[1]


def _mutated(
    bits: dict[str, int], names: list[str], sizes: dict[str, int], budget: float, key: Tensor
) -> dict[str, int]:
    order = [names[n] for n in randomness.uniform(randomness.fold(key, "layers"), len(names))[0].argsort().tolist()]
    found = dict(bits)
    found[order[0]] = _next(found[order[0]], 1)
    for name in order[1:]:
        if sum(found[n] * sizes[n] for n in names) <= budget:
            return found
        found[name] = _next(found[name], -1)
    return found if sum(found[n] * sizes[n] for n in names) <= budget else dict(bits)


def _next(bits: int, step: int) -> int:
    """The next width up or down, if there is one."""
    place = WIDTHS.index(bits) + step if bits in WIDTHS else 0
    return WIDTHS[min(max(place, 0), len(WIDTHS) - 1)]


class _Together:
    """Widths of all layers -> distance of P with all these weights quantized to P. Each width has one student."""

    def __init__(
        self,
        teacher: nn.Module,
        plan: QuantPlan,
        scheme: Quantization,
        sites: list[str],
        images: Tensor,
        task: Judge,
    ) -> None:
        self.students = {bits: _of_width(bits, teacher, plan, scheme, sites, images) for bits in WIDTHS}
        self.images, self.task = images, task
        with torch.no_grad():
            self.expected = task.run(teacher, images)

    @torch.no_grad()
    def __call__(self, bits: dict[str, int]) -> float:
        student = self.students[max(WIDTHS)]
        weights: dict[QuantWeightMixin, Tensor] = {}
        for name, width in bits.items():
            path = name.removesuffix(".weight")
            layer, source = (model.get_submodule(path) for model in (student, self.students[width]))
            assert isinstance(layer, QuantWeightMixin) and isinstance(source, QuantWeightMixin)
            weights[layer] = source.quantized_weight()
        with holding(weights):
            found = self.task.run(student, self.images, self.expected)
        return self.task.distance(self.expected, found).mean().item()
