"""Several recipes on one model, side by side: runs the rows that are missing, one after another, and measures each.

A row is one run: a recipe, bits, a seed and overrides. OUT/NAME is its run folder, and a line of OUT/rows.jsonl has its
results. A row with a line is not run again, but is evaluated on folders of images that are new. Several processes, on
any machines that can access it, may share one OUT: each row is leased to one of them.
"""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.artifact.saved import from_pretrained, read_config
from maskaq.errors import BusyError, DataError, MaskaqError, RecipeError, RunFolderError
from maskaq.models import expose
from maskaq.models.hf import adopted
from maskaq.progress import Progress
from maskaq.quant.twin import frozen
from maskaq.recipe.schema import Recipe, load_recipe
from maskaq.report.collect import FACTS_FILE
from maskaq.runs.arguments import model_identity
from maskaq.runs.provenance import commit, pick_device
from maskaq.runs.quantize import quantize
from maskaq.storage.files import lines_of, locked, short, write_bytes_atomic
from maskaq.storage.leases import Leases, check_shared
from maskaq.storage.runfolder import QUANTIZED, RunFolder
from maskaq.tasks import task_of
from maskaq.tasks.outputs import joined, on_cpu
from maskaq.torchrun import are_started

ROWS_FILE = "rows.jsonl"
_RESERVED = ("leases", "rows.lock", "compare.html", "compare.md", "compare.tex")
_FEWEST_IMAGES = 32
_SECONDS_BETWEEN_TRIES = 10.0  # to run a row whose folder is locked

Batches = Callable[[nn.Module, str], Iterable[tuple[Tensor, Any]]]
"""A model and the name of a folder -> its images and labels, or annotations."""


@dataclass(frozen=True)
class Row:
    """One run of a comparison."""

    name: str
    model: str
    recipe: str
    bits: str
    seed: int = 0
    overrides: tuple[str, ...] = ()


