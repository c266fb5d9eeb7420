"""Where the images of a run come from, as its recipe says."""

from torch import nn

from maskaq.engine import Engine
from maskaq.images.folder import FolderImages
from maskaq.images.generator import GeneratedImages
from maskaq.images.source import ImageSource
from maskaq.images.synthesis import Synthesizer
from maskaq.progress import Progress
from maskaq.recipe.schema import Recipe


def image_source(
    teacher: nn.Module, student: nn.Module, recipe: Recipe, seed: int, progress: Progress, engine: Engine
) -> ImageSource:
    """The image source of a run, for all its processes."""
    if not recipe.data_free:
        return FolderImages(teacher, recipe, seed=seed, progress=progress)
    if recipe.synthesis.generator.steps:
        return GeneratedImages(teacher, student, recipe, seed=seed, progress=progress)
    return Synthesizer(teacher, student, recipe, seed=seed, progress=progress, engine=engine)
