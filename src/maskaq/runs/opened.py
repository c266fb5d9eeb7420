"""Open a run again: the teacher, the student before and after calibration, and the accuracy of each."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.artifact.saved import add_metrics, from_pretrained, read_config
from maskaq.errors import CheckpointError, MaskaqError, PretrainedError, RunFolderError, unwritable
from maskaq.images.sets import SyntheticSet
from maskaq.images.stored import first_images, latest_images, state_digest
from maskaq.models import expose
from maskaq.models.load import load_model, rebuild, set_normalization
from maskaq.progress import Progress
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.recipe.schema import Quantization, Recipe, recipe_from_dict
from maskaq.report import collect
from maskaq.report.record import Record
from maskaq.runs.provenance import pick_device
from maskaq.runs.quantize import range_images, saved_state
from maskaq.runs.torch_modes import own_torch_modes
from maskaq.storage import files
from maskaq.storage.runfolder import METRICS_FILE, QUANTIZED, RunFolder
from maskaq.tasks.classification import CALIBRATED, FULL_PRECISION, NEAREST, SEARCHED, EvalResult, evaluate

PAGE_FILE = "report.html"

Batches = Callable[[nn.Module], Iterable[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class OpenedRun:
    """The models of a run folder."""

    folder: Path
    recipe: Recipe
    seed: int
    source: dict[str, Any]
    """Name, arguments and checkpoint of the model, as `maskaq.load_model` takes them."""

    def load_teacher(self) -> nn.Module:
        """The full-precision model that the source names, whatever its weights are now."""
        source = self.source
        return load_model(source["name"], source["checkpoint"], source["args"], source.get("mean"), source.get("std"))

    def teacher(self) -> nn.Module:
        """The full-precision model, from where the run took it; refused if its weights are others now."""
        return self._teacher

    @cached_property
    def _teacher(self) -> nn.Module:
        model = self.load_teacher()
        if state_digest(model.state_dict()) != RunFolder.read(self.folder).identity["model"]["weights"]:
            raise CheckpointError(
                f"{self.source['checkpoint'] or self.source['name']} has other weights now than when "
                f"{self.folder} was made; give the run the file it was made from"
            )
        return expose(model)

    def nearest(self) -> nn.Module:
        """Round to nearest at the same bits: the teacher's weights, the smallest and largest values as ranges."""
        return self._uncalibrated(replace(self.recipe.quantization, weight_range="minmax", activation_range="minmax"))

    def searched(self) -> nn.Module:
        """Where calibration starts: round to nearest with the ranges that the recipe's methods find."""
        return self._uncalibrated(self.recipe.quantization)

    @own_torch_modes()
    def _uncalibrated(self, scheme: Quantization) -> nn.Module:
        """The student as it was before calibration: ranges from the first images of the first round."""
        teacher, run = self.teacher(), RunFolder.read(self.folder)
        student = quantized_twin(teacher, scheme)
        images = first_images(run, self.recipe.quantization.range_images)
        init_ranges_(student, range_images(teacher, images, self.recipe), scheme)
        return student

    @own_torch_modes()
    def calibrated(self) -> nn.Module:
        """The model that the run handed over, as `maskaq.from_pretrained` gives it. Needs no teacher."""
        path = RunFolder.read(self.folder).path(QUANTIZED)
        if not path.exists():
            raise RunFolderError(
                f"{self.folder} is not finished: run its command again to go on, or: {_calibrate(self.folder)}"
            )
        try:
            model = from_pretrained(path)
        except PretrainedError as error:
            raise PretrainedError(f"{error}; a sound one is made by: {_calibrate(self.folder)}") from error
        made: Any = model.maskaq_config
        identity = RunFolder.read(self.folder).identity
        if any(made["made"].get(key) != identity[key] for key in ("recipe", "model", "seed")):
            raise RunFolderError(
                f"{self.folder / QUANTIZED} is of another model or recipe than the run; delete it, and it is made "
                f"anew by: {_calibrate(self.folder)}"
            )
        return model

    def handed_over(self) -> nn.Module:
        """What `calibrated` was made from, with its quantizers: the student, or the start if that was better."""
        path = RunFolder.read(self.folder).path(QUANTIZED)
        kept = read_config(path)["made"].get("handover", {}).get("kept") if path.exists() else "end"
        return self.searched() if kept == "start" else self.student()

    @own_torch_modes()
    def student(self) -> nn.Module:
        """The student of the newest checkpoint, with its quantizers."""
        saved = saved_state(RunFolder.read(self.folder))
        if saved is None:
            raise RunFolderError(f"{self.folder} has no checkpoint: {_calibrate(self.folder)}")
        state, _ = saved
        blank = set_normalization(rebuild(self.source["architecture"]), self.source.get("mean"), self.source.get("std"))
        student = quantized_twin(expose(blank), self.recipe.quantization)
        student.load_state_dict(state["student"])
        return student

    def images(self) -> SyntheticSet:
        """The synthetic images of the latest round that is there."""
        return latest_images(RunFolder.read(self.folder))


