"""Hours of a run on 1 to 1,000 GPUs, with failures: a simulation from measured step times.

    python benchmarks/simulate.py benchmarks/results/2026-11-16-h200-*-ffb7bc2.json

The files are of `maskaq bench --json` or `benchmarks/steps.py`. Simulated is what the code does: parts of a round's
images are claimed by whoever is free; a worker that dies gives its part back when its lease ends, and comes back later;
a round ends when all its images are there; then some ranks calibrate, go back to the last checkpoint when one of them
dies, and start the next round. What was not measured is an argument. Where the step of a smaller calibration batch was
not measured, that of the next larger one stands for it, which is too much and never too little.
"""

import argparse
import heapq
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles

from maskaq.recipe.schema import Recipe, load_recipe

PARAMETERS = {"deit_tiny": 5.7e6, "deit_small": 22e6, "deit_base": 86.6e6, "swin_tiny": 28.3e6}


@dataclass(frozen=True)
class Measured:
    """Step times of a model on one GPU."""

    model: str
    synthesis: dict[int, float]
    """Batch -> seconds of a step of that many images."""
    calibration: dict[int, float]
    setup: float
    """Seconds before the first step, with compiled code in the cache."""

    @property
    def parameters(self) -> float:
        return next(count for name, count in PARAMETERS.items() if self.model.startswith(name))

    def calibration_step(self, batch: int) -> float:
        larger = [size for size in self.calibration if size >= batch]
        return self.calibration[min(larger)] if larger else math.inf


def read(files: Sequence[Path]) -> list[Measured]:
    steps: dict[str, dict[str, dict[int, float]]] = {}
    setup: dict[str, float] = {}
    for file in files:
        for timing in json.loads(file.read_text())["timings"]:
            batch, model = timing["batch"], timing["model"]
            steps.setdefault(model, {}).setdefault(timing["stage"], {})[batch] = batch * timing["microseconds"] / 1e6
            setup[model] = max(setup.get(model, 0.0), timing["setup_seconds"])
    return [Measured(m, found["synthesis"], found["calibration"], setup[m]) for m, found in sorted(steps.items())]


@dataclass(frozen=True)
class Cluster:
    gpus: int
    ranks: int
    """GPUs of one node that calibrate together, at most."""
    mtbf: float
    """Seconds between failures of one GPU."""
    repair: float
    """Seconds until a worker that died is there again."""
    lease: float
    bandwidth: float
    """Bytes per second of a sum over ranks, each way."""
    checkpoint: float = 30.0
    look: float = 0.5


