"""What each command does: parsed words in, one call of the library, tables out."""

import argparse
import ast
import itertools
import os
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from maskaq import bench as measure
from maskaq import zoo
from maskaq.artifact.card import bits_of, caveat_of
from maskaq.artifact.export import SUFFIXES, check_target
from maskaq.artifact.export import export as write_export
from maskaq.artifact.saved import from_pretrained, is_pretrained
from maskaq.cli import console as draw
from maskaq.cli.main import DEMO_DATA
from maskaq.engine import pick_engine
from maskaq.errors import (
    CheckpointError,
    DataError,
    DeviceError,
    MaskaqError,
    ModelError,
    RecipeError,
    RunFolderError,
    unknown,
)
from maskaq.images.sets import TensorImages, image_folder, to_pixels
from maskaq.losses.terms import CALIBRATION_TERMS, SYNTHESIS_TERMS, Objective
from maskaq.models import (
    classifier_tags,
    data_config,
    expose,
    geometry,
    has_classifier,
    pretrained_tags,
    refuse_zero_weights,
    supported_names,
)
from maskaq.models.load import SUFFIXES as WEIGHTS
from maskaq.models.load import architecture_of, load_model, load_shape, rebuild, weights_in_place_of_name
from maskaq.quant.inspection import inspect_deployed, inspect_model
from maskaq.quant.quantizers import QUANTIZERS
from maskaq.quant.rotation import teacher_of
from maskaq.recipe.schema import Recipe, describe_keys, load_recipe, shipped_recipes
from maskaq.runs import opened as results
from maskaq.runs import provenance
from maskaq.runs import quantize as run
from maskaq.storage import files, runfolder
from maskaq.storage.runfolder import RunFolder
from maskaq.tasks.classification import CALIBRATED, FULL_PRECISION, EvalResult
from maskaq.tasks.classification import evaluate as evaluate_model

_MOST_THREADS = 8  # of each core, that a measurement makes sense with
_VERIFIED_ON = 16  # synthetic images that an exported file is compared on


def quantize(args: argparse.Namespace, console: Console, only_images: bool = False) -> None:
    recipe = _recipe(args)
    args.out = args.out or f"runs/{args.model}-{recipe.quantization.bits.replace(':', '-')}"
    model_args = _model_args(args)
    model = _full_precision(args, lambda: load_model(args.model, args.checkpoint, model_args, args.mean, args.std))
    source = {
        "name": args.model,
        "args": model_args,
        "checkpoint": _absolute(args.checkpoint) if args.checkpoint else None,
        "mean": args.mean,
        "std": args.std,
        "architecture": architecture_of(model, args.model, model_args),
        "command": shlex.join(["maskaq", *args.words]),
    }
    _run(args, console, recipe, model, source, only_images)


def synthesize(args: argparse.Namespace, console: Console) -> None:
    args.data = None
    quantize(args, console, only_images=True)


def calibrate(args: argparse.Namespace, console: Console) -> None:
    opened = _opened(args.folder, args.checkpoint)
    _check_names(opened.recipe)
    source = opened.source
    args.out, args.model, args.seed = args.folder, source["name"], opened.seed
    args.keep = args.keep or opened.keep
    _run(args, console, opened.recipe, opened.load_teacher(), source, False)


