"""maskaq.models: the exposed copy computes what timm computes, and says truly where its tokens lie."""

import hashlib
import inspect
from functools import partial

import pytest
import timm
import torch
from timm.models import get_pretrained_cfg
from timm.models import swin_transformer as timm_swin
from timm.models import vision_transformer as timm_vit
from torch import nn
from torch.nn.utils import parametrize, prune

from maskaq.errors import ModelError
from maskaq.models import (
    classifier_tags,
    data_config,
    embedding_width,
    expose,
    geometry,
    has_classifier,
    pretrained_tags,
    refuse_zero_weights,
    supported_names,
)
from maskaq.models.products import AttentionProducts, Matmul
from maskaq.models.taps import taps

VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 10}
SWIN = {
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "img_size": 32,
    "window_size": 4,
    "num_classes": 10,
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def perturbed(model, scale=0.1):
    """The model in eval mode with noise on every parameter, so that no bias, gamma or position table is at rest."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def vit(name="vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(0)
    return perturbed(timm.create_model(name, pretrained=False, **{**VIT, **kwargs}))


def swin(name="swin_tiny_patch4_window7_224", **kwargs):
    torch.manual_seed(0)
    return perturbed(timm.create_model(name, pretrained=False, **{**SWIN, **kwargs}))


def images_for(model, n=3):
    return torch.randn(n, *data_config(model)["input_size"], generator=torch.Generator().manual_seed(2))


def digest(model):
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.numpy().tobytes())
    return total.hexdigest()


def takes(function, *names):
    """Whether this timm has these arguments."""
    return set(names) <= set(inspect.signature(function).parameters)


def with_attention(**kwargs):
    """A ViT whose attentions are built with arguments that its factory does not pass on."""
    if not takes(timm_vit.Attention, *kwargs):
        pytest.skip(f"timm {timm.__version__} has no attention with {', '.join(kwargs)}")
    model = vit()
    for block in model.blocks:
        block.attn = perturbed(timm_vit.Attention(32, num_heads=2, qkv_bias=True, **kwargs))
    return model.eval()


def scaled_attention():
    if not takes(timm_vit.VisionTransformer, "scale_attn_norm", "scale_mlp_norm"):
        pytest.skip(f"timm {timm.__version__} has no norm on the head outputs")
    return vit(scale_attn_norm=True, scale_mlp_norm=True)


VITS = {
    "class token": vit,
    "average pooling": partial(vit, global_pool="avg"),
    "average pooling without class token": partial(vit, global_pool="avg", class_token=False),
    "register tokens": partial(vit, reg_tokens=3),
    "registers, no_embed_class": partial(vit, reg_tokens=2, no_embed_class=True),
    "LayerScale": partial(vit, init_values=0.1),
    "qk_norm": partial(vit, qk_norm=True),
    "no qkv bias": partial(vit, qkv_bias=False),
    "pre_norm, fc_norm": partial(vit, pre_norm=True, fc_norm=True),
    "distilled": partial(vit, "deit_tiny_distilled_patch16_224", patch_size=16),
    "deit": partial(vit, "deit_tiny_patch16_224"),
    "deit3": partial(vit, "deit3_small_patch16_224"),
    "patch 4": partial(vit, patch_size=4, img_size=16),
    "not square": partial(vit, img_size=(24, 40)),
    "patches not square": partial(vit, patch_size=(8, 4), img_size=(32, 24)),
    "one channel": partial(vit, in_chans=1),
    "seven classes": partial(vit, num_classes=7),
    "ResPostBlock": partial(vit, "vit_base_patch16_rpn_224"),
    "ParallelThingsBlock": partial(vit, "vit_small_patch16_18x2_224"),
    "padded image": partial(vit, img_size=36, dynamic_img_size=True, dynamic_img_pad=True),
    "drop rates": partial(vit, drop_rate=0.5, proj_drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5),
    "gated": partial(with_attention, gated=True),
    "scaled norms": scaled_attention,
    "wide heads": partial(with_attention, attn_head_dim=24),
}
SWINS = {
    "two stages": swin,
    "four stages": partial(swin, depths=(2, 2, 2, 2), num_heads=(2, 2, 4, 4), img_size=64),
    "padded windows": partial(swin, img_size=40, window_size=4),
    "padded windows of 7": partial(swin, img_size=40, window_size=7),
    "odd grid, merging pads": partial(swin, img_size=40, depths=(2, 2, 2), num_heads=(2, 2, 4)),
    "odd grid, window 3": partial(swin, img_size=44, window_size=3),
    "window larger than the grid": partial(swin, window_size=16),
    "always partition": partial(swin, window_size=7, always_partition=True),
    "free image size": partial(swin, img_size=40, strict_img_size=False),
    "not square": partial(swin, img_size=(24, 40)),
    "one channel, seven classes": partial(swin, in_chans=1, num_classes=7),
    "own head dimension": partial(swin, head_dim=12),
    "no qkv bias": partial(swin, qkv_bias=False),
}
ALL = {**{f"vit: {k}": v for k, v in VITS.items()}, **{f"swin: {k}": v for k, v in SWINS.items()}}
every_variant = pytest.mark.parametrize("build", ALL.values(), ids=ALL.keys())


# --- parity with timm --------------------------------------------------------------------------------------------


@every_variant
def test_exposed_outputs_and_keys_equal_timms(build):
    model = build()
    images = images_for(model)
    exposed = expose(model)
    with torch.no_grad():
        expected, got = model(images), exposed(images)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.01 and (expected[0] - expected[1]).abs().max() > 0.01  # parity of something
    assert list(exposed.state_dict()) == list(model.state_dict())
    assert not any(isinstance(m, (timm_vit.Attention, timm_swin.WindowAttention)) for m in exposed.modules())


@pytest.mark.parametrize("part", ["relative_position_bias_table", "attn_mask"])
def test_swin_parity_depends_on_position_bias_and_shift_mask(part):
    model = swin()
    exposed, images = expose(model), images_for(model)
    tensors = [t for n, t in (*exposed.named_parameters(), *exposed.named_buffers()) if n.endswith(part)]
    assert tensors
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
        assert (exposed(images) - model(images)).abs().max() > 1e-3


def test_gradients_to_the_image_equal_timms():
    for model in (vit(), swin()):
        images = images_for(model).requires_grad_()
        (expected,) = torch.autograd.grad(model(images).square().sum(), images)
        (got,) = torch.autograd.grad(expose(model)(images).square().sum(), images)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [vit, partial(vit, "deit_tiny_distilled_patch16_224", patch_size=16), swin])
def test_the_original_is_untouched(build):
    model = build().train()
    before = digest(model), [type(m) for m in model.modules()]
    pointers = {p.data_ptr() for p in model.parameters()}
    exposed = expose(model)
    with torch.no_grad():
        for parameter in exposed.parameters():
            parameter.add_(1)
    assert (digest(model), [type(m) for m in model.modules()]) == before
    assert all(m.fused_attn for m in model.modules() if isinstance(m, timm_vit.Attention))
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert not hasattr(model, "_maskaq_geometry")
    assert not pointers & {p.data_ptr() for p in exposed.parameters()}


def test_the_exposed_copy_is_frozen_in_eval_mode_and_float32():
    exposed = expose(vit().half().train())
    assert not exposed.training
    assert all(not p.requires_grad and p.dtype == torch.float32 for p in exposed.parameters())


def test_exposing_twice_is_exposing_once():
    once = expose(swin())
    twice = expose(once)
    images = images_for(once)
    assert twice is not once and torch.equal(once(images), twice(images))
    assert [layer.attention for layer in geometry(twice).layers] == [x.attention for x in geometry(once).layers]


def test_timms_state_dict_loads_into_the_exposed_copy():
    first, second = swin(), swin()
    perturbed(second)
    exposed = expose(first)
    exposed.load_state_dict(second.state_dict(), strict=True)
    torch.testing.assert_close(exposed(images_for(first)), second(images_for(first)), rtol=1e-5, atol=1e-5)


def test_a_model_built_without_timms_factory_is_exposed_too():
    model = perturbed(timm_vit.VisionTransformer(**VIT))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(expose(model)(images), model(images), rtol=1e-5, atol=1e-5)
    assert geometry(expose(model)).image_size == (32, 32)


# --- geometry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "prefix", "reads_class"),
    [
        ({}, 1, True),
        ({"global_pool": "avg"}, 1, False),
        ({"global_pool": "avg", "class_token": False}, 0, False),
        ({"reg_tokens": 4}, 5, True),
        ({"name": "deit_tiny_distilled_patch16_224", "patch_size": 16}, 2, True),
    ],
)
def test_vit_geometry_counts_prefix_tokens_and_knows_the_class_query(kwargs, prefix, reads_class):
    exposed = expose(vit(**kwargs))
    facts = geometry(exposed)
    assert [(x.attention, x.block) for x in facts.layers] == [(f"blocks.{i}.attn", f"blocks.{i}") for i in range(2)]
    side = 32 // kwargs.get("patch_size", 8)
    for layer in facts.layers:
        assert (layer.grid, layer.windows, layer.raster) == ((side, side), 1, None)
        attention = exposed.get_submodule(layer.attention)
        assert layer.prefix_tokens == attention.prefix_tokens == prefix and attention.class_query == reads_class


def test_geometry_knows_image_classes_and_the_first_and_last_layers():
    facts = geometry(expose(vit(img_size=(24, 40), num_classes=7)))
    assert (facts.image_size, facts.channels, facts.classes) == ((24, 40), 3, 7)
    assert (facts.first, facts.last) == (("patch_embed.proj",), ("head",))
    assert facts.layers[0].grid == (3, 5)
    distilled = geometry(expose(vit("deit_tiny_distilled_patch16_224", patch_size=16)))
    assert distilled.last == ("head", "head_dist")
    facts = geometry(expose(swin()))
    assert (facts.first, facts.last, facts.image_size) == (("patch_embed.proj",), ("head.fc",), (32, 32))


def test_mean_and_std_have_one_value_for_each_channel():
    facts = geometry(expose(vit("deit_tiny_patch16_224")))
    assert facts.mean == pytest.approx((0.485, 0.456, 0.406)) and facts.std == pytest.approx((0.229, 0.224, 0.225))
    grey = geometry(expose(vit("deit_tiny_patch16_224", in_chans=1)))
    assert grey.channels == len(grey.mean) == len(grey.std) == 1
    pixels = torch.rand(2, 1, 32, 32)
    assert grey.normalise(pixels).shape == pixels.shape
    torch.testing.assert_close(grey.pixels(grey.normalise(pixels)), pixels)


def test_two_parallel_attentions_are_two_layers_of_one_block():
    layers = geometry(expose(vit("vit_small_patch16_18x2_224"))).layers
    assert [x.block for x in layers] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1"]
    assert len({x.attention for x in layers}) == 4


def test_swin_geometry_counts_windows_of_every_stage():
    exposed = expose(swin(img_size=40, depths=(2, 2, 2), num_heads=(2, 2, 4)))
    layers = geometry(exposed).layers
    assert [x.attention for x in layers[:3]] == [f"layers.{i}.blocks.{j}.attn" for i, j in [(0, 0), (0, 1), (1, 0)]]
    assert [x.grid for x in layers] == [(10, 10)] * 2 + [(5, 5)] * 2 + [(3, 3)] * 2
    sides = [exposed.get_submodule(x.block).window_size for x in layers]
    assert sides[:4] == [(4, 4)] * 4 and set(sides[4:]) <= {(2, 2), (3, 3)}  # the last by the release of timm
    assert [x.windows for x in layers] == [9, 9, 4, 4] + [4 if side == (2, 2) else 1 for side in sides[4:]]
    assert all(x.prefix_tokens == 0 for x in layers)


@every_variant
def test_geometry_agrees_with_what_the_blocks_give(build):
    exposed = expose(build())
    facts, images = geometry(exposed), images_for(exposed, n=2)
    with taps(exposed, "probs", "probs_received", "heads", "blocks") as seen, torch.no_grad():
        exposed(images)
        assert len(seen["heads"]) == len(facts.layers) == len({x.attention for x in facts.layers})
        blocks = dict(zip(facts.blocks, seen["blocks"], strict=True))
        points = (seen[name] for name in ("probs", "probs_received", "heads"))
        for layer, probs, received, heads in zip(facts.layers, *points, strict=True):
            block = blocks[layer.block]
            patches = layer.grid[0] * layer.grid[1]
            assert len(heads) == 2 * layer.windows
            assert layer.patch_heads(heads).shape == (2, heads.shape[1], patches, heads.shape[3])
            assert layer.patch_attention(received).shape == (2, patches)
            assert layer.maps(probs).shape[:3] == (2, layer.windows, heads.shape[1])
            on_grid = block.shape[1:3] if block.dim() == 4 else (block.shape[1] - layer.prefix_tokens,)
            assert tuple(on_grid) == (layer.grid if block.dim() == 4 else (patches,))


RASTERS = {
    "vit": partial(vit, reg_tokens=2),
    "not square": partial(vit, img_size=(24, 40)),
    "swin": partial(swin, num_heads=(2, 2)),
    "swin, padded": partial(swin, img_size=40, window_size=4),
    "swin, odd": partial(swin, img_size=(28, 44), window_size=3, depths=(2, 2, 2), num_heads=(2, 2, 4)),
    "swin, one window": partial(swin, window_size=16),
}


@pytest.mark.parametrize("build", RASTERS.values(), ids=RASTERS.keys())
def test_a_painted_patch_turns_up_at_its_raster_place_in_every_layer(build):
    """Where every token attends to itself alone, only the painted patch can differ from a blank image."""
    exposed = expose(build())
    for module in exposed.modules():
        if isinstance(module, AttentionProducts):
            module.softmax = OnlyItself()
    facts = geometry(exposed)
    rows, columns = facts.layers[0].grid
    height, width = exposed.patch_embed.patch_size
    images = torch.zeros(rows * columns + 1, 3, *facts.image_size)  # one image for each patch, and a blank one
    for n in range(rows * columns):
        top, left = n // columns * height, n % columns * width
        images[n, :, top : top + height, left : left + width] = torch.randn(3, height, width)
    with taps(exposed, "heads") as seen, torch.no_grad():
        exposed(images)
        for layer, raw in zip(facts.layers, seen["heads"], strict=True):
            heads = in_raster_order(layer, raw)  # (B, H, N, D)
            differs = (heads[:-1] - heads[-1:]).abs().amax(dim=(1, 3)) > 1e-4  # (B, N)
            shrunk = round(rows / layer.grid[0])  # how many times stages have merged patches
            n = torch.arange(rows * columns)
            place = n // columns // shrunk * layer.grid[1] + n % columns // shrunk
            assert torch.equal(differs, nn.functional.one_hot(place, layer.grid[0] * layer.grid[1]).bool())


class OnlyItself(nn.Module):
    def forward(self, logits):
        return torch.eye(logits.shape[-1]).expand_as(logits)


@pytest.mark.parametrize("kwargs", [{}, {"img_size": 40}, {"img_size": (24, 40), "window_size": 7}])
def test_swin_patch_attention_and_heads_equal_window_reverse_and_roll(kwargs):
    exposed = expose(swin(**kwargs))
    with taps(exposed, "probs", "probs_received", "heads") as seen, torch.no_grad():
        exposed(images_for(exposed, n=2))
        points = (seen[name] for name in ("probs", "probs_received", "heads"))
        for layer, probs, received, heads in zip(geometry(exposed).layers, *points, strict=True):
            block = exposed.get_submodule(layer.block)
            wanted = raster(probs.mean(dim=(1, 2))[..., None], block, layer.grid)[..., 0]
            torch.testing.assert_close(layer.patch_attention(received), wanted)
            merged = raster(heads.transpose(1, 2).flatten(2), block, layer.grid)  # (B, N, H*D)
            expected = merged.unflatten(2, heads.shape[1::2]).transpose(1, 2)
            assert torch.equal(in_raster_order(layer, heads), expected)


def in_raster_order(layer, heads):
    """(B, H, N, D). The layer leaves patches window by window, where no padding is to be taken out."""
    patches = layer.patch_heads(heads)
    is_padded = layer.windows * heads.shape[2] - layer.prefix_tokens > patches.shape[2]
    return patches if layer.raster is None or is_padded else patches[:, :, layer.raster]


def raster(tokens, block, grid):
    """(B*W, T, C) -> (B, N, C) as timm's own block puts its windows back."""
    (win_h, win_w), (height, width) = block.window_size, grid
    padded = [-(-height // win_h) * win_h, -(-width // win_w) * win_w]
    merged = timm_swin.window_reverse(tokens.unflatten(1, (win_h, win_w)), (win_h, win_w), *padded)
    return merged[:, :height, :width].roll(tuple(block.shift_size), dims=(1, 2)).flatten(1, 2)


@pytest.mark.parametrize("point", ["scores", "probs"])
@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (partial(vit, reg_tokens=1), lambda maps: maps[:, :, 0, 2:].mean(dim=1)),
        (partial(vit, global_pool="avg"), lambda maps: maps[:, :, 1:, 1:].mean(dim=(1, 2))),
    ],
    ids=["class token read", "patches averaged"],
)
def test_patch_attention_is_the_class_row_where_the_class_token_is_read_else_the_mean_over_patches(
    build, wanted, point
):
    exposed = expose(build())
    with taps(exposed, point, f"{point}_received") as seen, torch.no_grad():
        exposed(images_for(exposed))
        for layer, maps, received in zip(geometry(exposed).layers, seen[point], seen[f"{point}_received"], strict=True):
            torch.testing.assert_close(layer.patch_attention(received), wanted(maps))


# --- taps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [vit, partial(vit, qk_norm=True), swin], ids=["vit", "qk_norm", "swin"])
def test_taps_record_scores_unscaled_probs_heads_and_blocks(build):
    exposed = expose(build())
    layers = geometry(exposed).layers
    attention, block = (exposed.get_submodule(path) for path in (layers[-1].attention, layers[-1].block))
    held = {}
    attention.register_forward_hook(lambda module, args, out: held.update(x=args[0], out=out))
    block.register_forward_hook(lambda module, args, out: held.update(block=out))
    with taps(exposed, "scores", "probs", "heads", "blocks") as seen, torch.no_grad():
        exposed(images_for(exposed))
        assert set(seen) == {"scores", "probs", "heads", "blocks"}
        assert all(len(tensors) == len(layers) for tensors in seen.values())
        count, tokens, _ = held["x"].shape
        qkv = attention.qkv(held["x"]).view(count, tokens, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        torch.testing.assert_close(seen["scores"][-1], q @ k.mT, rtol=1e-5, atol=1e-5)
        for probs in seen["probs"]:
            torch.testing.assert_close(probs.sum(dim=-1), torch.ones(probs.shape[:-1]))
        torch.testing.assert_close(seen["heads"][-1], seen["probs"][-1] @ v, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(attention.proj(seen["heads"][-1].transpose(1, 2).flatten(2)), held["out"])
        assert torch.equal(seen["blocks"][-1], held["block"])


def test_vit_probs_are_the_softmax_of_the_scaled_scores():
    exposed = expose(vit())
    with taps(exposed, "scores", "probs") as seen:
        exposed(images_for(exposed))
        for scores, probs in zip(seen["scores"], seen["probs"], strict=True):
            torch.testing.assert_close(probs, (scores / 16**0.5).softmax(dim=-1))


def test_taps_keep_the_latest_pass_and_its_gradient():
    exposed = expose(vit())
    images = images_for(exposed).requires_grad_()
    with taps(exposed, "scores") as seen:
        exposed(torch.zeros_like(images))
        blank = seen["scores"][0]
        exposed(images)
        assert not torch.equal(seen["scores"][0], blank)
        (gradient,) = torch.autograd.grad(seen["scores"][1].square().sum(), images)
    assert gradient.abs().sum() > 0


def hooks_in(model):
    """Hooks, and points that are listened to."""
    return sum(len(m._forward_hooks) + len(getattr(m, "listened", ())) for m in model.modules())


def test_hooks_are_gone_after_the_with_and_after_an_exception():
    exposed = expose(vit())
    with taps(exposed, "scores", "blocks") as seen:
        exposed(images_for(exposed))
        assert hooks_in(exposed) == 4
    assert hooks_in(exposed) == 0 and not seen
    with pytest.raises(RuntimeError, match="inside"), taps(exposed, "probs"):
        raise RuntimeError("inside")
    assert hooks_in(exposed) == 0
    with pytest.raises(KeyError), taps(exposed, "scores", "no such point"):
        pass
    assert hooks_in(exposed) == 0


def test_taps_do_not_change_the_outputs():
    exposed = expose(swin())
    images = images_for(exposed)
    alone = exposed(images)
    with taps(exposed, "scores", "probs", "heads", "blocks"):
        assert torch.equal(exposed(images), alone)


def test_taps_and_geometry_ask_for_an_exposed_model():
    with pytest.raises(ModelError, match=r"VisionTransformer.*expose first"):
        geometry(vit())
    with pytest.raises(ModelError, match="expose first"), taps(vit(), "scores"):
        pass


# --- what is refused ---------------------------------------------------------------------------------------------

SMALL = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
REFUSED = {
    "convolutional": ("resnet18", {}, "this ResNet has no attention layer"),
    "no block": ("vit_tiny_patch16_224", {**SMALL, "depth": 0}, "has no attention layer"),
}


@pytest.mark.parametrize(("name", "kwargs", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_an_unsupported_model_is_refused_by_name_with_what_is_supported(name, kwargs, words):
    model = timm.create_model(name, pretrained=False, **kwargs)
    with pytest.raises(ModelError, match=words) as caught:
        expose(model)
    assert "maskaq list models" in str(caught.value)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (partial(vit, global_pool=""), r"VisionTransformer has no pooling \(global_pool is ''\)"),
        (partial(swin, global_pool=""), r"SwinTransformer has no pooling \(global_pool is ''\)"),
    ],
)
def test_a_model_without_one_output_for_an_image_is_refused(build, words):
    with pytest.raises(ModelError, match=words):
        expose(build())


@pytest.mark.parametrize("kwargs", [{"block_fn": timm_vit.ParallelScalingBlock}, {"attn_layer": "diff"}])
def test_a_vit_of_other_blocks_or_attention_computes_the_same_once_exposed(kwargs):
    if not takes(timm_vit.VisionTransformer, next(iter(kwargs))):
        pytest.skip(f"timm {timm.__version__} has no {next(iter(kwargs))}")
    model = perturbed(vit(**kwargs))
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(expose(model)(images), model(images), atol=1e-5)


def test_a_layer_of_unknown_kind_is_refused_by_its_path():
    model = vit()
    model.blocks[1].mlp.fc1 = type("LowRankLinear", (nn.Linear,), {})(32, 128)
    with pytest.raises(ModelError, match=r"layer 'blocks.1.mlp.fc1' \(LowRankLinear\) cannot be quantized"):
        expose(model)


def doubled(layer):
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


ALTERED = {
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "weight norm": lambda m: nn.utils.weight_norm(m),
    "spectral norm": lambda m: nn.utils.spectral_norm(m),
    "parametrized": lambda m: parametrize.register_parametrization(m, "weight", Half()),
    "new weight norm": lambda m: nn.utils.parametrizations.weight_norm(m),
    "forward": doubled,
    "forward hook": lambda m: m.register_forward_hook(lambda module, inputs, out: 2 * out),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
    "backward hook": lambda m: m.register_full_backward_hook(lambda module, back, out: None),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED.keys())
@pytest.mark.parametrize("path", ["blocks.1.mlp.fc1", "head"])
def test_a_layer_that_computes_more_than_its_class_says_is_refused_by_its_path(alter, path):
    model = vit()
    alter(model.get_submodule(path))
    with pytest.raises(ModelError, match=f"layer '{path}'"):
        expose(model)


def test_a_model_with_a_forward_of_its_own_is_refused():
    model = swin()
    model.forward = lambda x: x
    with pytest.raises(ModelError, match="SwinTransformer.*forward"):
        expose(model)


def test_a_pruned_model_made_permanent_is_taken():
    model = vit()
    prune.l1_unstructured(model.head, "weight", 0.5)
    prune.remove(model.head, "weight")
    images = images_for(model)
    torch.testing.assert_close(expose(model)(images), model(images))


@pytest.mark.parametrize("build", [vit, partial(vit, "deit_tiny_distilled_patch16_224"), swin])
def test_a_classifier_of_zeros_is_refused_by_its_name(build):
    model = build()
    refuse_zero_weights(expose(model))
    for name in (heads := geometry(expose(model)).last):
        nn.init.zeros_(model.get_submodule(name).weight)
    with pytest.raises(ModelError, match=f"layer '{heads[0]}'.*classifier"):
        refuse_zero_weights(expose(model))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(ModelError, match=f"layer '{heads[0]}'.*every linear layer"):
        refuse_zero_weights(expose(model))


def test_zeros_elsewhere_are_taken():
    model = vit(init_values=1.0)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "gamma", "blocks.1.attn.proj.weight")):
            nn.init.zeros_(parameter)
    refuse_zero_weights(expose(model))


def test_a_refused_model_is_left_as_it_was():
    model = vit(global_pool="")
    before = [type(m) for m in model.modules()]
    with pytest.raises(ModelError, match="pooling"):
        expose(model)
    assert [type(m) for m in model.modules()] == before


def test_a_masked_vit_attention_is_refused_not_ignored():
    attention = expose(vit()).blocks[0].attn
    tokens = torch.randn(1, 17, 32)
    for mask in ({"attn_mask": torch.ones(17, 17)}, {"is_causal": True}):
        with pytest.raises(ModelError, match="masked attention"):
            attention(tokens, **mask)


def test_supported_names_are_timms_names_of_the_families():
    names = supported_names()
    assert {"deit_tiny_patch16_224", "deit3_small_patch16_224", "swin_tiny_patch4_window7_224"} <= set(names)
    assert "vit_tiny_patch16_224" in names and "resnet18" not in names and names == sorted(set(names))
    assert {"swinv2_tiny_window8_256", "eva02_tiny_patch14_224"} <= set(names)
    assert ("vit_small_patch16_dinov3" in names) == timm.is_model("vit_small_patch16_dinov3")  # not in old releases
    assert supported_names("cait") == [name for name in names if name.startswith("cait_")]


@pytest.mark.parametrize("name", ["aimv2_large_patch14_224", "beit3_base_patch16_224", "eva_large_patch14_196"])
def test_relatives_of_the_vit_compute_the_same_once_exposed(name):
    if not timm.is_model(name):
        pytest.skip("not in this timm")
    model = perturbed(timm.create_model(name, num_classes=5, depth=2, embed_dim=48, num_heads=3, img_size=28))
    images = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        assert torch.allclose(expose(model)(images), model(images), atol=1e-5)


def test_models_whose_weights_have_no_classifier_are_known():
    lacking = [name for name in supported_names() if not has_classifier(name)]
    assert "vit_small_patch14_dinov2" in lacking and "deit_tiny_patch16_224" not in lacking
    assert "vit_giant_patch14_224" in lacking  # timm has no weights of it
    assert pretrained_tags("vit_giant_patch14_224") == [] == classifier_tags("vit_small_patch14_dinov2")
    assert pretrained_tags("vit_small_patch14_dinov2") == ["lvd142m"]
    assert pretrained_tags("deit3_small_patch16_224")[0] == get_pretrained_cfg("deit3_small_patch16_224").tag
    assert "mae" in pretrained_tags("vit_base_patch16_224") and "mae" not in classifier_tags("vit_base_patch16_224")


CLIP = "vit_base_patch16_clip_224"


def test_clip_image_towers_are_those_that_were_not_fine_tuned():
    names = timm.list_models("*_clip_*.*", pretrained=True, module="vision_transformer")
    towers = [name for name in names if embedding_width(get_pretrained_cfg(name).to_dict())]
    classes = {get_pretrained_cfg(name).num_classes for name in names if name not in towers}
    assert len(towers) >= 40 and classes == {1000, 11821}
    assert not [name for name in towers if has_classifier(name) or "_ft_" in name]
    assert has_classifier(f"{CLIP}.openai_ft_in1k") and "openai" not in classifier_tags(CLIP)
    assert embedding_width(get_pretrained_cfg("deit_tiny_patch16_224").to_dict()) == 0


@pytest.mark.parametrize(("name", "width"), [(f"{CLIP}.openai", 512), ("vit_medium_patch16_clip_224", 512)])
def test_a_clip_image_tower_gives_features_unless_it_has_another_head(name, width):
    small = {"depth": 1, "embed_dim": 48, "num_heads": 3}
    tower = geometry(expose(timm.create_model(name, **small)))
    assert (tower.task, tower.classes, tower.last) == ("features", 0, ("head",))
    for model, classes in (
        (timm.create_model(name, num_classes=7, **small), 7),
        (timm.create_model(f"{CLIP}.openai_ft_in1k", **small), 1000),
    ):
        facts = geometry(expose(model))
        assert (facts.task, facts.classes) == ("classification", classes)
    assert geometry(expose(timm.create_model(name, **small), task="classification")).classes == width


def test_matmul_multiplies_and_knows_its_signs():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    assert torch.equal(Matmul()(a, b), a @ b) and Matmul().signed == (True, True)
    products = AttentionProducts()
    assert (products.qk.signed, products.av.signed) == ((True, True), (False, True))


def test_a_model_exposed_before_is_frozen_and_float_again():
    exposed = expose(expose(vit()).half().train().requires_grad_(True))
    assert not exposed.training and all(p.dtype == torch.float32 and not p.requires_grad for p in exposed.parameters())


def test_blocks_that_differ_in_drop_rates_alone_are_alike_once_exposed():
    """Compiled blocks are shared by those that are alike."""
    exposed = expose(swin(depths=(4,), num_heads=(2,), drop_path_rate=0.5, proj_drop_rate=0.2))
    kinds = {type(module).__name__ for module in exposed.modules()}
    assert not kinds & {"DropPath", "Dropout"}
    assert str(exposed.layers[0].blocks[0]) == str(exposed.layers[0].blocks[2])
