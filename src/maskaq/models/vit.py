"""timm's VisionTransformer and its distilled DeiT: class token or average pooling, registers, LayerScale, q/k norm."""

from typing import Any

from timm.models import vision_transformer as timm_vit
from torch import Tensor, nn

from maskaq.errors import ModelError
from maskaq.models.products import AttentionProducts
from maskaq.shapes import Layer

ROOT = timm_vit.VisionTransformer
NAMES = ("vit_*", "deit_*", "deit3_*", "flexivit_*", "eva_large_*", "beit3_*", "aimv2_*")
ATTENTIONS = (timm_vit.Attention,)  # older timm has it nowhere else
BLOCKS = (timm_vit.Block, timm_vit.ResPostBlock, timm_vit.ParallelThingsBlock)


class ExposedAttention(AttentionProducts):
    """timm's Attention with its two products as modules; same parameters, same names, same result."""

    def __init__(self, attention: timm_vit.Attention) -> None:
        super().__init__()
        self.num_heads: int = attention.num_heads
        self.scale = attention.scale
        self.qkv = attention.qkv
        self.q_norm = attention.q_norm
        self.k_norm = attention.k_norm
        self.norm = getattr(attention, "norm", None) or nn.Identity()  # younger timm: normalises the head outputs
        self.gate = getattr(attention, "gate", None)  # younger timm: a sigmoid gate on the head outputs
        self.proj = attention.proj

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ModelError(
                "masked attention was asked of a ViT; maskaq supports full attention over all patches only"
            )
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, H, D)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # (B, H, T, D)
        q, k = self.q_norm(q), self.k_norm(k)
        heads = self.attend(q, k, v)  # (B, H, T, D)
        out = self.norm(heads.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj(out)


def expose_(model: Any) -> tuple[Layer, ...]:
    """Swap every attention of a VisionTransformer in place; return its layers, first to last."""
    if getattr(model, "attn_pool", None) is not None:
        raise ModelError(
            f"layer 'attn_pool': this model pools its patches by attention (global_pool is {model.global_pool!r}), as "
            "SigLIP models do, which maskaq does not support. Supported: timm's VisionTransformer with a class token "
            "or average pooling, such as vit_*_siglip_gap_*, and SwinTransformer (swin_*)"
        )
    rows, columns = model.patch_embed.dynamic_feat_size(model.patch_embed.img_size)  # with padding, where it pads
    reads_class_token = getattr(model, "has_class_token", True) and model.global_pool == "token"
    layers = []
    for index, block in enumerate(model.blocks):
        if type(block) not in BLOCKS:
            allowed = ", ".join(cls.__name__ for cls in BLOCKS)
            raise ModelError(f"blocks.{index} is a {type(block).__name__}; supported ViT blocks: {allowed}")
        for name, module in list(block.named_modules()):
            if type(module) in ATTENTIONS:
                parent, _, child = name.rpartition(".")
                attention = ExposedAttention(module)
                attention.prefix_tokens, attention.class_query = model.num_prefix_tokens, reads_class_token
                setattr(block.get_submodule(parent), child, attention)
                layers.append(
                    Layer(
                        attention=f"blocks.{index}.{name}",
                        block=f"blocks.{index}",
                        grid=(rows, columns),
                        prefix_tokens=model.num_prefix_tokens,
                    )
                )
    return tuple(layers)
