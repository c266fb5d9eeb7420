"""The method on one page: twin, ranges, then rounds of synthesis and calibration (Algorithm 1), saved as it goes."""

import hashlib
import operator
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import timm
import torch
from torch import Tensor, nn

import maskaq
from maskaq import pretrained, randomness, runfolder
from maskaq.calibration import Calibrator
from maskaq.config import Recipe, load_recipe, to_dict, to_toml
from maskaq.data import SyntheticSet, image_files, to_pixels
from maskaq.engine import Engine, pick_engine
from maskaq.errors import DeviceError, MaskaqError, ModelError, RecipeError, RunFolderError, SynthesisError
from maskaq.folder import FolderImages
from maskaq.models import expose, geometry, refuse_zero_weights
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.report import collect
from maskaq.report.record import STRIP_FILE
from maskaq.runfolder import METRICS_FILE, QUANTIZED, RunFolder
from maskaq.synthesis import Synthesizer
from maskaq.watch import Watch

ImageSource = Synthesizer | FolderImages


@dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    model: nn.Module
    """The calibrated student of the last epoch."""
    folder: Path
    images: SyntheticSet
    """The synthetic images of the last round."""


@contextmanager
def own_torch_modes() -> Iterator[None]:
    """Gradients, and float32: whatever the caller's `torch.no_grad`, `torch.autocast` or default dtype says."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.set_default_dtype(before)


@own_torch_modes()
def quantize(
    model: nn.Module,
    recipe: Recipe | str | Path = "quick",
    out: str | Path = "runs/maskaq",
    *,
    bits: str | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    watch: Watch | None = None,
    source: dict[str, Any] | None = None,
    checkpoint_seconds: float = 30.0,
    only_images: bool = False,
    forecast: bool = False,
    fast: bool | None = None,
) -> Result:
    """Quantize a model without data into the run folder `out`. The same call again continues where it stopped.

    Args:
        recipe: a Recipe, or the name or file of one.
        bits: wXaY, in place of the recipe's.
        source: what the model is (name, arguments, checkpoint), written down so that `out` can be evaluated later.
        only_images: stop after the first round of synthesis.
        forecast: tell the watch how long it will take, from a few steps.
        fast: False runs every step as it is written, in float32; by default a GPU runs it the fast way where it can.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, bits=bits)
    elif bits is not None:
        recipe = replace(recipe, quantization=replace(recipe.quantization, bits=str(bits).strip().lower()))
    _check_arguments(watch, source)
    watch, seed = watch or Watch(), _whole_number(seed)
    if not isinstance(out, str | Path) or "\0" in str(out):
        raise RunFolderError(f"out: expected the path of a run folder, got {out!r}")
    device = pick_device(device)
    teacher = expose(model)
    if any(tensor.is_meta for tensor in (*teacher.parameters(), *teacher.buffers())):
        raise ModelError(f"this {type(model).__name__} is on the meta device, where it has no weights: load them first")
    refuse_zero_weights(teacher)
    teacher = teacher.to(device)
    student = quantized_twin(teacher, recipe.quantization)
    engine = pick_engine(device, fast, watch)
    image_source: ImageSource
    if recipe.data_free:
        image_source = Synthesizer(teacher, student, recipe, seed=seed, watch=watch, engine=engine)
    else:
        image_source = FolderImages(teacher, recipe, seed=seed, watch=watch)
    calibrator = Calibrator(teacher, student, recipe, seed=seed, watch=watch, engine=engine)

    about = facts(teacher, source, engine) | {"data_free": recipe.data_free}
    settings = identity(model, recipe, seed), to_toml(recipe), about
    check_folder(recipe, out)
    with RunFolder.open(out, *settings) as run:
        if run.read_text("recipe.toml") != to_toml(recipe):
            watch.note(
                f"{run.path('recipe.toml')} was changed; it is a copy for reading, and the run keeps the recipe in "
                "run.json. Delete it to have it written anew"
            )
        init_ranges_(student, noise(teacher, recipe.quantization.range_images, seed), recipe.quantization)
        first_epoch = _restore(run, student, calibrator)
        finished = first_epoch == recipe.calibration.epochs and pretrained.is_sound(run.path(QUANTIZED))
        if finished:
            watch.note(f"{out} is finished: its model is made, nothing is left to calibrate")
        elif forecast and recipe.most_steps and isinstance(image_source, Synthesizer):  # it times steps
            watch.forecast(_forecast(image_source, run, first_epoch, only_images))
        images = None
        for round, epochs in enumerate(recipe.rounds):
            if first_epoch >= epochs.stop and round < len(recipe.rounds) - 1:
                continue  # an earlier call finished this round
            images = _images_of_round(run, image_source, round, recipe)
            if only_images:
                break
            if first_epoch == 0 and round == 0:
                init_ranges_(student, range_images(teacher, images, recipe), recipe.quantization)
            left = range(max(first_epoch, epochs.start), epochs.stop)
            title = f"calibrate, round {round + 1} of {len(recipe.rounds)}"
            watch.stage(title, len(images) * len(epochs), done=len(images) * (len(epochs) - len(left)))
            last_saved = time.monotonic()
            for epoch in left:
                began = time.monotonic()
                losses = calibrator.epoch(images, epoch)
                seconds = time.monotonic() - began
                run.event(stage="calibrate", round=round, epoch=epoch, seconds=seconds, **losses)
                if epoch == epochs.stop - 1 or time.monotonic() - last_saved > checkpoint_seconds:
                    _checkpoint(run, student, calibrator, epoch + 1)
                    last_saved = time.monotonic()
        assert images is not None
        if not only_images:
            if not finished:
                _save_model(run, student, source)
            _collect_report(run, teacher, student, recipe, seed, watch)
    return Result(model=student, folder=Path(out), images=images)


