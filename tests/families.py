"""A small model of every family that timm has: few blocks, small images, random weights."""

from typing import Any

import torch
from torch import nn

from maskaq.models.timm_models import create_timm

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", dict(img_size=32, patch_size=8, depth=2, embed_dim=48)),
    "siglip": ("vit_base_patch16_siglip_224", dict(img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3)),
    "swin": ("swin_tiny_patch4_window7_224", dict(img_size=56, depths=(1, 2), embed_dim=24, num_heads=(1, 2))),
    "swinv2": (
        "swinv2_tiny_window8_256",
        dict(img_size=64, depths=(1, 2), embed_dim=24, num_heads=(1, 2), window_size=4),
    ),
    "swinv2_cr": (
        "swinv2_cr_tiny_ns_224",
        dict(img_size=56, depths=(1, 2), embed_dim=24, num_heads=(1, 2), window_size=7),
    ),
    "eva": ("eva_giant_patch14_224", dict(img_size=28, patch_size=7, depth=2, embed_dim=48, num_heads=3)),
    "eva02": ("eva02_tiny_patch14_224", dict(img_size=28, patch_size=7, depth=2, embed_dim=48, num_heads=3)),
    "dinov3": ("vit_small_patch16_dinov3", dict(img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3)),
    "rope": ("vit_small_patch16_rope_mixed_224", dict(img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3)),
    "beit": ("beit_base_patch16_224", dict(img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3)),
    "relpos": (
        "vit_relpos_small_patch16_224",
        dict(img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3),
    ),
    "samvit": (
        "samvit_base_patch16",
        dict(img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3, window_size=3, global_attn_indexes=(1,)),
    ),
    "naflexvit": ("naflexvit_base_patch16_gap", dict(img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3)),
    "hybrid": ("vit_tiny_r_s16_p8_224", dict(img_size=64, depth=2, embed_dim=48)),
    "vitamin": ("vitamin_small_224", dict(img_size=64)),
    "hiera": ("hiera_tiny_224", dict(img_size=(64, 64), embed_dim=24)),
    "sam2": ("sam2_hiera_tiny", dict(img_size=64, embed_dim=24)),
    "maxvit": ("maxvit_rmlp_pico_rw_256", dict(img_size=64)),
    "coatnet": ("coatnet_nano_rw_224", dict(img_size=64)),
    "xcit": ("xcit_nano_12_p16_224", dict(img_size=32, depth=2)),
    "cait": ("cait_xxs24_224", dict(img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3)),
    "crossvit": ("crossvit_9_240", dict()),
    "tiny_vit": ("tiny_vit_5m_224", dict(img_size=64)),
    "volo": ("volo_d1_224", dict(img_size=64)),
    "levit": ("levit_128s", dict(img_size=64, embed_dim=(32, 48, 64), key_dim=8, num_heads=(2, 3, 4), depth=(1, 1, 1))),
    "coat": ("coat_lite_tiny", dict(img_size=64)),
    "pvt_v2": ("pvt_v2_b0", dict(img_size=64)),
    "mvitv2": ("mvitv2_tiny", dict(img_size=64)),
    "efficientformer": ("efficientformer_l1", dict()),
    "efficientformerv2": ("efficientformerv2_s0", dict()),
    "twins": ("twins_svt_small", dict(img_size=64, embed_dims=(16, 32, 48, 64), depths=(2, 2, 2, 2), wss=(4, 4, 4, 2))),
    "nest": ("nest_tiny_jx", dict(img_size=64)),
    "tnt": ("tnt_s_legacy_patch16_224", dict(img_size=32, depth=2, embed_dim=48, num_heads_outer=3)),
    "convit": ("convit_tiny", dict(img_size=32, depth=3, local_up_to_layer=2)),
    "fastvit": ("fastvit_sa12", dict(img_size=64)),
    "mobilevit": ("mobilevit_xxs", dict(img_size=64)),
    "mobilevitv2": ("mobilevitv2_050", dict(img_size=64)),
    "davit": ("davit_tiny", dict(img_size=56, depths=(1, 1), embed_dims=(24, 48), num_heads=(1, 2))),
    "nextvit": ("nextvit_small", dict(img_size=64)),
    "pit": ("pit_ti_224", dict(img_size=64)),
    "visformer": ("visformer_tiny", dict(img_size=64)),
    "gcvit": ("gcvit_xxtiny", dict(img_size=64)),
    "edgenext": ("edgenext_xx_small", dict(img_size=64)),
    "efficientvit": ("efficientvit_m0", dict()),
}


def small(family: str, **kwargs: Any) -> nn.Module:
    """The small model of a family; its weights are those of a seed, and large enough to matter."""
    name, args = SMALL[family]
    torch.manual_seed(0)
    model = create_timm(name, **{"num_classes": 10, **args, **kwargs}).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if not parameter.any():  # biases, classifiers, and gates that would hide a branch
                parameter.normal_(std=0.02)
            if parameter_name.endswith(("gamma", "gamma1", "gamma_1", "gamma_2")):
                parameter.fill_(0.5)
    return model
