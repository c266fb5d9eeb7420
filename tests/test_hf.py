"""Models of Hugging Face transformers: the same outputs, the processor's preparation, a run, a folder, a hint."""

import json

import pytest
import torch
from test_families import TINY

pytest.importorskip("transformers", minversion="5.0")

from hf_models import MODELS, small, small_upernet

import maskaq
from maskaq.artifact.export import export
from maskaq.cli import main as cli
from maskaq.errors import CheckpointError, MaskaqError, ModelError
from maskaq.images.stored import noise
from maskaq.models import class_names, data_config, expose, geometry, task_name
from maskaq.models.hf import adopted
from maskaq.models.load import architecture_of, load_model, rebuild
from maskaq.recipe.schema import load_recipe


def outputs(model, images):
    """What transformers itself gives, with eager attention."""
    import transformers

    kind = type(model)
    eager = kind(kind.config_class.from_dict(model.config.to_dict())).eval()
    eager.load_state_dict(model.state_dict())
    if hasattr(eager, "set_attn_implementation"):
        transformers.utils.logging.set_verbosity_error()
        eager.set_attn_implementation("eager")
    extra = {"noise": torch.arange(16.0).expand(len(images), -1)} if "MAE" in kind.__name__ else {}
    if extra:
        eager.config.mask_ratio = 0.0
    if "Siglip2" in kind.__name__:
        from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

        images = torch.stack([convert_image_to_patches(image, eager.config.patch_size) for image in images])
        shapes = torch.tensor([[4, 4]] * len(images))
        extra = {"pixel_attention_mask": torch.ones(images.shape[:2], dtype=torch.int32), "spatial_shapes": shapes}
    with torch.no_grad():
        found = eager(pixel_values=images, **extra)
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(found, name, None) is not None:
            return getattr(found, name)
    return found.last_hidden_state[:, 0] if "MAE" in kind.__name__ else found.last_hidden_state.mean(dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_computes_the_same_once_exposed(name):
    model = small(name)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = outputs(model, images)
    exposed = expose(model)
    with torch.no_grad():
        found = exposed(images)
    assert torch.allclose(found, expected, atol=1e-5)
    spec = geometry(exposed)
    assert len(spec.layers) == 2 and spec.image_size == (32, 32)
    assert spec.classes == (5 if "ForImageClassification" in MODELS[name][0] else 0)


@pytest.fixture
def folder(tmp_path):
    import transformers

    model = small("vit")
    model.config.id2label = {i: f"class {i}" for i in range(5)}
    model.save_pretrained(tmp_path / "vit")
    size = {"height": 32, "width": 32}
    processor = transformers.ViTImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])
    processor.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_folder_is_timed(folder, capsys):
    words = ["bench", f"hf:{folder}", "--plain", "--batch", "2", "--calibration-batch", "2", "--steps", "1"]
    assert cli.main([*words, "--repeats", "1", "--device", "cpu"]) == 0
    assert "calibration" in capsys.readouterr().out


