"""Small models of transformers, random weights."""

from typing import Any

import torch

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
SIZE = {"image_size": 32, "patch_size": 8}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", {**SMALL, **SIZE, "num_labels": 5}),
    "deit": ("DeiTForImageClassification", {**SMALL, **SIZE, "num_labels": 5}),
    "swin": ("SwinForImageClassification", {**SWIN, "num_labels": 5}),
    "swinv2": ("Swinv2ForImageClassification", {**SWIN, "num_labels": 5}),
    "dinov2": ("Dinov2ForImageClassification", {**SMALL, **SIZE, "num_labels": 5}),
    "dinov2 features": ("Dinov2Model", {**SMALL, **SIZE}),
    "dinov2 with registers": ("Dinov2WithRegistersModel", {**SMALL, **SIZE, "num_register_tokens": 2}),
    "dinov3": ("DINOv3ViTModel", {**SMALL, **SIZE, "num_register_tokens": 2}),
    "beit": ("BeitForImageClassification", {**SMALL, **SIZE, "num_labels": 5, "use_relative_position_bias": True}),
    "data2vec": ("Data2VecVisionForImageClassification", {**SMALL, **SIZE, "num_labels": 5}),
    "siglip": ("SiglipVisionModel", {**SMALL, **SIZE}),
    "siglip 2": ("Siglip2VisionModel", {**SMALL, "patch_size": 8, "num_patches": 16}),
    "clip": ("CLIPVisionModelWithProjection", {**SMALL, **SIZE, "projection_dim": 16}),
    "vit mae": ("ViTMAEModel", {**SMALL, **SIZE}),
    "i-jepa": ("IJepaModel", {**SMALL, **SIZE}),
}


def small_upernet(classes: int = 5) -> Any:
    """A segmenter on Swin with random weights, BatchNorm statistics included; 64 pixels."""
    import transformers

    stages = ["stage1", "stage2", "stage3", "stage4"]
    swin = {**SWIN, "image_size": 64, "embed_dim": 8, "depths": [1, 2, 1, 1], "num_heads": [1, 2, 2, 4]}
    backbone = transformers.SwinConfig(**swin, out_features=stages)
    torch.manual_seed(0)
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, auxiliary_in_channels=32, auxiliary_channels=8, num_labels=classes
    )
    model = transformers.UperNetForSemanticSegmentation(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand_like(buffer) * 0.3)
    return model


def small(name: str) -> Any:
    import transformers

    cls, settings = MODELS[name]
    kind = getattr(transformers, cls)
    torch.manual_seed(0)
    model = kind(kind.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
