"""Find what the arguments of a command refer to: a recipe, a model, a run folder, a saved model."""

import ast
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from maskaq.artifact.saved import from_pretrained, is_pretrained
from maskaq.cli.arguments import ModelOptions, RecipeOptions
from maskaq.errors import ModelError, RecipeError, unknown
from maskaq.images.sets import to_pixels
from maskaq.images.stored import noise
from maskaq.losses.terms import CALIBRATION_TERMS, SYNTHESIS_TERMS, Objective
from maskaq.models import geometry
from maskaq.models.load import architecture_of, load_model, load_shape
from maskaq.quant.quantizers import QUANTIZERS
from maskaq.recipe.schema import Recipe, load_recipe
from maskaq.runs.opened import OpenedRun, handed_over_model, open_run
from maskaq.storage.runfolder import is_run


def recipe_of(options: RecipeOptions, default: str) -> Recipe:
    recipe = load_recipe(default if options.recipe is None else options.recipe, *options.set, bits=options.bits)
    check_names(recipe)
    return recipe


def check_names(recipe: Recipe) -> None:
    """RecipeError for an unknown quantizer or term, before weights are downloaded and a plan is shown."""
    scheme = recipe.quantization
    for name in (scheme.weight, scheme.activation, scheme.softmax):
        if name not in QUANTIZERS and (name != "same" or name != scheme.softmax):
            raise RecipeError(unknown("quantizer", name, QUANTIZERS))
    Objective(SYNTHESIS_TERMS, recipe.synthesis.terms, "synthesis.terms")
    Objective(CALIBRATION_TERMS, recipe.calibration.terms, "calibration.terms")


def timm_args(options: ModelOptions) -> dict[str, Any]:
    """Arguments for timm, from --model-arg and --img-size."""
    found: dict[str, Any] = {}
    for pair in options.model_arg:
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
    if options.img_size is not None:
        if "img_size" in found:
            raise ModelError("--img-size and --model-arg img_size are the same: give one of them")
        found["img_size"] = options.img_size
    return found


def model_of(options: ModelOptions) -> nn.Module:
    """The full-precision model with its weights."""
    return load_model(options.model, options.checkpoint, timm_args(options), options.mean, options.std, options.task)


def source_of(options: ModelOptions, model: nn.Module, command: str) -> dict[str, Any]:
    """Name, arguments and checkpoint of a model, as the run records them."""
    args = timm_args(options)
    return {
        "name": options.model,
        "args": args,
        "checkpoint": absolute(options.checkpoint) if options.checkpoint else None,
        "mean": options.mean,
        "std": options.std,
        "task": options.task,
        "architecture": architecture_of(model, options.model, args),
        "command": command,
    }


def shape_of(options: ModelOptions) -> nn.Module:
    """The full-precision model for its shapes: with the weights of a file if one is given, else without weights."""
    if options.checkpoint is not None:
        return model_of(options)
    return load_shape(options.model, timm_args(options), options.mean, options.std, options.task)


def full_precision(options: ModelOptions, load: Callable[[ModelOptions], nn.Module] = model_of) -> nn.Module:
    """Load a model; if its name is a folder, error messages are about the folder."""
    name = options.model
    try:
        return load(options)
    except ModelError as error:
        if is_of_transformers(name):
            raise ModelError(f"{name} is a folder of a transformers model: give hf:{name}") from error
        if is_run(name) or is_pretrained(name):
            what = "a run" if is_run(name) else "a saved model"
            raise ModelError(
                f"{name} is {what}, quantized already: give the name of the full-precision model. To look at "
                "what it holds: maskaq inspect or maskaq evaluate"
            ) from error
        if os.path.isdir(name):
            raise ModelError(
                f"{name} is a folder, neither a run (it has no run.json) nor a saved model (no config.json): "
                "expected the name of a model (`maskaq list models`)"
            ) from error
        raise


def is_of_transformers(folder: str | Path) -> bool:
    """Whether a folder's config is that of a transformers model."""
    try:
        config = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("model_type", "maskaq") != "maskaq"


def opened_run(folder: str, checkpoint: str | None) -> OpenedRun:
    """Open a run, with the weights file that the user gave; a file with other weights fails early."""
    opened = with_checkpoint(open_run(folder), checkpoint)
    if checkpoint is not None:
        opened.teacher()
    return opened


def with_checkpoint(opened: OpenedRun, checkpoint: str | None) -> OpenedRun:
    if checkpoint is None:
        return opened
    return replace(opened, source=opened.source | {"checkpoint": absolute(checkpoint)})


def quantized_model(options: ModelOptions) -> nn.Module:
    """The quantized model in a folder: of a run, or a saved one."""
    of_run = is_run(options.model)
    if given := "--checkpoint" if options.checkpoint else first_given(options):
        what = "run that knows its model" if of_run else "saved model with its weights"
        raise ModelError(f"{options.model} is a {what}: {given} is for a model's name")
    return handed_over_model(options.model) if of_run else from_pretrained(options.model)


def deployed_model(folder: Path, count: int) -> tuple[Any, Tensor]:
    """The quantized model of a run or a saved model, and images for verifying its exported file."""
    if is_pretrained(folder):  # without a run there are no synthetic images: noise tells codes apart as well
        model = from_pretrained(folder)
        return model, noise(model, count, seed=0)
    opened = open_run(folder)
    model = opened.calibrated()
    return model, geometry(model).normalise(to_pixels(opened.images().images[:count]))


def first_given(options: ModelOptions) -> str:
    """The first given option that applies only to a model's name; empty if there is none."""
    values: dict[str, object] = {"--model-arg": options.model_arg or None, "--img-size": options.img_size}
    values |= {"--mean": options.mean, "--std": options.std, "--task": options.task}
    return next((option for option, value in values.items() if value is not None), "")


def absolute(file: str) -> str:
    return str(Path(file).resolve())