def edited(folder, name, **values):
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_checkpoint_with_more_layers_than_its_config_says_is_refused(folder):
    edited(folder, "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="more layers"):
        load_model(f"hf:{folder}")


def test_a_checkpoint_with_other_shapes_than_its_config_says_is_refused(folder):
    edited(folder, "config.json", patch_size=4)
    with pytest.raises(CheckpointError, match=r"other shapes.*expected \(.*found \("):
        load_model(f"hf:{folder}")


@torch.no_grad()
def test_a_checkpoint_without_a_pooler_gives_the_class_token_and_not_what_a_random_pooler_makes_of_it(tmp_path):
    import transformers

    model = transformers.ViTModel(small("vit").config, add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(loaded(images), model(pixel_values=images).last_hidden_state[:, 0], atol=1e-6)
    again = rebuild(architecture_of(loaded, ""))
    again.load_state_dict(loaded.state_dict())
    assert torch.allclose(again(images), loaded(images), atol=1e-6)


@torch.no_grad()
def test_the_image_tower_of_a_clip_has_the_width_that_the_whole_model_says(tmp_path):
    import transformers

    text = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    vision = {**MODELS["clip"][1], "projection_dim": 99}  # no more than a default that nobody reads
    config = transformers.CLIPConfig(vision_config=vision, text_config={**text, "vocab_size": 8}, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    expected = model.visual_projection(model.vision_model(pixel_values=images).pooler_output)
    assert torch.allclose(load_model(f"hf:{tmp_path}")(images), expected, atol=1e-5)
    with pytest.raises(ModelError, match="CLIPVisionModelWithProjection"):
        expose(model)


def test_a_model_of_text_is_refused_by_its_name():
    import transformers

    text = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    with pytest.raises(ModelError, match="BertModel takes input_ids"):
        expose(transformers.BertModel(transformers.BertConfig(**text, vocab_size=8)))


def test_the_users_own_model_stays_as_it_is():
    model = small("vit mae")
    ratio, attention, kinds = model.config.mask_ratio, model.config._attn_implementation, [*map(type, model.modules())]
    expose(model)
    assert (model.config.mask_ratio, model.config._attn_implementation) == (ratio, attention) and ratio > 0
    assert [*map(type, model.modules())] == kinds


def test_a_folder_without_hf_before_it_says_what_to_type(folder, tmp_path, capsys):
    for words in (["quantize", str(folder), "--out", str(tmp_path / "run")], ["inspect", str(folder)]):
        assert cli.main(words) == 1
        assert f"hf:{folder}" in capsys.readouterr().err
    with pytest.raises(ModelError, match="hf:facebook/dinov2-small"):
        load_model("facebook/dinov2-small")


def test_a_folder_is_read_without_progress_bars(folder, capsys):
    load_model(f"hf:{folder}")
    assert capsys.readouterr().err == ""


def test_code_beside_a_model_is_not_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('it was run')")
    edited(folder, "config.json", auto_map={"AutoConfig": "evil.Config"}, model_type="evil")
    with pytest.raises(CheckpointError):
        load_model(f"hf:{folder}")


@pytest.mark.parametrize(
    ("key", "value"), [("image_std", [0.5, 0.0, 0.5]), ("image_mean", 0.5), ("resample", 99)], ids=lambda x: str(x)
)
def test_an_image_processor_that_makes_no_sense_is_refused(folder, key, value):
    edited(folder, "preprocessor_config.json", **{key: value})
    with pytest.raises(MaskaqError, match=key):
        load_model(f"hf:{folder}")


def test_a_damaged_image_processor_is_refused_and_the_nearest_pixel_is_a_way_to_resize(folder):
    edited(folder, "preprocessor_config.json", resample=0)
    assert data_config(load_model(f"hf:{folder}"))["interpolation"] == "nearest"
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        load_model(f"hf:{folder}")


@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("config.json", {"layer_norm_eps": 0.1}, "norm_eps"),
        ("preprocessor_config.json", {"image_mean": [0.3, 0.3, 0.3]}, "mean"),
    ],
    ids=["eps", "mean"],
)
def test_a_run_notices_that_the_config_beside_its_weights_has_changed(folder, tmp_path, name, values, error):
    model, source = load_model(f"hf:{folder}"), {"name": f"hf:{folder}", "args": {}}
    maskaq.quantize(model, load_recipe("quick", *TINY), tmp_path / "run", source=source, device="cpu", only_images=True)
    edited(folder, name, **values)
    with pytest.raises(CheckpointError, match=error):
        maskaq.open_run(tmp_path / "run").teacher()


def test_the_processor_and_the_labels_of_a_folder_are_used(folder):
    model = load_model(f"hf:{folder}")
    config = data_config(model)
    assert config["input_size"] == (3, 32, 32)
    assert config["mean"] == pytest.approx((0.1, 0.2, 0.3)) and config["std"] == pytest.approx((0.4, 0.5, 0.6))
    assert class_names(expose(model)) == [f"class {i}" for i in range(5)]


def test_a_convolution_with_padding_valid_is_one_without(tmp_path):
    result = maskaq.quantize(small("siglip"), load_recipe("quick", *TINY), tmp_path / "run", device="cpu", report=False)
    loaded = maskaq.from_pretrained(tmp_path / "run" / "quantized")
    assert "A SiglipVisionModel for images" in (tmp_path / "run" / "quantized" / "README.md").read_text()
    images = noise(loaded, 2, seed=0)
    with torch.no_grad():
        assert torch.allclose(loaded(images), result.model(images), atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "dinov3", "vit mae", "siglip 2"])
