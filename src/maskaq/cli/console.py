"""Console output: progress, plans, tables. Everything goes to the terminal through one rich Console."""

import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as RichProgress,
)
from rich.table import Table
from torch import nn

from maskaq.bench import Timing
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe
from maskaq.runs.status import FleetStatus, Status
from maskaq.shapes import Geometry
from maskaq.tasks import CALIBRATED, FULL_PRECISION, PTQ, RTN, TASKS, Evaluation, Task, lost_to_rounding, recovered

if TYPE_CHECKING:  # their packages are an extra
    from maskaq.artifact.export.runtimes import Products, Speed
    from maskaq.artifact.export.verify import Verification

SECONDS_BETWEEN_LINES = 10.0
_PACES = {
    "fixed": "",
    "error": " x the student's error at the start",
    "first_step": " x the student's error at the start, halved until a step lowers the loss",
}


class ProgressBar(Progress):
    """A progress bar with the time left, for a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[metrics]}"),
        )
        self.bars = RichProgress(*columns, console=console)
        self.task: TaskID | None = None

    def __enter__(self) -> "ProgressBar":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def stage(self, title: str, total: int, done: int = 0) -> None:
        if self.task is not None and self.bars.tasks[-1].finished is False and self.bars.tasks[-1].total:
            self.bars.update(self.task, completed=self.bars.tasks[-1].total)
        self.task = self.bars.add_task(title, total=total, completed=done, metrics="")

    def advance(self, units: int = 1, **metrics: float) -> None:
        if self.task is None:  # outside a stage there is no bar
            return
        text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.bars.update(self.task, advance=units, metrics=text)

    def forecast(self, seconds: float) -> None:
        self.note(_forecast_line(seconds))

    def note(self, text: str) -> None:
        self.bars.console.print(text)


class ProgressLines(Progress):
    """Plain lines at intervals, for a log file."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.title = ""
        self.total = 0
        self.done = 0
        self.first = 0
        self.began = self.last_line = time.monotonic()

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stage(self, title: str, total: int, done: int = 0) -> None:
        self.title = title
        self.total = total
        self.done = done
        self.first = done
        self.began = self.last_line = time.monotonic()
        self.console.print(f"{title}: 0 %" if not done else f"{title}: {100 * done / max(1, total):.0f} % from before")

    def advance(self, units: int = 1, **metrics: float) -> None:
        if not self.title:  # outside a stage there is nothing to print
            return
        self.done += units
        now = time.monotonic()
        if now - self.last_line < SECONDS_BETWEEN_LINES and self.done < self.total:
            return
        self.last_line = now
        left = (now - self.began) / max(1, self.done - self.first) * max(0, self.total - self.done)
        text = "".join(f", {name} {value:.4g}" for name, value in metrics.items())
        share = 100 * self.done / max(1, self.total)
        self.console.print(f"{self.title}: {share:.0f} %, {duration(now - self.began)}, left {duration(left)}{text}")

    def forecast(self, seconds: float) -> None:
        self.note(_forecast_line(seconds))

    def note(self, text: str) -> None:
        self.console.print(text)


class Notes(ProgressLines):
    """Only notes, for processes other than the leader."""

    def stage(self, title: str, total: int, done: int = 0) -> None:
        """Printed by the leader."""

    def forecast(self, seconds: float) -> None:
        """Printed by the leader."""


def progress_for(console: Console) -> ProgressBar | ProgressLines:
    if console.quiet:
        return Notes(Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True))
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


def _forecast_line(seconds: float) -> str:
    return f"estimate   {duration(seconds)} (rough, from a few steps)"


