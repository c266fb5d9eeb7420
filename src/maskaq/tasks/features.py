"""Features: an embedding of the image, made for no class, judged by how close it stays to the teacher's.

For models without a classifier: DINOv2, the image towers of CLIP and SigLIP, any model with `num_classes=0`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.errors import DataError
from maskaq.progress import Progress
from maskaq.tasks.outputs import outputs
from maskaq.tasks.task import CLASS_TERMS, LOGIT_TERMS, Batches, Column, Outputs, Task

NEIGHBOURS = 20
TEMPERATURE = 0.07
"""As DINO's evaluation has them (Caron et al. 2021)."""


@dataclass(frozen=True)
class FeatureResult:
    """Similarity to the full-precision model's features, and accuracy of their nearest neighbours, over n images."""

    task: ClassVar[str] = "features"
    cosine: float | None
    """Mean cosine similarity to the features of the full-precision model; None if it was not evaluated."""
    knn: float | None
    """Top-1 in percent of k nearest neighbours, each image among the others; None where the folder has no classes."""
    n: int
    cosine_error: float = 0.0
    features: Tensor | None = field(default=None, repr=False, compare=False)
    """(n, D): what other models are compared with."""

    @property
    def headline(self) -> float:
        return self.cosine if self.cosine is not None else (self.knn or 0.0) / 100

    @property
    def standard_error(self) -> float:
        """Of the cosine similarity; without one, of the accuracy as a share."""
        if self.cosine is not None:
            return self.cosine_error
        return math.sqrt(self.headline * (1 - self.headline) / self.n)

    def as_full(self) -> "FeatureResult":
        return replace(self, cosine=1.0)

    def to_dict(self) -> dict[str, float | None]:
        error = None if self.cosine is None or math.isinf(self.cosine_error) else self.cosine_error
        figures = {"cosine": self.cosine, "standard_error": error, "knn": self.knn}
        return figures | {"n": self.n}


class Features(Task):
    """A model that gives one embedding for an image."""

    name = "features"
    output = "features"
    columns: ClassVar[Mapping[str, Column]] = {
        "cosine": Column("cosine to full precision", ".4f"),
        "standard_error": Column("± s.e.", ".4f"),
        "knn": Column("k-NN top-1 %"),
        "n": Column("n", "d"),
    }
    distance_name = "1 - cosine similarity to the full-precision model"
    loss_name = "of the cosine similarity"
    agreement_name = "cosine similarity to the full-precision model"
    in_place_of: ClassVar[Mapping[str, str | None]] = dict.fromkeys(CLASS_TERMS) | dict.fromkeys(
        LOGIT_TERMS, "feature_error"
    )

    def distance(self, expected: Outputs, found: Outputs) -> Tensor:
        return 1 - self.agreement(expected, found)

    def agreement(self, expected: Outputs, found: Outputs) -> Tensor:
        return similarity(expected[self.output], found[self.output])

    def show_agreement(self, value: float) -> str:
        return f"{value:.3f}"

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, batches: Batches, progress: Progress | None = None, full: FeatureResult | None = None
    ) -> FeatureResult:
        """Args:
        full: the result of the full-precision model on the same images; without it there is no similarity.
        """
        found = [(features.float().cpu(), labels.cpu()) for features, labels in outputs(model, batches, progress)]
        if not found:
            raise DataError("there are no images to evaluate on")
        features, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        knn = 100 * nearest_neighbour_accuracy(features, labels) if _has_classes(labels) else None
        if full is None:
            return FeatureResult(None, knn, len(features), features=features)
        if not isinstance(full, FeatureResult) or full.features is None or full.features.shape != features.shape:
            raise DataError("features can only be compared with those of the same images, of one width")
        cosine = similarity(full.features, features)
        error = (cosine.std() / math.sqrt(len(features))).item() if len(features) > 1 else math.inf
        return FeatureResult(cosine.mean().item(), knn, len(features), error, features)


def similarity(expected: Tensor, found: Tensor) -> Tensor:
    """(B,): cosine similarity of vectors, in double precision; 1 for equal ones, be they 0."""
    cosine = F.cosine_similarity(expected.double(), found.double(), dim=1, eps=1e-150)
    return torch.where((expected == found).all(dim=1), 1.0, cosine)


def _has_classes(labels: Tensor) -> bool:
    """Whether images are labelled with more than one class, and some class has two images to be neighbours."""
    _, counts = labels.unique(return_counts=True)
    return bool((labels >= 0).all()) and len(counts) > 1 and int(counts.max()) > 1


def nearest_neighbour_accuracy(features: Tensor, labels: Tensor, k: int = NEIGHBOURS) -> float:
    """Share of the images whose neighbours, by a vote weighted with exp(cosine / T), have the image's own class."""
    unit = F.normalize(features, dim=1)
    k = min(k, len(unit) - 1)
    names, labels = labels.unique(return_inverse=True)
    hits = 0
    for start in range(0, len(unit), 512):
        rows = torch.arange(start, min(start + 512, len(unit)))
        similarity = unit[rows] @ unit.T
        similarity[torch.arange(len(rows)), rows] = -2.0  # an image is not its own neighbour
        near = similarity.topk(k, dim=1)
        votes = torch.zeros(len(rows), len(names))
        votes.scatter_add_(1, labels[near.indices], (near.values / TEMPERATURE).exp())
        hits += int((votes.argmax(dim=1) == labels[rows]).sum())
    return hits / len(unit)
