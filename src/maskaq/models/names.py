"""timm's names of the models that can be quantized, by family, and what timm's records say of their weights."""

from collections.abc import Mapping
from typing import Any

from timm.models import get_pretrained_cfg, list_models, list_modules

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "vit": ("vision_transformer", "deit"),
    "swin": ("swin_transformer",),
    "swinv2": ("swin_transformer_v2", "swin_transformer_v2_cr"),
    "eva": ("eva",),
    "maxvit": ("maxxvit",),
    "xcit": ("xcit",),
    "hiera": ("hiera", "hieradet_sam2"),
    "fastvit": ("fastvit",),
    "mobilevit": ("mobilevit",),
    "beit": ("beit",),
    "crossvit": ("crossvit",),
    "tiny_vit": ("tiny_vit",),
    "volo": ("volo",),
    "vitamin": ("vitamin",),
    "hybrid": ("vision_transformer_hybrid",),
    "relpos": ("vision_transformer_relpos",),
    "cait": ("cait",),
    "levit": ("levit",),
    "coat": ("coat",),
    "pvt_v2": ("pvt_v2",),
    "mvitv2": ("mvitv2",),
    "efficientformer": ("efficientformer", "efficientformer_v2"),
    "twins": ("twins",),
    "naflexvit": ("naflexvit",),
    "nest": ("nest",),
    "tnt": ("tnt",),
    "convit": ("convit",),
    "samvit": ("vision_transformer_sam",),
    "davit": ("davit",),
    "nextvit": ("nextvit",),
    "pit": ("pit",),
    "visformer": ("visformer",),
    "gcvit": ("gcvit",),
    "edgenext": ("edgenext",),
    "efficientvit": ("efficientvit_msra",),
}
"""Family -> timm's files that define its models."""


def modules_of(family: str | None = None) -> list[str]:
    """timm's files of a family, or of all, that this timm has."""
    chosen = [FAMILIES[family]] if family is not None else FAMILIES.values()
    there = set(list_modules())
    return [module for modules in chosen for module in modules if module in there]


def supported_names(family: str | None = None) -> list[str]:
    """timm model names that can be quantized."""
    return sorted({name for module in modules_of(family) for name in list_models(module=module)})


def has_classifier(name: str) -> bool:
    """Whether timm's own weights of a name, or of its default tag, come with a classifier.

    Those of self-supervised models and of CLIP image towers do not; of some architectures timm has no weights.
    """
    config = get_pretrained_cfg(name)
    return bool(config and config.has_weights and config.num_classes and not embedding_width(config.to_dict()))


def pretrained_tags(name: str) -> list[str]:
    """The tags of the weights that timm has for an architecture, its default first."""
    architecture = name.split(".")[0]
    default = get_pretrained_cfg(architecture)
    tags = [found.split(".", 1)[1] for found in list_models(f"{architecture}.*", pretrained=True)]
    return sorted(tags, key=lambda tag: default is None or tag != default.tag)


def classifier_tags(name: str) -> list[str]:
    """Those of `pretrained_tags` whose weights have a classifier."""
    architecture = name.split(".")[0]
    return [tag for tag in pretrained_tags(name) if has_classifier(f"{architecture}.{tag}")]


def record_of(model: Any) -> Mapping[str, Any]:
    """timm's record of a model, its `pretrained_cfg`; empty if it has none."""
    return getattr(model, "pretrained_cfg", None) or {}


def update_record_(model: Any, **entries: Any) -> None:
    """Change entries of a model's record, under both of the names that timm has for it."""
    model.pretrained_cfg = model.default_cfg = {**record_of(model), **entries}


def embedding_width(record: Mapping[str, Any]) -> int:
    """The width of an image tower's embedding, which timm's record gives as its `num_classes`; 0 for others.

    A record (`pretrained_cfg`) does not say so itself. Towers are trained with text: CLIP, SigLIP, MobileCLIP, the
    Perception Encoder. Their architecture or their tag says so, unless they were fine-tuned on a data set with classes,
    which a tag tells by its `ft`, as in `openai_ft_in1k`.
    """
    architecture = str(record.get("architecture") or "")
    tag = str(record.get("tag") or "")
    words = {*architecture.split("_"), *tag.split("_")}
    tower = any("clip" in word for word in words) or {"pe", "core"} <= words
    if not tower or not tag or "ft" in tag.split("_"):
        return 0
    known = get_pretrained_cfg(f"{architecture}.{tag}")  # a record may have been changed since
    return 0 if known is None else int(known.num_classes)
