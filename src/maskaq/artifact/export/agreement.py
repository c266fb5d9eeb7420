"""How the outputs of a file compare with those of the model it was made from, each left to itself."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maskaq.tasks import task_of


@dataclass(frozen=True)
class Agreement:
    images: int
    means: str
    """What file and model do on an image where they agree."""
    share: float
    """Of the images that they agree on."""
    correlation: float
    """Of all their outputs."""
    reference: float
    """Correlation of the file's outputs with those of the same arithmetic in torch."""


_MEANS = {
    "classification": "predict the same class",
    "features": "give features with a cosine similarity above 0.99",
    "segmentation": "give 99 % of the pixels the same class",
}


def means(model: nn.Module) -> str:
    return _MEANS[task_of(model).name]


def share(model: nn.Module, ours: Tensor, theirs: Tensor) -> float:
    task = task_of(model)
    return (task.agreement({task.output: ours}, {task.output: theirs}) > 0.99).double().mean().item()


def correlation(ours: Tensor, theirs: Tensor) -> float:
    return torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1].item()
