"""Models of Hugging Face transformers: one tensor in, one tensor out, attention through our products.

`HuggingFace` wraps a model: images in, logits or one embedding for each image out, of a segmenter logits of every
pixel. Its attention goes through transformers' own `AttentionInterface`; the classes that do not use it are rewired as
any other model is.
"""

import copy
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.errors import CheckpointError, DependencyError, ModelError, first_line
from maskaq.models.hub import hub_or_cache

PREFIX = "hf:"
_ATTENTION = "maskaq"
# Classes of whole checkpoints -> the part that sees images and has an output for each.
_PART = {
    "CLIPModel": "CLIPVisionModelWithProjection",
    "SiglipModel": "SiglipVisionModel",
    "Siglip2Model": "Siglip2VisionModel",
    "ViTMAEForPreTraining": "ViTMAEModel",
    "ViTForMaskedImageModeling": "ViTModel",
    "BeitForMaskedImageModeling": "BeitModel",
    "SwinForMaskedImageModeling": "SwinModel",
    "DeiTForMaskedImageModeling": "DeiTModel",
}
_OUTPUTS = ("logits", "image_embeds", "pooler_output")
SEGMENTER = "UperNetForSemanticSegmentation"
_POOLER = "add_pooling_layer"  # an argument of the classes that have a pooler or not, whatever their config says
_INTERPOLATION = {0: "nearest", 2: "bilinear", 3: "bicubic", 1: "lanczos"}


class HuggingFace(nn.Module):
    """A transformers model as a function from images (B, C, H, W) to logits or features (B, D).

    A segmenter, UperNet, gives logits (B, K, H, W); its auxiliary head, which helps training alone, is dropped.
    """

    def __init__(self, model: Any, processor: Any = None) -> None:
        super().__init__()
        config = model.config
        self.model = model
        is_segmenter = type(model).__name__ == SEGMENTER
        if is_segmenter:
            config.use_auxiliary_head, model.auxiliary_head = False, None
            self.backbone_path, self.predictors = "model.backbone", ("model.decode_head.classifier",)
            _capture_nothing(model)
        self.has_classifier = is_segmenter or type(model).__name__.endswith("ForImageClassification")
        self.num_classes = int(config.num_labels) if self.has_classifier else 0
        self.has_class_token = any(name.endswith("cls_token") for name, _ in model.named_parameters())
        self.cuts_patches = any(type(module).__name__ == "Siglip2VisionEmbeddings" for module in model.modules())
        _fix_tokens(model)
        with _quiet(_transformers()):  # it warns of those that have no such interface, which are rewired
            _register()
            model.set_attn_implementation(_ATTENTION)
        names = [str(config.id2label.get(i, f"LABEL_{i}")) for i in range(self.num_classes)]
        named = names and any(name != f"LABEL_{i}" for i, name in enumerate(names))
        self.pretrained_cfg: dict[str, Any] = {
            "architecture": PREFIX + type(model).__name__,
            **({"task": "segmentation"} if is_segmenter else {}),
            "input_size": _input_size(_vision(config), processor),
            "mean": _numbers(processor, "image_mean"),
            "std": _numbers(processor, "image_std"),
            "crop_pct": _crop(processor),
            "interpolation": _interpolation(processor),
            **({"label_names": names} if named else {}),
        }
        self.default_cfg = self.pretrained_cfg

    def forward(self, images: Tensor) -> Tensor:
        extra: dict[str, Any] = {}
        if self.cuts_patches:
            images = _patches(images, _vision(self.model.config).patch_size)
            extra = {"pixel_attention_mask": None, "spatial_shapes": None}
        found = self.model(pixel_values=images, **extra)
        for name in _OUTPUTS:
            output = getattr(found, name, None)
            if isinstance(output, Tensor):
                return output
        hidden: Tensor = found.last_hidden_state
        if self.has_class_token and not getattr(self.model.config, "use_mean_pooling", False):
            return hidden[:, 0]
        return hidden[:, int(self.has_class_token) :].mean(dim=1)


def _fix_tokens(model: nn.Module) -> None:
    """Let every image have all patches, and positions that are not resized for it.

    ViT-MAE leaves a random part of them out, SigLIP 2 takes any grid. Neither has a fixed meaning, nor can be exported.
    """
    for module in model.modules():
        if type(module).__name__ in _TOKENS:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), _TOKENS[kind.__name__])


def _all_patches(module: Any, sequence: Tensor, noise: None = None) -> tuple[Tensor, None, None]:
    return sequence, None, None


def _on_own_grid(module: Any, pixel_values: Tensor, spatial_shapes: None = None) -> Tensor:
    embedded: Tensor = module.patch_embedding(pixel_values) + module.position_embedding.weight
    return embedded


_TOKENS: dict[str, dict[str, Any]] = {
    "ViTMAEEmbeddings": {"random_masking": _all_patches},
    "Siglip2VisionEmbeddings": {"forward": _on_own_grid},
}
"""Class of transformers -> its methods that are replaced."""


