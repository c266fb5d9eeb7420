"""The quantization plan of a run: made from its recipe, or read from its folder."""

from pathlib import Path

from torch import nn

from maskaq.calibrate import handover
from maskaq.progress import Progress
from maskaq.quant.mixed import choose_bits
from maskaq.quant.plan import QuantPlan, build_plan
from maskaq.recipe.schema import Recipe
from maskaq.storage.runfolder import RunFolder, is_run
from maskaq.tasks import task_of

_MEASURED_ON = 16  # images that widths of mixed precision are chosen on


def make_plan(teacher: nn.Module, recipe: Recipe, seed: int = 0, progress: Progress | None = None) -> QuantPlan:
    """What a run of this recipe would quantize, and how; mixed precision is measured on synthetic images."""
    plan = build_plan(teacher, recipe.quantization)
    if recipe.bits.average is None:
        return plan
    images = handover.held_out_images(teacher, _MEASURED_ON, seed, "mixed precision")
    return choose_bits(teacher, plan, recipe.quantization, recipe.bits.average, images, task_of(teacher), progress)


def plan_of_run(folder: str | Path) -> QuantPlan | None:
    """The plan that a run in this folder began with; None if there is none yet."""
    if not is_run(folder):
        return None
    found = RunFolder.read(folder).plan
    return None if found is None else QuantPlan.from_dict(found)