def read_rows(file: str | Path) -> list[Row]:
    """The rows of a file, one per line: `name | model | recipe | bits | seed | key=value ...`; # starts a comment."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the rows in {file}: {error}") from error
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    rows = [_row(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line]
    if twice := _twice(rows):
        raise RecipeError(f"{file}: expected a name of its own for each row, got {twice!r} more than once")
    return rows


def _twice(rows: Sequence[Row]) -> str | None:
    """The first name that occurs more than once."""
    names = [row.name for row in rows]
    return next((name for name in names if names.count(name) > 1), None)


def _row(line: str, where: str) -> Row:
    parts = [part.strip() for part in line.split("|")]
    if len(parts) != 6 or not re.fullmatch(r"[\w.+-]*\w", parts[0]) or not parts[4].isdecimal():
        raise RecipeError(
            f"{where}: expected NAME | model | recipe | bits | SEED | key=value ..., with a plain name, got: {line}"
        )
    name, model, recipe, bits, seed, overrides = parts
    return Row(name, model, recipe, bits, int(seed), tuple(overrides.split()))


def rows_of(
    model: str, recipes: Sequence[str], bits: Sequence[str], seeds: Sequence[int], overrides: Sequence[str] = ()
) -> list[Row]:
    """Every recipe at every width with every seed; all rows of the first seed come first."""
    rows = []
    for seed in seeds:
        for width in bits:
            for recipe in recipes:
                plain = re.sub(r"[^\w.+-]+", "-", recipe).strip("-.+")
                name = f"{plain}-{width.replace(':', '-')}-{seed}"
                rows.append(Row(name, model, recipe, width, seed, tuple(overrides)))
    return rows


def scaled(recipe: Recipe, scale: float) -> Recipe:
    """The recipe with a share of its budget: of its images and of the steps of a generator; the rest is unchanged.

    The cost of synthesis and calibration is proportional to the number of images. A method with a few dozen keeps all.
    """
    if scale == 1:
        return recipe

    def share(number: int, least: int) -> int:
        return min(number, max(least, round(number * scale)))

    synthesis, calibration = recipe.synthesis, recipe.calibration
    images = share(synthesis.images, _FEWEST_IMAGES)
    generator = replace(synthesis.generator, steps=share(synthesis.generator.steps, 1))
    interleave = replace(calibration.interleave, iterations=share(calibration.interleave.iterations, 1))
    return replace(
        recipe,
        synthesis=replace(synthesis, images=images, batch=min(synthesis.batch, images), generator=generator),
        calibration=replace(calibration, interleave=interleave),
    )


@dataclass
class Line:
    """The results of a row, as in OUT/rows.jsonl."""

    name: str
    model: str
    recipe: str
    bits: str
    seed: int
    overrides: list[str] = field(default_factory=list)
    scale: float = 1.0
    images: str = ""
    """Number of images, and steps of each round."""
    data_free: bool = True
    quantized: dict[str, Any] = field(default_factory=dict)
    """What was quantized: digest of the weights, size and normalization of images."""
    calibrated_on: str = ""
    """The folder of real images that the row was calibrated on; empty if there is none."""
    top1: dict[str, float] = field(default_factory=dict)
    """Folder of images -> the task's headline figure: top-1 in percent, cosine similarity, mIoU, AP of boxes."""
    hits: dict[str, str] = field(default_factory=dict)
    """Folder -> one character per image: 1 where the model is right."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Folder -> all figures of the evaluation, where an image is not simply right or wrong."""
    kl: dict[str, float] = field(default_factory=dict)
    """Folder -> mean distance of Q's outputs to P's."""
    seconds: float = 0.0
    """Time of the run, without the measurements for its report."""
    handover: dict[str, Any] | None = None
    device: str = ""
    commit: str | None = None
    failed: str = ""
    """Why there is no model; empty if there is one."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Line":
        known = {key: value for key, value in values.items() if key in cls.__dataclass_fields__}
        return cls(**known)


class Comparison:
    """The rows of a comparison in their folder, both finished and missing.

    Args:
        model: the full-precision model of all rows.
        batches: evaluation images; without folders nothing is measured.
        folders: names of evaluation folders, as `batches` takes them.
        keep_images: keep the images and checkpoints of every run, which take most of its space.
    """

    def __init__(
        self,
        out: str | Path,
        model: nn.Module,
        rows: Sequence[Row],
        *,
        source: Mapping[str, Any],
        batches: Batches | None = None,
        folders: Sequence[str] = (),
        scale: float = 1.0,
        device: str | None = None,
        fast: bool | None = None,
        keep_images: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if are_started():
            raise RecipeError("a comparison is not for torchrun: start it once for each GPU, with the same --out")
        self.out = Path(out)
        self.model = model
        self.rows = list(rows)
        self.source = dict(source)
        self.batches = batches
        self.folders = list(folders)
        self.scale = scale
        self.device = pick_device(device)
        self.fast = fast
        self.keep_images = keep_images
        self.progress = progress or Progress()
        self.task = task_of(model)
        self._expected: dict[str, dict[str, Tensor]] = {}
        self._images: dict[str, Iterable[tuple[Tensor, Any]]] = {}
        if twice := _twice(rows):
            raise RecipeError(f"expected a name of its own for each row, got {twice!r} more than once")
        if odd := sorted({row.name for row in rows} & {ROWS_FILE, *_RESERVED}):
            raise RecipeError(f"a row cannot be named {odd[0]!r}: the comparison has a file of that name")
        self.recipes = {row.name: self._recipe(row) for row in rows}  # a wrong one fails before anything is run
        ours = model_identity(adopted(model))
        self._quantized = {"weights": ours["model"]["weights"], **ours["preparation"]}
        check_shared(self.out)  # with other processes that take rows

    @property
    def file(self) -> Path:
        return self.out / ROWS_FILE

    def lines(self) -> dict[str, Line]:
        """Row name -> results, of the rows that are done."""
        return {line["name"]: Line.from_dict(line) for line in lines_of(self.file)}

    def is_left(self, again: bool = True) -> bool:
        """Whether rows are still to run or to measure; those that failed only if they are to be tried again.

        Rows that are there under the same names with other settings are refused.
        """
        lines = self.lines()
        for row in self.rows:
            if row.name in lines and not lines[row.name].failed:
                self._check_same(row, lines[row.name])
        return any(
            line is None or (again if line.failed else any(folder not in line.top1 for folder in self.folders))
            for line in (lines.get(row.name) for row in self.rows)
        )

    def run(self, limit: float = math.inf) -> Iterator[Line]:
        """Run the missing rows, and yield the line of each row when it is done. No row begins after `limit` seconds.

        Rows are leased: rows of other processes are waited for, and taken over if their process dies.
        """
        began, at_start = time.monotonic(), self.lines()
        rows = {row.name: row for row in self.rows if row.name not in at_start or at_start[row.name].failed}
        for row in self.rows:
            if row.name not in rows:
                yield self._measured(row, at_start[row.name])

        def is_over(name: str) -> bool:
            line = self.lines().get(name)
            is_new = line is not None and (not line.failed or line != at_start.get(name))  # failed rows are tried again
            return is_new or name in tried or time.monotonic() - began > limit

        leases = Leases(self.out / "leases")
        tried: set[str] = set()
        try:
            for name in leases.each(rows, is_over):
                try:
                    new = self._run(rows[name])
                except BusyError as error:  # its process was silent for too long, or its machine died with the lock
                    self.progress.note(f"{name} is tried again later: {error}")
                    time.sleep(_SECONDS_BETWEEN_TRIES)
                    continue
                tried.add(name)
                yield new
        finally:
            leases.close()
        for name in [name for name in rows if name not in tried]:
            line = self.lines().get(name)
            if line is not None:
                yield self._measured(rows[name], line)
            else:
                self.progress.note(f"{name}: not begun, the time is up")

    def _measured(self, row: Row, line: Line) -> Line:
        """The line of a row that was done before or elsewhere, with measurements on new folders added."""
        self._check_same(row, line)
        if not line.failed and any(folder not in line.top1 for folder in self.folders):
            self._measure(line, from_pretrained(self.out / row.name / QUANTIZED, self.model).to(self.device))
            self._write(line)
        return line

    def _run(self, row: Row) -> Line:
        recipe = self.recipes[row.name]
        line = Line(
            **{**asdict(row), "overrides": list(row.overrides)},
            scale=self.scale,
            images=f"{recipe.synthesis.images} x {_steps(recipe)}",
            data_free=recipe.data_free,
            quantized=self._quantized,
            calibrated_on="" if recipe.data_free else os.path.abspath(recipe.synthesis.folder),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            commit=commit(),
        )
        folder = self.out / row.name
        spent = _spent(folder)
        is_measured = (folder / FACTS_FILE).exists()
        began = time.monotonic()
        try:
            result = quantize(
                self.model,
                recipe,
                folder,
                seed=row.seed,
                device=self.device,
                progress=self.progress,
                source=self.source,
                fast=self.fast,
                keep="last",  # a method that makes the model worse is shown as it is
            )
        except RunFolderError:
            raise  # another process works on it, or the disk is full: that is not a result
        except MaskaqError as error:  # a method that diverges is a result
            line.failed = str(error)
            self._write(line)
            return line
        line.seconds = spent + time.monotonic() - began
        if not is_measured and (folder / FACTS_FILE).exists():  # measurements for the report are not part of the method
            line.seconds -= RunFolder.read(folder).read_json(FACTS_FILE)["seconds"]
        line.seconds = round(line.seconds, 1)
        line.handover = read_config(folder / QUANTIZED)["made"].get("handover")
        self._measure(line, result.model.eval())
        self._write(line)
        if not self.keep_images:
            for name in ("images", "checkpoints"):
                shutil.rmtree(folder / name, ignore_errors=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return line

    def _recipe(self, row: Row) -> Recipe:
        folders = {f"{{{i}}}": os.path.abspath(data) for i, data in enumerate(self.folders)}
        name = re.sub(r"\{\d\}", lambda found: folders.get(found[0], found[0]), row.recipe)
        return scaled(load_recipe(name, *row.overrides, bits=row.bits), self.scale)

    def _check_same(self, row: Row, line: Line) -> None:
        asked = {**asdict(row), "overrides": list(row.overrides), "scale": self.scale, "quantized": self._quantized}
        found = {key: getattr(line, key) for key in asked}
        if odd := [key for key in asked if found[key] != asked[key]]:
            what = {"quantized": "full-precision model", "overrides": "--set"}.get(odd[0], odd[0])
            there, here = (_in_words(side[odd[0]]) for side in (found, asked))
            raise RecipeError(
                f"{self.file}: {row.name} was run with another {what}, {there} instead of {here}: give the row another "
                "name, or choose another --out"
            )

    @torch.no_grad()
    def _measure(self, line: Line, model: nn.Module) -> None:
        for folder in self.folders:
            if folder in line.top1:
                continue
            if self.task.has_layouts:
                found = self.task.evaluate(model, self.images_of(folder))
                line.figures[folder], line.top1[folder] = found.to_dict(), found.headline
                line.kl[folder] = self._distance(model, folder)
                continue
            expected = self._teachers(folder)
            outputs = self._outputs(model, folder)
            line.kl[folder] = self.task.distance(expected, outputs).mean().item()
            if self.task.name == "classification":
                right = outputs[self.task.output].argmax(dim=1) == self._labels(folder)
                line.hits[folder] = "".join("01"[hit] for hit in right.tolist())
                line.top1[folder] = 100 * right.float().mean().item()
            else:
                line.top1[folder] = self.task.agreement(expected, outputs).mean().item()

    def full_precision(self) -> dict[str, float]:
        """Folder -> headline figure of P."""
        return {folder: self._full_precision(folder) for folder in self.folders}

    def _full_precision(self, folder: str) -> float:
        if self.task.has_layouts:
            return self.task.evaluate(self._teacher, self.images_of(folder)).headline
        if self.task.name == "features":
            return 1.0
        hits = self._teachers(folder)[self.task.output].argmax(dim=1) == self._labels(folder)
        return 100 * hits.float().mean().item()

    @cached_property
    def _teacher(self) -> nn.Module:
        return expose(self.model).to(self.device)

    def _teachers(self, folder: str) -> dict[str, Tensor]:
        if folder not in self._expected:
            self._expected[folder] = self._outputs(self._teacher, folder)
        return self._expected[folder]

    @torch.no_grad()
    def _outputs(self, model: nn.Module, folder: str) -> dict[str, Tensor]:
        return joined([on_cpu(self.task.run(model, x.to(self.device))) for x, _ in self.images_of(folder)])

    def _distance(self, model: nn.Module, folder: str) -> float:
        """Mean distance of Q's outputs to P's. Both look at one image at a time: dense outputs are large."""
        found: list[float] = []
        with frozen(model), frozen(self._teacher):
            for images, _ in self.images_of(folder):
                for image in images.to(self.device).split(1):
                    expected = self.task.run(self._teacher, image)
                    found.append(self.task.distance(expected, self.task.run(model, image, expected)).item())
        return _mean(found)

    def _labels(self, folder: str) -> Tensor:
        return torch.cat([labels for _, labels in self.images_of(folder)])

    def images_of(self, folder: str) -> Iterable[tuple[Tensor, Any]]:
        """The batches of a folder, read once; large images with annotations are read each time."""
        assert self.batches is not None
        if folder not in self._images:
            found = self.batches(self.model, folder)
            self._images[folder] = found if self.task.has_layouts else list(found)
        return self._images[folder]

    def _write(self, line: Line) -> None:
        """Add a line, or replace the one of the same row; other processes may do so at the same time."""
        with locked(self.out / "rows.lock"):
            kept = self.lines() | {line.name: line}
            text = "".join(json.dumps(asdict(found)) + "\n" for found in kept.values())
            write_bytes_atomic(self.file, text.encode())


def _steps(recipe: Recipe) -> str:
    if recipe.synthesis.generator.steps:
        return f"generator of {recipe.synthesis.generator.steps} steps"
    return " + ".join(str(recipe.steps_in_round(number)) for number in range(len(recipe.rounds)))


def _spent(folder: Path) -> float:
    """Seconds that earlier calls have spent on a run, from its events."""
    if not (folder / "run.json").exists():
        return 0.0
    return sum(float(event.get("seconds") or 0) for event in RunFolder.read(folder).events())


def _in_words(value: Any) -> str:
    """A setting as text for a message."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {short(x)}" for key, x in value.items())
    return (" ".join(value) or "nothing") if isinstance(value, list) else repr(value)