def _patches(images: Tensor, side: int) -> Tensor:
    """(B, C, H, W) as (B, patches, values of a patch), values in the order of SigLIP 2's image processor."""
    grid = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (B, C, rows, side, columns, side)
    return grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _vision(config: Any) -> Any:
    """The part of a config that is about images."""
    return getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls, registered as "maskaq"."""
    compute = module.products.attention if hasattr(module, "products") else F.scaled_dot_product_attention
    heads = compute(query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return heads.transpose(1, 2).contiguous(), None


def class_name(model: Any) -> str:
    """The class of a model as users know it: of a wrapped one that of transformers."""
    return type(model.model if isinstance(model, HuggingFace) else model).__name__


def is_hf(model: Any) -> bool:
    """Whether a model is one of transformers': asked without importing it."""
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)


def adopted(model: Any) -> Any:
    """A transformers model wrapped; any other as it is."""
    if not is_hf(model):
        return model
    if part := _PART.get(type(model).__name__):
        raise ModelError(
            f"this {type(model).__name__} has more parts than the one that sees images: expected a {part}. Pass that, "
            f"or save this one with save_pretrained(DIR) and give {PREFIX}DIR"
        )
    _refuse_without_images(model)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    own = copy.deepcopy(model, shared)  # modules and the config are changed, but not the user's; the weights are theirs
    return HuggingFace(own, _processor(model.name_or_path) if getattr(model, "name_or_path", "") else None)


def _refuse_without_images(model: Any) -> None:
    taken = getattr(model, "main_input_name", None)
    if taken != "pixel_values":
        raise ModelError(
            f"this {type(model).__name__} takes {taken}: expected a vision model, which takes pixel_values"
        )


def load(source: str) -> HuggingFace:
    """The model of a folder or of a repository of the hub, with its weights, float32."""
    transformers = _transformers()
    _refuse_paths(source)
    extra: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with _hub_of(source), _quiet(transformers, bars=not os.path.isdir(source)):
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
            if config.model_type == "timm_wrapper":
                raise CheckpointError(
                    f"{PREFIX}{source} has a model of timm: give its name, {config.architecture}, and the weights with "
                    "--checkpoint model.safetensors"
                )
            name = (getattr(config, "architectures", None) or [""])[0]
            cls = getattr(transformers, _PART.get(name, name), None) or transformers.AutoModel
            if name == "CLIPModel":  # the width of its embedding is told beside the tower's config, and maybe not in it
                extra["config"] = config.vision_config
                extra["config"].projection_dim = config.projection_dim
            model, report = cls.from_pretrained(source, **extra)
            if any(key.startswith("pooler.") for key in report["missing_keys"]):  # else it would be a random one
                model, report = type(model).from_pretrained(source, **extra, **{_POOLER: False})
    except CheckpointError:
        raise
    except Exception as error:  # hub, disk, json, unknown model types: many classes, one remedy
        raise CheckpointError(
            f"{PREFIX}{source}: expected a folder or repository of a transformers model: {first_line(error)}"
        ) from error
    _refuse_without_images(model)
    _refuse_misfit(model, report, f"{PREFIX}{source}")
    return HuggingFace(model.eval(), _processor(source)).eval()


def _refuse_paths(source: str) -> None:
    """CheckpointError for a path of what is no folder, and cannot be a repository's name."""
    if os.path.isfile(source):
        raise CheckpointError(
            f"{PREFIX}{source} is a file: expected the folder of a transformers model, as save_pretrained writes it. "
            f"Weights with timm's names go to --checkpoint, as in MODEL --checkpoint {source}"
        )
    if not os.path.isdir(source) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) is None:
        raise CheckpointError(f"{PREFIX}{source}: there is no such folder, and no repository has such a name")


def _refuse_misfit(model: Any, report: Mapping[str, Any], source: str) -> None:
    """CheckpointError unless every weight of the model came from the checkpoint."""
    kind = type(model).__name__
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"{source}: {len(missing)} weights of {kind} are not in the checkpoint, {missing[0]!r} first: expected all "
            "of them"
        )
    if other := sorted(report["mismatched_keys"]):
        key, theirs, mine = other[0]
        raise CheckpointError(
            f"{source}: {len(other)} weights of {kind} have other shapes than its config.json says, {key!r} first: "
            f"expected {tuple(mine)}, found {tuple(theirs)} in the checkpoint"
        )
    own = {re.sub(r"\.\d+\.", ".N.", key) for key in model.state_dict()}
    left = sorted(key for key in report["unexpected_keys"] if re.sub(r"\.\d+\.", ".N.", key) in own)
    if left:  # other left-over weights are of parts that are not wanted: a text tower, a decoder
        raise CheckpointError(
            f"{source}: the checkpoint has more layers than its config.json says, {left[0]!r} first: expected as many"
        )


