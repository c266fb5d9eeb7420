"""mmdetection's Mask R-CNN and mmsegmentation's UperNet on Swin, as far as checkpoints and tests need them.

Names and shapes of their state dicts, and the backbone, pyramid and heads as plain functions of such a dict, written
from their published definitions.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = {"embed": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24)}
SMALL = {"embed": 8, "depths": (1, 2, 2, 1), "heads": (1, 2, 2, 4)}
"""A Swin for tests that compute."""


def backbone_shapes(embed: int, depths, heads, window: int = 7) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.patch_embed.projection.weight": (embed, 3, 4, 4),
        "backbone.patch_embed.projection.bias": (embed,),
        **_norm("backbone.patch_embed.norm", embed),
    }
    for i, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        width = embed << i
        for j in range(depth):
            path = f"backbone.stages.{i}.blocks.{j}"
            shapes |= _norm(f"{path}.norm1", width)
            shapes[f"{path}.attn.w_msa.relative_position_bias_table"] = ((2 * window - 1) ** 2, count)
            shapes[f"{path}.attn.w_msa.relative_position_index"] = (window**2, window**2)
            shapes |= _layer(f"{path}.attn.w_msa.qkv", 3 * width, width) | _layer(
                f"{path}.attn.w_msa.proj", width, width
            )
            shapes |= _norm(f"{path}.norm2", width)
            shapes |= _layer(f"{path}.ffn.layers.0.0", 4 * width, width) | _layer(
                f"{path}.ffn.layers.1", width, 4 * width
            )
        if i + 1 < len(depths):
            shapes |= _norm(f"backbone.stages.{i}.downsample.norm", 4 * width)
            shapes[f"backbone.stages.{i}.downsample.reduction.weight"] = (2 * width, 4 * width)
    for i in range(len(depths)):
        shapes |= _norm(f"backbone.norm{i}", embed << i)
    return shapes


def mask_rcnn_shapes(
    embed: int, depths, heads, window: int = 7, classes: int = 80, width: int = 256, fc: int = 1024
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `mask_rcnn_swin-t-p4-w7_fpn_ms-crop-3x` where the arguments are those of TINY."""
    shapes = backbone_shapes(embed, depths, heads, window)
    for i in range(4):
        shapes |= _layer(f"neck.lateral_convs.{i}.conv", width, embed << i, 1, 1)
    for i in range(4):
        shapes |= _layer(f"neck.fpn_convs.{i}.conv", width, width, 3, 3)
    shapes |= _layer("rpn_head.rpn_conv", width, width, 3, 3)
    shapes |= _layer("rpn_head.rpn_cls", 3, width, 1, 1) | _layer("rpn_head.rpn_reg", 12, width, 1, 1)
    box, mask = "roi_head.bbox_head", "roi_head.mask_head"
    shapes |= _layer(f"{box}.fc_cls", classes + 1, fc) | _layer(f"{box}.fc_reg", 4 * classes, fc)
    shapes |= _layer(f"{box}.shared_fcs.0", fc, 49 * width) | _layer(f"{box}.shared_fcs.1", fc, fc)
    for i in range(4):
        shapes |= _layer(f"{mask}.convs.{i}.conv", width, width, 3, 3)
    shapes |= {f"{mask}.upsample.weight": (width, width, 2, 2), f"{mask}.upsample.bias": (width,)}
    return shapes | _layer(f"{mask}.conv_logits", classes, width, 1, 1)


