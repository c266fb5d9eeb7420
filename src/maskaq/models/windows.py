"""timm's Swin as the backbone of a detector or a segmenter: four feature maps of images of any size.

Such Swins were trained by mmdetection and mmsegmentation, which pad a feature map to whole windows and then shift it.
timm shifts first, so its windows and outputs differ if a side is not a multiple of the window.
"""

import inspect
from typing import Any

import timm
import torch
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, window_partition, window_reverse
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.errors import ModelError, unknown

_ARGUMENTS = set(inspect.signature(SwinTransformer).parameters) - {"img_size", "strict_img_size", "always_partition"}


class WindowBlock(SwinTransformerBlock):
    """timm's block with the windows of the Swin paper's dense models; same parameters, same names."""

    def windows(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B * windows, h, w, C): padded with zeros to whole windows, shifted, cut."""
        height, width = self.window_size
        x = F.pad(x, (0, 0, 0, -x.shape[2] % width, 0, -x.shape[1] % height))
        x = torch.roll(x, (-self.shift_size[0], -self.shift_size[1]), dims=(1, 2))
        return window_partition(x, self.window_size)

    def merged(self, windows: Tensor, height: int, width: int) -> Tensor:
        """(B * windows, h, w, C) -> (B, H, W, C): the inverse of `windows`."""
        whole = (height + -height % self.window_size[0], width + -width % self.window_size[1])
        x = window_reverse(windows, self.window_size, *whole)
        return torch.roll(x, self.shift_size, dims=(1, 2))[:, :height, :width].contiguous()

    def mask(self, x: Tensor) -> Tensor | None:
        """(windows, T, T) for a feature map (B, H, W, C): -100 between what a shift brought together from two edges."""
        if not any(self.shift_size):
            return None
        regions = []
        for side, window, shift in zip(x.shape[1:3], self.window_size, self.shift_size, strict=True):
            place = torch.arange(side + -side % window, device=x.device)
            regions.append((place >= len(place) - window).long() + (place >= len(place) - shift).long() * (shift > 0))
        region = 3 * regions[0][:, None] + regions[1]
        parts = window_partition(region[None, ..., None], self.window_size).flatten(1)
        return -100.0 * (parts[:, None] != parts[:, :, None]).to(x.dtype)

    def _attn(self, x: Tensor) -> Tensor:
        windows = self.windows(x)
        attended = self.attn(windows.flatten(1, 2), mask=self.mask(x))
        return self.merged(attended.view_as(windows), x.shape[1], x.shape[2])


def swin_features(name: str, img_size: int | tuple[int, int], **arguments: Any) -> nn.Module:
    """timm's Swin of a name, without weights: images (B, 3, H, W), sides multiples of the patch, -> four (B, h, w, C).

    Args:
        arguments: those of timm's SwinTransformer that are to differ, such as `embed_dim` and `depths`.
    """
    if not name.startswith("swin_"):
        raise ModelError(
            f"backbone {name!r}: expected the name of a Swin of timm, such as swin_tiny_patch4_window7_224"
        )
    for key in arguments:
        if key not in _ARGUMENTS:  # an older timm would ignore it
            raise ModelError(unknown("argument", key, _ARGUMENTS))
    try:
        model = timm.create_model(
            name, features_only=True, img_size=img_size, strict_img_size=False, always_partition=True, **arguments
        )
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ModelError(f"backbone {name!r} with {arguments}: {error}") from error
    for module in model.modules():
        if type(module) is SwinTransformerBlock:
            module.__class__ = WindowBlock
    return model


def on_swin(
    host: Any, name: str, task: str, backbone: str, num_classes: int, img_size: int | tuple[int, int], arguments: Any
) -> Any:
    """A detector or segmenter on a Swin, without weights; `architecture` has the name and arguments to build it again.

    Args:
        host: its class, whose keyword arguments are taken out of `arguments`; the others are the Swin's.
    """
    own = {key: value for key, value in arguments.items() if key in (host.__init__.__kwdefaults__ or {})}
    swin = {key: value for key, value in arguments.items() if key not in own}
    features: Any = swin_features(backbone, img_size, **swin)
    model = host(features, features.feature_info.channels(), num_classes, **own)
    model.pretrained_cfg = model.default_cfg = image_record(name, task, num_classes, img_size)
    given = {"backbone": backbone, "num_classes": num_classes, "img_size": img_size, **arguments}
    model.architecture = {"name": name, "args": given}
    return model.eval()


def padded(images: Tensor, multiple: int) -> Tensor:
    """Images with zeros below and to the right, so that both sides are multiples."""
    return F.pad(images, (0, -images.shape[-1] % multiple, 0, -images.shape[-2] % multiple))


def image_record(name: str, task: str, num_classes: int, img_size: int | tuple[int, int]) -> dict[str, Any]:
    """What timm keeps as `pretrained_cfg`: how images are prepared."""
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    return {
        "architecture": name,
        "task": task,
        "num_classes": num_classes,
        "input_size": (3, height, width),
        "mean": timm.data.IMAGENET_DEFAULT_MEAN,
        "std": timm.data.IMAGENET_DEFAULT_STD,
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }
