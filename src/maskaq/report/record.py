"""Read a run folder for its report: figures, curves, images, in plain values. Needs no model."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from maskaq.calibrate.handover import WHICH, Handover
from maskaq.errors import RunFolderError
from maskaq.images.sets import Trajectory
from maskaq.recipe.schema import Recipe, recipe_from_dict, to_dict
from maskaq.report.collect import Collected
from maskaq.schedules import cosine
from maskaq.storage import files
from maskaq.storage.runfolder import METRICS_FILE, QUANTIZED, TRAJECTORY_FILE, RunFolder, dotted
from maskaq.tasks import CALIBRATED, TASKS, Task


@dataclass(frozen=True)
class Curve:
    """One quantity over steps or epochs."""

    x: list[float]
    y: list[float]
    marks: list[float] = field(default_factory=list)
    """Where a refresh of the images lies on x."""


@dataclass(frozen=True)
class Record:
    """One run, as the report shows it."""

    run: RunFolder
    collected: Collected
    missing: str = ""
    """Why parts of what was collected are not there."""
    unfinished: str = ""
    """How far a run came that is not finished."""

    @property
    def name(self) -> str:
        return self.run.root.resolve().name

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_from_dict(self.run.identity["recipe"])

    @property
    def kind(self) -> str:
        """Kind of its images: synthetic, noise, dead_leaves or real."""
        kind = "synthetic" if self.recipe.makes_images else self.recipe.synthesis.start
        return kind if self.recipe.data_free else "real"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recipe and the seed under dotted keys."""
        return {**dotted(to_dict(self.recipe)), "seed": self.run.identity["seed"]}

    @property
    def bits(self) -> str:
        """The widths in words."""
        bits = self.recipe.bits
        weights = f"{bits.weight}-bit weights"
        if bits.average is not None:
            weights = f"weights of {bits.average:g} bits on average"
        return f"{weights} and {bits.activation}-bit activations"

    @property
    def facts(self) -> dict[str, Any]:
        return self.collected.facts

    @property
    def model(self) -> str:
        source = self.run.source or {}
        return str(source.get("name") or self.run.identity["model"]["class"])

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        source = self.run.source or {}
        if source.get("command"):
            return str(source["command"])
        bits = self.recipe.quantization.bits
        seed = self.run.identity["seed"]
        if source.get("name"):
            recipe = shlex.quote(str(self.run.path("recipe.toml")))
            return f"maskaq quantize {shlex.quote(self.model)} --recipe {recipe} --bits {bits} --seed {seed}"
        return f'maskaq.quantize(model, maskaq.load_recipe("{self.run.path("recipe.toml")}"), seed={seed})'

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Name of a model -> its accuracy; empty where the run was not evaluated."""
        found = _object(self.run.read_json(METRICS_FILE)) if self.run.path(METRICS_FILE).exists() else {}
        if found.get("model") not in (None, _object(self._saved.get("weights")).get("sha256")):
            rows = _object(found.get("accuracy"))  # measured on a model that was handed over before this one
            found["accuracy"] = {name: row for name, row in rows.items() if name != CALIBRATED}
        return found

    @property
    def task(self) -> Task:
        """The task of the model; runs of 0.1 do not record it and are classifiers."""
        recorded = self.run.facts.get("task")
        return TASKS.get(recorded if isinstance(recorded, str) else "", TASKS["classification"])

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """Model -> its figures, of those that were measured."""
        return {name: row for name, row in _object(self.metrics.get("accuracy")).items() if self.task.is_row(row)}

    @property
    def bytes(self) -> tuple[int, int] | None:
        """Bytes of all weights, in float32 and packed at their bits."""
        rows = self.facts.get("sizes")
        if not rows:
            return None
        return sum(row["float_bytes"] for row in rows), sum(row["quantized_bytes"] for row in rows)

    @property
    def saved(self) -> int | None:
        """Bytes of the quantized model's file; None where there is none."""
        path = self.run.path(f"{QUANTIZED}/model.safetensors")
        return path.stat().st_size if path.exists() else None

    @property
    def handover(self) -> str:
        """A message if calibration made the model worse, else an empty string."""
        recorded = _object(_object(self._saved.get("made")).get("handover"))
        try:
            names = {field.name for field in fields(Handover)} - {"seconds", "distance"}
            found = Handover(**{name: recorded[name] for name in names}, seconds=0.0)
            found = replace(found, distance=str(recorded.get("distance", found.distance)))
            return f"{found}. {WHICH[found.kept]}" if found.end_is_worse else ""
        except (KeyError, TypeError, ValueError):  # none, or not as a run writes it
            return ""

    @cached_property
    def _saved(self) -> dict[str, Any]:
        """The config of the run's saved model; empty where there is none."""
        path = self.run.path(f"{QUANTIZED}/config.json")
        try:
            return _object(self.run.read_json(f"{QUANTIZED}/config.json")) if path.exists() else {}
        except RunFolderError:  # `maskaq.from_pretrained` says what is wrong with it
            return {}

    @cached_property
    def trajectories(self) -> dict[int, Trajectory]:
        """Round -> snapshots of one image's optimisation."""
        found = {}
        for round_index in range(len(self.recipe.rounds)):
            path = self.run.path(TRAJECTORY_FILE.format(round=round_index))
            if path.exists():
                tensors, words = files.read_tensors(path, "delete it: the report does without it")
                if "number" in words:  # else it is unknown which image it is
                    steps = [int(step) for step in words["steps"].split()]
                    found[round_index] = Trajectory(int(words["number"]), tensors["images"], steps)
        return found

    # ---- curves

    @cached_property
    def _events(self) -> tuple[dict[tuple[int, int], dict[str, Any]], dict[int, dict[str, Any]]]:
        """Shards by (round, shard) and epochs by number: what was done again after a kill counts once."""
        events = [event for event in self.run.events() if isinstance(event, dict)]
        shards = {(e["round"], e["shard"]): e for e in events if {"round", "shard", "curves"} <= e.keys()}
        epochs = {e["epoch"]: e for e in events if {"round", "epoch"} <= e.keys()}
        return dict(sorted(shards.items())), dict(sorted(epochs.items()))

    @property
    def seconds(self) -> dict[str, float | None]:
        """Seconds of each stage and in total; None if the events are missing."""
        shards, epochs = self._events
        named = {"synthesis": [*shards.values()], "calibration": [*epochs.values()]}
        named["all"] = [*shards.values(), *epochs.values()]
        return {
            stage: sum(e.get("seconds", 0.0) for e in events) if events else None for stage, events in named.items()
        }

    @cached_property
    def synthesis(self) -> dict[str, Curve]:
        """Each loss term over the steps of all rounds, averaged over the shards."""
        sums: dict[str, dict[int, list[float]]] = {}
        offsets = self._offsets()
        for (round_index, _), event in self._events[0].items():
            for point in event.get("curves", ()):
                for term, value in point.items():
                    if term != "step":
                        at = sums.setdefault(term, {}).setdefault(offsets[round_index] + point["step"], [])
                        at.append(value)
        return {
            term: Curve(sorted(points), [sum(points[x]) / len(points[x]) for x in sorted(points)], self._marks(offsets))
            for term, points in sums.items()
        }

    @property
    def synthesis_rate(self) -> Curve:
        """The learning rate on the pixels, from the recipe."""
        config = self.recipe.synthesis
        offsets = self._offsets()
        curve = Curve([], [], self._marks(self._offsets()))
        for round_index in sorted({round_index for round_index, _ in self._events[0]}):
            steps = self.recipe.steps_in_round(round_index)
            for step in sorted({i * (steps - 1) // 99 for i in range(100) if steps}):
                curve.x.append(offsets[round_index] + step)
                curve.y.append(self.recipe.lr_in_round(round_index) * cosine(step / steps, config.lr_final))
        return curve

    @cached_property
    def calibration(self) -> dict[str, Curve]:
        """The loss, each of its terms and the learning rate over the epochs."""
        epochs = self._events[1]
        known = ("time", "stage", "round", "epoch", "seconds")
        names = {name: None for event in epochs.values() for name in event if name not in known}
        marks = [
            float(epochs_of.start) for epochs_of in self.recipe.rounds[1:] if epochs_of.start <= max(epochs, default=0)
        ]
        return {
            name: Curve(
                [e for e in epochs if name in epochs[e]], [v[name] for v in epochs.values() if name in v], marks
            )
            for name in names
        }

    def _offsets(self) -> dict[int, int]:
        """First step of each round, counted over all rounds."""
        rounds = range(len(self.recipe.rounds))
        return {round_index: sum(self.recipe.steps_in_round(r) for r in range(round_index)) for round_index in rounds}

    def _marks(self, offsets: Mapping[int, int]) -> list[float]:
        there = {round_index for round_index, _ in self._events[0]}
        return [float(offset) for round_index, offset in offsets.items() if round_index and round_index in there]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def differences(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Setting -> its value in each run, for those that are not the same in all."""
    keys = {key: None for record in records for key in record.settings}
    rows = {key: [record.settings.get(key) for record in records] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}
