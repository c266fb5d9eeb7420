"""Compare the outputs of a file with those of the model it was made from, each computing on its own codes."""

from dataclasses import dataclass

import torch
from torch import Tensor


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


def correlation(ours: Tensor, theirs: Tensor) -> float:
    if torch.equal(ours, theirs):  # also where all are the same number
        return 1.0
    return torch.corrcoef(torch.stack([ours.flatten(), theirs.flatten()]))[0, 1].item()