def _run(
    args: argparse.Namespace,
    console: Console,
    recipe: Recipe,
    model: nn.Module,
    source: dict[str, Any],
    only_images: bool,
) -> None:
    """Plan, run, evaluate, summary."""
    began = time.monotonic()
    args.out = str(Path(args.out))  # without a trailing slash
    device = provenance.pick_device(args.device)
    batches = _batches(args) if args.data else None
    if batches:
        batches(model)  # a wrong folder is told now, not after the work
    exposed = expose(model)
    refuse_zero_weights(exposed)
    RunFolder.check(args.out, run.identity(model, recipe, args.seed), run.DEFAULTS)
    run.check_folder(recipe, args.out)
    console.print(draw.plan_table(args.model, model, geometry(exposed), recipe, str(device), args.out))
    with draw.progress_for(console) as progress:
        run.quantize(
            model,
            recipe,
            args.out,
            seed=args.seed,
            device=device,
            progress=progress,
            source=source,
            only_images=only_images,
            forecast=True,
            fast=False if args.plain else None,
            keep=args.keep,
            report=not args.no_report,
        )
        # The teacher is where this command has it, which may be elsewhere than when the run was finished.
        table = None
        if batches:
            opened = results.open_run(args.out)
            opened = replace(opened, source=opened.source | source)
            table = results.compare(opened, batches, device=device, progress=progress)
    console.print()
    if only_images:
        console.print(f"images are in {args.out}; go on with: maskaq calibrate {shlex.quote(args.out)}")
        return
    if table:
        title = f"{args.model} {recipe.quantization.bits} on {args.data}{_caveat(recipe.caveat)}"
        console.print(draw.accuracy_table(table, title))
        console.print(draw.what_was_won_back(table))
        results.write_metrics(args.out, table, args.data)
    console.print(f"quantized model: {args.out}/{runfolder.QUANTIZED}   ({draw.duration(time.monotonic() - began)})")
    if not args.no_report:
        _write_report(args.out, console, device)
    if not table:
        console.print(f"evaluate it with: maskaq evaluate {shlex.quote(args.out)} --data DIR")


def evaluate(args: argparse.Namespace, console: Console) -> None:
    batches, device = _batches(args), provenance.pick_device(args.device)
    path = Path(args.model)
    is_run = _is_run(path)
    is_saved = not is_run and is_pretrained(path)
    if is_run or is_saved:
        args.model = str(path)  # without a trailing slash
    elif path.suffix.lower() in WEIGHTS:
        raise ModelError(weights_in_place_of_name(args.model))
    elif os.path.exists(path):
        raise ModelError(
            f"{path} is neither a run folder (it has no run.json) nor a saved model (no config.json) nor a model name"
        )
    elif path.name != args.model:  # it has a slash: meant as a folder
        raise RunFolderError(f"there is no run folder {path}: expected the --out of an earlier run, or a model name")
    table: dict[str, EvalResult | str]
    with draw.progress_for(console) as progress:
        if is_run:
            if given := _given(args):
                raise ModelError(f"{args.model} is a run and knows its model: {given} is for a model's name")
            opened = _opened(args.model, args.checkpoint)
            table = results.compare(opened, batches, device=device, progress=progress)
            caveat = _caveat(opened.recipe.caveat)
        else:
            model: Any = (
                _saved(args)
                if is_saved
                else load_model(args.model, args.checkpoint, _model_args(args), args.mean, args.std)
            )
            caveat = _caveat(caveat_of(model.maskaq_config)) if is_saved else ""
            loader = batches(model)
            progress.stage(f"evaluate {args.model}", len(loader.dataset))  # type: ignore[arg-type]
            row = CALIBRATED if is_saved else FULL_PRECISION
            table = {row: evaluate_model(model.to(device), loader, progress)}
    console.print(draw.accuracy_table(table, f"{args.model} on {args.data}{caveat}"))
    try:
        if is_run:
            results.write_metrics(args.model, table, args.data)
    finally:  # what was measured is kept wherever it can be
        if args.json:
            files.write_json_atomic(args.json, results.metrics(table, args.data))
    if is_run and (path / results.PAGE_FILE).exists():  # it shows other figures
        _write_report(args.model, console, device)


