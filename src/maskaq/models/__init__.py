"""Turn a timm model into one common form. No other package knows about architectures.

In that form every attention is an `AttentionProducts` whose products can be tapped and quantized, and a `Geometry`
says how tokens lie on the image. A new family is one file with `ROOT`, `NAMES` and `expose_`, listed in `FAMILIES`.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from timm.data import ImageNetInfo, resolve_model_data_config
from timm.layers import DropPath
from timm.models import get_pretrained_cfg, list_models
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from maskaq.errors import ModelError
from maskaq.models import swin, vit
from maskaq.models.products import AttentionProducts, Matmul
from maskaq.shapes import Geometry

FAMILIES = (vit, swin)

__all__ = [
    "AttentionProducts",
    "Matmul",
    "class_names",
    "classifier_tags",
    "data_config",
    "embedding_width",
    "expose",
    "geometry",
    "has_classifier",
    "parts",
    "pretrained_tags",
    "refuse_zero_weights",
    "supported_names",
    "task_name",
]

# timm's files of the families; models of the same names in other files are hybrids, relative positions, EVA.
_MODULES = ("vision_transformer", "deit", "swin_transformer")
# Names in these files that `expose` refuses for their blocks or their attention.
_REFUSED = ("*_xp_*", "vit_d*wee_*", "vit_pwee_*", "vit_dlittle_*")
_NORMS = ("LayerNorm", "RmsNorm", "RMSNorm", "SimpleNorm", "LayerScale")


def expose(model: nn.Module, task: str | None = None) -> nn.Module:
    """A copy of the model in the common form: frozen, eval mode, float32, same outputs, same state-dict keys.

    Args:
        task: `classification` or `features`; by default what the model itself says (`task_name`).
    """
    family = next((f for f in FAMILIES if isinstance(model, f.ROOT)), None)
    if isinstance(model, str):
        raise ModelError(f"expected a model, got its name: maskaq.load_model({model!r}) loads it")
    if family is None:
        raise ModelError(f"{type(model).__name__} is not a supported model. {_supported()}")
    _refuse_altered_layers(model)
    exposed = copy.deepcopy(model).float().eval().requires_grad_(False)
    if isinstance(getattr(model, "_maskaq_geometry", None), Geometry):
        return exposed
    _drop_nothing(exposed)
    layers = family.expose_(exposed)
    _refuse_unknown_layers(exposed)
    if not layers:
        raise ModelError(f"this {type(model).__name__} has no attention layer (its depth is 0). {_supported()}")
    config = data_config(model)
    task = task or task_name(model)
    exposed._maskaq_geometry = Geometry(  # type: ignore[assignment]
        layers=layers,
        image_size=config["input_size"][1:],
        channels=config["input_size"][0],
        task=task,
        classes=int(exposed.num_classes) if task == "classification" else 0,  # type: ignore[arg-type]
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        first=tuple(n for n, m in exposed.named_modules() if isinstance(m, nn.Conv2d)),
        last=_heads(exposed, task),
    )
    return exposed


def _drop_nothing(model: nn.Module) -> None:
    """Remove dropout and drop path. They do nothing in eval mode, but their rates would make equal blocks differ."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (DropPath, nn.Dropout)):
                setattr(module, name, nn.Identity())


def data_config(model: Any) -> dict[str, Any]:
    """timm's data config of a model (size, mean, std, crop, interpolation), with the size it was built for."""
    exposed = getattr(model, "_maskaq_geometry", None)  # of a model whose layers may have been replaced since
    proj = getattr(getattr(model, "patch_embed", None), "proj", None)
    if exposed is None and not isinstance(proj, nn.Conv2d):
        raise ModelError(f"this {type(model).__name__} has no patch embedding by one convolution. {_supported()}")
    config = resolve_model_data_config(model)
    height, width = getattr(model.patch_embed, "img_size", None) or config["input_size"][1:]
    channels = model.patch_embed.proj.in_channels if exposed is None else exposed.channels
    config["input_size"] = (channels, int(height), int(width))
    for key in ("mean", "std"):  # timm keeps three of each whatever `in_chans` is
        if len(config[key]) != channels:
            config[key] = (sum(config[key]) / len(config[key]),) * channels
    return config


