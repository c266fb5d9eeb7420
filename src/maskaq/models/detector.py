"""Mask R-CNN on timm's Swin, of torchvision's layers: boxes, classes and masks of the objects in an image.

It computes what mmdetection's Mask R-CNN with Swin does, so that its checkpoints convert exactly. torchvision's own
`MaskRCNN` does not: its anchors are rounded, its RoIAlign is not aligned, and mask edges are rounded to pixels.
Background is class 0 of the class logits, as in torchvision; boxes and masks have the K classes alone.

Images are normalised, (B, 3, H, W) of any size; a box is left, top, right, bottom in pixels.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, clip_boxes_to_image, nms, roi_align
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from maskaq.boxes import ROI_UNITS, decoded, of_class, taken
from maskaq.models.windows import on_swin, padded

STRIDES = (4, 8, 16, 32, 64)
RATIOS = (0.5, 1.0, 2.0)
"""Height by width of the anchors."""
OBJECTS = ("boxes", "labels", "scores", "masks")
"""Of the outputs of `MaskRCNN.objects`, the objects themselves."""
_BOX_SIZE, _MASK_SIZE = 7, 14  # of pooled features
_PROPOSAL_NMS, _DETECTION_NMS = 0.7, 0.5
_LEAST_SCORE = 0.05


class BoxPredictor(nn.Module):
    """Class logits (N, K + 1) and box deltas (N, 4 K) of RoIs; torchvision's predicts deltas of the background too."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(width, num_classes + 1)
        self.bbox_pred = nn.Linear(width, 4 * num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x), self.bbox_pred(x)