def export(args: argparse.Namespace, console: Console) -> None:
    path = Path(args.folder)
    file = check_target(args.output or path / f"model{SUFFIXES[args.format]}", args.format)
    if is_pretrained(path):  # without a run there are no synthetic images: noise tells codes apart as well
        model: Any = from_pretrained(path)
        images = run.noise(model, _VERIFIED_ON, seed=0)
    else:
        opened = results.open_run(path)
        model = opened.calibrated()
        images = geometry(model).normalise(to_pixels(opened.images().images[:_VERIFIED_ON]))
    loader = _batches(args)(model) if args.data else None  # a wrong folder fails early
    saved = model.maskaq_config
    metadata = {
        "bits": bits_of(saved),
        "model": saved["timm"]["name"],
        "architecture": saved["timm"],
        "recipe": saved["made"].get("recipe"),
        "data_free": saved["made"].get("data_free"),
    }
    found = write_export(model, file, args.format, images, metadata)
    if found is None:
        console.print(f"{file}   ({file.stat().st_size / 1e6:.2f} MB)")
        console.print(f"verified on {len(images)} images: the same logits, bit for bit")
    else:
        from maskaq.artifact.export import runtimes

        beside = " and .bin" if args.format == "openvino" else ""
        console.print(f"{file}{beside}   ({runtimes.bytes_of(file) / 1e6:.2f} MB)")
        for line in draw.verification(found, runtimes.runtime_of(file), runtimes.products(file)):
            console.print(line)
        if loader:
            accuracy: dict[str, EvalResult | str] = {"maskaq": evaluate_model(model, loader)}
            accuracy |= {file.name: evaluate_model(runtimes.runnable(file), loader)}
            console.print(draw.accuracy_table(accuracy, f"{args.folder} on {args.data}{_caveat(caveat_of(saved))}"))


def bench_runtime(args: argparse.Namespace, console: Console) -> None:
    from maskaq.artifact.export import onnx as files
    from maskaq.artifact.export import runtimes

    notes = runtimes.metadata_of(args.files[0])
    if "architecture" not in notes:
        raise ModelError(f"{args.files[0]} does not say which model it is: expected a file of `maskaq export`")
    for file in args.files[1:]:
        other = runtimes.metadata_of(file)
        if other.get("architecture") != notes["architecture"]:
            named = " and ".join(f"{f} ({n.get('model')})" for f, n in ((args.files[0], notes), (file, other)))
            raise ModelError(f"{named} are of two models: their speeds are not to be compared; measure each by itself")
    if args.threads > _MOST_THREADS * (os.cpu_count() or 1):
        raise DeviceError(f"--threads {args.threads}: expected about as many as there are cores, {os.cpu_count()}")
    model = rebuild(notes["architecture"])
    loader = _batches(args)(model) if args.data else None
    with tempfile.TemporaryDirectory() as folder, draw.progress_for(console) as progress:
        float32 = files.export_float(model, Path(folder) / "float32.onnx")
        progress.note(f"{len(args.files) + 1} files, {args.repeats} repeats at batch {', '.join(map(str, args.batch))}")
        paths = {"float32": float32} | {file: Path(file) for file in args.files}
        speeds = list(runtimes.bench_files(paths, batches=args.batch, threads=args.threads, repeats=args.repeats))
    console.print(draw.speed_table(speeds, f"the CPU, {args.threads} threads"))
    counts = {file: runtimes.products(file) for file in args.files}
    for file, count in counts.items():
        console.print(f"{file}: {count} ({runtimes.runtime_of(file)})")
    accuracy: dict[str, EvalResult | str] = {}
    if loader:
        accuracy = {file: evaluate_model(runtimes.runnable(file, args.threads), loader) for file in args.files}
        console.print(draw.accuracy_table(accuracy, f"on {args.data}"))
    if args.json:
        figures = {
            "speeds": [speed.to_dict() for speed in speeds],
            "products": {file: asdict(count) for file, count in counts.items()},
        }
        figures |= results.metrics(accuracy, args.data) if accuracy else {}
        _write_figures(args, torch.device("cpu"), figures)


def report(args: argparse.Namespace, console: Console) -> None:
    if args.checkpoint and len(args.folders) > 1:
        raise CheckpointError("--checkpoint is for one run: report each run alone first, then all of them together")
    runs = [_opened(args.folders[0], args.checkpoint)] if args.checkpoint else args.folders
    with draw.progress_for(console) as progress:
        page = results.write_report(*runs, out=args.out, device=args.device, progress=progress)
    console.print(f"report: {page} ({draw.size(page.stat().st_size)}), and {page.with_suffix('.md').name} beside it")


