"""Evaluation for the commands: models, images, and titles of accuracy tables."""

import os
from typing import Any

import torch
from torch.utils.data import DataLoader

from maskaq import zoo
from maskaq.artifact.card import caveat_of
from maskaq.artifact.saved import is_pretrained
from maskaq.cli import resolve
from maskaq.cli.arguments import DEMO_DATA, SCENES_DATA, DataOptions, ModelOptions
from maskaq.errors import DataError, ModelError
from maskaq.images.ade20k import ade20k_folder
from maskaq.images.coco import coco_folder
from maskaq.images.scenes import COUNT, scene_images
from maskaq.images.sets import TensorImages, image_folder
from maskaq.models import data_config
from maskaq.progress import Progress
from maskaq.runs.opened import compare
from maskaq.tasks import CALIBRATED, FULL_PRECISION, Evaluation, evaluate, task_of
from maskaq.tasks.metrics import coco_tools

_ANNOTATED = {"detection": coco_folder, "segmentation": ade20k_folder}
"""Task -> reader of a folder of annotated images."""
_SCENES_AT_ONCE = 10

Accuracy = dict[str, Evaluation | str]
"""Model -> its evaluation, or why there is none."""


class EvaluationImages:
    """The images of --data, as batches for a model.

    The models of a run prepare images in the same way, so the folder is listed once for all of them.
    """

    def __init__(self, options: DataOptions) -> None:
        self.options = options
        self._loader: DataLoader | None = None
        self._made_for: dict[str, Any] = {}

    def __call__(self, model: Any) -> DataLoader:
        if self._loader is None or self._made_for != _needs(model):
            self._loader = self._batches(model)
            self._made_for = _needs(model)
        return self._loader

    def _batches(self, model: Any) -> DataLoader:
        options = self.options
        assert options.data is not None
        task = task_of(model).name
        if task == "detection":
            coco_tools()  # needed to evaluate: a run that is evaluated at its end asks for it before it begins
        if options.data == DEMO_DATA:
            _refuse_options_of_folders(options, f"{DEMO_DATA} is prepared and has its classes")
            return _demo_batches(model)
        name, _, count = options.data.partition(":")
        is_scenes = name == SCENES_DATA
        if task in _ANNOTATED:
            _refuse_options_of_folders(options, f"for classifiers alone; images for {task} keep their ratio")
            if is_scenes:
                return scene_images(model, _number_of_scenes(count), workers=options.readers, batch=_SCENES_AT_ONCE)
            return _ANNOTATED[task](options.data, model, workers=options.readers)
        if is_scenes and not os.path.exists(options.data):
            raise DataError(f"--data {options.data} is for detectors and segmenters: give a folder of images")
        return image_folder(
            options.data,
            model,
            class_index=options.class_index,
            crop_pct=options.crop_pct,
            interpolation=options.interpolation,
            workers=options.readers,
        )


def _refuse_options_of_folders(options: DataOptions, reason: str) -> None:
    """DataError for options that are for folders of one sub-folder per class."""
    values = {
        "--class-index": options.class_index,
        "--crop-pct": options.crop_pct,
        "--interpolation": options.interpolation,
    }
    given = [option for option, value in values.items() if value is not None]
    if given:
        raise DataError(f"{' and '.join(given)}: {reason}")


def _number_of_scenes(text: str) -> int:
    """The N of --data scenes:N."""
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise DataError(f"--data {SCENES_DATA}:N: expected a number of scenes above 0, got {text!r}")
    return int(text or COUNT)


def evaluation_images(options: DataOptions) -> EvaluationImages | None:
    """The images of --data; None if the option was not given."""
    return EvaluationImages(options) if options.data else None


def _needs(model: Any) -> dict[str, Any]:
    """The parts of a model's data config that its batches depend on."""
    return data_config(model) | {"classes": int(model.num_classes)}


def _demo_batches(model: Any) -> DataLoader:
    images, labels = zoo.test_images()
    is_other = task_of(model).name in _ANNOTATED or model.num_classes != 10
    if is_other or data_config(model)["input_size"] != (3, 32, 32):
        raise DataError(f"{DEMO_DATA} is for the embedded CIFAR-10 models; give --data DIR for {type(model).__name__}")
    return DataLoader(TensorImages(images, labels, model), batch_size=100)


def accuracy_of_run(
    chosen: ModelOptions, batches: EvaluationImages, device: torch.device, progress: Progress
) -> tuple[Accuracy, str]:
    """Accuracy of all models of a run, and a warning if it was calibrated on real images."""
    if given := resolve.first_given(chosen):
        raise ModelError(f"{chosen.model} is a run and knows its model: {given} is for a model's name")
    opened = resolve.opened_run(chosen.model, chosen.checkpoint)
    return compare(opened, batches, device=device, progress=progress), opened.recipe.caveat


def accuracy_of_model(
    chosen: ModelOptions, batches: EvaluationImages, device: torch.device, progress: Progress
) -> tuple[Accuracy, str]:
    """Accuracy of a saved or full-precision model, and a warning if it was calibrated on real images."""
    is_saved = is_pretrained(chosen.model)
    model: Any = resolve.quantized_model(chosen) if is_saved else resolve.model_of(chosen)
    caveat = caveat_of(model.maskaq_config) if is_saved else ""
    loader = batches(model)
    progress.stage(f"evaluate {chosen.model}", len(loader.dataset))  # type: ignore[arg-type]
    row = CALIBRATED if is_saved else FULL_PRECISION
    found = evaluate(model.to(device), loader, progress)
    if is_saved and found.to_dict().get("cosine", 0) is None:
        if found.to_dict()["knn"] is None:
            raise DataError(
                f"nothing can be measured: the folder has no classes, and features are compared with those of the "
                f"full-precision model, which {chosen.model} does not have: evaluate the run folder"
            )
        progress.note("cosine similarity needs the full-precision model: evaluate the run folder to have it")
    return {row: found if is_saved else found.as_full()}, caveat


def title(what: str, data: str | None, caveat: str = "") -> str:
    """Title of a table: what was evaluated, on which images, and a warning if real images were used."""
    return f"{what} on {data}{calibrated_on(caveat)}"


def calibrated_on(caveat: str) -> str:
    return f"\ncalibrated on {caveat}" if caveat else ""
