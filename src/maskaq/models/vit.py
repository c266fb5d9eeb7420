"""timm's VisionTransformer and its distilled DeiT: class token or average pooling, registers, LayerScale, q/k norm."""

from typing import Any

from timm.layers import AttentionPoolLatent
from timm.models import vision_transformer as timm_vit
from torch import Tensor, nn

from maskaq.errors import ModelError
from maskaq.models.products import AttentionProducts
from maskaq.models.structure import Exposed, Reader, Stream, branch, is_absent, replace_module
from maskaq.shapes import Layer

ROOT = timm_vit.VisionTransformer
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


class ExposedAttentionPool(AttentionProducts):
    """timm's AttentionPoolLatent, the pooling of SigLIP, with its two products as modules.

    A learned query attends to all tokens. It has no map over patches and is no layer of the method's losses.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.num_heads: int = pool.num_heads
        self.scale = pool.scale
        self.pool: str = pool.pool
        self.pos_embed = pool.pos_embed
        self.latent = pool.latent
        self.q = pool.q
        self.kv = pool.kv
        self.q_norm = pool.q_norm
        self.k_norm = pool.k_norm
        self.proj = pool.proj
        self.norm = pool.norm
        self.mlp = pool.mlp

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if self.pos_embed is not None:
            x = x + self.pos_embed[None]
        q = self.q(self.latent.expand(x.shape[0], -1, -1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        kv = self.kv(x).unflatten(-1, (2, self.num_heads, -1))  # (B, T, 2, H, D)
        k, v = (part.transpose(1, 2) for part in kv.unbind(2))  # (B, H, T, D)
        heads = self.attend(self.q_norm(q), self.k_norm(k), v)  # (B, H, latents, D)
        out = self.proj(heads.transpose(1, 2).flatten(2))
        if self.mlp is not None:
            out = out + self.mlp(self.norm(out))
        return out[:, 0] if self.pool == "token" else out.mean(dim=1) if self.pool == "avg" else out


def takes(model: Any) -> bool:
    """Whether all of a VisionTransformer is as this file has it: no hybrid, no attention of another kind."""
    modules = [module for block in model.blocks for module in block.modules()]
    return (
        isinstance(getattr(model.patch_embed, "proj", None), nn.Conv2d)
        and not hasattr(model.patch_embed, "backbone")
        and type(getattr(model, "attn_pool", None)) in (AttentionPoolLatent, ExposedAttentionPool, type(None))
        and all(type(block) in BLOCKS for block in model.blocks)
        and all(type(module) in (*ATTENTIONS, ExposedAttention) for module in modules if "Att" in type(module).__name__)
    )


def expose_(model: Any, image: Tensor) -> Exposed:
    """Swap every attention of a VisionTransformer in place."""
    if getattr(model, "attn_pool", None) is not None:
        model.attn_pool = ExposedAttentionPool(model.attn_pool)
    rows, columns = model.patch_embed.dynamic_feat_size(model.patch_embed.img_size)  # with padding, where it pads
    reads_class_token = getattr(model, "has_class_token", True) and model.global_pool == "token"
    layers = []
    for index, block in enumerate(model.blocks):
        for name, module in list(block.named_modules()):
            if type(module) in ATTENTIONS:
                attention = ExposedAttention(module)
                attention.prefix_tokens = model.num_prefix_tokens
                attention.class_query = reads_class_token
                replace_module(block, name, attention)
                layers.append(
                    Layer(
                        attention=f"blocks.{index}.{name}",
                        block=f"blocks.{index}",
                        grid=(rows, columns),
                        prefix_tokens=model.num_prefix_tokens,
                    )
                )
    return Exposed.of(model, layers)


def streams(model: Any) -> tuple[Stream, ...] | str:
    """The residual stream of an exposed model; or, in words, why it has none that can be rotated."""
    if any(type(block) is timm_vit.ResPostBlock for block in model.blocks):
        return "each block adds the output of a norm"
    if model.global_pool not in ("token", "avg"):
        return f"the model's pooling (global_pool is {model.global_pool!r}) depends on the basis"
    norms = [name for name in ("norm", "fc_norm") if not is_absent(getattr(model, name))]
    heads = [name for name in ("head", "head_dist") if not is_absent(getattr(model, name, None))]
    if not heads:
        return "no linear layer reads the last norm"
    if len(norms) > 1 or ("fc_norm" in norms and "head_dist" in heads):
        return "more than one norm comes before the classifier"
    branches = [branch for name, block in model.blocks.named_children() for branch in _branches(name, block)]
    readers = (*(reader for _, reader in branches), Reader(tuple(heads), next(iter(norms), "")))
    writers = tuple(writer for writer, _ in branches)
    if not is_absent(model.norm_pre):  # whatever comes before it is no part of the stream
        return (Stream(model.embed_dim, writers, readers, entry="norm_pre"),)
    names = ("pos_embed", "cls_token", "reg_token", "dist_token")
    tokens = tuple(name for name in names if getattr(model, name, None) is not None)
    if not is_absent(model.patch_embed.norm):
        return (Stream(model.embed_dim, writers, readers, tokens, entry="patch_embed.norm"),)
    return (Stream(model.embed_dim, (("patch_embed.proj", ""), *writers), readers, tokens),)


def _branches(name: str, block: Any) -> list[tuple[tuple[str, str], Reader]]:
    path = f"blocks.{name}"
    if type(block) is timm_vit.ParallelThingsBlock:
        found = [
            (f"{path}.{kind}.{i}", part) for kind in ("attns", "ffns") for i, part in enumerate(getattr(block, kind))
        ]
        inner = [(where, "attn" if hasattr(part, "attn") else "mlp", "norm", "ls", part) for where, part in found]
    else:
        inner = [(path, "attn", "norm1", "ls1", block), (path, "mlp", "norm2", "ls2", block)]
    return [
        branch(
            f"{where}.{what}",
            getattr(part, what),
            "" if is_absent(getattr(part, norm)) else f"{where}.{norm}",
            "" if is_absent(getattr(part, scale)) else f"{where}.{scale}",
        )
        for where, what, norm, scale, part in inner
    ]
