"""Detectors and segmenters by name: what builds them, and the embedded ones."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from maskaq import zoo
from maskaq.errors import ModelError, first_line
from maskaq.models.detector import mask_rcnn
from maskaq.models.names import supported_names, update_record_
from maskaq.models.segmenter import upernet

BUILDERS: dict[str, Callable[..., nn.Module]] = {"mask_rcnn": mask_rcnn, "upernet": upernet}
"""Name of an architecture -> what builds it, without weights, from its arguments."""
USUAL = {"mask_rcnn": {"num_classes": 80, "img_size": 800}, "upernet": {"num_classes": 150, "img_size": 512}}
"""What the checkpoints of an architecture were trained for: COCO and ADE20K."""


_CLASSIFIER = {"mask_rcnn": ("box_predictor.cls_score.weight", 1), "upernet": ("head.weight", 0)}
"""The weights with a row for each class, and how many of these rows are the background."""


def names() -> list[str]:
    """Architectures with the Swins of timm that they can stand on, as users name them."""
    return [f"{kind}_{swin}" for kind in BUILDERS for swin in supported_names("swin")]


def named(name: Any, args: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Architecture and arguments of a name such as `mask_rcnn_swin_tiny_patch4_window7_224`; None for other names."""
    if name in BUILDERS:
        return name, dict(args)
    for kind in BUILDERS:
        if isinstance(name, str) and name.startswith(f"{kind}_"):
            return kind, {"backbone": name.removeprefix(f"{kind}_"), **USUAL[kind], **args}
    return None


def classes_in(kind: str, state: Mapping[str, Tensor]) -> int:
    """How many classes a state dict with our names is for, the background not counted; 0 where it does not say."""
    key, background = _CLASSIFIER[kind]
    return len(state[key]) - background if key in state and state[key].dim() else 0


def build(name: str, args: Mapping[str, Any]) -> nn.Module:
    """A detector or segmenter without weights; ModelError for arguments that it does not take."""
    try:
        return BUILDERS[name](**{key: tuple(x) if isinstance(x, list) else x for key, x in args.items()})
    except (TypeError, ValueError, IndexError, RuntimeError) as error:  # whatever timm and torch say to them
        raise ModelError(f"{name} with {dict(args)}: {first_line(error)}") from error


def embedded_shape(name: str) -> nn.Module:
    """An embedded model with random weights; its own are not read."""
    if name in zoo.CLASSIFIERS:
        return zoo.embedded_shape(name)
    card = zoo.card(name)
    model: Any = build(card["architecture"]["name"], card["architecture"]["args"])
    ground = ["background"] if model.pretrained_cfg["task"] == "segmentation" else []
    labels = [*ground, *card["classes"]]
    update_record_(model, architecture=name, mean=tuple(card["mean"]), std=tuple(card["std"]), label_names=labels)
    return model.float().eval()


def embedded_model(name: str) -> nn.Module:
    """One of the embedded models, in eval mode and float32, with its data config attached as timm does."""
    model = embedded_shape(name)
    model.load_state_dict(zoo.weights(name))
    return model
