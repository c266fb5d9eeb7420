"""Small models inside the package: two classifiers trained by us on CIFAR-10 (examples/train_cifar10.py), with 1,000
test images, and a detector and a segmenter trained on procedural scenes (examples/train_scenes.py).

They let anyone run everything in minutes, without a download. The cards beside the files say how each was made.
"""

import json
from importlib import resources
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from safetensors import safe_open
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

CLASSIFIERS = {"cifar10_vit": VisionTransformer, "cifar10_swin": SwinTransformer}
DENSE = ("scenes_detector", "scenes_segmenter")
"""Of procedural scenes; `maskaq.models.hosts` builds them."""


def embedded_names() -> list[str]:
    return sorted((*CLASSIFIERS, *DENSE))


def card(name: str) -> dict[str, Any]:
    """What the file of an embedded model says of it: its arguments, mean, std and classes, how it was trained."""
    with _path(f"{name}.safetensors") as path, safe_open(path, framework="pt") as file:
        return {key: _from_json(value) for key, value in (file.metadata() or {}).items()}


def weights(name: str) -> dict[str, Tensor]:
    """The weights of an embedded model, in float32."""
    with _path(f"{name}.safetensors") as path:
        found = safetensors.torch.load_file(path)
    return {key: value.float() if value.is_floating_point() else value for key, value in found.items()}


def embedded_shape(name: str) -> nn.Module:
    """An embedded classifier with random weights; its own are not read."""
    about = card(name)
    model = CLASSIFIERS[name](**about["arguments"]).float()  # whatever torch's default is
    size = about["arguments"]["img_size"]
    model.pretrained_cfg = model.default_cfg = {
        "architecture": name,
        "num_classes": about["arguments"]["num_classes"],
        "input_size": (3, size, size),
        "mean": tuple(about["mean"]),
        "std": tuple(about["std"]),
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "label_names": about["classes"],
    }
    return model.eval()


def test_images() -> tuple[Tensor, Tensor]:
    """1,000 images of the CIFAR-10 test set, 100 of each class: (1000, 3, 32, 32) uint8 and (1000,) labels."""
    with _path("cifar10_test_1000.png") as path:
        sheet = torch.from_numpy(np.array(Image.open(path).convert("RGB")))  # ten rows of classes, 100 images across
    images = sheet.reshape(10, 32, 100, 32, 3).permute(0, 2, 4, 1, 3).flatten(0, 1)
    return images.contiguous(), torch.arange(10).repeat_interleave(100)


def _path(name: str) -> Any:
    return resources.as_file(resources.files(__package__) / name)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