def _calibrate(folder: Path) -> str:
    return f"maskaq calibrate {shlex.quote(str(folder))}"


def open_run(folder: str | Path) -> OpenedRun:
    """A run folder for reading."""
    run = RunFolder.read(folder)
    source = run.source
    if not source:
        raise RunFolderError(
            f"{folder} was made from a model in memory, without a name: load its model alone, with "
            f"maskaq.from_pretrained({str(Path(folder) / QUANTIZED)!r})"
        )
    try:
        source = {"args": {}, "checkpoint": None, **source}
        source = {"architecture": {"name": source["name"], "args": source["args"]}, **source}
        return OpenedRun(Path(folder), recipe_from_dict(run.identity["recipe"]), run.identity["seed"], source)
    except (KeyError, TypeError) as error:
        raise RunFolderError(
            f"{run.path('run.json')} is damaged (no {error}): put the file back from a copy, or start anew"
        ) from error


def compare(
    run: OpenedRun, batches: Batches, *, device: str | torch.device | None = None, progress: Progress | None = None
) -> dict[str, EvalResult | str]:
    """Accuracy of the teacher, of both uncalibrated models and of the calibrated one; a reason where one is missing."""
    progress = progress or Progress()
    table: dict[str, EvalResult | str] = {}
    calibrated = run.calibrated()  # before the hours: an unfinished or damaged run is told at once
    makers = {FULL_PRECISION: run.teacher, NEAREST: run.nearest, SEARCHED: run.searched, CALIBRATED: lambda: calibrated}
    for name, make in makers.items():
        try:
            model = make()
        except MaskaqError as error:
            table[name] = str(error)  # the teacher's file may be gone; the student must not suffer for it
            continue
        loader = batches(model)
        progress.stage(f"evaluate {name}", len(getattr(loader, "dataset", ())))
        table[name] = evaluate(model.to(pick_device(device)), loader, progress)
    return table


def write_metrics(folder: str | Path, table: dict[str, EvalResult | str], data: str) -> None:
    """metrics.json of a run folder, and its model's card: what `compare` found, and on which images.

    A row that could not be measured now keeps what was measured before on the same images: the run is the same.
    """
    found = metrics(table, data)
    run = RunFolder.read(folder)
    before = _measured(run, data)
    found["accuracy"] |= {name: before[name] for name, row in table.items() if isinstance(row, str) and name in before}
    files.write_json_atomic(run.path(METRICS_FILE), found)
    add_metrics(run.path(QUANTIZED), found)


def _measured(run: RunFolder, data: str) -> dict[str, Any]:
    """The rows of metrics.json that are figures, if they are of these images."""
    try:
        kept = run.read_json(METRICS_FILE)
    except RunFolderError:  # there is none, or none that can be read
        return {}
    rows = kept.get("accuracy") if isinstance(kept, dict) and kept.get("data") == data else None
    return {name: row for name, row in rows.items() if isinstance(row, dict)} if isinstance(rows, dict) else {}