# ---- tables


def common_overrides(lines: Sequence[Line]) -> list[str]:
    """The overrides that all rows have; a table shows them once."""
    first, *others = [line.overrides for line in lines] or [[]]
    return [word for word in first if all(word in found for found in others)]


def label_of(line: Line, common: Sequence[str]) -> str:
    """The label of a row in a table, without its seed."""
    return " ".join((line.recipe, *(word for word in line.overrides if word not in common)))


@dataclass(frozen=True)
class Entry:
    """A recipe at one width, over all its seeds."""

    label: str
    bits: str
    seeds: int
    figures: dict[str, float]
    """Folder -> mean over seeds."""
    mean: float | None
    """Over folders and seeds, without a folder that the row was calibrated on."""
    error: float | None
    """Standard error over images and, if there are several, over seeds."""
    difference: tuple[float, float] | None
    """From the first entry of the width, paired image by image, and its standard error."""
    kl: float | None
    seconds: float
    images: str
    data_free: bool
    failed: str = ""


def entries(lines: Iterable[Line], folders: Sequence[str] | None = None) -> list[Entry]:
    """The lines grouped by recipe and width, in their order; for all their folders, or for some."""
    lines = [line if folders is None else _on(line, folders) for line in lines]
    common = common_overrides(lines)
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.bits, label_of(line, common)), []).append(line)
    first: dict[str, list[Line]] = {}
    found = []
    for (bits, label), group in sorted(groups.items(), key=lambda item: item[0][0]):
        done = [line for line in group if not line.failed]
        base = first.setdefault(bits, done) if done else []
        found.append(_entry(label, bits, group, done, [] if base is done else base))
    return found