@pytest.mark.slow
def test_a_run_of_a_model_of_transformers_is_saved_loaded_and_exported(name, tmp_path):
    model = small(name)
    result = maskaq.quantize(model, load_recipe("quick", *TINY, bits="w6a6"), tmp_path / "run", device="cpu")
    loaded = maskaq.from_pretrained(tmp_path / "run" / "quantized")
    images = noise(loaded, 2, seed=0)
    with torch.no_grad():
        assert torch.allclose(loaded(images), result.model(images), atol=1e-5)
    if name != "dinov3":
        assert export(loaded, tmp_path / "model.onnx", "onnx", images).codes > 0


def test_a_checkpoint_of_transformers_given_to_a_timm_name_says_what_to_type(folder):
    with pytest.raises(CheckpointError, match=f"hf:{folder}"):
        load_model("vit_tiny_patch16_224", folder / "model.safetensors")


def test_what_is_no_model_of_transformers_is_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected a folder or repository"):
        load_model(f"hf:{tmp_path}")
    with pytest.raises(ModelError, match="no --checkpoint"):
        load_model(f"hf:{tmp_path}", tmp_path / "x.safetensors")


def test_a_file_a_folder_that_is_not_there_and_a_model_of_timm_say_what_to_type(folder, tmp_path):
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "config.json").write_text(
        '{"architecture": "vit_tiny_patch16_224", "num_classes": 5, "pretrained_cfg": {}}'
    )
    file = folder / "model.safetensors"
    for source, error in (
        (file, f"--checkpoint {file}"),
        (tmp_path / "none", "no such folder"),
        ("", "no such folder"),
        (tmp_path / "timm", "vit_tiny_patch16_224.*--checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=error):
            load_model(f"hf:{source}")


def test_a_shard_that_is_missing_is_named(tmp_path):
    small("vit").save_pretrained(tmp_path, max_shard_size="10KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize("reachable", [True, False])
def test_a_hub_that_cannot_be_reached_is_not_waited_for(monkeypatch, reachable):
    """Neither for the processor of a model that came from it, nor for a model."""
    import transformers
    from huggingface_hub import constants

    asked = []

    def from_pretrained(source, **kwargs):
        asked.append((source, constants.HF_HUB_OFFLINE))
        raise OSError("not in the cache")

    model = small("vit")
    model.name_or_path = "user/vit"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("maskaq.models.hub._answers", lambda endpoint: reachable)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", from_pretrained)
    assert geometry(expose(model)).image_size == (32, 32)
    with pytest.raises(CheckpointError, match="not in the cache"):
        load_model("hf:user/vit")
    assert asked == [("user/vit", not reachable)] * 2


def test_the_processor_of_a_folder_is_read_without_asking_for_the_hub(monkeypatch, folder):
    import transformers

    model = transformers.ViTForImageClassification.from_pretrained(folder)
    monkeypatch.setattr("maskaq.models.hub._answers", lambda endpoint: pytest.fail("asked for the hub"))
    assert data_config(adopted(model))["mean"] == pytest.approx((0.1, 0.2, 0.3))


def test_other_models_are_left_as_they_are():
    model = torch.nn.Linear(2, 2)
    assert adopted(model) is model


# --- UperNet ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 64), (50, 71)])
@torch.no_grad()
def test_an_upernet_of_transformers_computes_the_same_once_exposed_at_any_size(size):
    model = small_upernet()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    expected = model(pixel_values=images).logits
    exposed = expose(model)
    found = exposed(images)
    assert found.shape == (2, 5, *size)
    assert torch.allclose(found, expected, atol=1e-4) and expected.std() > 0.1
    spec = geometry(exposed)
    assert (spec.task, spec.classes, len(spec.layers)) == ("segmentation", 5, 5)
    assert spec.in_backbone(spec.layers[0].attention) and not spec.in_backbone("model.decode_head.bottleneck.conv")


def test_the_auxiliary_head_of_an_upernet_is_dropped_but_not_from_the_users_model():
    model = small_upernet()
    adopted_model = adopted(model)
    assert task_name(adopted_model) == "segmentation"
    assert not any("auxiliary" in key for key in adopted_model.state_dict())
    assert any("auxiliary" in key for key in model.state_dict())
    again = rebuild(architecture_of(adopted_model, ""))
    assert again.state_dict().keys() == adopted_model.state_dict().keys()


def test_an_upernet_folder_gives_its_processors_size_and_its_labels(tmp_path):
    import transformers

    model = small_upernet()
    model.config.id2label = dict(enumerate(("wall", "sky", "tree", "road", "car")))
    model.save_pretrained(tmp_path)
    size = {"height": 96, "width": 64}
    mean = [0.1, 0.2, 0.3]
    transformers.SegformerImageProcessor(size=size, image_mean=mean, image_std=[0.5] * 3).save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}")
    config = data_config(loaded)
    assert config["input_size"] == (3, 96, 64) and config["mean"] == pytest.approx(tuple(mean))
    assert class_names(expose(loaded)) == ["wall", "sky", "tree", "road", "car"]


@torch.no_grad()
def test_a_folder_with_the_names_that_published_upernets_have_computes_what_mmsegmentation_does(tmp_path):
    """Those of openmmlab/upernet-swin-tiny: an older transformers wrote it."""
    import openmmlab_models as mm
    import transformers
    from safetensors.torch import save_file

    state = mm.filled(mm.upernet_shapes(**mm.SMALL, classes=6, width=16, auxiliary=8))
    swin = {"embed_dim": 8, "depths": mm.SMALL["depths"], "num_heads": mm.SMALL["heads"], "window_size": 7}
    stages = ["stage1", "stage2", "stage3", "stage4"]
    config = transformers.UperNetConfig(
        backbone_config=transformers.SwinConfig(**swin, out_features=stages),
        hidden_size=16,
        auxiliary_in_channels=32,
        auxiliary_channels=8,
        num_labels=6,
    )
    config.architectures = ["UperNetForSemanticSegmentation"]
    config.save_pretrained(tmp_path)
    renamed = {key: value.contiguous() for key, value in mm.transformers_names(state).items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    images = torch.randn(1, 3, 61, 94, generator=torch.Generator().manual_seed(1))
    logits = mm.upernet_head(state, mm.stages(state, images, **mm.SMALL))
    expected = torch.nn.functional.interpolate(logits, (61, 94), mode="bilinear", align_corners=False)
    found = load_model(f"hf:{tmp_path}")(images)
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4), (found - expected).abs().max()


@pytest.mark.slow
def test_a_run_of_an_upernet_of_transformers_is_saved_and_loaded(tmp_path):
    result = maskaq.quantize(small_upernet(), load_recipe("quick", *TINY, bits="w6a6"), tmp_path / "run", device="cpu")
    loaded = maskaq.from_pretrained(tmp_path / "run" / "quantized")
    images = noise(loaded, 2, seed=0)
    with torch.no_grad():
        assert loaded(images).shape == (2, 5, 64, 64)
        assert torch.allclose(loaded(images), result.model(images), atol=1e-5)