def metrics(table: dict[str, EvalResult | str], data: str) -> dict[str, Any]:
    """The table in plain values, as in metrics.json."""
    rows = {name: row if isinstance(row, str) else row.to_dict() for name, row in table.items()}
    return {"data": data, "accuracy": rows}


def write_report(
    *runs: OpenedRun | str | Path,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Path:
    """The report of a run, or of several side by side: one HTML page, and a Markdown file beside it; gives the page.

    Args:
        out: the page; default: report.html in the run's folder, compare.html here for several.
    """
    from maskaq.report import page  # plotly and jinja2 are an extra, and slow to import

    folders = [RunFolder.read(run.folder if isinstance(run, OpenedRun) else run) for run in runs]
    path = Path(out) if out else folders[0].path(PAGE_FILE) if len(folders) == 1 else Path("compare.html")
    if path.suffix != ".html":
        raise RunFolderError(f"the page is an HTML file: expected a name that ends in .html, got {path}")
    beside = path.with_suffix(".md")
    if problem := unwritable(path) or unwritable(beside):
        raise RunFolderError(problem)
    for file in (path, beside) if out or len(folders) > 1 else ():  # the pages of a run folder are the run's
        if file.exists() and not page.is_ours(_first_bytes(file)):
            raise RunFolderError(f"{file} is there and is no report of maskaq: choose another name than {path}")
    records = [_record(run, folder, device, progress) for run, folder in zip(runs, folders, strict=True)]
    try:
        pages = {path: page.html(records), beside: page.markdown(records)}
    except page.UNUSABLE as error:
        where = ", ".join(str(folder.root) for folder in folders)
        raise RunFolderError(
            f"{collect.FACTS_FILE}, {METRICS_FILE} or events.jsonl of {where} is not as maskaq wrote it ({error!r}): "
            "delete the one that was edited"
        ) from error
    for file, text in pages.items():
        files.write_bytes_atomic(file, text.encode(errors="backslashreplace"))
    return path


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(1000)
    except OSError as error:
        raise RunFolderError(f"{file} cannot be read: {error.strerror}") from error


def _record(
    run: OpenedRun | str | Path, folder: RunFolder, device: str | torch.device | None, progress: Progress | None
) -> Record:
    """A run as a page tells it, from what was kept in its folder; what is not there is collected now, if it can be."""
    kept = collect.read(folder)
    if kept is not None:
        return Record(folder, kept)
    recipe, seed = recipe_from_dict(folder.identity["recipe"]), folder.identity["seed"]
    rounds = collect.images_of_rounds(folder, recipe)
    if not rounds:
        raise RunFolderError(f"{folder.root} has no images yet, there is nothing to report: {_calibrate(folder.root)}")
    models: dict[str, nn.Module] = {}
    reasons: dict[str, None] = {}
    try:
        opened = run if isinstance(run, OpenedRun) else open_run(run)
        for name, make in (("student", opened.handed_over), ("teacher", opened.teacher), ("searched", opened.searched)):
            try:
                models[name] = make().to(pick_device(device))
            except MaskaqError as error:
                reasons[str(error)] = None
    except MaskaqError as error:
        reasons[str(error)] = None
    collected, unfinished = collect.collect(recipe, seed, rounds, models, progress), _unfinished(folder, recipe)
    if not reasons and not unfinished:  # else a later try may find more
        collect.write(folder.root, collected)
    return Record(folder, collected, "; ".join(reasons), unfinished)


def _unfinished(folder: RunFolder, recipe: Recipe) -> str:
    """How far a run came that has no model yet; nothing for one that has."""
    if folder.path(QUANTIZED).exists():
        return ""
    try:
        saved = saved_state(folder)
        done = f"its latest checkpoint is after {saved[1] if saved else 0} of {recipe.calibration.epochs} epochs"
    except RunFolderError:
        done = "its checkpoint cannot be read"
    return f"{done}; go on with: {_calibrate(folder.root)}"
