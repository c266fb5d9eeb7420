"""`maskaq compare`."""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import DataOptions, Invocation, ModelOptions
from maskaq.cli.processes import copies, environments
from maskaq.errors import DependencyError, MaskaqError, RecipeError

if TYPE_CHECKING:
    from maskaq.report.comparison import Page, TableRow
    from maskaq.runs.compare import Comparison, Entry, Line

SUMMARY = "run several recipes on one model, and write a page and tables that compare them"
RESUMABLE = True
_BEGAN = "MASKAQ_COMPARE_BEGAN"
"""Environment variable that tells the processes of `--workers` when their command began, by the machine's clock."""


@dataclass(frozen=True)
class Arguments:
    model: ModelOptions
    folders: tuple[str, ...]
    class_index: str | None
    crop_pct: float | None
    interpolation: str | None
    readers: int
    recipes: str | None
    bits: str
    seeds: str
    set: tuple[str, ...]
    rows: tuple[str, ...]
    only: str | None
    scale: float
    out: str
    limit: float
    keep_images: bool
    processes: int
    device: str | None
    plain: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--recipes", metavar="A,B,...", help="recipes as in `quantize`, such as quick,quick+mimiq")
    parser.add_argument("--bits", default="w4a4", metavar="W,...", help="widths, such as w4a4,w3a3 (default: w4a4)")
    parser.add_argument("--seeds", default="0", metavar="N,...", help="(default: 0)")
    options.add_set(parser)
    parser.add_argument(
        "--rows",
        type=converters.path,
        metavar="FILE",
        nargs="+",
        default=[],
        help="files of rows in place of --recipes, one per line: name | model | recipe | bits | seed | key=value ...; "
        "rows of other models are skipped, and {0} in a recipe stands for the first folder of --data",
    )
    parser.add_argument("--only", metavar="NAME,...", help="run only these rows")
    parser.add_argument(
        "--scale",
        type=converters.share,
        default=1.0,
        metavar="X",
        help="share of each recipe's budget: of its images, at least 32, or of a generator's steps (default: 1)",
    )
    parser.add_argument(
        "--out", type=converters.path, default="runs/compare", metavar="DIR", help="(default: runs/compare)"
    )
    parser.add_argument(
        "--limit",
        type=converters.limit,
        default=math.inf,
        metavar="SECONDS",
        help="begin no row so long after the start of the command",
    )
    parser.add_argument("--keep-images", action="store_true", help="keep the images and checkpoints of every run")
    parser.add_argument(
        "--workers",
        type=converters.positive,
        default=1,
        dest="processes",
        metavar="N",
        help="processes on this machine; each runs one row at a time, on its own GPU if there are enough (default: 1)",
    )
    options.add_device(parser)
    options.add_plain(parser)
    options.add_data(parser)
    for action in parser._actions:
        if action.dest == "data":  # here several folders
            action.dest, action.nargs, action.default = "folders", "+", []


def run(arguments: Arguments, invocation: Invocation) -> None:
    began = float(os.environ.get(_BEGAN, time.monotonic()))  # before torch and the model are loaded

    from maskaq.cli import console as draw  # they bring torch and timm
    from maskaq.cli import resolve
    from maskaq.cli.evaluation import EvaluationImages
    from maskaq.runs.compare import Comparison

    rows = _rows(arguments)
    model = resolve.full_precision(arguments.model)
    data = DataOptions(None, arguments.class_index, arguments.crop_pct, arguments.interpolation, arguments.readers)

    def batches(model: Any, folder: str) -> Any:
        return EvaluationImages(replace(data, data=folder))(model)

    for folder in arguments.folders:
        batches(model, folder)  # a wrong folder fails now, not after the work
    console = invocation.console
    with draw.progress_for(console) as progress:
        comparison = Comparison(
            arguments.out,
            model,
            rows,
            source=resolve.source_of(arguments.model, model, invocation.command_line),
            batches=batches if arguments.folders else None,
            folders=arguments.folders,
            scale=arguments.scale,
            device=arguments.device,
            fast=False if arguments.plain else None,
            keep_images=arguments.keep_images,
            progress=progress,
        )
        for recipe in comparison.recipes.values():
            resolve.check_names(recipe)
        several = arguments.processes > 1 and comparison.is_left()
        if several:
            for line in _by_processes(arguments, invocation, comparison, progress, began):
                console.print(_summary(line))
        if not several or comparison.is_left(again=False):
            for line in comparison.run(arguments.limit - (time.monotonic() - began)):
                console.print(_summary(line))
    lines = comparison.lines()
    found = [lines[row.name] for row in rows if row.name in lines]
    if not found:
        raise MaskaqError("no row is done yet: repeat the command to continue")
    page = _page(arguments, comparison, found)
    console.print(draw.plain_table(page.title, *_table(page)))
    for text in page.about:
        console.print(text)
    _write(arguments.out, page, console)
    if missing := [row.name for row in rows if row.name not in lines]:
        console.print(f"{len(missing)} of {len(rows)} rows are not done: repeat the command to continue")


