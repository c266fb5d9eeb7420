"""Arguments of `quantize`, checked before any work, and the identity of a run."""

import operator
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from maskaq.calibrate.handover import KEEP
from maskaq.errors import ModelError, RecipeError, RunFolderError
from maskaq.images.stored import state_digest
from maskaq.models import data_config, task_name
from maskaq.models.seam import HEADS
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe, to_dict, up_to_date

_ACTIVATIONS = ("nn.modules.activation", "layers.activations", "transformers.activations")
_LATER = ("heads", "norm_eps", "activations")  # runs of 0.2.0 do not have these keys


def identity(model: nn.Module, recipe: Recipe, seed: int) -> dict[str, Any]:
    """The identity of a run: a run with another identity needs another folder."""
    return {"recipe": to_dict(recipe), **model_identity(model), "seed": seed}


def model_identity(model: nn.Module) -> dict[str, Any]:
    """The part of a run's identity that belongs to its model: `model`, and `preparation` of images."""
    weights = {"class": type(model).__name__, "weights": state_digest(model.state_dict()), **_settings(model)}
    if (task := task_name(model)) != "classification":  # older runs, all of classifiers, have no task
        weights["task"] = task
    images = data_config(model)
    preparation = {
        "image_size": list(images["input_size"][1:]),
        "mean": list(images["mean"]),
        "std": list(images["std"]),
    }
    return {"model": weights, "preparation": preparation}


def _settings(model: nn.Module) -> dict[str, Any]:
    """What changes a model's outputs but is not in its weights: heads, constants of norms, activation functions."""
    modules = list(model.modules())
    counts = [getattr(module, name, 0) for module in modules for name in HEADS]
    acts = {type(module).__name__ for module in modules if type(module).__module__.endswith(_ACTIVATIONS)}
    return {
        "heads": sorted({count for count in counts if type(count) is int and count}),  # PiT has a list of them too
        "norm_eps": sorted({module.eps for module in modules if isinstance(module, nn.LayerNorm)}),
        "activations": sorted(acts - {"Softmax"}),
    }


def up_to_date_identity(stored: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The identity of a run of any version as this version would write it; keys that came later are from `asked`."""
    recipe, model = stored.get("recipe"), stored.get("model")
    found = dict(stored)
    if isinstance(recipe, dict):
        found["recipe"] = up_to_date(recipe)
    if isinstance(model, dict) and not set(_LATER) & set(model):
        found["model"] = model | {key: asked["model"][key] for key in _LATER if key in asked.get("model", {})}
    return found


def whole_number(seed: Any) -> int:
    """RecipeError unless a seed is a whole number of 64 bits, beyond which seeds would repeat."""
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise RecipeError(f"seed: expected a whole number, got {seed!r}") from error
    if not -(2**63) <= number < 2**63:
        raise RecipeError(f"seed: expected a whole number of 64 bits, from -2**63 to 2**63 - 1, got {seed!r}")
    return number


def check_recipe(recipe: Recipe, task: str) -> None:
    """RecipeError if a recipe for a detector or segmenter uses what only classifiers have."""
    if task in ("classification", "features"):
        return
    if odd := [name for name in recipe.calibration.stages if name != "calibrate"]:
        raise RecipeError(f'calibration.stages: {odd[0]} is not for {task}; give ["calibrate"]')
    if recipe.synthesis.generator.steps:
        raise RecipeError(f"synthesis.generator makes images of a class: it is not for {task}; set its steps to 0")


def check_arguments(out: Any, keep: Any, progress: Any, source: Any, checkpoint_seconds: Any, fast: Any) -> None:
    """MaskaqError for wrong arguments of `quantize` that would otherwise fail in the middle of the work."""
    if not isinstance(out, str | Path) or "\0" in str(out):
        raise RunFolderError(f"out: expected the path of a run folder, got {out!r}")
    if keep not in KEEP:
        raise RecipeError(f"keep: expected one of {', '.join(KEEP)}, got {keep!r}")
    wanted = 'expected a dict such as {"name": "deit_tiny_patch16_224", "args": {"num_classes": 10}}'
    if source is not None and not isinstance(source, dict):
        raise ModelError(f"source: {wanted}, got {source!r}")
    architecture = (source or {}).get("architecture")
    if architecture is not None and not (isinstance(architecture, dict) and "name" in architecture):
        raise ModelError(f"source['architecture']: {wanted}, got {architecture!r}")
    for where, part in (("source", source or {}), ("source['architecture']", architecture or {})):
        for key, kind, example in (("name", str, "a timm name"), ("args", dict, "a dict of timm's arguments")):
            if not isinstance(part.get(key, kind()), kind):
                raise ModelError(f"{where}[{key!r}]: expected {example}, or no such key, got {part[key]!r}")
    if not isinstance(checkpoint_seconds, Real) or checkpoint_seconds != checkpoint_seconds:
        raise RecipeError(f"checkpoint_seconds: expected a number of seconds, got {checkpoint_seconds!r}")
    if fast is not None and not isinstance(fast, bool):
        raise RecipeError(f"fast: expected True, False or None, got {fast!r}")
    methods = [name for name in vars(Progress) if not name.startswith("_")]
    lacks = [] if progress is None else [name for name in methods if not hasattr(progress, name)]
    if lacks:
        raise RecipeError(f"progress: expected a maskaq.progress.Progress, got {progress!r}, which has no {lacks[0]}")
