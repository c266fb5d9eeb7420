"""timm's SwinTransformer: shifted windows, relative position bias, all stages."""

import math
from typing import Any

import torch
from timm.models import swin_transformer as timm_swin
from torch import Tensor, nn

from maskaq.models.products import AttentionProducts
from maskaq.models.structure import Exposed, Reader, Stream, branch, is_absent
from maskaq.shapes import Layer

ROOT = timm_swin.SwinTransformer


class ExposedWindowAttention(AttentionProducts):
    """timm's WindowAttention with its two products as modules; same parameters, same names, same result."""

    relative_position_index: Tensor

    def __init__(self, attention: timm_swin.WindowAttention) -> None:
        super().__init__()
        self.num_heads: int = attention.num_heads
        self.scale = attention.scale
        self.window_area: int = attention.window_area
        self.qkv = attention.qkv
        self.proj = attention.proj
        self.relative_position_bias_table = attention.relative_position_bias_table
        self.register_buffer("relative_position_index", attention.relative_position_index, persistent=False)

    def _position_bias(self) -> Tensor:
        index = self.relative_position_index.flatten()
        bias = self.relative_position_bias_table[index].view(self.window_area, self.window_area, -1)
        return bias.permute(2, 0, 1)  # (H, T, T)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B*W, T, 3, H, D)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # (B*W, H, T, D)
        bias = self._position_bias()[None]  # (1, H, T, T)
        if mask is not None:  # (W, T, T): keeps the regions of a shifted window apart
            bias = bias + mask[:, None]
        heads = self.attend(q, k, v, bias)  # (B*W, H, T, D)
        return self.proj(heads.transpose(1, 2).flatten(2))


def takes(model: Any) -> bool:
    return True


def expose_(model: Any, image: Tensor) -> Exposed:
    """Swap every attention of a SwinTransformer in place."""
    layers = []
    height, width = model.patch_embed.grid_size
    for i, stage in enumerate(model.layers):
        if not isinstance(stage.downsample, nn.Identity):
            height, width = -(-height // 2), -(-width // 2)  # merging pads an odd side; `input_resolution` forgets that
        for j, block in enumerate(stage.blocks):
            block.attn = ExposedWindowAttention(block.attn)
            layers.append(_layer(f"layers.{i}.blocks.{j}", block, height, width))
    return Exposed.of(model, layers)


def _layer(name: str, block: timm_swin.SwinTransformerBlock, height: int, width: int) -> Layer:
    """Send the patch numbers through the block's own shift, pad and partition to see where each patch ends up."""
    shift_h, shift_w = block.shift_size
    win_h, win_w = block.window_size
    patches = torch.arange(height * width).view(1, height, width, 1)
    patches = torch.roll(patches, shifts=(-shift_h, -shift_w), dims=(1, 2))
    pad = (0, 0, 0, -width % win_w, 0, -height % win_h)
    patches = torch.nn.functional.pad(patches, pad, value=height * width)  # padding sorts behind every patch
    tokens = timm_swin.window_partition(patches, (win_h, win_w)).flatten()  # (W*Q,) patch number of each token
    return Layer(
        attention=f"{name}.attn",
        block=name,
        grid=(height, width),
        windows=len(tokens) // (win_h * win_w),
        raster=tokens.argsort(stable=True)[: height * width],
    )


def streams(model: Any) -> tuple[Stream, ...] | str:
    """The residual streams of an exposed model, one for each stage; or, in words, why they cannot be rotated."""
    if model.global_pool != "avg":
        return f"pooling by {model.global_pool} depends on the basis"
    if is_absent(model.head.fc):
        return "no linear layer reads the last norm"
    layers = model._maskaq_geometry.layers
    tokens = (layer.windows * model.get_submodule(layer.attention).window_area for layer in layers)
    if any(count != math.prod(layer.grid) for count, layer in zip(tokens, layers, strict=True)):
        return "windows are padded with zeros behind a norm, whose shift would reach the padding once it is folded"
    found = []
    for i, stage in enumerate(model.layers):
        first, merging = stage.blocks[0], None if is_absent(stage.downsample) else f"layers.{i}.downsample"
        branches = [b for j, block in enumerate(stage.blocks) for b in _branches(f"layers.{i}.blocks.{j}", block)]
        starts = [f"{merging}.reduction"] if merging else ["patch_embed.proj"] * is_absent(model.patch_embed.norm)
        readers = [reader for _, reader in branches]
        if i + 1 < len(model.layers):
            after = f"layers.{i + 1}.downsample"
            readers.append(Reader((f"{after}.reduction",), f"{after}.norm"))
        else:
            readers.append(Reader(("head.fc",), "norm"))
        writers = (*((start, "") for start in starts), *(writer for writer, _ in branches))
        found.append(Stream(first.dim, writers, tuple(readers), entry="" if starts else "patch_embed.norm"))
    return tuple(found)


def _branches(path: str, block: Any) -> list[tuple[tuple[str, str], Reader]]:
    inner = (("attn", "norm1"), ("mlp", "norm2"))
    return [branch(f"{path}.{what}", getattr(block, what), f"{path}.{norm}") for what, norm in inner]
