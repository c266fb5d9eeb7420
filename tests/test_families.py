"""Every family of timm: the same outputs once exposed, tokens where they are, a run from end to end, an export."""

import pytest
import torch
from families import SMALL, small
from helpers import mostly_slow
from timm.models import list_models
from torch import einsum, matmul, nn, softmax
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as attend
from torchvision.transforms.functional import to_pil_image

import maskaq
from maskaq.artifact.export import export
from maskaq.errors import ModelError
from maskaq.images.stored import noise
from maskaq.models import expose, geometry, in_float
from maskaq.models.load import load_shape, set_task
from maskaq.models.names import FAMILIES, embedding_width, modules_of
from maskaq.models.products import AttentionProducts
from maskaq.models.rewiring import product_of
from maskaq.models.taps import taps
from maskaq.models.timm_models import create_timm
from maskaq.quant.kinds import layers
from maskaq.recipe.schema import load_recipe

FOLDED = ("visformer",)  # its sums lose so many digits that timm's own in float32 are off by 3e-5
FAST = ("eva02", "dinov3", "swinv2", "beit", "cait", "levit", "samvit", "naflexvit", "twins", "convit")
MAIN_FAMILIES = [family for family in FAMILIES if family not in ("davit", "nextvit", "pit", "visformer", "gcvit")]


def some_slow(families, *slow):
    """A few families for the slow tests, all others for the exhaustive ones."""
    assert set(slow) <= set(families)
    marks = {family: pytest.mark.slow if family in slow else pytest.mark.exhaustive for family in families}
    return [pytest.param(family, marks=mark) for family, mark in marks.items()]


