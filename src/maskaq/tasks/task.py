"""What a model is for. A task says what images are made for, which outputs are compared, and how both are judged."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from maskaq.progress import Progress
from maskaq.shapes import Geometry

Batches = Iterable[tuple[Tensor, Any]]
"""Images as the model takes them, and what is known of them: (B,) labels, or an annotation for each image."""

Outputs = Mapping[str, Tensor]
"""What a model gives for a batch of images, by name."""

Layout = Mapping[str, Tensor]
"""What each image is made for, where that is more than a class: tensors (B, ...) of fixed shapes, by name."""


CLASS_TERMS = (
    *("class_prior", "soft_class_prior", "region_prior", "difference_prior", "sum_prior", "entropy_margin"),
    *("label_loss", "difference_entropy"),
)
"""Loss terms about the class of an image, which only classifiers have."""

LOGIT_TERMS = ("logit_kl", "logit_kl_mean", "logit_mae")
"""Loss terms that compare the logits of teacher and student."""


class Evaluation(Protocol):
    """How good a model is on n images."""

    task: ClassVar[str]
    """The name of its task."""

    @property
    def n(self) -> int: ...

    @property
    def headline(self) -> float:
        """The figure that models are compared by; more is better."""

    @property
    def standard_error(self) -> float:
        """Of the headline."""

    def as_full(self) -> "Evaluation":
        """The same as that of the full-precision model, which is compared with itself."""

    def to_dict(self) -> dict[str, Any]:
        """Its figures by name, as metrics.json has them; None for one that could not be measured."""


@dataclass(frozen=True)
class Column:
    """One figure of an evaluation, as tables show it."""

    title: str
    format: str = ".2f"

    def show(self, value: float | None) -> str:
        return "-" if value is None else f"{value:{self.format}}"


class Task(ABC):
    """One kind of model. Everything that depends on what a model is for is asked here."""

    name: str
    output: str
    """What the model's one output is called, or the first of several: loss terms read it by this name."""
    has_layouts = False
    """Whether images are made for something that has its place in the image: then they are not rolled or mirrored."""
    in_place_of: ClassVar[Mapping[str, str | None]] = {}
    """Loss terms of classes -> the term that this task has in their place, or None."""
    columns: ClassVar[Mapping[str, Column]]
    """Figures of an evaluation -> how tables show them. The first is the headline, the last the number of images."""
    distance_name: str
    """What `distance` measures, in words."""
    agreement_name: str
    """What `agreement` measures, in words."""
    loss_name: str
    """What is lost of the headline figure, in words: points of top-1."""

    @property
    def headline(self) -> str:
        """The column that models are compared by."""
        return next(iter(self.columns))

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """The figures of an evaluation as a table shows them."""
        return [column.show(row.get(key)) for key, column in self.columns.items()]

    def percent(self, row: Mapping[str, Any]) -> float:
        """The headline figure as the length of a bar, from 0 to 100."""
        value = row.get(self.headline) or 0.0
        return float(value if self.columns[self.headline].title.endswith("%") else 100 * max(0.0, value))

    def is_row(self, row: Any) -> bool:
        """Whether figures read from a file are those of an evaluation: numbers, and None where one was not measured."""
        figures = [row.get(key) for key in self.columns] if isinstance(row, dict) else []
        measured = [x for x in figures[:-1] if x is not None]
        return bool(measured) and all(type(x) in (int, float) for x in measured) and type(figures[-1]) is int

    def targets(self, indices: Tensor, classes: int) -> Tensor:
        """What the images of these numbers are made for: (B,) class numbers, -1 for none, as in all tasks but one."""
        return torch.full_like(indices, -1)

    def terms(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The loss terms of a recipe with those that this task has in their place."""
        found: dict[str, float] = {}
        for name, weight in weights.items():
            own = self.in_place_of.get(name, name)
            if own is not None:
                found[own] = found.get(own, 0.0) + weight
        return found

    def layouts(self, keys: Tensor, geometry: Geometry) -> Layout:
        """What the images of these keys are made for; empty where a class says it all."""
        return {}

    def relabelled(self, layout: Layout, outputs: Outputs) -> Layout:
        """The layout again, after the teacher has looked at what became of the images."""
        return layout

    def run(self, model: nn.Module, images: Tensor, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The outputs of a model.

        Args:
            given: a layout, or the teacher's outputs, where the outputs of a model depend on a choice: all models
                are then compared on the same one.
        """
        return {self.output: model(images)}

    @abstractmethod
    def distance(self, expected: Outputs, found: Outputs) -> Tensor:
        """(B,): how far the outputs of a model are from the teacher's; 0 where they are equal."""

    @abstractmethod
    def agreement(self, expected: Outputs, found: Outputs) -> Tensor:
        """(B,): how much the outputs of a model agree with the teacher's, at most 1."""

    def show_agreement(self, value: float) -> str:
        """A mean agreement in figures."""
        return f"{100 * value:.1f} %"

    def describe(self, expected: Outputs, found: Outputs, label: int) -> dict[str, Any]:
        """What a report says below one image, from the teacher's and the student's outputs for it, a batch of one."""
        return {"similarity": self.agreement(expected, found).item()}

    def drawn(self, model: nn.Module, images: Tensor) -> Tensor | None:
        """(B, 3, H, W) uint8: what a model finds in normalised images, drawn on them; None where there is no place.

        A class has the colour `drawing.colour` of its number.
        """
        return None

    @abstractmethod
    def evaluate(
        self, model: nn.Module, batches: Batches, progress: Progress | None = None, full: Any = None
    ) -> Evaluation:
        """How good a model is on labelled images; `full` is the evaluation of the full-precision model."""
