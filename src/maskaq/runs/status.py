"""The progress of a run, or of a table of runs, and its workers: read from the folder, on any machine."""

import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from maskaq.recipe.schema import Recipe, recipe_from_dict
from maskaq.runs.compare import ROWS_FILE
from maskaq.storage.files import lines_of
from maskaq.storage.leases import Held, Leases
from maskaq.storage.runfolder import LEADER, QUANTIZED, RunFolder


@dataclass(frozen=True)
class Working:
    """A worker of the current round, from its leases and events."""

    name: str
    does: str
    """What it has a lease for; empty if it waits or has left."""
    gone: bool
    """Whether the process is certainly dead, which only its own machine can tell."""
    silent: float | None
    """Seconds since it last touched its lease, by this machine's clock; None without a lease."""
    shards: int
    """Number that it has made, in all rounds."""
    rate: float
    """Images times steps per second."""


@dataclass(frozen=True)
class Status:
    """The status of a run."""

    folder: str
    stage: str
    """`synthesize`, `calibrate` or `finished`."""
    round: int
    rounds: int
    shards: int
    """Of the current round."""
    shards_in_round: int
    epochs: int
    epochs_in_all: int
    workers: list[Working]
    left: float | None
    """Seconds left at the rates so far; None if they are not known yet."""

    @property
    def is_worked_on(self) -> bool:
        return any(worker.does and not worker.gone for worker in self.workers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class FleetStatus:
    """The status of a table whose rows are runs, shared among processes."""

    folder: str
    done: int
    """Number of rows that are done."""
    seconds: float | None
    """Average time of a row."""
    rows: dict[str, str]
    """Row -> the worker that runs it."""
    runs: list[Status]
    """The status of these rows, if they have begun."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def stage(self) -> str:
        return "at work" if self.rows else "nobody works on it"


def status(folder: str | Path) -> Status | FleetStatus:
    """The status of a run folder, or of a folder with a table of runs; writes nothing."""
    path = Path(folder)
    is_fleet = not (path / "run.json").exists() and ((path / ROWS_FILE).exists() or (path / "leases").is_dir())
    return _of_fleet(path) if is_fleet else _of_run(path)


def _of_fleet(folder: Path) -> FleetStatus:
    lines = lines_of(folder / ROWS_FILE)
    times = [line["seconds"] for line in lines if line.get("seconds")]
    held = Leases(folder / "leases").all()
    rows = {name: _name(lease) for name, lease in held.items() if not _is_gone(lease)}
    runs = [_of_run(folder / name) for name in rows if (folder / name / "run.json").exists()]
    return FleetStatus(str(folder), len(lines), mean(times) if times else None, rows, runs)


def _of_run(folder: Path) -> Status:
    run = RunFolder.read(folder)
    recipe = recipe_from_dict(run.identity["recipe"])
    events = [event for event in run.events() if isinstance(event, dict)]
    finished = run.path(QUANTIZED).exists()
    epochs = max((int(e["epoch"]) + 1 for e in events if "epoch" in e), default=max(run.checkpoints(), default=0))
    epochs = recipe.epochs if finished else min(epochs, recipe.epochs)
    rounds = range(len(recipe.rounds))
    last = max((index for index in rounds if run.order(index) is not None or run.shards(index)), default=0)
    here = len(rounds) - 1 if finished else last
    in_round = -(-recipe.synthesis.images // recipe.synthesis.batch)
    shards = len(run.shards(here))
    stage = "finished" if finished else "synthesize" if shards < in_round else "calibrate"
    workers = [] if finished else list(_workers(run, recipe, events, here))
    return Status(
        folder=str(folder),
        stage=stage,
        round=here + 1,
        rounds=len(rounds),
        shards=shards,
        shards_in_round=in_round,
        epochs=epochs,
        epochs_in_all=recipe.epochs,
        workers=workers,
        left=0.0 if finished else _left(recipe, here, shards / in_round, epochs, workers, events),
    )


def _in_words(lease: str) -> str:
    """What the owner of a lease with this name does."""
    if lease == LEADER:
        return "leads the run"
    part = re.fullmatch(r"round_(\d+)-part_(\d+)", lease)
    return f"part {int(part[2]) + 1} of round {int(part[1]) + 1}" if part else lease


def _name(lease: Held) -> str:
    return str(lease.worker or "not yet known")


def _is_gone(lease: Held) -> bool:
    return lease.worker is not None and lease.worker.is_dead()


def _workers(run: RunFolder, recipe: Recipe, events: list[dict[str, Any]], here: int) -> Iterable[Working]:
    """Workers that have a lease or have made images of the current round."""
    made: dict[str, list[tuple[float, float]]] = {}
    leases: dict[str, dict[str, Held]] = {}
    for name, lease in Leases(run.path("leases")).all().items():
        leases.setdefault(_name(lease), {})[name] = lease
    for event in events:
        if {"shard", "worker", "seconds", "round"} <= event.keys():
            first = event["shard"] * recipe.synthesis.batch
            count = min(recipe.synthesis.batch, recipe.synthesis.images - first)
            steps = max(1, recipe.steps_in_round(event["round"]))
            made.setdefault(event["worker"], []).append((count * steps, event["seconds"]))
            if event["round"] == here:
                leases.setdefault(event["worker"], {})
    for worker, held in leases.items():
        does = ", ".join(map(_in_words, held))
        gone = any(map(_is_gone, held.values()))
        silent = time.time() - max(lease.touched for lease in held.values()) if held else None
        work = made.get(worker, [])
        seconds = sum(took for _, took in work)
        rate = sum(count for count, _ in work) / seconds if seconds else 0.0
        yield Working(worker, does, gone, silent, len(work), rate)


def _left(
    recipe: Recipe, here: int, done: float, epochs: int, workers: list[Working], events: list[dict[str, Any]]
) -> float | None:
    """Seconds left: images at the rates of the current workers, epochs at the pace of the latest ones.

    Before the first epoch is done, it is assumed to take as long as one step of all images on the fastest worker.
    """
    images = recipe.synthesis.images
    steps = recipe.steps_in_round(here) * (1 - done) + sum(
        map(recipe.steps_in_round, range(here + 1, len(recipe.rounds)))
    )
    # During synthesis, a worker without a lease has left; during calibration, all but the leader wait for a round.
    rate = sum(worker.rate for worker in workers if not worker.gone and (worker.does or done == 1))
    paces = [e["seconds"] for e in events if {"epoch", "seconds"} <= e.keys()][-20:]
    fastest = max((worker.rate for worker in workers), default=0.0) if recipe.most_steps else 0.0
    pace = median(paces) if paces else images / fastest if fastest else None
    if (steps and not rate) or (epochs < recipe.epochs and pace is None):
        return None
    return (images * steps / rate if steps else 0.0) + (recipe.epochs - epochs) * (pace or 0.0)
