"""UperNet on timm's Swin: the class of every pixel. The decoder is that of segmentation-models-pytorch.

It computes what mmsegmentation's UperNet with Swin does in evaluation; the auxiliary head, which helps training alone,
is left out.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.errors import DependencyError
from maskaq.models.windows import on_swin, padded


class UperNet(nn.Module):
    """A backbone with the decoder of UperNet; `upernet` builds it by name.

    Args:
        backbone: gives four feature maps (B, h, w, C) at strides 4 to 32.
        width: channels of the decoder.
    """

    def __init__(self, backbone: nn.Module, channels: Sequence[int], num_classes: int, *, width: int = 512) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.backbone_path = "backbone"
        self.predictors = ("head",)
        self.backbone = backbone
        self.decoder = _decoder()(encoder_channels=(3, 0, *channels), decoder_channels=width)
        for norm in self.decoder.feature_norms:
            norm.eps = 1e-5  # as mmsegmentation's
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) of any size -> logits (B, K, H, W)."""
        stages = [x.permute(0, 3, 1, 2) for x in self.backbone(padded(images, 4))]
        logits = self.head(self.decoder([images, images, *stages]))  # it skips the maps of strides 1 and 2
        return F.interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)


def upernet(backbone: str, num_classes: int, img_size: int | tuple[int, int], **arguments: Any) -> UperNet:
    """A UperNet on a Swin of timm, without weights. `architecture` has the name and the arguments to build it again.

    Args:
        img_size: what images are usually resized to; others are taken too.
        arguments: of `UperNet` and of timm's SwinTransformer.
    """
    model: UperNet = on_swin(UperNet, "upernet", "segmentation", backbone, num_classes, img_size, arguments)
    return model


def _decoder() -> Any:
    try:
        from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder
    except ImportError as error:
        raise DependencyError(
            'UperNet needs segmentation-models-pytorch 0.5 or newer: pip install "maskaq[segmentation]"'
        ) from error
    return UPerNetDecoder