def run(recipe: Recipe, measured: Measured, cluster: Cluster, chance: random.Random) -> tuple[float, int]:
    """Seconds of one run, and the failures in it."""
    batch = max(measured.synthesis)
    ready = [measured.setup] * cluster.gpus  # when each worker is free
    now, failures = 0.0, 0
    for index, epochs in enumerate(recipe.rounds):
        parts = -(-recipe.synthesis.images // batch)
        now, ready, failed = synthesise(
            parts, recipe.steps_in_round(index) * measured.synthesis[batch], now, ready, cluster, measured.setup, chance
        )
        took, crashed = calibrate(recipe, len(epochs), measured, cluster, chance)
        now += took
        failures += failed + crashed
    return now, failures


def synthesise(
    parts: int, seconds: float, now: float, ready: list[float], cluster: Cluster, setup: float, chance: random.Random
) -> tuple[float, list[float], int]:
    """When all parts of a round are there, when each worker is free, and how many died."""
    workers = [(max(now, at), number) for number, at in enumerate(ready)]
    heapq.heapify(workers)
    open_parts = [now] * parts  # since when each can be claimed
    heapq.heapify(open_parts)
    ends, failures = [], 0
    while open_parts:
        at, number = heapq.heappop(workers)
        begin = max(at, heapq.heappop(open_parts))
        dies = chance.expovariate(1 / cluster.mtbf)
        if dies < seconds:
            failures += 1
            heapq.heappush(open_parts, begin + dies + cluster.lease)
            heapq.heappush(workers, (begin + dies + cluster.repair + setup, number))
        else:
            ends.append(begin + seconds)
            heapq.heappush(workers, (begin + seconds, number))
    free = [0.0] * len(ready)
    for at, number in workers:
        free[number] = at
    return max(ends) + cluster.look, free, failures


def calibrate(
    recipe: Recipe, epochs: int, measured: Measured, cluster: Cluster, chance: random.Random
) -> tuple[float, int]:
    """Seconds of the epochs of a round on the best number of ranks, and how often one of them died."""
    counts = [2**n for n in range(8) if 2**n <= min(cluster.gpus, cluster.ranks, recipe.calibration.batch)]
    ranks = min(counts, key=lambda count: step(recipe, measured, cluster, count))
    epoch = -(-recipe.synthesis.images // recipe.calibration.batch) * step(recipe, measured, cluster, ranks)
    interval = max(cluster.checkpoint, epoch)
    left, took, failures = epochs * epoch, 0.0, 0
    while left > 0:
        dies = chance.expovariate(ranks / cluster.mtbf)
        if dies >= left:
            return took + left, failures
        failures += 1
        took += dies + cluster.repair + measured.setup
        left -= dies // interval * interval
    return took, failures


def step(recipe: Recipe, measured: Measured, cluster: Cluster, ranks: int) -> float:
    own = -(-recipe.calibration.batch // ranks)
    share = 2 * 4 * measured.parameters * (ranks - 1) / ranks
    return measured.calibration_step(own) + share / cluster.bandwidth


def formula(recipe: Recipe, measured: Measured, cluster: Cluster) -> float:
    """R [ceil(N / (G B)) S B t(B)] + E ceil(N / b) (t_it + 2 P / bandwidth), without failures."""
    batch = max(measured.synthesis)
    waves = -(-recipe.synthesis.images // (cluster.gpus * batch))
    rounds = sum(recipe.steps_in_round(index) for index in range(len(recipe.rounds)))
    steps = recipe.epochs * -(-recipe.synthesis.images // recipe.calibration.batch)
    ranks = min(cluster.gpus, cluster.ranks, recipe.calibration.batch)
    sums = 8 * measured.parameters / cluster.bandwidth if ranks > 1 else 0.0
    own = measured.calibration_step(-(-recipe.calibration.batch // ranks))
    return waves * rounds * measured.synthesis[batch] + steps * (own + sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--recipe", default="paper")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 1000])
    parser.add_argument("--ranks", type=int, default=8, help="GPUs that calibrate together, at most (default: 8)")
    parser.add_argument("--mtbf", type=float, default=50_000, help="GPU hours between failures (default: 50,000)")
    parser.add_argument("--repair", type=float, default=300, help="seconds until a worker is back (default: 300)")
    parser.add_argument("--lease", type=float, default=60)
    parser.add_argument("--bandwidth", type=float, default=100e9, help="bytes per second of a sum (default: 1e11)")
    parser.add_argument("--runs", type=int, default=500)
    args = parser.parse_args()
    recipe = load_recipe(args.recipe)
    print("| model | GPUs | hours, mean | 95 % | failures a run | formula | times faster | efficiency |")
    print("|---|---|---|---|---|---|---|---|")
    for measured in read(args.files):
        one = 0.0
        for gpus in args.gpus:
            cluster = Cluster(gpus, args.ranks, args.mtbf * 3600, args.repair, args.lease, args.bandwidth)
            chance = random.Random(0)
            found = [run(recipe, measured, cluster, chance) for _ in range(args.runs)]
            hours = [seconds / 3600 for seconds, _ in found]
            one = one or mean(hours)
            failures = mean(count for _, count in found)
            expected = formula(recipe, measured, cluster) / 3600
            faster = one / mean(hours)
            figures = (f"{mean(hours):.2f}", f"{quantiles(hours, n=20)[-1]:.2f}", f"{failures:.4f}", f"{expected:.2f}")
            print("|", " | ".join((measured.model, str(gpus), *figures, f"{faster:.1f}", f"{faster / gpus:.0%}")), "|")


if __name__ == "__main__":
    main()