def inspect(args: argparse.Namespace, console: Console) -> None:
    is_run = _is_run(args.model)
    if is_run or is_pretrained(args.model):
        options = {"--bits": args.bits, "--set": args.set, "--recipe": args.recipe}
        given = [option for option, value in options.items() if value or value == ""]
        if given:
            what = "run" if is_run else "saved model"
            raise RecipeError(f"{args.model} is a {what} and has its bits: {given[0]} is for a model's name")
        saved: Any = _saved(args, is_run)
        report, title = inspect_deployed(saved), f"{args.model}{_caveat(caveat_of(saved.maskaq_config))}"
        facts = geometry(saved)
    else:
        recipe = _recipe(args)
        model_args, numbers = _model_args(args), (args.mean, args.std)
        has_file = args.checkpoint is not None
        load = partial(load_model, args.model, args.checkpoint) if has_file else partial(load_shape, args.model)
        model = _full_precision(args, partial(load, model_args, *numbers))
        exposed = teacher_of(model, recipe.quantization)
        if recipe.bits.average is not None and any(p.is_meta for p in exposed.parameters()):
            raise RecipeError(
                f"{recipe.quantization.bits}: widths are chosen by measuring the weights, which {args.model} does not "
                "have here: give them with --checkpoint, or inspect a finished run"
            )
        with draw.progress_for(console) as progress:
            plan = run.make_plan(exposed, recipe, progress=progress)
        report, title = inspect_model(exposed, recipe, plan), f"{args.model} {recipe.quantization.bits}"
        facts = geometry(exposed)
    table = Table(title=title, title_justify="left")
    left = ("layer", "kind", "quantizers")
    for column in ("layer", "kind", "shape", "weight bits", "input bits", "quantizers", "fp32 kB", "quantized kB"):
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in report.rows:
        size = (f"{row.float_bytes / 1e3:.1f}", f"{row.quantized_bytes / 1e3:.1f}") if row.float_bytes else ("", "")
        kind = f"{row.kind} ({row.rotation})" if row.rotation else row.kind
        table.add_row(row.name, kind, row.shape, row.weight_bits, row.input_bits, row.quantizers, *size)
    console.print(table)
    if turned := ", ".join(dict.fromkeys(row.rotation for row in report.rows if row.rotation)):
        console.print(f"rotated before the grid: {turned}")
    for reason in report.left_out:
        console.print(f"not rotated: {reason}")
    console.print(f"{facts.classes} classes, {draw.preparation(facts)}")
    before, after = report.float_bytes / 1e6, report.quantized_bytes / 1e6
    smaller = f"{before / after:.1f} x smaller"
    console.print(f"{before:.2f} MB in float32 -> {after:.2f} MB with weights packed at their bits ({smaller})")


def bench(args: argparse.Namespace, console: Console) -> None:
    recipe = _recipe(args)
    device = provenance.pick_device(args.device)
    timings: list[measure.Timing] = []
    with draw.progress_for(console) as progress:
        engine = pick_engine(device, False if args.plain else None, progress)
        for name in args.models:
            teacher = teacher_of(rebuild({"name": name, "args": {}}), recipe.quantization).to(device)
            progress.note(
                f"{name}: timing synthesis and calibration, {args.repeats} repeats of {args.steps} steps each"
            )
            sizes = {"batch": args.batch, "calibration_batch": args.calibration_batch}
            timings += measure.bench(name, teacher, recipe, engine, **sizes, steps=args.steps, repeats=args.repeats)
    console.print(draw.bench_table(timings, provenance.device_name(device)))
    if args.json:
        figures = {"note": args.note, "timings": [timing.to_dict() for timing in timings]}
        _write_figures(args, device, figures)


def _write_figures(args: argparse.Namespace, device: torch.device, figures: dict[str, Any]) -> None:
    """What was measured, with the day, the command and where it ran."""
    facts = {"date": time.strftime("%Y-%m-%d"), "command": shlex.join(["maskaq", *args.words])}
    files.write_json_atomic(args.json, facts | provenance.surroundings(device) | figures)