def check_folder(recipe: Recipe, out: str | Path) -> None:
    """DataError for a folder of images that a new run cannot use: before anything is written."""
    if not recipe.data_free and not Path(out, "run.json").exists():
        image_files(recipe.synthesis.folder, recipe.synthesis.images)


def _images_of_round(run: RunFolder, source: ImageSource, round: int, recipe: Recipe) -> SyntheticSet:
    """The round's images: shards that are there are read, others made. A warm refresh starts from the round before."""
    config, work = recipe.synthesis, max(1, recipe.steps_in_round(round))
    shards = list(enumerate(torch.arange(config.images).split(config.batch)))
    there = {shard for shard, _ in shards if run.has_shard(round, shard)}
    finished = sum(len(indices) for shard, indices in shards if shard in there)
    title = f"{source.stage}, round {round + 1} of {len(recipe.rounds)}"
    source.watch.stage(title, config.images * work, done=finished * work)
    missing = [(shard, indices) for shard, indices in shards if shard not in there]
    while missing:
        together = source.shards_at_once(len(missing))
        _make_shards(run, source, round, missing[:together])
        missing = missing[together:]
    sets = [SyntheticSet(**run.load_shard(round, shard)) for shard, _ in shards]
    images = SyntheticSet.concatenate(sets)
    lost_in_all = config.images - len(images)
    if lost_in_all > config.max_lost * config.images or not len(images):
        cause = f"check the model's weights, or lower synthesis.lr (now {config.lr})"
        if round:  # the round before went well with the same teacher: what is new is the calibrated student
            refresh_lr = f", or refresh.lr (now {recipe.refresh.lr})" if recipe.refresh.lr else ""
            cause = (
                f"by round {round + 1} the student has probably diverged: lower calibration.lr "
                f"(now {recipe.calibration.lr}) or set calibration.clip_grad{refresh_lr}"
            )
        cause = getattr(source, "blamed", None) or cause
        raise SynthesisError(
            f"{lost_in_all} of {config.images} images were lost to NaN or Inf, more than synthesis.max_lost "
            f"{config.max_lost} allows; {cause}, in a new run folder"
        )
    return images


