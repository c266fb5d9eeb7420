"""What the file of a model computes: its outputs by name, and how they are compared with the model's."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from maskaq.boxes import iou
from maskaq.tasks import task_of
from maskaq.tasks.task import Outputs

OUTPUT = "logits"
_SHOWN = 0.5
"""The least score of an object that both have to find."""


class Program:
    """One output, `logits`, which is what the model returns."""

    outputs: ClassVar[Mapping[str, str]] = {OUTPUT: "what the model returns"}
    """What a file gives, and what that is."""
    inner: ClassVar[tuple[str, ...]] = ()
    """Tensors inside the file that are verified too."""
    choices: ClassVar[tuple[str, ...]] = ()
    """Of both, those that are chosen among others: near a border the last bit of a float decides."""
    ranked = OUTPUT
    """The output whose correlation says how much file and model agree."""
    _means: ClassVar[Mapping[str, str]] = {
        "classification": "predict the same class",
        "features": "give features with a cosine similarity above 0.99",
        "segmentation": "give 99 % of the pixels the same class",
    }

    def compute(self, model: Any, images: Tensor, given: Outputs | None = None) -> dict[str, Tensor]:
        """Outputs and inner tensors.

        Args:
            given: those of another program for the same model, whose choices the model is to follow.
        """
        return {OUTPUT: model(images)}

    def alike(self, model: nn.Module, ours: Outputs, theirs: Outputs) -> Tensor:
        """(B,) bool: whether two programs, each left to itself, say the same of an image, as `means` puts it."""
        task = task_of(model)
        return task.agreement({task.output: ours[OUTPUT]}, {task.output: theirs[OUTPUT]}) > 0.99

    def means(self, model: nn.Module) -> str:
        return self._means[task_of(model).name]

    def same_choices(self, ours: Outputs, theirs: Outputs) -> float:
        """Share of the choices that both make of the same numbers."""
        return 1.0


class DetectorProgram(Program):
    """The objects of an image, with proposals, NMS and heads, as `MaskRCNN.objects` finds them."""

    outputs: ClassVar[Mapping[str, str]] = {
        "boxes": "(N, objects, 4): left, top, right, bottom in pixels, best first",
        "labels": "(N, objects): classes from 0",
        "scores": "(N, objects): 0 where there is no object",
        "masks": "(N, objects, 28, 28): probabilities over the box",
    }
    inner = ("objectness", "deltas", "proposals", "class_logits", "box_deltas")
    choices = ("proposals", "boxes", "labels", "scores")
    ranked = "scores"

    def compute(self, model: Any, images: Tensor, given: Outputs | None = None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = model.objects(images, given)
        return found

    def alike(self, model: nn.Module, ours: Outputs, theirs: Outputs) -> Tensor:
        return torch.stack(
            [(same | (first["scores"] <= _SHOWN)).all(dim=1) for first, same in _matched(ours, theirs, 0.9)]
        ).all(dim=0)

    def means(self, model: nn.Module) -> str:
        return "find the same objects"

    def same_choices(self, ours: Outputs, theirs: Outputs) -> float:
        p, q = ({"boxes": x["proposals"], "labels": torch.zeros(x["proposals"].shape[:2])} for x in (ours, theirs))
        pairs = [*_matched(p, q, 0.99), *_matched(ours, theirs, 0.99)]
        there = [(first["boxes"][..., 2:] > first["boxes"][..., :2]).all(dim=2) for first, _ in pairs]
        shares = [same[own].float().mean() for own, (_, same) in zip(there, pairs, strict=True) if own.any()]
        return min((share.item() for share in shares), default=1.0)


def _matched(ours: Outputs, theirs: Outputs, overlap: float) -> list[tuple[Outputs, Tensor]]:
    """Of each of the two, (B, n) bool: which objects the other has too, with the same label."""
    same = (iou(ours["boxes"], theirs["boxes"]) > overlap) & (ours["labels"][:, :, None] == theirs["labels"][:, None])
    return [(ours, same.any(dim=2)), (theirs, same.any(dim=1))]


def program_of(model: nn.Module) -> Program:
    return DetectorProgram() if task_of(model).name == "detection" else Program()
