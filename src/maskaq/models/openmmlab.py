"""Checkpoints of mmdetection's Mask R-CNN and mmsegmentation's UperNet on Swin, as ours.

Most of it is names. What is more than a name:

* Their PatchMerging gathers four patches with `nn.Unfold`: channel by channel, the four patches of each in the order of
  rows. timm puts whole patches one after the other, in the order of columns. Norm and reduction are sorted anew; with
  their names alone changed they would fit and compute something else.
* PatchMerging is at the end of a stage there, at the start of the next one here.
* Background is the last class there, the first here.
* UperNet's laterals count from the finest map there, from the coarsest here; its auxiliary head, which helps training
  alone, is dropped.

The detectors that the authors of Swin published (Swin-Transformer-Object-Detection, and -Semantic-Segmentation) have
timm's names and order in the backbone, and mmdetection's in the rest: `layers` in place of `stages` tells them.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from maskaq.errors import CheckpointError, first_line
from maskaq.models.checkpoint import State

_STAGE = r"backbone\.(?:stages|layers)\.(\d+)\."
_BLOCK = _STAGE + r"blocks\.(\d+)\."
_BACKBONE: tuple[tuple[str, str], ...] = (
    (r"backbone\.patch_embed\.(?:proj|projection)\.", "backbone.patch_embed.proj."),
    (r"backbone\.patch_embed\.norm\.", "backbone.patch_embed.norm."),
    (_BLOCK + r"(norm[12])\.", r"backbone.layers_\1.blocks.\2.\3."),
    (_BLOCK + r"attn\.(?:w_msa\.)?", r"backbone.layers_\1.blocks.\2.attn."),
    (_BLOCK + r"(?:ffn\.layers\.0\.0|mlp\.fc1)\.", r"backbone.layers_\1.blocks.\2.mlp.fc1."),
    (_BLOCK + r"(?:ffn\.layers\.1|mlp\.fc2)\.", r"backbone.layers_\1.blocks.\2.mlp.fc2."),
)
_MASK_RCNN: tuple[tuple[str, str], ...] = (
    (r"backbone\.norm(\d)\.", r"norms.\1."),
    (r"neck\.lateral_convs\.(\d)\.conv\.", r"fpn.inner_blocks.\1.0."),
    (r"neck\.fpn_convs\.(\d)\.conv\.", r"fpn.layer_blocks.\1.0."),
    (r"rpn_head\.rpn_conv\.", "rpn_head.conv.0.0."),
    (r"rpn_head\.rpn_cls\.", "rpn_head.cls_logits."),
    (r"rpn_head\.rpn_reg\.", "rpn_head.bbox_pred."),
    (r"roi_head\.bbox_head\.shared_fcs\.0\.", "box_head.fc6."),
    (r"roi_head\.bbox_head\.shared_fcs\.1\.", "box_head.fc7."),
    (r"roi_head\.bbox_head\.fc_cls\.", "box_predictor.cls_score."),
    (r"roi_head\.bbox_head\.fc_reg\.", "box_predictor.bbox_pred."),
    (r"roi_head\.mask_head\.convs\.(\d)\.conv\.", r"mask_head.\1.0."),
    (r"roi_head\.mask_head\.upsample\.", "mask_predictor.conv5_mask."),
    (r"roi_head\.mask_head\.conv_logits\.", "mask_predictor.mask_fcn_logits."),
)
_UPERNET: tuple[tuple[str, str], ...] = (
    (r"backbone\.norm(\d)\.", r"decoder.feature_norms.\1."),
    (r"decode_head\.psp_modules\.(\d)\.1\.", r"decoder.psp.blocks.\1.1."),
    (r"decode_head\.bottleneck\.", "decoder.psp.out_conv."),
    (r"decode_head\.fpn_bottleneck\.", "decoder.fusion_block."),
    (r"decode_head\.conv_seg\.", "head."),
)
_LATERALS = {"lateral_convs": "fpn_lateral_blocks.{}.conv_norm_relu.", "fpn_convs": "fpn_conv_blocks.{}."}
# What the model computes by itself, and what it has no use for.
_LEFT_OUT = r"auxiliary_head\.|.*\.(relative_position_index|attn_mask)$"


def architecture_in(state: Mapping[str, Tensor]) -> str:
    """`mask_rcnn` or `upernet` where a state dict is one of theirs on Swin; else empty."""
    if "backbone.norm3.weight" not in state:
        return ""
    heads = {"roi_head.bbox_head.fc_cls.weight": "mask_rcnn", "decode_head.conv_seg.weight": "upernet"}
    return next((name for key, name in heads.items() if key in state), "")


def converted(state: Mapping[str, Tensor]) -> State:
    """The state dict of our `MaskRCNN` or `UperNet`; a key that theirs have not keeps its name."""
    rename = {"mask_rcnn": _mask_rcnn_name, "upernet": _upernet_name}[architecture_in(state)]
    found: State = {}
    for key, value in state.items():
        if re.match(_LEFT_OUT, key):
            continue
        if (name := rename(key)) in found:
            raise CheckpointError(f"two weights of the file are {name!r}, {key!r} among them: expected one of each")
        try:
            found[name] = _sorted(key, value)
        except (RuntimeError, IndexError) as error:
            raise CheckpointError(f"{key!r} has the shape {tuple(value.shape)}: {first_line(error)}") from error
    return found


def classes_in(state: Mapping[str, Tensor]) -> int:
    """How many classes one of theirs has, the background not counted."""
    background = architecture_in(state) == "mask_rcnn"
    key = "roi_head.bbox_head.fc_cls.weight" if background else "decode_head.conv_seg.weight"
    if not state[key].dim() or len(state[key]) <= background:
        raise CheckpointError(f"{key!r} has the shape {tuple(state[key].shape)}: expected a row for each class")
    return len(state[key]) - background


def _mask_rcnn_name(key: str) -> str:
    return _renamed(key, (*_BACKBONE, *_MASK_RCNN))


def _upernet_name(key: str) -> str:
    found = re.match(r"decode_head\.(lateral_convs|fpn_convs)\.(\d)\.", key)
    if found:
        key = f"decoder.{_LATERALS[found[1]].format(2 - int(found[2]))}{key[found.end() :]}"
    key = _renamed(key, (*_BACKBONE, *_UPERNET))
    if key.startswith("decoder."):  # smp has convolution, norm and ReLU in one Sequential
        key = re.sub(r"\.bn\.(\w+)$", r".1.\1", re.sub(r"\.conv\.(\w+)$", r".0.\1", key))
    return key


def _renamed(key: str, rules: tuple[tuple[str, str], ...]) -> str:
    if found := re.match(_STAGE + r"downsample\.", key):
        return f"backbone.layers_{int(found[1]) + 1}.downsample.{key[found.end() :]}"
    for pattern, name in rules:
        if found := re.match(pattern, key):
            return found.expand(name) + key[found.end() :]
    return key


def _sorted(key: str, value: Tensor) -> Tensor:
    """A tensor in our order of patches and classes."""
    if re.match(r"backbone\.stages\.\d+\.downsample\.", key):
        return by_patches(value)
    if key.startswith("roi_head.bbox_head.fc_cls."):
        return torch.roll(value, 1, dims=0)
    return value


def by_patches(value: Tensor) -> Tensor:
    """(..., 4 C), channel by channel as `nn.Unfold` has them, -> patch by patch as timm's PatchMerging does.

    Unfold's patches of a channel go along the rows: (0, 0), (0, 1), (1, 0), (1, 1); timm's down the columns.
    """
    by_channel = value.unflatten(-1, (-1, 2, 2))  # (..., C, row, column)
    return by_channel.movedim(-3, -1).transpose(-3, -2).flatten(-3)  # (..., column, row, C)
