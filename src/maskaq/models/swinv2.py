"""The cosine attention of timm's SwinTransformerV2, of both kinds: q and k of length 1, a learned gain of each head.

softmax(gain * q k^T + bias): written with our products, so that the fast engine can take it. All else of the models is
the seam's business.
"""

import math
from typing import Any

import torch
from timm.models import swin_transformer_v2 as timm_v2
from timm.models import swin_transformer_v2_cr as timm_cr
from torch import Tensor, nn
from torch.nn import functional as F

_LARGEST = math.log(1 / 0.01)


class CosineAttention(timm_v2.WindowAttention):
    """timm's WindowAttention of Swin V2 with its products as modules."""

    products: Any

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x)
        if self.q_bias is not None:
            qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias))  # type: ignore[arg-type]
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        index: Tensor = self.relative_position_index  # type: ignore[assignment]
        bias = table[index.flatten()].view(*index.shape, -1).permute(2, 0, 1)  # (H, T, T)
        return self.proj(_attend(self, qkv, 16 * torch.sigmoid(bias)[None], mask))


class CosineAttentionCr(timm_cr.WindowMultiHeadAttention):
    """timm's WindowMultiHeadAttention of Swin V2 "cr" with its products as modules."""

    products: Any

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.proj(_attend(self, self.qkv(x), self._relative_positional_encodings(), mask))


def _attend(attention: Any, qkv: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    qkv = qkv.unflatten(-1, (3, attention.num_heads, -1))  # (B*W, T, 3, H, D)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # (B*W, H, T, D)
    if mask is not None:  # (W, T, T)
        bias = bias + mask[:, None]
    gain = attention.logit_scale.clamp(max=_LARGEST).exp().view(-1, 1, 1)
    heads: Tensor = attention.products.scaled(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, bias, gain)
    return heads.transpose(1, 2).flatten(2)


EXPOSED: dict[type[nn.Module], type[nn.Module]] = {
    timm_v2.WindowAttention: CosineAttention,
    timm_cr.WindowMultiHeadAttention: CosineAttentionCr,
}
"""timm's classes of attention -> ours."""