def _by_processes(
    arguments: Arguments, invocation: Invocation, comparison: "Comparison", progress: Any, began: float
) -> Iterator["Line"]:
    """Run the rows in several processes; yields each line when it is new or has measurements on more folders."""
    import torch

    gpus = torch.cuda.device_count() if arguments.device in (None, "cuda") else 0
    words = (*invocation.words, "--workers", "1")
    known = comparison.lines()
    progress.note(f"{arguments.processes} processes run the rows; `maskaq status {arguments.out}` shows their progress")
    own = [found | {_BEGAN: str(began)} for found in environments(arguments.processes, gpus)]
    with copies(words, own) as started:
        running = started
        while running:
            time.sleep(0.5)
            ended = [process for process in running if not process.is_running]
            found = comparison.lines()
            yield from (line for name, line in found.items() if line != known.get(name))
            known = found
            for process in ended:
                if process.failure:
                    progress.note(f"a process ended before all rows were done: {process.failure}")
            running = [process for process in running if process not in ended]


def _rows(arguments: Arguments) -> list[Any]:
    from maskaq.runs.compare import read_rows, rows_of

    if bool(arguments.recipes) == bool(arguments.rows):
        raise RecipeError("compare: expected either --recipes A,B,... or --rows FILE")
    if arguments.recipes:
        seeds = arguments.seeds.split(",")
        if not all(seed.strip().isdecimal() for seed in seeds):
            raise RecipeError(f"--seeds: expected whole numbers such as 0,1,2, got {arguments.seeds!r}")
        recipes, bits = (text.split(",") for text in (arguments.recipes, arguments.bits))
        rows = rows_of(arguments.model.model, recipes, bits, [int(seed) for seed in seeds], arguments.set)
    else:
        rows = [row for file in arguments.rows for row in read_rows(file) if row.model == arguments.model.model]
        rows = [replace(row, overrides=(*row.overrides, *arguments.set)) for row in rows]
    if arguments.only:
        wanted = arguments.only.split(",")
        if odd := set(wanted) - {row.name for row in rows}:
            raise RecipeError(
                f"--only: there is no row {', '.join(sorted(odd))}; rows: {', '.join(r.name for r in rows)}"
            )
        rows = [row for row in rows if row.name in wanted]
    if not rows:
        raise RecipeError(f"compare: no row is of the model {arguments.model.model}")
    return rows


def _summary(line: "Line") -> str:
    if line.failed:
        return f"{line.name}: failed: {line.failed}"
    figures = "  ".join(f"{folder} {value:.2f}" for folder, value in line.top1.items())
    return f"{line.name}: {figures or 'done'}  {line.seconds:.0f} s"


def _page(arguments: Arguments, comparison: "Comparison", lines: list["Line"]) -> "Page":
    from maskaq.models import class_names, expose
    from maskaq.report import collect
    from maskaq.report.comparison import Column, Page
    from maskaq.runs.compare import common_overrides, entries, label_of
    from maskaq.storage.runfolder import RunFolder

    task = comparison.task
    found, common = entries(lines, comparison.folders or None), common_overrides(lines)
    full = comparison.full_precision() if comparison.folders else {}
    first: dict[tuple[str, str], Any] = {}
    for line in lines:
        if not line.failed:
            first.setdefault((label_of(line, common), line.bits), line)
    columns = []
    for (label, bits), line in first.items():
        kept = collect.read(RunFolder.read(comparison.out / line.name))
        columns.append(Column(f"{label} {bits}", kept, f"seed {line.seed}, {line.images}"))
    names = class_names(expose(comparison.model)) or []
    about = [_about(comparison, lines, full)]
    if common:
        about.append(f"All rows with {' '.join(common)}.")
    if any(not line.data_free for line in lines):
        about.append("Rows of images:DIR are calibrated on real images: an upper bound, NOT data-free.")
    return Page(
        title=f"{arguments.model.model}: {len(found)} recipes side by side",
        folders=tuple(comparison.folders),
        rows=tuple(_row(entry, comparison.folders) for entry in found),
        about=tuple(about),
        columns=tuple(columns),
        real=_real_images(comparison),
        names=dict(enumerate(names)),
        headline=task.columns[task.headline].title,
        distance=_distance(task),
    )


