"""Open a run: the teacher, the student before and after calibration, and the accuracy of each."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskaq.artifact.saved import add_metrics, from_pretrained, read_config, saved_digest
from maskaq.calibrate.handover import KEEP
from maskaq.errors import CheckpointError, MaskaqError, PretrainedError, RunFolderError, unwritable
from maskaq.images.sets import SyntheticSet
from maskaq.images.stored import first_images, latest_images, range_images
from maskaq.models import geometry
from maskaq.models.load import load_model, rebuild, set_normalization
from maskaq.progress import Progress
from maskaq.quant.plan import QuantPlan, build_plan, with_own_mlps
from maskaq.quant.rotation import teacher_of
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.recipe.schema import Recipe, recipe_from_dict
from maskaq.report import collect
from maskaq.report.collect import Collected
from maskaq.report.record import Record
from maskaq.runs.arguments import model_identity, up_to_date_identity
from maskaq.runs.plans import plan_of_run
from maskaq.runs.provenance import pick_device
from maskaq.runs.torch_modes import own_torch_modes
from maskaq.storage import files
from maskaq.storage.runfolder import METRICS_FILE, QUANTIZED, RunFolder
from maskaq.tasks import CALIBRATED, FULL_PRECISION, PTQ, RTN, Evaluation, evaluate

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
    keep: str = "better"
    """`keep` of the latest command of the run."""
    task: str = "classification"
    """The task of the model in this run."""
    known_teacher: nn.Module | None = field(default=None, repr=False, compare=False)
    """The exposed teacher, if the caller already has it, so that it is not loaded again."""

    def load_teacher(self) -> nn.Module:
        """The full-precision model that the source names, without a check of its weights."""
        source = self.source
        settings = (source.get(key) for key in ("mean", "std", "task"))
        return load_model(source["name"], source["checkpoint"], source["args"], *settings)

    def teacher(self) -> nn.Module:
        """The full-precision model, loaded from its source; CheckpointError if its weights have changed."""
        return self._teacher

    @cached_property
    def _teacher(self) -> nn.Module:
        model = self.known_teacher
        if model is None:
            model = self.load_teacher()
            self.check_weights(model)
        return teacher_of(model, self.recipe.quantization, self.task)

    def check_weights(self, model: nn.Module) -> None:
        """CheckpointError if a model is not the run's teacher: other weights, heads or normalization."""
        now = model_identity(model)
        then = up_to_date_identity(RunFolder.read(self.folder).identity, now)
        for part in ("model", "preparation"):
            if odd := [key for key in now[part] if key in then[part] and then[part][key] != now[part][key]]:
                value = "" if odd[0] == "weights" else f" ({now[part][odd[0]]})"
                raise CheckpointError(
                    f"{self.source['checkpoint'] or self.source['name']} has other {odd[0]}{value} now than when "
                    f"{self.folder} was made; give the run the file it was made from"
                )

    def rtn(self) -> nn.Module:
        """The round-to-nearest baseline at the same bits: the teacher's weights, min-max ranges."""
        return self._uncalibrated(self.plan().with_range("minmax"))

    def ptq(self) -> nn.Module:
        """The baseline with searched ranges, where calibration starts: round to nearest, the recipe's range methods."""
        return self._uncalibrated(self.plan())

    def plan(self) -> QuantPlan:
        """What is quantized, and how."""
        return plan_of_run(self.folder) or build_plan(self.teacher(), self.recipe.quantization)

    @own_torch_modes()
    def _uncalibrated(self, plan: QuantPlan) -> nn.Module:
        """The student as it was before calibration: ranges from the first images of the first round."""
        teacher = self.teacher()
        run = RunFolder.read(self.folder)
        scheme, own = with_own_mlps(teacher, self.recipe.quantization, plan)
        student = quantized_twin(teacher, scheme, own)
        images = first_images(run, scheme.range_images)
        init_ranges_(student, range_images(teacher, images, self.recipe), scheme)
        return student

    @own_torch_modes()
    def calibrated(self) -> nn.Module:
        """The saved model, as `maskaq.from_pretrained` loads it. Needs no teacher."""
        return handed_over_model(self.folder)

    def handed_over(self) -> nn.Module:
        """The model behind `calibrated`, with its quantizers: the student, or its start if that was better."""
        path = RunFolder.read(self.folder).path(QUANTIZED)
        recorded = read_config(path)["made"].get("handover") if path.exists() else None
        is_start = isinstance(recorded, dict) and recorded.get("kept") == "start"
        return self.ptq() if is_start else self.student()

    @own_torch_modes()
    def student(self) -> nn.Module:
        """The student of the newest checkpoint, with its quantizers."""
        run = RunFolder.read(self.folder)
        saved = run.load_checkpoint()
        if saved is None:
            raise RunFolderError(f"{self.folder} has no checkpoint: {_again(run)}")
        blank = set_normalization(rebuild(self.source["architecture"]), self.source.get("mean"), self.source.get("std"))
        scheme = self.recipe.quantization
        student = quantized_twin(teacher_of(blank, scheme, self.task), scheme, plan_of_run(self.folder))
        try:
            student.load_state_dict(saved.state()["student"])
        except (RuntimeError, TypeError, AttributeError) as error:
            raise files.DamagedError(run.path("checkpoints"), error, files.RESTORE) from error
        return student

    def images(self) -> SyntheticSet:
        """The synthetic images of the latest round that has any."""
        return latest_images(RunFolder.read(self.folder))