def _on(line: Line, folders: Sequence[str]) -> Line:
    """The line with the measurements on these folders only."""

    def chosen(measured: Mapping[str, Any]) -> dict[str, Any]:
        return {folder: value for folder, value in measured.items() if folder in folders}

    top1, hits = chosen(line.top1), chosen(line.hits)
    return replace(line, top1=top1, hits=hits, figures=chosen(line.figures), kl=chosen(line.kl))


def _entry(label: str, bits: str, group: list[Line], done: list[Line], base: list[Line]) -> Entry:
    folders = list(dict.fromkeys(folder for line in done for folder in line.top1))
    seen = {line.calibrated_on for line in group}
    fair = [folder for folder in folders if os.path.abspath(folder) not in seen]
    figures = {folder: _mean([line.top1[folder] for line in done if folder in line.top1]) for folder in folders}
    measured = [line for line in done if fair and all(folder in line.top1 for folder in fair)]
    means = [_mean([line.top1[folder] for folder in fair]) for line in measured]
    images = sum(len(done[0].hits.get(folder, "")) for folder in fair) if done else 0
    mean = _mean(means) if means else None
    error = None
    if mean is not None and images:
        sampling = 100 * math.sqrt(max(0.0, mean / 100 * (1 - mean / 100)) / images)
        error = math.hypot(sampling, _standard_error(means))
    elif mean is not None and (told := [_sampling(line, fair) for line in done if line.figures]):
        error = math.hypot(_mean(told), _standard_error(means))
    kls = [value for line in done for folder, value in line.kl.items() if folder in fair]
    return Entry(
        label=label,
        bits=bits,
        seeds=len(done),
        figures=figures,
        mean=mean,
        error=error,
        difference=_paired(done, base, fair),
        kl=_mean(kls) if kls else None,
        seconds=_mean([line.seconds for line in done]) if done else 0.0,
        images=group[0].images,
        data_free=group[0].data_free,
        failed=group[0].failed if not done else "",
    )


def _sampling(line: Line, folders: Sequence[str]) -> float:
    """Standard error of the mean over folders, from that of each; 0 where it could not be measured."""
    errors = [line.figures.get(folder, {}).get("standard_error") or 0.0 for folder in folders]
    return math.hypot(*errors) / len(errors)


def _paired(lines: list[Line], base: list[Line], folders: Sequence[str]) -> tuple[float, float] | None:
    """Mean difference in points on the same images and seeds, and its standard error over images."""
    others = {line.seed: line for line in base}
    gaps: list[list[int]] = []
    for line in lines:
        other = others.get(line.seed)
        if other is None or not all(folder in line.hits and folder in other.hits for folder in folders) or not folders:
            continue
        mine, theirs = ("".join(found.hits[folder] for folder in folders) for found in (line, other))
        if len(mine) == len(theirs):
            gaps.append([int(a) - int(b) for a, b in zip(mine, theirs, strict=True)])
    if not gaps:
        return None
    per_image = [100 * sum(column) / len(gaps) for column in zip(*gaps, strict=True)]
    return _mean(per_image), _standard_error(per_image)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))
