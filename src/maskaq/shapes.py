"""Axes and geometry of a model: all that the losses need, so that none depends on the architecture.

Legend   B images   W windows of an image   H heads   T tokens of a window (prefix + patches)
         Q queries, K keys (patches)   N patches of an image in raster order   D channels of a head
         C channels of an image, or classes
A plain ViT is one window with its prefix tokens in front; Swin is many windows and no prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """One attention layer: where it is in the model, and how its tokens lie on the image."""

    attention: str
    """Module path of the attention."""
    block: str
    """Module path of the block around it."""
    grid: tuple[int, int]
    """Patches down and across."""
    windows: int = 1
    prefix_tokens: int = 0
    raster: Tensor | None = None
    """(N,) position of each raster patch among the W*Q window tokens; None where they are in raster order already."""

    def maps(self, attention: Tensor) -> Tensor:
        """(B*W, H, T, T) -> (B, W, H, Q, K) without prefix tokens. Rows may be longer than T: the rest is padding.

        Where windows reach over the image's edge, the tokens there are patches like others, as they are to the model.
        """
        p = self.prefix_tokens
        tokens = attention.shape[2]
        return attention.unflatten(0, (-1, self.windows))[..., p:, p:tokens]

    def patch_attention(self, received: Tensor) -> Tensor:
        """(B*W, H, T) attention that each token receives -> (B, N): of each patch, mean over heads."""
        rows = received[..., self.prefix_tokens :].mean(dim=1)  # (B*W, K)
        return self._to_raster(rows.unflatten(0, (-1, self.windows)).flatten(1))

    def patch_heads(self, heads: Tensor) -> Tensor:
        """(B*W, H, T, D) attention-head outputs -> (B, H, N, D), patches only.

        In the order in which they lie in memory, window by window, since comparing patch with patch needs no positions;
        in raster order only if padding has to be removed.
        """
        patches = self.window_patches(heads).transpose(1, 2).flatten(2, 3)
        is_padded = patches.shape[2] > self.grid[0] * self.grid[1]
        return self._to_raster(patches, dim=2) if is_padded else patches

    def raster_heads(self, heads: Tensor) -> Tensor:
        """(B*W, H, T, D) attention-head outputs -> (B, N, H*D): of each patch in raster order, heads side by side."""
        patches = self.window_patches(heads).transpose(2, 3).flatten(3)  # (B, W, Q, H*D)
        return self._to_raster(patches.flatten(1, 2))

    def window_patches(self, tokens: Tensor) -> Tensor:
        """(B*W, H, T, ...) -> (B, W, H, Q, ...): the values of patches alone, window by window."""
        return tokens[:, :, self.prefix_tokens :].unflatten(0, (-1, self.windows))

    def window_positions(self, tokens: int, device: torch.device) -> Tensor:
        """(W, Q, 2): row and column of each patch's centre on the image, in [0, 1], by windows of Q tokens.

        Padding beyond the image's edge gets positions far away from it.
        """
        rows, columns = ((torch.arange(n, device=device) + 0.5) / n for n in self.grid)
        centres = torch.cartesian_prod(rows, columns)  # (N, 2), in raster order
        if self.raster is not None:
            centres = centres.new_full((self.windows * tokens, 2), 100.0).index_copy(0, self.raster, centres)
        return centres.unflatten(0, (self.windows, -1))

    def in_windows(self, patches: Tensor, tokens: int) -> Tensor:
        """(B, N) in raster order -> (B, W, Q), by windows of Q tokens; 0 for padding beyond the image's edge."""
        if self.raster is not None:
            patches = patches.new_zeros(len(patches), self.windows * tokens).index_copy(1, self.raster, patches)
        return patches.unflatten(1, (self.windows, tokens))

    def _to_raster(self, tokens: Tensor, dim: int = 1) -> Tensor:
        return tokens if self.raster is None else tokens.index_select(dim, self.raster)


@dataclass(frozen=True)
class Geometry:
    """What the method needs to know about a model."""

    layers: tuple[Layer, ...]
    """Attention over patches of the image."""
    image_size: tuple[int, int]
    channels: int
    task: str
    """What the model is for: the name of a task of `maskaq.tasks`."""
    classes: int
    """0 where the model predicts no classes."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    first: tuple[str, ...]
    """Module paths of the patch embedding's convolutions."""
    last: tuple[str, ...]
    """Module paths of the classifiers, or of the projection that an embedding ends with."""
    blocks: tuple[str, ...] = ()
    """Module paths of the blocks with attention."""
    left_out: tuple[str, ...] = ()
    """Attention layers that the losses do not use, and why."""
    backbone: str = ""
    """Module path of the part that `quantization.scope = backbone` quantizes; empty: all but the `last` layers."""

    def in_backbone(self, name: str) -> bool:
        """Whether a module belongs to the backbone."""
        return name.startswith(f"{self.backbone}.") if self.backbone else name not in self.last

    def to(self, device: torch.device | str) -> "Geometry":
        moved = [replace(x, raster=None if x.raster is None else x.raster.to(device)) for x in self.layers]
        return replace(self, layers=tuple(moved))

    def patch_attention(self, received: Sequence[Tensor]) -> list[Tensor]:
        """Attention received by the tokens of each layer -> (B, N) attention to each patch, layer by layer."""
        return [layer.patch_attention(rows.float()) for layer, rows in zip(self.layers, received, strict=True)]

    def normalise(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> what the model takes."""
        return (pixels - self._channel(self.mean, pixels)) / self._channel(self.std, pixels)

    def pixels(self, images: Tensor) -> Tensor:
        """What the model takes -> [0, 1]."""
        return images * self._channel(self.std, images) + self._channel(self.mean, images)

    @staticmethod
    def _channel(values: tuple[float, ...], like: Tensor) -> Tensor:
        return _constant(values, like.device, like.dtype).view(1, -1, 1, 1)


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, device=device, dtype=dtype)  # once: a copy from the host would halt a captured step