def list_names(args: argparse.Namespace, console: Console) -> None:
    if args.what == "models":
        lines = [f"{name} (embedded)" for name in zoo.embedded_names()]
        lines += [f"{name}  {_weights_of(name)}" for name in supported_names() if fnmatchcase(name, args.pattern)]
    elif args.what == "recipes":
        lines = [_hanging(name, _first_comment(text)) for name, text in shipped_recipes().items()]
        lines += [_hanging("images:DIR", "Real images of a folder: the ceiling, NOT data-free.")]
    elif args.what == "terms":
        both = {"synthesis": SYNTHESIS_TERMS, "calibration": CALIBRATION_TERMS}
        lines = [f"{stage}.terms.{spec.name:26}{spec.doc}" for stage, terms in both.items() for spec in terms.values()]
    elif args.what == "quantizers":
        lines = [f"{name:10}{(cls.__doc__ or '').splitlines()[0]}" for name, cls in QUANTIZERS.items()]
    else:
        keys = list(describe_keys())
        width = 2 + max(len(default) for _, default, _ in keys)
        lines = [f"{key:42}{default:{width}}{doc}" for key, default, doc in keys]
    lines = [line for line in lines if fnmatchcase(line.split()[0], args.pattern)]
    if not lines:
        raise MaskaqError(
            f"no name in `maskaq list {args.what}` matches {args.pattern!r}: expected a pattern such as '*tiny*'"
        )
    for line in lines:
        print(line)
    sys.stdout.flush()


def _weights_of(name: str) -> str:
    """The tags of timm's weights of an architecture, as NAME.TAG takes them, and what to do where they are no help."""
    tags, usable = pretrained_tags(name), classifier_tags(name)
    headless = [tag for tag in tags if tag not in usable]
    groups = [", ".join(usable)] if usable else []
    groups += [f"without classifier: {', '.join(headless)}"] if headless else []
    if not tags:
        return "(timm has no weights: give --checkpoint)"
    if not usable:
        groups.append("(give --checkpoint with a classifier)")
    elif not has_classifier(name):
        groups.append(f"(the name alone has no classifier: take {name}.{usable[0]})")
    return "  ".join(groups)


def demo(args: argparse.Namespace, console: Console) -> None:
    args.model = f"cifar10_{args.model}"
    args.out = args.out or f"runs/demo-{args.model}-{args.bits}"
    args.recipe, args.checkpoint, args.model_arg, args.data = "demo", None, [], DEMO_DATA
    args.img_size = args.mean = args.std = None
    quantize(args, console)


def _write_report(folder: str, console: Console, device: torch.device) -> None:
    """The page of a run that went well: a missing library must not make it look like one that failed."""
    try:
        with draw.progress_for(console) as progress:
            page = results.write_report(folder, device=device, progress=progress)
        console.print(f"report: {page}")
    except MaskaqError as error:
        console.print(f"no report: {error}")


def _batches(args: argparse.Namespace) -> Callable[[nn.Module], DataLoader]:
    """The evaluation images, as a function of the model whose transform they need."""

    def batches(model: Any) -> DataLoader:
        if args.data == DEMO_DATA:
            images, labels = zoo.test_images()
            if model.num_classes != 10 or data_config(model)["input_size"] != (3, 32, 32):
                raise DataError(
                    f"{DEMO_DATA} is for the embedded CIFAR-10 models; give --data DIR for {type(model).__name__}"
                )
            return DataLoader(TensorImages(images, labels, model), batch_size=100)
        return image_folder(
            args.data,
            model,
            class_index=args.class_index,
            crop_pct=args.crop_pct,
            interpolation=args.interpolation,
            workers=args.workers,
        )

    return batches