def _distance(task: Any) -> str:
    """Title of the column with the distance between the outputs of P and Q."""
    return "KL" if task.distance_name.startswith("KL") else "distance"


def _about(comparison: "Comparison", lines: list["Line"], full: dict[str, float]) -> str:
    seeds = sorted({line.seed for line in lines})
    words = [f"Seeds {', '.join(map(str, seeds))}"]
    if comparison.scale != 1:
        words.append(f"{comparison.scale:g} of each recipe's own images, all else as in the recipe")
    for folder, value in full.items():
        words.append(f"full precision has {value:.2f} on {folder}")
    hits = next((line.hits for line in lines if line.hits), {})
    figures = next((line.figures for line in lines if line.figures), {})
    images = sum(len(found) for found in hits.values()) + sum(found["n"] for found in figures.values())
    if images:
        words.append(
            f"{images} evaluation images; ± is the standard error over images and, with several seeds, over seeds"
        )
    if hits:
        words.append("differences are paired image by image")
    if any(line.kl for line in lines):
        words.append(f"{_distance(comparison.task)}: {comparison.task.distance_name}, on these images")
    where = {line.device for line in lines} | {f"commit {line.commit}" for line in lines if line.commit}
    return "; ".join([*words, *sorted(where)]) + "."


def _row(entry: "Entry", folders: list[str]) -> "TableRow":
    from maskaq.report.comparison import TableRow

    mean = "-" if entry.mean is None else f"{entry.mean:.2f}"
    if entry.mean is not None and entry.error:
        mean += f" ± {entry.error:.2f}"
    difference = "" if entry.difference is None else "{:+.2f} ± {:.2f}".format(*entry.difference)
    figures = tuple(f"{entry.figures[folder]:.2f}" if folder in entry.figures else "-" for folder in folders)
    note = f"failed: {entry.failed}" if entry.failed else "" if entry.data_free else "real images, not data-free"
    label = entry.label + (f" ({entry.seeds} seeds)" if entry.seeds > 1 else "")
    kl = "-" if entry.kl is None else f"{entry.kl:.3f}"
    return TableRow(entry.bits, label, entry.images, figures, mean, difference, kl, f"{entry.seconds:.0f}", note)


def _table(page: "Page") -> tuple[list[str], list[list[str]]]:
    from maskaq.report.comparison import cells, head

    return head(page), [cells(row) for row in page.rows]


def _real_images(comparison: "Comparison") -> dict[int, Any]:
    """A real image of each class, from the first folder."""
    from maskaq.images.sets import to_bytes
    from maskaq.models import expose, geometry

    found: dict[int, Any] = {}
    if comparison.folders and not comparison.task.has_layouts:
        spec = geometry(expose(comparison.model))
        for images, labels in comparison.images_of(comparison.folders[0]):
            for image, label in zip(images, labels.tolist(), strict=True):
                if label >= 0 and label not in found:
                    found[label] = to_bytes(spec.pixels(image[None].cpu()))[0]
    return found


def _write(out: str, page: "Page", console: Any) -> None:
    from pathlib import Path

    from maskaq.report import comparison
    from maskaq.storage.files import write_bytes_atomic

    files = {"compare.md": comparison.markdown(page), "compare.tex": comparison.latex(page)}
    try:
        files["compare.html"] = comparison.html(page)
    except DependencyError as error:
        console.print(f"no page: {error}")
    for name, text in files.items():
        write_bytes_atomic(Path(out, name), text.encode())
    console.print(f"written: {', '.join(str(Path(out, name)) for name in files)}")