def _make_shards(run: RunFolder, source: ImageSource, round: int, shards: list[tuple[int, Tensor]]) -> None:
    """Make some shards together and store each."""
    began = time.monotonic()
    before = [_before(run, source, round, shard) for shard, _ in shards]
    known = [images for images in before if images is not None]
    start = SyntheticSet.concatenate(known) if known else None
    made = source(torch.cat([indices for _, indices in shards]), round, start)
    seconds = (time.monotonic() - began) / len(shards)
    _keep_strip(run, source, round, first=shards[0][0] == 0)
    for shard, indices in shards:
        part = made[torch.isin(made.indices, indices)]
        lost = sorted(set(indices.tolist()) - set(part.indices.tolist()))
        run.save_shard(round, shard, part.tensors(), count=len(part), lost=lost)
        run.event(stage=source.stage, round=round, shard=shard, seconds=seconds, lost=lost, curves=source.curves)


def _keep_strip(run: RunFolder, source: ImageSource, round: int, first: bool) -> None:
    """One image of the round on its way: the first, or the first of a later shard where that one was lost."""
    path, strip = run.path(STRIP_FILE.format(round=round)), source.strip
    if strip is not None and (first or not path.exists()):
        words = {"number": str(strip.number), "steps": " ".join(map(str, strip.steps))}
        runfolder.write_tensors(path, {"images": strip.images}, words)


def _before(run: RunFolder, source: ImageSource, round: int, shard: int) -> SyntheticSet | None:
    """What a warm refresh of a shard starts from; None: it is made anew."""
    if round == 0 or source.recipe.refresh.start == "cold":
        return None
    if not run.has_shard(round - 1, shard):  # it was damaged and deleted; the student it was made against is gone
        source.watch.note(f"shard {shard} of round {round - 1} is not there any more: this one starts anew")
        return None
    return SyntheticSet(**run.load_shard(round - 1, shard))


def range_images(teacher: nn.Module, images: SyntheticSet, recipe: Recipe) -> Tensor:
    """The first synthetic images, as the model takes them: they set the ranges that calibration starts from."""
    chosen = images[: recipe.quantization.range_images].to(next(teacher.parameters()).device)
    return geometry(teacher).normalise(to_pixels(chosen.images))


def _save_model(run: RunFolder, student: nn.Module, source: dict[str, Any] | None) -> None:
    deployed = pretrained.as_deployed(student)
    named = source and (source.get("architecture") or {key: source[key] for key in ("name", "args") if key in source})
    architecture = pretrained.find_architecture(deployed, named)  # a model of the user's own may have none
    made = {**run.identity, "command": (source or {}).get("command"), **run.facts}
    made.pop("source", None)  # it has paths of this machine
    if run.path(METRICS_FILE).exists():  # measured before the folder was lost
        made["metrics"] = pretrained.metrics_to_show(run.read_json(METRICS_FILE))
    pretrained.write(deployed, run.path(QUANTIZED), architecture, made=made)


def _collect_report(
    run: RunFolder, teacher: nn.Module, student: nn.Module, recipe: Recipe, seed: int, watch: Watch
) -> None:
    """Keep what a report of the run needs of its models, while they are at hand. Its failure is not the run's."""
    try:
        first = collect.first_images(run, 0, recipe.quantization.range_images)
        if run.path(collect.FACTS_FILE).exists() or first is None:
            return
        watch.note("measuring every layer for the report")
        searched = quantized_twin(teacher, recipe.quantization)
        init_ranges_(searched, range_images(teacher, first, recipe), recipe.quantization)
        models = {"teacher": teacher, "searched": searched, "student": student}
        collect.write(run.root, collect.collect(recipe, seed, collect.images_of_rounds(run, recipe), **models))
    except (MaskaqError, RuntimeError) as error:
        watch.note(f"the run is finished, but nothing was collected for its report: {error}")


def _checkpoint(run: RunFolder, student: nn.Module, calibrator: Calibrator, epoch: int) -> None:
    ill = [name for name, value in student.named_parameters() if not torch.isfinite(value).all()]
    if ill:
        what = f"{len(ill)} tensors of the student became NaN or Inf by epoch {epoch - 1}, {ill[0]} first"
        raise calibrator.diverged(what)
    state = {"student": dict(student.state_dict()), "optimizer": calibrator.state_dict()}
    tensors, layout = runfolder.flatten_state(state)
    run.save_checkpoint(tensors, {"epoch": epoch, "layout": layout})