def upernet_shapes(
    embed: int, depths, heads, window: int = 7, classes: int = 150, width: int = 512, auxiliary: int = 256
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `upernet_swin_tiny_patch4_window7_512x512_160k_ade20k` where the arguments are TINY."""
    shapes = backbone_shapes(embed, depths, heads, window)
    last = embed << 3
    shapes |= _layer("decode_head.conv_seg", classes, width, 1, 1)
    for i in range(4):
        shapes |= _conv(f"decode_head.psp_modules.{i}.1", width, last, 1)
    shapes |= _conv("decode_head.bottleneck", width, last + 4 * width, 3)
    for i in range(3):
        shapes |= _conv(f"decode_head.lateral_convs.{i}", width, embed << i, 1)
    for i in range(3):
        shapes |= _conv(f"decode_head.fpn_convs.{i}", width, width, 3)
    shapes |= _conv("decode_head.fpn_bottleneck", width, 4 * width, 3)
    shapes |= _layer("auxiliary_head.conv_seg", classes, auxiliary, 1, 1)
    return shapes | _conv("auxiliary_head.convs.0", auxiliary, embed << 2, 3)


def _layer(path: str, out: int, *rest: int) -> dict[str, tuple[int, ...]]:
    return {f"{path}.weight": (out, *rest), f"{path}.bias": (out,)}


def _norm(path: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{path}.weight": (width,), f"{path}.bias": (width,)}


def _conv(path: str, out: int, width: int, side: int) -> dict[str, tuple[int, ...]]:
    """mmcv's ConvModule: a convolution without a bias, and its BatchNorm."""
    norms = {f"{path}.bn.{name}": (out,) for name in ("weight", "bias", "running_mean", "running_var")}
    return {f"{path}.conv.weight": (out, width, side, side), **norms, f"{path}.bn.num_batches_tracked": ()}


def filled(shapes, seed: int = 0) -> dict[str, Tensor]:
    """A state dict of these shapes with weights that matter everywhere."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in shapes.items():
        if key.endswith("relative_position_index"):
            state[key] = position_index(int(shape[0] ** 0.5))
        elif key.endswith("num_batches_tracked"):
            state[key] = torch.tensor(7)
        else:
            fan = max(1, torch.Size(shape[1:]).numel())
            noise = torch.randn(shape, generator=generator)
            one = len(shape) == 1 and key.endswith(("weight", "var"))
            state[key] = 1 + 0.2 * noise.tanh() if one else noise * (1.0 if "table" in key else 1.5 / fan**0.5)
    return state


# --- what they compute -----------------------------------------------------------------------------------------


def position_index(window: int) -> Tensor:
    """(w^2, w^2): the row of the bias table for each pair of places in a window."""
    row = torch.arange(window)
    places = [(y, x) for y in row.tolist() for x in row.tolist()]
    return torch.tensor(
        [[(a - c + window - 1) * (2 * window - 1) + b - d + window - 1 for c, d in places] for a, b in places]
    )


def linear(state, path: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{path}.weight"], state.get(f"{path}.bias"))


def conv(state, path: str, x: Tensor, **options) -> Tensor:
    return F.conv2d(x, state[f"{path}.weight"], state.get(f"{path}.bias"), **options)


def norm(state, path: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{path}.weight"], state[f"{path}.bias"])


def merged(state, path: str, x: Tensor) -> Tensor:
    """PatchMerging, by nn.Unfold; x is (B, H, W, C)."""
    x = F.pad(x.permute(0, 3, 1, 2), (0, x.shape[2] % 2, 0, x.shape[1] % 2))
    gathered = F.unfold(x, kernel_size=2, stride=2).transpose(1, 2)  # (B, L, 4 C)
    reduced = linear(state, f"{path}.reduction", norm(state, f"{path}.norm", gathered))
    return reduced.unflatten(1, (x.shape[2] // 2, x.shape[3] // 2))


def attended(state, path: str, x: Tensor, heads: int, window: int, shift: int) -> Tensor:
    """ShiftWindowMSA, window by window; x is (B, H, W, C)."""
    _, height, width, channels = x.shape
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    tall, wide = x.shape[1:3]
    region = torch.zeros(tall, wide)
    if shift:
        x = torch.roll(x, (-shift, -shift), dims=(1, 2))
        number = 0
        for rows in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
            for columns in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
                region[rows, columns] = number
                number += 1
    out = torch.zeros_like(x)
    bias = state[f"{path}.relative_position_bias_table"][position_index(window)].permute(2, 0, 1)
    for top in range(0, tall, window):
        for left in range(0, wide, window):
            part = (slice(None), slice(top, top + window), slice(left, left + window))
            tokens = x[part].flatten(1, 2)
            q, k, v = linear(state, f"{path}.qkv", tokens).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            where = region[part[1:]].flatten()
            mask = torch.where(where[:, None] == where[None], 0.0, -100.0)
            scores = (q * (channels // heads) ** -0.5) @ k.transpose(-2, -1) + bias + mask
            found = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
            out[part] = linear(state, f"{path}.proj", found).unflatten(1, (window, window))
    if shift:
        out = torch.roll(out, (shift, shift), dims=(1, 2))
    return out[:, :height, :width]


def stages(state, images: Tensor, depths, heads, window: int = 7, **_) -> list[Tensor]:
    """The four normed outputs (B, C, h, w) of the backbone."""
    images = F.pad(images, (0, -images.shape[3] % 4, 0, -images.shape[2] % 4))
    x = norm(
        state,
        "backbone.patch_embed.norm",
        conv(state, "backbone.patch_embed.projection", images, stride=4).permute(0, 2, 3, 1),
    )
    found = []
    for i, depth in enumerate(depths):
        for j in range(depth):
            path = f"backbone.stages.{i}.blocks.{j}"
            shift = window // 2 if j % 2 else 0
            x = x + attended(state, f"{path}.attn.w_msa", norm(state, f"{path}.norm1", x), heads[i], window, shift)
            hidden = F.gelu(linear(state, f"{path}.ffn.layers.0.0", norm(state, f"{path}.norm2", x)))
            x = x + linear(state, f"{path}.ffn.layers.1", hidden)
        found.append(norm(state, f"backbone.norm{i}", x).permute(0, 3, 1, 2))
        if i + 1 < len(depths):
            x = merged(state, f"backbone.stages.{i}.downsample", x)
    return found


def pyramid(state, found: list[Tensor]) -> list[Tensor]:
    """P2 to P6."""
    laterals = [conv(state, f"neck.lateral_convs.{i}.conv", x) for i, x in enumerate(found)]
    for i in (3, 2, 1):
        laterals[i - 1] = laterals[i - 1] + F.interpolate(laterals[i], laterals[i - 1].shape[2:], mode="nearest")
    levels = [conv(state, f"neck.fpn_convs.{i}.conv", x, padding=1) for i, x in enumerate(laterals)]
    return [*levels, F.max_pool2d(levels[-1], 1, stride=2)]


def rpn(state, level: Tensor) -> tuple[Tensor, Tensor]:
    x = conv(state, "rpn_head.rpn_conv", level, padding=1).relu()
    return conv(state, "rpn_head.rpn_cls", x), conv(state, "rpn_head.rpn_reg", x)


def box_head(state, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Class scores, the background last, and deltas of the classes."""
    path = "roi_head.bbox_head"
    x = linear(state, f"{path}.shared_fcs.0", pooled.flatten(1)).relu()
    x = linear(state, f"{path}.shared_fcs.1", x).relu()
    return linear(state, f"{path}.fc_cls", x), linear(state, f"{path}.fc_reg", x)


def mask_head(state, pooled: Tensor) -> Tensor:
    path = "roi_head.mask_head"
    for i in range(4):
        pooled = conv(state, f"{path}.convs.{i}.conv", pooled, padding=1).relu()
    larger = F.conv_transpose2d(pooled, state[f"{path}.upsample.weight"], state[f"{path}.upsample.bias"], stride=2)
    return conv(state, f"{path}.conv_logits", larger.relu())


def upernet_head(state, found: list[Tensor]) -> Tensor:
    """The decoder's logits, at a quarter of the image's size."""

    def module(path: str, x: Tensor, padding: int = 0) -> Tensor:
        x = conv(state, f"{path}.conv", x, padding=padding)
        keys = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(x, *(state[f"{path}.bn.{key}"] for key in keys)).relu()

    def larger(x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)

    last = found[-1]
    pools = [F.adaptive_avg_pool2d(last, side) for side in (1, 2, 3, 6)]
    pooled = [larger(module(f"decode_head.psp_modules.{i}.1", x), last) for i, x in enumerate(pools)]
    laterals = [module(f"decode_head.lateral_convs.{i}", x) for i, x in enumerate(found[:3])]
    laterals.append(module("decode_head.bottleneck", torch.cat([last, *pooled], dim=1), 1))
    for i in (3, 2, 1):
        laterals[i - 1] = laterals[i - 1] + larger(laterals[i], laterals[i - 1])
    levels = [module(f"decode_head.fpn_convs.{i}", x, 1) for i, x in enumerate(laterals[:3])] + laterals[3:]
    joined = torch.cat([larger(x, levels[0]) for x in levels], dim=1)
    return conv(state, "decode_head.conv_seg", module("decode_head.fpn_bottleneck", joined, 1))


def authors_names(state) -> dict[str, Tensor]:
    """The same checkpoint as the Swin authors' own detectors have it: other names and order in the backbone."""
    found = {}
    for key, value in state.items():
        if ".downsample." in key:  # rows of patches inside channels -> channels inside columns of patches
            parts = value.reshape(*value.shape[:-1], -1, 4)
            value = torch.cat([parts[..., i] for i in (0, 2, 1, 3)], dim=-1)
        for old, new in (
            ("backbone.stages.", "backbone.layers."),
            ("patch_embed.projection", "patch_embed.proj"),
            (".attn.w_msa.", ".attn."),
            (".ffn.layers.0.0.", ".mlp.fc1."),
            (".ffn.layers.1.", ".mlp.fc2."),
        ):
            key = key.replace(old, new)
        found[key] = value
    return found


def transformers_names(state) -> dict[str, Tensor]:
    """A UperNet's state dict with the names of transformers' checkpoints, by the rules of its conversion script."""
    found = {}
    for key, value in state.items():
        if ".qkv." in key:
            path, kind = key.split(".attn.w_msa.qkv.")
            for name, part in zip(("query", "key", "value"), value.chunk(3), strict=True):
                found[_transformers(f"{path}.attention.self.{name}.{kind}")] = part
        elif ".downsample." in key:
            parts = value.reshape(*value.shape[:-1], -1, 4)
            found[_transformers(key)] = torch.cat([parts[..., i] for i in (0, 2, 1, 3)], dim=-1)
        else:
            found[_transformers(key)] = value
    return found


def _transformers(key: str) -> str:
    for old, new in (
        ("backbone.patch_embed.projection", "backbone.embeddings.patch_embeddings.projection"),
        ("backbone.patch_embed.norm", "backbone.embeddings.norm"),
        ("backbone.stages", "backbone.encoder.layers"),
        ("attn.w_msa.relative", "attention.self.relative"),
        ("attn.w_msa.proj", "attention.output.dense"),
        ("norm1", "layernorm_before") if "blocks" in key else ("", ""),
        ("norm2", "layernorm_after") if "blocks" in key else ("", ""),
        ("ffn.layers.0.0", "intermediate.dense"),
        ("ffn.layers.1", "output.dense"),
        (".bn.", ".batch_norm."),
        ("conv_seg", "classifier"),
        *((f"backbone.norm{i}.", f"backbone.hidden_states_norms.stage{i + 1}.") for i in range(4)),
    ):
        key = key.replace(old, new) if old else key
    return key