def _opened(folder: str, checkpoint: str | None) -> results.OpenedRun:
    """A run, with its weights file where the user says it is now: one that is not the run's is refused before work."""
    opened = results.open_run(folder)
    if checkpoint is None:
        return opened
    opened = replace(opened, source=opened.source | {"checkpoint": _absolute(checkpoint)})
    opened.teacher()
    return opened


def _is_run(folder: str | Path) -> bool:
    return os.path.exists(os.path.join(folder, "run.json"))


def _saved(args: argparse.Namespace, is_run: bool = False) -> nn.Module:
    """The quantized model in a folder: of a run, or a saved one."""
    given = "--checkpoint" if args.checkpoint else _given(args)
    if given:
        what = "run that knows its model" if is_run else "saved model with its weights"
        raise ModelError(f"{args.model} is a {what}: {given} is for a model's name")
    if not is_run:
        return from_pretrained(args.model)
    return results.handed_over_model(args.model)


def _full_precision(args: argparse.Namespace, load: Callable[[], nn.Module]) -> nn.Module:
    """A loaded model; what is wrong with a folder in place of its name is told in the folder's terms."""
    try:
        return load()
    except ModelError as error:
        if _is_run(args.model) or is_pretrained(args.model):
            what = "a run" if _is_run(args.model) else "a saved model"
            raise ModelError(
                f"{args.model} is {what}, quantized already: give the name of the full-precision model. To look at "
                "what it holds: maskaq inspect or maskaq evaluate"
            ) from error
        if os.path.isdir(args.model):
            raise ModelError(
                f"{args.model} is a folder, neither a run (it has no run.json) nor a saved model (no config.json): "
                "expected the name of a model (`maskaq list models`)"
            ) from error
        raise


def _given(args: argparse.Namespace) -> str:
    """The first option of a model's name that was given; empty if none was."""
    options = {"--model-arg": args.model_arg or None, "--img-size": args.img_size}
    options |= {"--mean": args.mean, "--std": args.std}
    return next((option for option, value in options.items() if value is not None), "")


def _absolute(file: str) -> str:
    return str(Path(file).resolve())


def _model_args(args: argparse.Namespace) -> dict[str, Any]:
    """What timm is given: --model-arg and --img-size."""
    found: dict[str, Any] = {}
    for pair in args.model_arg:
        key, sign, text = pair.partition("=")
        if not sign:
            raise ModelError(f"--model-arg {pair!r}: expected key=value, for example img_size=192")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
        except (RecursionError, MemoryError) as error:  # what the parser raises for thousands of brackets
            raise ModelError(
                f"--model-arg {key}: expected a number, word or list, got one nested too deeply"
            ) from error
    if args.img_size is not None:
        if "img_size" in found:
            raise ModelError("--img-size and --model-arg img_size are the same: give one of them")
        found["img_size"] = args.img_size
    return found


def _recipe(args: argparse.Namespace) -> Recipe:
    name = args.default_recipe if args.recipe is None else args.recipe
    recipe = load_recipe(name, *args.set, bits=args.bits)
    _check_names(recipe)
    return recipe


def _caveat(words: str) -> str:
    """For the title of a table."""
    return f"\ncalibrated on {words}" if words else ""


def _check_names(recipe: Recipe) -> None:
    """RecipeError for a quantizer or a term that does not exist: before weights are fetched and a plan is shown."""
    for name in (recipe.quantization.weight, recipe.quantization.activation):
        if name not in QUANTIZERS:
            raise RecipeError(unknown("quantizer", name, QUANTIZERS))
    Objective(SYNTHESIS_TERMS, recipe.synthesis.terms, "synthesis.terms")
    Objective(CALIBRATION_TERMS, recipe.calibration.terms, "calibration.terms")


def _first_comment(text: str) -> str:
    """The first paragraph of the comment that a recipe starts with."""
    lines = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]
    return " ".join(itertools.takewhile(bool, lines))


def _hanging(name: str, text: str) -> str:
    """A name and what it means, in lines of at most 120 characters."""
    return textwrap.fill(text, 120, initial_indent=f"{name:12}", subsequent_indent=" " * 12)