def geometry(exposed: nn.Module) -> Geometry:
    """The geometry of a model that went through `expose`."""
    found = getattr(exposed, "_maskaq_geometry", None)
    if not isinstance(found, Geometry):
        raise ModelError(f"{type(exposed).__name__} has no geometry: pass it through maskaq.expose first")
    return found


def parts(exposed: nn.Module) -> list[str]:
    """Module paths of the blocks and of all else with parameters beside them, in the order they are computed.

    That is the patch embedding, in Swin the merging of patches, the last norm and the classifier.
    """
    blocks = {layer.block for layer in geometry(exposed).layers}
    around = {block[:end] for block in blocks for end, letter in enumerate(block) if letter == "."}

    def walk(module: nn.Module, path: str) -> Iterator[str]:
        for name, child in module.named_children():
            if path + name in around:
                yield from walk(child, f"{path}{name}.")
            elif next(child.parameters(), None) is not None:
                yield path + name

    return list(walk(exposed, ""))


def task_name(model: Any) -> str:
    """What a model is for: `features` where its outputs are an embedding and not classes, else `classification`.

    So are those of a model without a classifier (num_classes is 0) and of a CLIP image tower. A tower with another
    number of outputs than its own is a user's classifier.
    """
    record: Any = getattr(model, "pretrained_cfg", None) or {}
    width = embedding_width(record)
    outputs = getattr(model, "num_classes", None)
    return "features" if outputs == 0 or (width and width == outputs) else "classification"


def supported_names(families: Iterable[ModuleType] = FAMILIES) -> list[str]:
    """timm model names that can be quantized."""
    patterns = [pattern for family in families for pattern in family.NAMES]
    found = (list_models(patterns, module=module, exclude_filters=_REFUSED) for module in _MODULES)
    return sorted({name for names in found for name in names})


def has_classifier(name: str) -> bool:
    """Whether timm's own weights of a name, or of its default tag, come with a classifier.

    Those of self-supervised models and of CLIP image towers do not; of some architectures timm has no weights.
    """
    config = get_pretrained_cfg(name)
    return bool(config and config.has_weights and config.num_classes and not embedding_width(config.to_dict()))


def pretrained_tags(name: str) -> list[str]:
    """The tags of the weights that timm has for an architecture, its default first."""
    architecture = name.split(".")[0]
    default = get_pretrained_cfg(name.split(".")[0])
    tags = [found.split(".", 1)[1] for found in list_models(f"{architecture}.*", pretrained=True)]
    return sorted(tags, key=lambda tag: default is None or tag != default.tag)


def classifier_tags(name: str) -> list[str]:
    """Those of `pretrained_tags` whose weights have a classifier."""
    architecture = name.split(".")[0]
    return [tag for tag in pretrained_tags(name) if has_classifier(f"{architecture}.{tag}")]


def embedding_width(record: Mapping[str, Any]) -> int:
    """The width of a CLIP image tower's embedding, which timm's record gives as its `num_classes`; 0 for others.

    A record (`pretrained_cfg`) does not say so itself: the towers are the CLIP architectures that were not fine-tuned
    on a data set with classes, which a tag tells by its `ft`, as in `openai_ft_in1k`.
    """
    architecture = str(record.get("architecture") or "")
    tag = str(record.get("tag") or "")
    if "_clip_" not in architecture or not tag or "ft" in tag.split("_"):
        return 0
    known = get_pretrained_cfg(f"{architecture}.{tag}")  # a record may have been changed since
    return 0 if known is None else int(known.num_classes)


def _supported() -> str:
    return "Supported: timm's " + " and ".join(f"{f.ROOT.__name__} ({', '.join(f.NAMES)})" for f in FAMILIES)