class MaskRCNN(nn.Module):
    """A backbone with feature pyramid, region proposals and RoI heads; `mask_rcnn` builds it by name.

    Args:
        backbone: gives four feature maps (B, h, w, C) at strides 4 to 32.
        width, box_width, mask_width: channels of the pyramid, of the box head and of the mask head.
        mask_layers: convolutions of the mask head.
        anchor_scale: side of an anchor in strides of its level.
        finest: RoIs up to twice this side are pooled from the finest level, up to four times from the next, and so on.
        proposals: boxes that `detect` gives to the heads; before NMS as many from each level.
        per_level: boxes of each level that `forward` gives to the heads.
        detections: objects that `detect` gives for an image, at most.
    """

    def __init__(
        self,
        backbone: nn.Module,
        channels: Sequence[int],
        num_classes: int,
        *,
        width: int = 256,
        box_width: int = 1024,
        mask_width: int = 256,
        mask_layers: int = 4,
        anchor_scale: float = 8,
        finest: float = 56,
        proposals: int = 1000,
        per_level: int = 8,
        detections: int = 100,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.backbone_path = "backbone"
        self.predictors = (
            *("rpn_head.cls_logits", "rpn_head.bbox_pred", "box_predictor.cls_score", "box_predictor.bbox_pred"),
            "mask_predictor.mask_fcn_logits",
        )
        self.anchor_scale, self.finest = anchor_scale, finest
        self.proposals, self.per_level, self.detections = proposals, per_level, detections
        self.proposal_nms = Suppression(_PROPOSAL_NMS, -math.inf, proposals)
        self.highest = Highest()
        self.object_nms = Suppression(_DETECTION_NMS, _LEAST_SCORE, detections)
        self.backbone = backbone
        self.norms = nn.ModuleList(nn.LayerNorm(c) for c in channels)
        self.fpn = FeaturePyramidNetwork(list(channels), width, extra_blocks=LastLevelMaxPool())
        self.rpn_head = RPNHead(width, len(RATIOS))
        self.box_head = TwoMLPHead(width * _BOX_SIZE**2, box_width)
        self.box_predictor = BoxPredictor(box_width, num_classes)
        self.mask_head = MaskRCNNHeads(width, [mask_width] * mask_layers, dilation=1)
        self.mask_predictor = MaskRCNNPredictor(mask_width, mask_width, num_classes)

    def forward(self, images: Tensor, boxes: Tensor | None = None) -> dict[str, Tensor]:
        """Every output before a choice among them, in fixed shapes.

        Args:
            boxes: (B, R, 4) for the heads; by default the model's own `top_boxes`.
        """
        features = self.features(images)
        objectness, deltas = self.rpn(features)
        if boxes is None:
            boxes = self.top_boxes(objectness, deltas, self.anchors(features), image_size(images))
        outputs = {f"pyramid_{level}": feature for level, feature in enumerate(features)}
        outputs |= {"objectness": objectness, "deltas": deltas, "boxes": boxes}
        return outputs | self.heads(features, boxes)

    def features(self, images: Tensor) -> list[Tensor]:
        """The pyramid P2 to P6: five (B, C, h, w) at strides 4 to 64 of the images padded to multiples of 32."""
        stages = self.backbone(padded(images, 32))
        maps = {str(i): norm(x).permute(0, 3, 1, 2) for i, (norm, x) in enumerate(zip(self.norms, stages, strict=True))}
        return list(self.fpn(maps).values())

    def rpn(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Objectness logits (B, A) and box deltas (B, A, 4) of the anchors."""
        logits, deltas = self.rpn_head(features)
        objectness = [x.permute(0, 2, 3, 1).flatten(1) for x in logits]
        moved = [x.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4)) for x in deltas]
        return torch.cat(objectness, dim=1), torch.cat(moved, dim=1)

    def anchors(self, features: list[Tensor]) -> Tensor:
        """(A, 4): level by level, row by row, the anchors of a place by their ratios."""
        return torch.cat([self._anchors_of(x, stride) for x, stride in zip(features, STRIDES, strict=True)])

    def _anchors_of(self, feature: Tensor, stride: int) -> Tensor:
        down, across = (stride * torch.arange(side, device=feature.device) for side in feature.shape[-2:])
        y, x = (side.flatten().float() for side in torch.meshgrid(down, across, indexing="ij"))
        half = 0.5 * stride * self.anchor_scale
        corner = [(half / math.sqrt(ratio), half * math.sqrt(ratio)) for ratio in RATIOS]
        sides = [torch.stack([x - w, y - h, x + w, y + h], dim=-1) for w, h in corner]
        return torch.stack(sides, dim=1).flatten(0, 1)

    def boxes_of(self, anchors: Tensor, deltas: Tensor, size: tuple[int, int]) -> Tensor:
        """(..., 4): anchors moved by the RPN's deltas, clipped to an image of a height and a width."""
        return clip_boxes_to_image(decoded(anchors, deltas), size)

    def top_boxes(
        self,
        objectness: Tensor,
        deltas: Tensor,
        anchors: Tensor,
        size: tuple[int, int],
        per_level: int | None = None,
    ) -> Tensor:
        """(B, 5 * per_level, 4): the highest-scored boxes of each level, without NMS, and without a gradient.

        A level with fewer anchors repeats its own.
        """
        count = self.per_level if per_level is None else per_level
        best = [
            start + part.topk(min(count, part.shape[1]), dim=1).indices for start, part in _by_level(objectness, size)
        ]
        index = torch.cat([x[:, torch.arange(count, device=x.device) % x.shape[1]] for x in best], dim=1)
        return self.boxes_of(anchors[index], taken(deltas, index), size).detach()

    def heads(self, features: list[Tensor], boxes: Tensor) -> dict[str, Tensor]:
        """What the RoI heads say of boxes (B, R, 4).

        Returns:
            class_logits (B, R, K + 1), background first; box_deltas (B, R, K, 4); mask_logits (B, R, K, 28, 28)
        """
        class_logits, box_deltas = self.classify(features, boxes)
        return {"class_logits": class_logits, "box_deltas": box_deltas, "mask_logits": self.segment(features, boxes)}

    def classify(self, features: list[Tensor], boxes: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits (B, R, K + 1) and box deltas (B, R, K, 4)."""
        logits, deltas = self.box_predictor(self.box_head(self.pool(features, boxes, _BOX_SIZE)))
        return logits.unflatten(0, boxes.shape[:2]), deltas.view(*boxes.shape[:2], self.num_classes, 4)

    def segment(self, features: list[Tensor], boxes: Tensor) -> Tensor:
        """Mask logits (B, R, K, 28, 28)."""
        return self.mask_predictor(self.mask_head(self.pool(features, boxes, _MASK_SIZE))).unflatten(0, boxes.shape[:2])

    def pool(self, features: list[Tensor], boxes: Tensor, size: int) -> Tensor:
        """(B * R, C, size, size): RoIAlign of each box from the level that fits its size.

        A box is pooled from every level, but is empty, and so 0, on all but its own: fixed shapes at no cost.
        """
        flat = boxes.flatten(0, 1).float()  # half precision would move edges by pixels
        image = torch.arange(boxes.shape[0], device=boxes.device)[:, None].expand(boxes.shape[:2]).flatten()
        side = ((flat[:, 2] - flat[:, 0]) * (flat[:, 3] - flat[:, 1])).sqrt()
        ratio = side / self.finest + 1e-6
        level = (ratio >= 2).int() + (ratio >= 4).int() + (ratio >= 8).int()  # runtimes have unlike logarithms
        pooled = torch.zeros((), device=boxes.device)
        for number, (feature, stride) in enumerate(zip(features[:4], STRIDES, strict=False)):
            rois = torch.cat([image[:, None].float(), flat * (level == number)[:, None]], dim=1)
            pooled = pooled + roi_align(feature.float(), rois, size, 1 / stride, sampling_ratio=0, aligned=True)
        return pooled.to(features[0].dtype)

    def objects(self, images: Tensor, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The objects of images, best first, and what they are chosen from, in fixed shapes: what a file computes.

        Args:
            given: outputs of another program for the same model: each step starts from those of the step before, so
                that a choice that turned for float rounding changes no more than itself.

        Returns:
            objectness, deltas; proposals (B, P, 4), empty ones last; class_logits, box_deltas of the proposals;
            boxes (B, n, 4), labels (B, n) from 0, scores (B, n), 0 of objects that are not there; masks (B, n, 28, 28),
            probabilities over the box
        """
        given, size = dict(given or {}), image_size(images)
        features = self.features(images)
        found = dict(zip(("objectness", "deltas"), self.rpn(features), strict=True))
        start = found | given
        found["proposals"] = self.propose(start["objectness"], start["deltas"], self.anchors(features), size)
        proposals = (found | given)["proposals"]
        found["class_logits"], found["box_deltas"] = self.classify(features, proposals)
        start = found | given
        found |= self.choose(proposals, start["class_logits"], start["box_deltas"], size)
        start = found | given
        logits = self.segment(features, start["boxes"])
        return found | {"masks": of_class(logits, start["labels"]).sigmoid()}

    @torch.no_grad()
    def detect(
        self, images: Tensor, most: int | None = None, sizes: Sequence[tuple[int, int]] | None = None
    ) -> list[dict[str, Tensor]]:
        """Objects of each image, best first: `boxes` (n, 4), `labels` (n,) from 0, `scores`, `masks` (n, H, W) bool.

        Args:
            most: fewer objects of an image than `detections` of the model.
            sizes: height and width of each image before it was resized: boxes and masks are those of that one.
        """
        return placed(self.objects(images), image_size(images), sizes, most)

    def propose(self, objectness: Tensor, deltas: Tensor, anchors: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, P, 4): the best boxes of each level, less those that overlap better ones of it; empty ones at the end."""
        best = [start + self.highest(part, self.proposals)[1] for start, part in _by_level(objectness, size)]
        levels = [number for number, part in enumerate(best) for _ in range(part.shape[1])]
        index = torch.cat(best, dim=1)
        boxes = self.boxes_of(anchors[index], taken(deltas, index), size)
        scores = objectness.gather(1, index).float().masked_fill(~_is_solid(boxes), -math.inf)
        left = self.proposal_nms(_apart(boxes, torch.tensor(levels, device=boxes.device), size), scores)
        scores, index = self.highest(scores.masked_fill(~left, -math.inf), self.proposals)
        return taken(boxes, index) * (scores > -math.inf)[..., None]

    def choose(
        self, proposals: Tensor, class_logits: Tensor, box_deltas: Tensor, size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """The best boxes of all classes, less those that overlap better ones of their class, with labels and scores."""
        scores = class_logits.softmax(dim=-1)[..., 1:] * _is_solid(proposals)[..., None]
        boxes = clip_boxes_to_image(decoded(proposals[:, :, None], box_deltas, ROI_UNITS), size).flatten(1, 2)
        label = torch.arange(self.num_classes, device=boxes.device).repeat(proposals.shape[1])
        scores = scores.flatten(1)
        left = self.object_nms(_apart(boxes, label, size), scores)
        scores, index = self.highest(scores.masked_fill(~left, 0), self.detections)
        boxes = taken(boxes, index) * (scores > 0)[..., None]
        return {"boxes": boxes, "labels": index % self.num_classes, "scores": scores}


class Highest(nn.Module):
    """The highest scores. A module: an exported file has an operator in its place.

    With few bits many scores are equal. Runtimes choose the first of them, and `topk` any.
    """

    def forward(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(B, N) -> values and places (B, at most `count`), highest first, and of equal ones the first."""
        values, index = scores.sort(dim=1, descending=True, stable=True)
        return values[:, :count], index[:, :count]


class Suppression(nn.Module):
    """Non-maximum suppression. A module: an exported file has an operator in its place.

    Args:
        overlap: intersection over union above which the worse of two boxes goes.
        least: score above which a box counts at all.
        most: boxes that are left of an image, at most.
    """

    def __init__(self, overlap: float, least: float, most: int) -> None:
        super().__init__()
        self.overlap, self.least, self.most = overlap, least, most

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        """(B, N, 4), (B, N) -> (B, N) bool: which boxes are left."""
        left = torch.zeros_like(scores, dtype=torch.bool)
        for row, own, score in zip(left, boxes, scores, strict=True):
            there = (score > self.least).nonzero()[:, 0]
            row[there[nms(own[there], score[there], self.overlap)[: self.most]]] = True
        return left


def mask_rcnn(backbone: str, num_classes: int, img_size: int | tuple[int, int], **arguments: Any) -> MaskRCNN:
    """A Mask R-CNN on a Swin of timm, without weights. `architecture` has the name and the arguments to build it again.

    Args:
        img_size: what images are usually resized to; others are taken too.
        arguments: of `MaskRCNN` and of timm's SwinTransformer.
    """
    model: MaskRCNN = on_swin(MaskRCNN, "mask_rcnn", "detection", backbone, num_classes, img_size, arguments)
    return model


def image_size(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]


def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """(n, h, w) masks of boxes -> (n, H, W) in the image, 0 around them: each mask is stretched over its box."""
    grids = []
    for low, high, side in ((1, 3, size[0]), (0, 2, size[1])):
        place = torch.arange(side, device=boxes.device) + 0.5
        extent = (boxes[:, high] - boxes[:, low]).clamp(min=1e-6)
        grids.append((place - boxes[:, low, None]) / extent[:, None] * 2 - 1)
    y, x = grids
    grid = torch.stack([x[:, None].expand(-1, size[0], -1), y[:, :, None].expand(-1, -1, size[1])], dim=-1)
    return F.grid_sample(masks[:, None], grid, align_corners=False)[:, 0]


def placed(
    found: Mapping[str, Tensor],
    size: tuple[int, int],
    sizes: Sequence[tuple[int, int]] | None = None,
    most: int | None = None,
) -> list[dict[str, Tensor]]:
    """`MaskRCNN.detect` from `MaskRCNN.objects` of images of a height and a width."""
    count = len(found["scores"])
    detections = []
    for number, (height, width) in zip(range(count), sizes or [size] * count, strict=True):
        there = found["scores"][number, :most] > 0
        boxes, labels, scores, masks = (found[name][number, :most][there] for name in OBJECTS)
        boxes = boxes * boxes.new_tensor([width / size[1], height / size[0]] * 2)
        pasted = paste(masks, boxes, (height, width)) >= 0.5
        detections.append({"boxes": boxes, "labels": labels, "scores": scores, "masks": pasted})
    return detections


def _by_level(objectness: Tensor, size: tuple[int, int]) -> list[tuple[int, Tensor]]:
    """Of each level the number of its first anchor, and the logits (B, A) of its anchors."""
    sides = [side + -side % 32 for side in size]
    lengths = [len(RATIOS) * math.prod(-(-side // stride) for side in sides) for stride in STRIDES]
    return list(zip(accumulate(lengths[:-1], initial=0), objectness.split(lengths, dim=1), strict=True))


def _is_solid(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] > boxes[..., :2]).all(dim=-1)


def _apart(boxes: Tensor, group: Tensor, size: tuple[int, int]) -> Tensor:
    """Boxes (B, N, 4) of an image moved apart, so that those of two groups (N,) do not overlap."""
    return boxes + (max(size) + 1.0) * group[:, None]