def duration(seconds: float) -> str:
    """90 -> 1:30; 5000 -> 1:23:20."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def size(count: int) -> str:
    """Bytes in words: 24_000 -> 24 kB; 3_100_000 -> 3 MB."""
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def preparation(geometry: Geometry) -> str:
    """How images are prepared for a model: 224 x 224 pixels, mean 0.5 0.5 0.5, std 0.5 0.5 0.5."""
    mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (geometry.mean, geometry.std))
    return f"{geometry.image_size[0]} x {geometry.image_size[1]} pixels, mean {mean}, std {std}"


def plan_table(name: str, model: nn.Module, geometry: Geometry, recipe: Recipe, device: str, out: str) -> Table:
    """Table of what a run will do."""
    scheme = recipe.quantization
    synthesis = recipe.synthesis
    calibration = recipe.calibration
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    stored = synthesis.images * len(recipe.rounds) * geometry.channels * math.prod(geometry.image_size)
    refreshes = len(recipe.rounds) - 1
    table = Table(show_header=False, box=None, pad_edge=False)
    gives = f"{geometry.classes} classes" if geometry.classes else "no classifier: its features are matched"
    if geometry.task not in ("classification", "features"):
        gives += f" ({geometry.task})"
    table.add_row("model", f"{name}, {parameters:.2f} M parameters, {gives}")
    table.add_row("input", preparation(geometry))
    if geometry.left_out:
        total = len(geometry.layers) + len(geometry.left_out)
        table.add_row("attention", f"{len(geometry.layers)} of {total} lie on the image: losses on maps use these")
    softmax = "" if scheme.softmax == "same" else f", {scheme.softmax} softmax"
    table.add_row(
        "bits",
        f"{scheme.bits} ({scheme.weight} weights, {scheme.activation} activations{softmax}; "
        f"first ranges: {scheme.weight_range} and {scheme.activation_range})",
    )
    if scheme.rotate:
        table.add_row("rotate", ", ".join(scheme.rotate))
    table.add_row("images", f"{synthesis.images} {recipe.caveat or _made(recipe)}")
    if refreshes:
        start = "continuing" if recipe.refresh.start == "warm" else f"from {synthesis.start}"
        times, each = ("once", "") if refreshes == 1 else (f"{refreshes} times", " each")
        table.add_row("refresh", f"{times}, {start}, {recipe.steps_in_round(1)} steps{each}")
    else:
        every = recipe.refresh.every
        why = f": refresh.every {every} is not below calibration.epochs {calibration.epochs}" if every else ""
        table.add_row("refresh", f"no refresh{why}")
    if "reconstruct" in calibration.stages:
        blocks = calibration.reconstruct
        table.add_row("reconstruct", f"{blocks.epochs} epochs in all, block after block, lr {blocks.lr:g}")
    rate = f"lr {calibration.lr:g}" + _PACES[calibration.pace]
    if "calibrate" in calibration.stages:
        table.add_row(
            "calibrate", f"{calibration.epochs} epochs of {calibration.optimizer}, {rate}, batch {calibration.batch}"
        )
    table.add_row("device", device)
    table.add_row("folder", f"{out} (images: about {size(stored)})")
    return table


def _made(recipe: Recipe) -> str:
    """How a recipe makes its images."""
    synthesis = recipe.synthesis
    if synthesis.generator.steps:
        return f"from a generator trained for {synthesis.generator.steps} steps"
    if not synthesis.steps:
        return f"from {synthesis.start}, not optimised"
    return f"from {synthesis.start}, x {synthesis.steps} steps, in batches of {synthesis.batch}"


def status_lines(found: Status | FleetStatus) -> Iterator[Table | str]:
    """Progress of a run and its workers, or of a table of runs."""
    return _fleet_lines(found) if isinstance(found, FleetStatus) else _run_lines(found)


def _run_lines(found: Status) -> Iterator[Table | str]:
    table = Table(show_header=False, box=None, pad_edge=False)
    stage, in_rounds, shards, epochs = _status_cells(found)
    rows = {
        "run": f"{found.folder}: {stage}",
        "round": in_rounds,
        "shards": f"{shards} in this round",
        "epochs": epochs,
    }
    if found.stage != "finished":
        rows["left"] = "not known yet" if found.left is None else duration(found.left)
    for row in rows.items():
        table.add_row(*row)
    yield table
    if found.stage == "finished":
        return
    if not found.is_worked_on:
        yield "nobody works on it: give its command again"
    if not found.workers:
        return
    workers = Table()
    for column in ("worker", "does"):
        workers.add_column(column)
    for column in ("silent s", "shards made", "images x steps / s"):
        workers.add_column(column, justify="right", no_wrap=True)
    for worker in found.workers:
        silent = "-" if worker.silent is None else f"{worker.silent:.0f}"
        rate = f"{worker.rate:.1f}" if worker.rate else "-"
        does = f"{worker.does} (process is gone)" if worker.gone else worker.does
        workers.add_row(worker.name, does, silent, str(worker.shards), rate)
    yield workers


def _fleet_lines(found: FleetStatus) -> Iterator[Table | str]:
    each = "" if found.seconds is None else f", {duration(found.seconds)} each"
    yield f"{found.folder}: {found.done} rows done{each}, {len(found.rows)} at work"
    table = Table()
    for column in ("row", "worker", "stage", "round", "shards", "epochs", "left"):
        table.add_column(column)
    runs = {Path(run.folder).name: run for run in found.runs}
    for name, worker in found.rows.items():
        if (run := runs.get(name)) is None:
            table.add_row(name, worker)
        else:
            table.add_row(name, worker, *_status_cells(run), "" if run.left is None else duration(run.left))
    if found.rows:
        yield table


def _status_cells(run: Status) -> tuple[str, ...]:
    return (
        run.stage,
        f"{run.round} of {run.rounds}",
        f"{run.shards} of {run.shards_in_round}",
        f"{run.epochs} of {run.epochs_in_all}",
    )


def accuracy_table(rows: dict[str, Evaluation | str], title: str) -> Table:
    """A row for each model, with the figures of its task."""
    columns = _task(rows).columns
    table = Table(title=title, title_justify="left")
    table.add_column("model", justify="left")
    for column in columns.values():
        table.add_column(column.title, justify="right")
    for name, row in rows.items():
        missing = ["-"] * (len(columns) - 1)
        table.add_row(name, *((*missing, row) if isinstance(row, str) else _task(rows).cells(row.to_dict())))
    return table


def _task(rows: dict[str, Evaluation | str]) -> Task:
    """The task of the models in the table."""
    return TASKS[next((row.task for row in rows.values() if not isinstance(row, str)), "classification")]


def what_was_recovered(rows: dict[str, Evaluation | str]) -> str:
    """A sentence: the share of the accuracy lost by round to nearest that calibration recovers."""
    full = rows[FULL_PRECISION]
    rtn = rows[RTN]
    ours = rows[CALIBRATED]
    if isinstance(full, str) or isinstance(rtn, str) or isinstance(ours, str):
        return ""
    unit = _task(rows).loss_name
    decimals = 4 if full.task == "features" else 1
    lost, noise = lost_to_rounding(full, rtn)
    share = recovered(full, rtn, ours)
    if share is None:
        return (
            f"round to nearest costs nothing measurable on {full.n} images: {lost:.{decimals}f} {unit}, "
            f"with a standard error of {noise:.{decimals}f}"
        )
    if share < 0:
        outcome = "maskaq is worse still: give it more epochs, or a lower calibration.lr"
    else:
        start = rows.get(PTQ)
        outcome = f"maskaq recovers {100 * share:.0f} % of that"
        if start is not None and not isinstance(start, str):
            outcome += f", its start by searched ranges alone {100 * (start.headline - rtn.headline) / lost:.0f} %"
    return f"round to nearest loses {lost:.{decimals}f} {unit}; {outcome}"


def bench_table(timings: Iterable[Timing], device: str) -> Table:
    table = Table(title=f"microseconds per image (synthesis: and step) on {device}", title_justify="left")
    table.add_column("model")
    table.add_column("stage")
    for column in ("engine", "batch", "us", "fastest - slowest", "set-up s", "MB/image", "of floor", "x release"):
        table.add_column(column, justify="right", no_wrap=True)
    for t in timings:
        memory = "" if t.megabytes_per_image is None else f"{t.megabytes_per_image:.1f}"
        faster = "" if t.times_faster_than_release is None else f"{t.times_faster_than_release:.0f}"
        spread = f"{t.fastest:.1f} - {t.slowest:.1f}"
        figures = (f"{t.microseconds:.1f}", spread, f"{t.setup_seconds:.1f}", memory, f"{t.share_of_floor:.0%}", faster)
        table.add_row(t.model, t.stage, t.engine, str(t.batch), *figures)
    return table


def verification(found: "Verification", runtime: str, products: "Products | None") -> Iterator[str]:
    """The result of a verification, as lines of text."""
    yield (
        f"verified on {found.images} images: the codes of {found.weights} weights are equal, and those of "
        f"{found.sites} activations, {found.codes} compared"
    )
    if found.turned:
        yield (
            f"{found.turned} of them came out one apart for float rounding: their values were at most "
            f"{found.farthest:.0e} steps from the border between two codes"
        )
    same = round(found.agreement * found.images)
    yield (
        f"from the same codes outputs differ by {found.logits:.0e}; each with its own codes, file and model "
        f"{found.agreement_means} on {same} of {found.images} images (correlation of outputs {found.correlation:.4f})"
    )
    if same < found.images:
        yield (
            "this is expected: the last bit of a float, or bfloat16, can turn a rounding, and one turned rounding can "
            "change the output; what the file has to get right are the codes and the outputs from the same codes"
        )
    if products is not None:
        yield f"{runtime} computes {products}"


def speed_table(speeds: Iterable["Speed"], device: str) -> Table:
    table = Table(title=f"milliseconds per image on {device}", title_justify="left")
    table.add_column("file")
    for column in ("runtime", "batch", "MB", "ms", "fastest - slowest", "x float32", "lowest - highest"):
        table.add_column(column, justify="right", no_wrap=True)
    for s in speeds:
        spread = f"{s.fastest:.2f} - {s.slowest:.2f}"
        ratios = f"{s.ratio_low:.2f} - {s.ratio_high:.2f}"
        figures = (f"{s.megabytes:.2f}", f"{s.milliseconds:.2f}", spread, f"{s.ratio:.2f}", ratios)
        table.add_row(s.file, s.runtime, str(s.batch), *figures)
    return table


def plain_table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of words."""
    table = Table(*head, title=title)
    for row in rows:
        table.add_row(*row)
    return table