def _heads(model: nn.Module, task: str) -> tuple[str, ...]:
    """Module paths of the linear layers that the outputs come from; none where they are the pooled tokens."""
    heads = tuple(
        n for n, m in model.named_modules() if n.split(".")[0] in ("head", "head_dist") and type(m) is nn.Linear
    )
    if not model.global_pool:
        raise ModelError(
            f"this {type(model).__name__} has no pooling (global_pool is ''): expected one output for each image, "
            f"{'logits' if task == 'classification' else 'features'}. {_supported()}"
        )
    return heads


def _refuse_altered_layers(model: nn.Module) -> None:
    """ModelError for a layer that computes something else than its class and its parameters say: a copy would lose it.

    Pruning, weight norm and spectral norm of `torch.nn.utils` compute a weight in a hook or a parametrization.
    """
    for name, module in model.named_modules():
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        patched = [
            key for key in vars(module) if callable(vars(module)[key]) and callable(getattr(type(module), key, 0))
        ]
        found = remedy = ""
        if is_parametrized(module):
            found = "has a parametrization"
            remedy = "torch.nn.utils.parametrize.remove_parametrizations"
        elif any(getattr(module, kind) for kind in hooks):
            found = "has a hook"
            remedy = "its handle's remove(), or torch.nn.utils.prune.remove after pruning"
        elif patched:
            found = f"has a {patched[0]} of its own"
            remedy = f"del layer.{patched[0]}"
        elif type(module) in (nn.Linear, nn.Conv2d) and not isinstance(module.weight, nn.Parameter):
            found = "has a weight that is not a parameter"
            remedy = "layer.weight = nn.Parameter(...)"
        if found:
            where = f"layer {name!r}" if name else "the model"
            raise ModelError(
                f"{where} ({type(module).__name__}) {found}: expected a plain layer; undo it with {remedy}"
            )


def refuse_zero_weights(exposed: nn.Module) -> None:
    """ModelError for a model that predicts the same for every image: an untrained classifier, or weights never set."""
    weights = {n: m.weight for n, m in exposed.named_modules() if type(m) in (nn.Linear, nn.Conv2d)}
    zero = [name for name, weight in weights.items() if not weight.any()]
    heads = geometry(exposed).last or tuple(weights)
    if set(heads) <= set(zero):
        what = "every linear layer" if len(zero) == len(weights) else "the classifier"
        raise ModelError(f"layer {heads[0]!r}: all weights of {what} are 0, so it is not trained; load trained weights")


def _refuse_unknown_layers(model: nn.Module) -> None:
    """Every module with parameters of its own must be one that the twin quantizes, or one known to stay in float."""
    for name, module in model.named_modules():
        known = (
            module is model
            or type(module) in (nn.Linear, nn.Conv2d)
            or isinstance(module, AttentionProducts)
            or any(word in type(module).__name__ for word in _NORMS)
        )
        owns_parameters = next(module.parameters(recurse=False), None) is not None
        hidden_attention = not known and ("Attention" in type(module).__name__ or "Attn" in type(module).__name__)
        if (owns_parameters and not known) or hidden_attention:
            raise ModelError(
                f"layer {name!r} ({type(module).__name__}) cannot be quantized. {_supported()}, built of plain Linear, "
                "Conv2d, attention, LayerNorm and LayerScale layers"
            )


def class_names(model: nn.Module) -> list[str] | None:
    """Names of the classes, where known: the model's own, or ImageNet's where timm's tag says so."""
    record: Any = getattr(model, "pretrained_cfg", None) or {}
    classes = geometry(model).classes
    names = record.get("label_names")
    if not names and classes == 1000 and "in1k" in str(record.get("tag")):  # the data of the last training
        imagenet = ImageNetInfo("imagenet-1k")
        names = [imagenet.index_to_description(i) for i in range(classes)]
    return [str(name) for name in names] if names and classes and len(names) == classes else None