def images_of(model: nn.Module, count: int = 2) -> torch.Tensor:
    spec = geometry(model)
    return torch.randn(count, spec.channels, *spec.image_size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", mostly_slow(list(SMALL), *FAST))
def test_a_model_computes_the_same_once_exposed(family):
    model = small(family)
    exposed = expose(model)
    images = images_of(exposed)
    with torch.no_grad():
        found = exposed(images)
        expected = model.double()(images.double()).float() if family in FOLDED else model(images)
    close = 2e-5 if family in FOLDED else 1e-5
    assert (found - expected).abs().max() <= close * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("family", ["eva02", "swinv2", "samvit", "twins", "sam2"])
def test_maps_are_laid_out_as_the_image_is(family):
    """A change of one patch of a block's input is seen where the layout says that patch is."""
    exposed = expose(small(family))
    spec = geometry(exposed)
    layer = spec.layers[0]
    attention = exposed.get_submodule(layer.attention)
    seen = {}
    handle = exposed.get_submodule(layer.block).register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    with torch.no_grad():
        exposed(images_of(exposed, 1))
    handle.remove()
    x = seen["args"][0]
    place = (layer.grid[0] // 2, layer.grid[1] - 1)
    changed = x.clone()
    if x.dim() == 4 and tuple(x.shape[1:3]) == layer.grid:
        changed[:, place[0], place[1]] += torch.randn(x.shape[3])
    elif x.dim() == 4:
        changed[:, :, place[0], place[1]] += torch.randn(x.shape[1])
    else:
        changed[:, x.shape[1] - layer.grid[0] * layer.grid[1] + place[0] * layer.grid[1] + place[1]] += 3
        changed[..., ::2] = x[..., ::2]
    kept = []
    attention.watched = lambda q, k: kept.append(q)
    with torch.no_grad():
        for value in (x, changed):
            exposed.get_submodule(layer.block)(value, *seen["args"][1:], **seen["kwargs"])
    attention.watched = None
    difference = (kept[1] - kept[0]).abs().amax(dim=3)  # (W, H, T)
    patches = layer.patch_attention(difference)[0].view(layer.grid)
    assert (patches > 1e-6).nonzero().tolist() == [list(place)]


def test_tokens_in_another_order_than_the_images_are_left_out_of_the_losses():
    spec = geometry(expose(small("hiera")))
    assert spec.layers == () and len(spec.left_out) == len(spec.blocks) > 0


def test_what_does_not_depend_on_the_image_and_position_tables_stay_in_float():
    exposed = expose(small("swinv2"))
    quantized = set(layers(exposed))
    assert not any("cpb_mlp" in name for name in quantized) and "FloatLinear" in in_float(exposed)
    assert {"layers.0.blocks.0.attn.products.qk", "layers.0.blocks.0.attn.qkv"} <= quantized


def test_a_batch_norm_behind_a_convolution_is_folded_into_it():
    model = small("levit")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    exposed = expose(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in exposed.modules())
    images = images_of(exposed)
    with torch.no_grad():
        assert torch.allclose(exposed(images), model(images), atol=1e-5)
    convolutions = [name for name, (module, kind) in layers(exposed).items() if kind.name == "convolution"]
    assert len(convolutions) == 4 and geometry(exposed).first == tuple(convolutions[:1])


def test_special_convolutions_are_plain_ones_once_exposed():
    exposed = expose(small("hybrid"))
    found = [module for module in exposed.modules() if isinstance(module, nn.Conv2d)]
    assert found and {type(module) for module in found} == {nn.Conv2d}


class Attention(nn.Module):
    """Somebody's own attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WrittenOut(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        maps = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
        return self.out(torch.matmul(maps, v).transpose(1, 2).flatten(2))


class Own(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.embed = nn.Conv2d(3, 24, 8, 8)
        self.blocks = nn.ModuleList(attention(24, 3) for _ in range(2))
        self.attentions = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), block) for block in self.blocks)
        del self.blocks
        self.head = nn.Linear(24, 5)
        self.pretrained_cfg = {"input_size": (3, 32, 32)}

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        for attention in self.attentions:
            x = x + attention(x)
        return self.head(x.mean(dim=1))


@pytest.mark.parametrize("attention", [Attention, WrittenOut])
def test_a_model_of_ones_own_is_exposed_and_tapped(attention):
    torch.manual_seed(0)
    model = Own(attention).eval()
    exposed = expose(model)
    images = images_of(exposed)
    spec = geometry(exposed)
    assert [(layer.grid, layer.prefix_tokens) for layer in spec.layers] == [((4, 4), 0)] * 2
    assert (spec.classes, spec.first, spec.last) == (5, ("embed",), ("head",))
    with torch.no_grad(), taps(exposed, "scores", "probs", "heads", "probs_received") as seen:
        assert torch.allclose(exposed(images), model(images), atol=1e-6)
        assert seen["scores"][1].shape == seen["probs"][1].shape == (2, 3, 16, 16)
        assert torch.allclose(seen["probs"][0].sum(dim=-1), torch.ones(2, 3, 16))
        assert seen["heads"][0].shape == (2, 3, 16, 8) and seen["probs_received"][0].shape == (2, 3, 16)


def test_a_model_of_ones_own_is_quantized_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model = Own(Attention).eval()
    assert not hasattr(model, "num_classes")
    result = maskaq.quantize(model, load_recipe("quick", *TINY), tmp_path / "run", device="cpu", report=False)
    loaded = maskaq.from_pretrained(tmp_path / "run" / "quantized", like=model)
    images = images_of(result.model)
    with torch.no_grad():
        assert torch.equal(loaded(images), result.model(images))
    (tmp_path / "images" / "a").mkdir(parents=True)
    to_pil_image(torch.zeros(3, 32, 32)).save(tmp_path / "images" / "a" / "0.png")
    with pytest.raises(ModelError, match="num_classes"):
        maskaq.image_folder(tmp_path / "images", model)


def written_with(scale):
    """A class in a function: its methods use a name of that function."""

    class Local(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            maps = softmax(matmul(q, k.transpose(-2, -1)) * scale, dim=-1)
            return self.out(torch.matmul(maps, v).transpose(1, 2).flatten(2))

    return Local


class OtherName(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class Einsum(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        maps = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5, dim=-1)
        return self.out(torch.einsum("bhqk,bhkd->bqhd", maps, v).flatten(2))


class EinsumOfTokens(Attention):
    """Heads behind the tokens, a function imported by itself, and spaces."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)
        maps = softmax(einsum("b q h d, b k h d -> b h q k", q * q.shape[-1] ** -0.5, k), dim=-1)
        return self.out(einsum("b h q k, b k h d -> b q h d", maps, v).flatten(2))


class HalfEinsum(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        maps = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5, dim=-1)
        return self.out((maps @ v).transpose(1, 2).flatten(2))


class Pairs(Own):
    """Blocks that are no modules with a forward of their own, and a class token that alone is read."""

    def __init__(self, attention):
        super().__init__(attention)
        self.token = nn.Parameter(torch.randn(1, 1, 24))
        self.attentions = nn.ModuleList(
            nn.ModuleDict({"attention": attention(24, 3), "mlp": nn.Linear(24, 24)}) for _ in range(2)
        )

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        for block in self.attentions:
            x = x + block["attention"](x)
            x = x + block["mlp"](x)
        return self.head(x[:, 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(OtherName),
        lambda: Own(written_with(0.3)),
        lambda: Pairs(Attention),
        lambda: Own(Einsum),
        lambda: Own(EinsumOfTokens),
        lambda: Own(HalfEinsum),
    ],
    ids=["another name", "a class in a function", "a class token", "einsum", "einsum of tokens", "half of it einsum"],
)
def test_ways_of_writing_attention_that_are_exposed(make):
    torch.manual_seed(0)
    model = make().eval()
    exposed = expose(model)
    images = images_of(exposed)
    spec = geometry(exposed)
    assert [layer.grid for layer in spec.layers] == [(4, 4)] * 2 and not spec.left_out
    assert len([name for name in layers(exposed) if name.endswith((".qk", ".av"))]) == 4
    with torch.no_grad():
        assert torch.allclose(exposed(images), model(images), atol=1e-6)
        for layer in spec.layers:
            assert exposed.get_submodule(layer.attention).class_query == (layer.prefix_tokens > 0)


class ImplicitEinsum(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        maps = torch.softmax(torch.einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5, dim=-1)
        return self.out((maps @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("equation", ["bhqd,bhkd->bhqk", "bhqk,bhkd->bqhd", "qd,kd->kq", "h d q, k d h -> k h q"])
def test_an_einsum_of_two_tensors_is_a_product_of_them(equation):
    a, b, out = equation.replace(" ", "").replace("->", ",").split(",")
    sizes = dict(zip("bhqkd", (2, 3, 4, 5, 6), strict=True))
    x, y = (torch.randn([sizes[axis] for axis in axes]) for axes in (a, b))
    left, right, product = product_of(equation)
    found = (x.permute(left) @ y.permute(right)).permute(product)
    assert found.shape == tuple(sizes[axis] for axis in out)
    assert torch.allclose(found, torch.einsum(equation, x, y), atol=1e-5)


@pytest.mark.parametrize(
    "equation", ["bhqd,hkd->bhqk", "qd,kd", "qd,kd->k", "qd,kd->qdk", "qq,qk->qk", "...qd,...kd->...qk"]
)
def test_other_einsums_are_no_products(equation):
    assert product_of(equation) is None


class InFunction(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(_written_out(q, k, v).transpose(1, 2).flatten(2))


class Causal(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, None, 0.0, True).transpose(1, 2).flatten(2))


class UsesMaps(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        found, maps = self.attention(x, x, x)
        return found * maps.amax(dim=2, keepdim=True)


@pytest.mark.parametrize(
    ("attention", "error"),
    [
        (ImplicitEinsum, r"attentions\.1\.1.*einsum"),
        (InFunction, "_written_out"),
        (Causal, "causal"),
        (UsesMaps, "MultiheadAttention"),
    ],
)
def test_attention_that_would_stay_in_float_is_refused_also_beside_attention_that_can_be_exposed(attention, error):
    model = Own(Attention).eval()
    model.attentions[1] = nn.Sequential(nn.LayerNorm(24), attention(24, 3))
    with pytest.raises(ModelError, match=error):
        expose(model)


def test_a_detector_of_ones_own_needs_boxes_and_the_layers_they_come_from():
    class Boxes(Own):
        def forward(self, x):
            return {"boxes": super().forward(x)}

    model = Boxes(Attention)
    model.pretrained_cfg["task"] = "detection"
    with pytest.raises(ModelError, match="predictors"):
        expose(model)


def test_attention_that_cannot_be_reached_is_an_error_that_says_where():
    class Hidden(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            return self.out(_helper(q, k, v).transpose(1, 2).flatten(2))

    with pytest.raises(ModelError, match="_helper"):
        expose(Own(Hidden))


def _helper(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def _written_out(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


@pytest.mark.slow
def test_a_model_without_maps_is_quantized_and_reported(tmp_path):
    name, args = SMALL["xcit"]
    source = {"name": name, "args": {"num_classes": 10, **args}}
    result = maskaq.quantize(small("xcit"), load_recipe("quick", *TINY), tmp_path / "run", source=source, device="cpu")
    assert geometry(result.model).layers == ()
    assert maskaq.from_pretrained(tmp_path / "run" / "quantized")(images_of(result.model)).shape == (2, 10)


def test_towers_give_features_by_timms_record_and_a_task_that_is_asked_for_counts_first():
    small_args = {"depth": 1, "embed_dim": 48, "num_heads": 3, "img_size": 32}
    tower = create_timm("eva02_base_patch16_clip_224.merged2b", **small_args)
    assert geometry(expose(tower)).task == "features"
    assert geometry(expose(set_task(tower, "classification"))).classes == 512
    assert geometry(expose(set_task(small("dinov3"), "features"))).classes == 0
    with pytest.raises(ModelError, match="no classifier"):
        set_task(small("dinov3", num_classes=0), "classification")


def test_an_image_size_is_taken_by_models_without_an_argument_for_it():
    model = create_timm("pvt_v2_b0", img_size=64)
    assert geometry(expose(model)).image_size == (64, 64)


@pytest.mark.parametrize("family", some_slow(MAIN_FAMILIES, "beit", "tiny_vit"))
def test_every_pretrained_name_of_a_family_is_accepted(family):
    names = {
        name.split(".")[0] for module in modules_of(family) for name in list_models(module=module, pretrained=True)
    }
    for name in sorted(names):
        exposed = expose(load_shape(name))
        products = [module for module in exposed.modules() if isinstance(module, AttentionProducts)]
        assert layers(exposed) and (products or family in ("fastvit", "mobilevit"))


def test_towers_are_those_trained_with_text():
    records = {
        "vit_base_patch16_clip_224.openai": 512,
        "vitamin_large_336.datacomp1b_clip": 768,
        "vit_base_patch16_clip_224.openai_ft_in1k": 0,
        "eva02_base_patch14_448.mim_in22k_ft_in1k": 0,
    }
    from timm.models import get_pretrained_cfg

    for name, width in records.items():
        config = get_pretrained_cfg(name)
        assert config is not None and embedding_width(config.to_dict()) == width


TINY = (
    "quantization.range_images=2",
    "synthesis.images=4",
    "synthesis.steps=2",
    "synthesis.batch=4",
    "calibration.epochs=1",
    "calibration.batch=4",
    "refresh.every=0",
)


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL)
def test_a_family_from_end_to_end(family, tmp_path):
    """Run, save, load, and export what is verified code by code."""
    name, args = SMALL[family]
    source = {"name": name, "args": {"num_classes": 10, **args}}
    recipe = load_recipe("quick", *TINY, bits="w6a6")
    result = maskaq.quantize(small(family), recipe, tmp_path / "run", source=source, device="cpu")
    loaded = maskaq.from_pretrained(tmp_path / "run" / "quantized")
    images = noise(loaded, 2, seed=0)
    with torch.no_grad():
        assert torch.allclose(loaded(images), result.model(images), atol=1e-5)
    verified = export(loaded, tmp_path / "model.onnx", "onnx", images)
    assert verified.codes > 0


@pytest.mark.parametrize("kind", ["plain", "masked", "keys of another width"])
def test_torchs_own_multi_head_attention_is_taken_apart(kind):
    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            other = {"kdim": 12, "vdim": 12} if kind == "keys of another width" else {}
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True, **other)
            self.register_buffer("mask", torch.eye(16, dtype=torch.bool) if kind == "masked" else None)

        def forward(self, x):
            keys = x[..., :12] if kind == "keys of another width" else x
            return self.attention(x, keys, keys, need_weights=False, attn_mask=self.mask)[0]

    torch.manual_seed(0)
    model = Own(Block).eval()
    exposed = expose(model)
    images = images_of(exposed)
    with torch.no_grad():
        assert torch.allclose(exposed(images), model(images), atol=1e-6)
    names = set(layers(exposed))
    assert {f"attentions.0.1.attention.{part}" for part in ("q", "out_proj", "products.qk", "products.av")} <= names