def _restore(run: RunFolder, student: nn.Module, calibrator: Calibrator) -> int:
    """Bring student and optimiser to the latest checkpoint; the number of epochs that are done."""
    saved = saved_state(run)
    if saved is None:
        return 0
    state, epoch = saved
    student.load_state_dict(state["student"])
    calibrator.load_state_dict(state["optimizer"])
    return epoch


def saved_state(run: RunFolder) -> tuple[dict[str, Any], int] | None:
    """The latest checkpoint, as `_checkpoint` wrote it: states of student and optimiser, and the epochs done."""
    saved = run.load_checkpoint()
    if saved is None:
        return None
    tensors, progress = saved
    return runfolder.restore_state(tensors, progress["layout"]), int(progress["epoch"])


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The asked device, or CUDA where there is one."""
    try:
        picked = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=picked).item()
    except TypeError as error:
        raise DeviceError(f"device: expected a name such as cpu or cuda:1, got {device!r}") from error
    except (RuntimeError, AssertionError, ImportError) as error:  # the last: a kind of device without its package
        raise DeviceError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error
    return picked


def _whole_number(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError as error:
        raise RecipeError(f"seed: expected a whole number, got {seed!r}") from error


def _forecast(synthesizer: Synthesizer, run: RunFolder, first_epoch: int, only_images: bool) -> float:
    """Seconds that are left, roughly: a few steps are timed, and calibrating on an image costs about a step."""
    recipe = synthesizer.recipe
    steps = 0.0 if only_images else float(recipe.calibration.epochs - first_epoch)
    for round, epochs in enumerate(recipe.rounds[:1] if only_images else recipe.rounds):
        if first_epoch < epochs.stop:
            there = sum(entry["count"] for entry in run.manifest(round).values()) / recipe.synthesis.images
            steps += recipe.steps_in_round(round) * max(0.0, 1 - there)
    return synthesizer.seconds_per_image_step() * recipe.synthesis.images * steps


def noise(teacher: nn.Module, n: int, seed: int) -> Tensor:
    """n images of Gaussian noise, the student's first ranges before any image is made."""
    facts, device = geometry(teacher), next(teacher.parameters()).device
    keys = randomness.fold(randomness.image_keys(seed, torch.arange(n, device=device)), "range noise")
    return randomness.normal(keys, facts.channels, *facts.image_size)


def identity(model: nn.Module, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What makes a run this run: another of these is another folder."""
    weights = {"class": type(model).__name__, "weights": weights_digest(model)}
    return {"recipe": to_dict(recipe), "model": weights, "seed": seed}


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names and values of a model's state."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def facts(teacher: nn.Module, source: dict[str, Any] | None, engine: Engine) -> dict[str, Any]:
    """Where and with what a run was made."""
    return {"source": source} | surroundings(next(teacher.parameters()).device) | {"engine": engine.name}


def surroundings(device: torch.device) -> dict[str, Any]:
    """Versions, commit, platform, device."""
    return {
        "versions": {
            "maskaq": maskaq.__version__,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
        "platform": platform.platform(),
        "device": device_name(device),
    }


def commit() -> str | None:
    """The commit of this maskaq, with "-dirty" where files of it were changed; None if it is not run from a clone."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not (root / "src" / "maskaq").is_dir():
        return None
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if on_gpu else f"cpu, {torch.get_num_threads()} threads"


def _check_arguments(watch: Any, source: Any) -> None:
    """MaskaqError for arguments of `quantize` that would only be noticed in the middle of the work."""
    if source is not None and not isinstance(source, dict):
        raise ModelError(f'source: expected a dict such as {{"name": ..., "args": {{...}}}}, got {source!r}')
    lacks = (
        [] if watch is None else [name for name in vars(Watch) if not name.startswith("_") and not hasattr(watch, name)]
    )
    if lacks:
        raise RecipeError(f"watch: expected a maskaq.watch.Watch, got {watch!r}, which has no {lacks[0]}")