def build(name: str, config: Mapping[str, Any], **options: Any) -> HuggingFace:
    """A model of a class and a config, with random weights; as `described` has them."""
    transformers = _transformers()
    cls = getattr(transformers, name.removeprefix(PREFIX), None)
    if cls is None:
        raise ModelError(f"{name}: transformers {transformers.__version__} has no such class")
    kind = cls.config_class
    return HuggingFace(cls(kind.from_dict(dict(config)), **options).eval()).eval()


def described(model: HuggingFace) -> dict[str, Any]:
    """Class and config, which `build` builds the model from, and whether it has a pooler if its class has a choice."""
    config = model.model.config.to_dict()
    private = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
    args: dict[str, Any] = {"config": {key: value for key, value in config.items() if key not in private}}
    if _POOLER in inspect.signature(type(model.model).__init__).parameters:
        args[_POOLER] = model.model.pooler is not None
    return {"name": PREFIX + type(model.model).__name__.split(".")[-1], "args": args}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise DependencyError(
            'Hugging Face models need transformers 5 or newer: pip install "maskaq[transformers]"'
        ) from error
    return transformers


def _register() -> None:
    """Make our attention function known to transformers."""
    transformers = _transformers()
    transformers.AttentionInterface.register(_ATTENTION, attention)
    masks = getattr(transformers, "AttentionMaskInterface", None)
    if masks is not None:  # vision models ask for no mask, or bring their own
        masks.register(_ATTENTION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def _capture_nothing(model: nn.Module) -> None:
    """Remove the hooks by which transformers collects hidden states: a backbone's feature maps do not need them."""
    for module in model.modules():
        for handle, hook in list(module._forward_hooks.items()):
            if hook.__module__.startswith("transformers."):
                del module._forward_hooks[handle]
        if is_hf(module):
            module._output_capturing_hooks_installed = True  # type: ignore[assignment]


@contextmanager
def _quiet(transformers: Any, bars: bool = True) -> Iterator[None]:
    """Context without the warnings of transformers, and without its progress bars: a folder is read in no time."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled() and not bars
    log.set_verbosity_error()
    if bars:
        log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _hub_of(source: str) -> AbstractContextManager[None]:
    """Where a source is read: a folder needs no hub, nor to ask for it."""
    return nullcontext() if os.path.isdir(source) else hub_or_cache()


def _processor(source: str) -> Any:
    """The image processor of a folder or repository; None if it has none."""
    if not source:
        return None
    try:
        with _hub_of(source):
            return _transformers().AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # none there, or one that needs what is not installed: own size and usual values
        if os.path.isfile(file := os.path.join(source, "preprocessor_config.json")):
            raise CheckpointError(f"{file} cannot be read as an image processor: {first_line(error)}") from error
        return None


def _interpolation(processor: Any) -> str:
    resample = getattr(processor, "resample", None)
    if resample is not None and resample not in _INTERPOLATION:
        raise ModelError(f"resample: expected one of {sorted(_INTERPOLATION)} in the image processor, got {resample!r}")
    return _INTERPOLATION[3 if resample is None else int(resample)]


def _input_size(config: Any, processor: Any) -> tuple[int, int, int]:
    channels = int(getattr(config, "num_channels", 3))
    if config.model_type == "siglip2_vision_model":  # its processor says how many patches an image may have
        side = isqrt(config.num_patches) * config.patch_size
        return (channels, side, side)
    size = _size(getattr(processor, "crop_size", None)) if getattr(processor, "do_center_crop", False) else None
    size = size or _size(getattr(processor, "size", None)) or _pair(getattr(config, "image_size", 224))
    return (channels, *size)


def _size(value: Any) -> tuple[int, int] | None:
    """Height and width of a processor's size, in whichever of its forms."""
    if isinstance(value, int):
        return value, value
    get = value.get if isinstance(value, Mapping) else lambda key: getattr(value, key, None)
    edge = get("shortest_edge")
    height, width = get("height") or edge, get("width") or edge
    return (int(height), int(width)) if height and width else None


def _crop(processor: Any) -> float:
    """How much of the resized image the crop keeps."""
    whole, crop = _size(getattr(processor, "size", None)), _size(getattr(processor, "crop_size", None))
    cropped = getattr(processor, "do_center_crop", False) and whole and crop
    return crop[0] / whole[0] if cropped else 1.0  # type: ignore[index]


def _numbers(processor: Any, key: str) -> tuple[float, ...]:
    found = getattr(processor, key, None)
    if found is None or not getattr(processor, "do_normalize", True):
        return (0.5, 0.5, 0.5) if processor is None else (0.0,) * 3 if key == "image_mean" else (1.0,) * 3
    values: Any = found if isinstance(found, list | tuple) else [None]
    if not all(isinstance(value, int | float) and (key == "image_mean" or value > 0) for value in values):
        raise ModelError(f"{key}: expected a number for each channel in the image processor, got {found!r}")
    return tuple(float(value) for value in values)


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))