@own_torch_modes()
def handed_over_model(folder: str | Path) -> nn.Module:
    """The saved model of a finished run, verified to belong to it."""
    run = RunFolder.read(folder)
    path = run.path(QUANTIZED)
    if not path.exists():
        raise RunFolderError(f"{folder} is not finished; to go on: {_again(run)}")
    try:
        model = from_pretrained(path)
    except PretrainedError as error:
        raise PretrainedError(f"{error}; to make a sound one: {_again(run)}") from error
    config: Any = model.maskaq_config
    if any(config["made"].get(key) != value for key, value in run.identity.items()):
        raise RunFolderError(f"{path} is of another model or recipe than the run; to make its own again: {_again(run)}")
    return model


def _again(run: RunFolder) -> str:
    """The command that finishes a run or rebuilds its model. `maskaq calibrate` uses the last request's settings."""
    if run.format == 1:
        return "run its command again with maskaq 0.1.0, which made it"
    return f"maskaq calibrate {shlex.quote(str(run.root))}"


def open_run(folder: str | Path) -> OpenedRun:
    """A run folder for reading."""
    run = RunFolder.read(folder)
    _check_record(run)
    source = run.source
    if not source:
        raise RunFolderError(
            f"{folder} was made from a model in memory, without a name: load its model alone, with "
            f"maskaq.from_pretrained({str(Path(folder) / QUANTIZED)!r}, like=model)"
        )
    source = {"args": {}, "checkpoint": None, **source}
    source = {"architecture": {"name": source["name"], "args": source["args"]}, **source}
    keep = run.latest_facts.get("keep", "better")
    recipe, seed = recipe_from_dict(run.identity["recipe"]), run.identity["seed"]
    return OpenedRun(Path(folder), recipe, seed, source, keep, run.identity["model"].get("task", "classification"))


def _check_record(run: RunFolder) -> None:
    """DamagedError unless run.json has the fields of a run: a folder from elsewhere may hold anything."""
    wrong = files.misfit(run.identity, {"recipe": {}, "model": {"class": str, "weights": str}, "seed": int}, "identity")
    source = {"name": str, "args?": {}, "checkpoint?": str, "architecture?": {"name": str, "args": {}}}
    if run.source:
        wrong = wrong or files.misfit(run.source, source, "source")
    if wrong or run.latest_facts.get("keep", "better") not in KEEP:
        raise files.DamagedError(run.path("run.json"), wrong or "keep", files.RESTORE)


def compare(
    run: OpenedRun, batches: Batches, *, device: str | torch.device | None = None, progress: Progress | None = None
) -> dict[str, Evaluation | str]:
    """Accuracy of the teacher, both uncalibrated models and the calibrated one, or the reason why it is missing."""
    progress = progress or Progress()
    table: dict[str, Evaluation | str] = {}
    full: Evaluation | None = None
    calibrated = run.calibrated()  # first, so that an unfinished or damaged run fails early
    makers = {FULL_PRECISION: run.teacher, RTN: run.rtn, PTQ: run.ptq, CALIBRATED: lambda: calibrated}
    for name, make in makers.items():
        try:
            model = make()
        except MaskaqError as error:
            table[name] = str(error)  # the teacher's file may be gone; the student can still be evaluated
            continue
        loader = batches(model)
        progress.stage(f"evaluate {name}", len(getattr(loader, "dataset", ())))
        found = evaluate(model.to(pick_device(device)), loader, progress, full)
        if name == FULL_PRECISION:
            full = found = found.as_full()
        table[name] = found
    return table


def write_metrics(folder: str | Path, table: dict[str, Evaluation | str], data: str) -> None:
    """Write the table of `compare` to metrics.json of a run folder and to the model's card.

    Rows that could not be measured now keep their earlier figures on the same images.
    """
    found = metrics(table, data)
    run = RunFolder.read(folder)
    found["model"] = saved_digest(run.path(QUANTIZED))  # whose figures these are
    before = _measured(run, found)
    for name, row in found["accuracy"].items():
        if isinstance(row, str):
            found["accuracy"][name] = before.get(name, row)
        else:  # features are compared with the teacher's, which may be missing now
            found["accuracy"][name] = before.get(name, {}) | {key: x for key, x in row.items() if x is not None}
    files.write_json_atomic(run.path(METRICS_FILE), found)
    add_metrics(run.path(QUANTIZED), found)


