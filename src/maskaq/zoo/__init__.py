"""Two small models inside the package, trained by us on CIFAR-10 (examples/train_cifar10.py), and 1,000 test images.

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

_CLASSES = {"cifar10_vit": VisionTransformer, "cifar10_swin": SwinTransformer}


def embedded_names() -> list[str]:
    return sorted(_CLASSES)


def embedded_model(name: str) -> nn.Module:
    """One of the embedded models, in eval mode and float32, with its data config attached as timm does."""
    model = embedded_shape(name)
    with _path(f"{name}.safetensors") as path:
        weights = safetensors.torch.load_file(path)
    model.load_state_dict({key: value.float() for key, value in weights.items()})
    return model


def embedded_shape(name: str) -> nn.Module:
    """The same with random weights; its own are not read."""
    with _path(f"{name}.safetensors") as path, safe_open(path, framework="pt") as file:
        card = {key: _from_json(value) for key, value in (file.metadata() or {}).items()}
    model = _CLASSES[name](**card["arguments"]).float()  # whatever torch's default is
    size = card["arguments"]["img_size"]
    model.pretrained_cfg = model.default_cfg = {
        "architecture": name,
        "num_classes": card["arguments"]["num_classes"],
        "input_size": (3, size, size),
        "mean": tuple(card["mean"]),
        "std": tuple(card["std"]),
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "label_names": card["classes"],
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