def _measured(run: RunFolder, now: dict[str, Any]) -> dict[str, Any]:
    """The rows of metrics.json that are figures, if they are of the same images and the same model."""
    try:
        kept = run.read_json(METRICS_FILE)
    except RunFolderError:  # there is none, or none that can be read
        return {}
    same = isinstance(kept, dict) and all(kept.get(key) == now[key] for key in ("data", "model"))
    rows = kept.get("accuracy") if same else None
    return {name: row for name, row in rows.items() if isinstance(row, dict)} if isinstance(rows, dict) else {}


def metrics(table: dict[str, Evaluation | str], data: str) -> dict[str, Any]:
    """The table as plain values, as in metrics.json."""
    rows = {name: row if isinstance(row, str) else row.to_dict() for name, row in table.items()}
    return {"data": data, "accuracy": rows}


def write_report(
    *runs: OpenedRun | str | Path,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    real: Batches | None = None,
) -> Path:
    """The report of a run, or of several side by side: one HTML page, and a Markdown file beside it; gives the page.

    Args:
        out: the page; default: report.html in the run's folder, compare.html here for several.
        real: labelled real images, which Theorem 2 is measured against; what is found stays in the run's reports.
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
    if real is not None:
        pairs = zip(runs, records, strict=True)
        records = [_with_real_images(run, record, real, device, progress) for run, record in pairs]
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


def _with_real_images(
    run: OpenedRun | str | Path,
    record: Record,
    real: Batches,
    device: str | torch.device | None,
    progress: Progress | None,
) -> Record:
    """The record with the quantities of Theorem 2 added; also stored in the run folder."""
    opened = run if isinstance(run, OpenedRun) else open_run(run)
    folder, recipe = record.run, record.recipe
    teacher, student = (model.to(pick_device(device)) for model in (opened.teacher(), opened.calibrated()))
    classes = geometry(teacher).classes
    if not classes or not recipe.makes_images:
        raise RunFolderError(f"{folder.root}: Theorem 2 is about classes, and its images were made for none")
    try:
        images = collect.images_per_label(folder, recipe, classes) or opened.images()[: collect.SAMPLED]
    except RunFolderError as error:
        raise RunFolderError(
            f"{folder.root}: Theorem 2 needs its synthetic images (in `maskaq compare`: --keep-images): {error}"
        ) from error
    found = collect.against_real(recipe, teacher, student, images, real(opened.teacher()), progress)
    facts = record.collected.facts
    changed = Collected(
        {**facts, "information": {**(facts.get("information") or {}), **found}}, record.collected.tensors
    )
    if not record.missing and not record.unfinished:
        collect.write(folder.root, changed)
    return replace(record, collected=changed)


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(1000)
    except OSError as error:
        raise RunFolderError(f"{file} cannot be read: {error.strerror}") from error


def _record(
    run: OpenedRun | str | Path, folder: RunFolder, device: str | torch.device | None, progress: Progress | None
) -> Record:
    """The record of a run from its folder; missing measurements are made now, if possible."""
    _check_record(folder)
    kept = collect.read(folder)
    if kept is not None:
        return Record(folder, kept)
    recipe = recipe_from_dict(folder.identity["recipe"])
    seed = folder.identity["seed"]
    rounds = collect.images_of_rounds(folder, recipe)
    if not rounds:
        raise RunFolderError(f"{folder.root} has no images yet, there is nothing to report: {_again(folder)}")
    models: dict[str, nn.Module] = {}
    reasons: dict[str, None] = {}
    try:
        opened = run if isinstance(run, OpenedRun) else open_run(run)
        for name, make in (("student", opened.handed_over), ("teacher", opened.teacher), ("searched", opened.ptq)):
            try:
                models[name] = make().to(pick_device(device))
            except MaskaqError as error:
                reasons[str(error)] = None
    except MaskaqError as error:
        reasons[str(error)] = None
    collected = collect.collect(recipe, seed, rounds, models, progress)
    unfinished = _unfinished(folder, recipe)
    if not reasons and not unfinished:  # else a later try may find more
        collect.write(folder.root, collected)
    return Record(folder, collected, "; ".join(reasons), unfinished)


def _unfinished(folder: RunFolder, recipe: Recipe) -> str:
    """Progress of a run that has no model yet; empty for a finished run."""
    if folder.path(QUANTIZED).exists():
        return ""
    try:
        saved = folder.load_checkpoint()
        done = f"its latest checkpoint is after {saved.epoch if saved else 0} of {recipe.epochs} epochs"
    except RunFolderError:
        done = "its checkpoint cannot be read"
    return f"{done}; to go on: {_again(folder)}"
