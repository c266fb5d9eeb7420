"""A quantized model as a folder to keep and to share.

    model.safetensors    weight codes packed at their own width; the rest in float32, by the deployed model's names
    config.json          the architecture, how images are prepared, what is quantized and how
    README.md            the model card: the same for people

Nothing is pickled, and a folder contains no code. What `config.json` says about the model is repeated inside
`model.safetensors`, whose SHA-256 it holds, so that an edit of either is noticed. `made` and the card may be edited;
to change labels, save again with `labels=`. (Folders of maskaq 0.1.0 do not repeat their labels and load as they are.)
"""

import copy
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import maskaq
from maskaq import zoo
from maskaq.artifact import hub
from maskaq.errors import MaskaqError, ModelError, PretrainedError, RunFolderError, first_line
from maskaq.models import class_names, data_config, expose, geometry
from maskaq.models.hf import HuggingFace
from maskaq.models.load import architecture_of, architecture_of_state, load_shape, rebuild
from maskaq.models.names import record_of, update_record_
from maskaq.models.structure import has_relu, put_relu_, replace_module, tensors_of
from maskaq.quant.deployed import CodedWeight, FixedGrid, FloatWeight, LogGrid
from maskaq.quant.kinds import kind_of, layers
from maskaq.quant.packing import WIDTHS, pack, packed_bytes, unpack
from maskaq.quant.plan import QuantPlan, plan_of
from maskaq.quant.rotation import rotate, rotate_online_, rotated
from maskaq.quant.twin import deploy
from maskaq.storage import files, runfolder

FORMAT = 1
CONFIG, WEIGHTS, CARD = hub.FILES
PREPARATION = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")
"""How images are prepared: keys of timm's `pretrained_cfg`, where timm and `data_config` look for them."""

_EXPECTED = f"expected a folder of maskaq.save_pretrained, with {CONFIG} and {WEIGHTS}"
_AGAIN = "copy or download the folder again, or save the model again"


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    architecture: Mapping[str, Any] | None = None,
    labels: Sequence[str] | None = None,
    made: Mapping[str, Any] | None = None,
) -> Path:
    """Save a calibrated student or a deployed model as a folder for `from_pretrained`; an earlier one is replaced.

    Args:
        architecture: {"name": timm name, "args": arguments} that build the model; needed if it does not follow from
            timm's own record and the shapes.
        labels: class names, in place of those the model has.
        made: how the model was made, as values that JSON can hold; the card shows the keys that it knows.
    """
    root = _path(folder)
    _check_replaceable(root)
    deployed = as_deployed(model)
    if not isinstance(made, Mapping | None):
        raise ModelError(f'made: expected names and values such as {{"note": "..."}}, got {made!r:.80}')
    if architecture is not None:
        if not isinstance(architecture, Mapping):
            raise ModelError(f'architecture: expected {{"name": ..., "args": {{...}}}}, got {architecture!r:.80}')
        if reason := _misfit(architecture, deployed):
            raise ModelError(f"architecture {dict(architecture)!r} does not build this model: {reason}")
    elif (architecture := find_architecture(deployed)) is None:
        raise ModelError(
            f"it is not known what builds this {type(deployed).__name__}: give "
            'architecture={"name": ..., "args": {...}}, the timm name and the arguments it was made with'
        )
    write(deployed, root, architecture, labels=labels, made=made)
    return root


def from_pretrained(folder: str | Path, like: nn.Module | None = None) -> nn.Module:
    """The model in a folder of `save_pretrained`: deployed, in eval mode, on the CPU.

    `USER/REPO`, where there is no such folder, is a repository of the Hugging Face hub.

    Args:
        like: a full-precision model of the same architecture, for a folder that does not name one; it is not changed.
    """
    if hub.is_repository(folder):
        with hub.downloaded(str(folder)) as files_of_it:
            return from_pretrained(files_of_it, like)
    root = _path(folder)
    if not isinstance(like, nn.Module | None):
        raise PretrainedError(f"like: expected a full-precision model, got {like!r:.80}")
    config, tensors = _read(root)
    if config.get("timm") is None and like is None:
        raise PretrainedError(
            f"{root / CONFIG} names no architecture: give a model of the same one, "
            "maskaq.from_pretrained(folder, like=model)"
        )
    try:
        if like is None:
            _check_size(config["timm"], tensors)
        return _built(config, tensors, like)
    except MaskaqError as error:
        raise PretrainedError(f"{root} cannot be loaded: {error}") from error
    except Exception as error:  # a config that a program wrote can be wrong in more ways than can be listed
        raise PretrainedError(
            f"{root} cannot be loaded: {CONFIG} does not describe a maskaq model ({first_line(error)})"
        ) from error


def push(folder: str | Path, repository: str, *, private: bool = False) -> str:
    """Upload a saved model with its card to the Hugging Face hub; the address of the commit.

    Args:
        repository: USER/REPO; created if it does not exist.
    """
    from maskaq.artifact.card import bits_of

    config = read_config(folder, sound=True)
    name = (config.get("timm") or {}).get("name") or config["architectures"][0]
    return hub.upload(folder, repository, f"{name}, {bits_of(config)}", private=private)


def is_pretrained(folder: str | Path) -> bool:
    """Whether a folder looks like a saved model; `from_pretrained` checks that it is sound."""
    return os.path.isfile(os.path.join(folder, CONFIG))


def saved_digest(folder: str | Path) -> str | None:
    """SHA-256 of a saved model's weights, as recorded in its config; None if there is no saved model."""
    try:
        weights = _read_config(Path(folder)).get("weights")
    except PretrainedError:
        return None
    return weights.get("sha256") if isinstance(weights, dict) else None


def read_config(folder: str | Path, sound: bool = False) -> dict[str, Any]:
    """The config of a saved model; with `sound`, PretrainedError unless the folder holds what was saved, to the bit."""
    return _read(Path(folder))[0] if sound else _read_config(Path(folder))


def write(
    deployed: nn.Module,
    root: Path,
    architecture: Mapping[str, Any] | None,
    *,
    labels: Sequence[str] | None = None,
    made: Mapping[str, Any] | None = None,
) -> None:
    """Write without checks: whatever is at root is replaced, and the architecture may be unknown."""
    tensors = _stored(deployed)
    described = _described(deployed, architecture)
    labelled = _labelled(deployed, labels)
    sealed = described | {"id2label": labelled.get("id2label")}  # null if there are none, which is sealed too
    data = files.seal(tensors, {"config": json.dumps(sealed, sort_keys=True)})
    config = described | labelled
    config["weights"] = {"sha256": sha256(data).hexdigest(), "bytes": len(data)}
    config["weights"]["float32_bytes"] = 4 * sum(value.numel() for value in _float_state(deployed).values())
    config["made"] = _plain_json(made if made is not None else _remembered(deployed).get("made", {}), "made")
    config["maskaq_version"] = maskaq.__version__
    written = {WEIGHTS: data, CONFIG: files.json_bytes(config), CARD: _card(config)}
    files.write_folder_atomic(root, written)


def add_metrics(folder: str | Path, metrics: Mapping[str, Any]) -> None:
    """Write measured accuracies into the config and the card of a saved model."""
    root = Path(folder)
    config = _read_config(root)
    config["made"] = {**config["made"], "metrics": metrics_to_show(metrics)}
    files.write_json_atomic(root / CONFIG, config)
    files.write_bytes_atomic(root / CARD, _card(config))


def _card(config: dict[str, Any]) -> bytes:
    from maskaq.artifact.card import model_card  # it imports the tasks and their losses, which loading does not need

    return model_card(config).encode()


def metrics_to_show(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with the name of the image folder instead of its full path, which is private."""
    return {**metrics, "data": Path(str(metrics.get("data", ""))).name}


def as_deployed(model: nn.Module) -> nn.Module:
    """A deployed copy of a calibrated student, or of a deployed model."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a quantized model to save, got {type(model).__name__}")
    if any(isinstance(module, CodedWeight | FixedGrid) for module in model.modules()):
        return copy.deepcopy(model).cpu().eval().requires_grad_(False)
    deployed = deploy(model)
    if not any(isinstance(module, CodedWeight | FixedGrid) for module in deployed.modules()):
        raise ModelError(f"this {type(model).__name__} is not quantized: maskaq.quantize gives a model to save")
    return deployed


# ---- what the config says


def _described(model: nn.Module, architecture: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config of a model in JSON types; a model loaded from the folder must give the same config."""
    images = data_config(model)
    described = {
        "model_type": "maskaq",
        "format_version": FORMAT,
        "architectures": [type(model).__name__],
        "timm": None if architecture is None else {"name": architecture["name"], "args": architecture.get("args", {})},
        "num_labels": geometry(model).classes,
        **({} if geometry(model).task == "classification" else {"task": geometry(model).task}),
        **{key: images[key] for key in PREPARATION},
        "quantization_config": _scheme(model),
    }
    plain: dict[str, Any] = _plain_json(described, "architecture")
    return plain


def _scheme(model: nn.Module) -> dict[str, Any]:
    """Bits of every site, and the most common bits; null is a tensor that stays in float."""
    sites = {name: site for name, module in model.named_modules() if (site := _site(module))}
    ends = (*geometry(model).first, *geometry(model).last)
    inner = [site for name, site in sites.items() if name not in ends]
    weight_bits, input_bits = (_commonest(site[key] for site in inner if key in site) for key in _LINEAR)
    usual = dict(zip(_LINEAR, (weight_bits, input_bits), strict=True)) | dict.fromkeys(_PRODUCT, input_bits)
    unusual = {name: {key: bits for key, bits in site.items() if bits != usual[key]} for name, site in sites.items()}
    return {
        "quant_method": "maskaq",
        "weight_bits": weight_bits,
        "activation_bits": input_bits,
        "weights": {
            "granularity": "output channel",
            "symmetric": True,
            "codes": "-2^(bits-1) to 2^(bits-1) - 1",
            "value": "code * scale",
            "packing": "code + 2^(bits-1), dense, from the lowest bit of the first byte on",
        },
        "activations": {
            "granularity": "tensor",
            "symmetric": False,
            "codes": "0 to 2^bits - 1",
            "value": "(code - zero_point) * scale",
            "dynamic": False,
        },
        **_other_grids(model),
        **({"rotate": list(names)} if (names := rotated(model).names) else {}),
        **({"mlp": "relu"} if has_relu(model) else {}),
        "exceptions": {name: site for name, site in unusual.items() if site},
        "sites": sites,
        **({} if (plan := plan_of(model)) is None else {"plan": plan.to_dict()}),
    }


def _other_grids(model: nn.Module) -> dict[str, Any]:
    """The activations whose grid is not uniform or not per tensor; empty if there are none."""
    grids = {name: module for name, module in model.named_modules() if isinstance(module, FixedGrid)}
    log = {name: grid for name, grid in grids.items() if isinstance(grid, LogGrid)}
    heads = [name for name, grid in grids.items() if grid.scale.dim()]
    shifted = any(grid.site is not None and grid.site.signed for grid in log.values())
    value = "(levels[code] - zero_point) * scale" if shifted else "levels[code] * scale"  # the latter as in 0.3.0
    rules = {"levels": "2^bits integers from 0 to 255, rising", "value": value}
    return ({"log_activations": rules | {"grids": list(log)}} if log else {}) | (
        {"per_head_activations": {"granularity": "head", "grids": heads}} if heads else {}
    )


_LINEAR, _PRODUCT = ("weight_bits", "input_bits"), ("a_bits", "b_bits")


def _site(module: nn.Module) -> dict[str, int | None] | None:
    """Bits of a deployed layer; None for any other module."""
    kind = kind_of(module)
    if kind is None or not isinstance(module, kind.deployed):
        return None
    return {f"{slot}_bits": getattr(kind.part(module, slot), "bits", None) for slot in kind.slots}


def _commonest(bits: Any) -> int | None:
    (found,) = Counter(bits).most_common(1) or [(None, 0)]
    return found[0]


def _labelled(model: nn.Module, labels: Sequence[str] | None) -> dict[str, Any]:
    """id2label and label2id, where the class names are known."""
    classes = geometry(model).classes
    names = class_names(model)
    if labels is not None:
        is_ordered = isinstance(labels, Iterable) and not isinstance(labels, str | Mapping | Set)
        names = list(labels) if is_ordered else []
        if not is_ordered or not all(isinstance(name, str) for name in names):
            raise ModelError(f"labels: expected a list of names, one for each of {classes} classes, got {labels!r:.80}")
    if names is None:
        return {}
    if len(names) != classes:
        raise ModelError(f"labels: expected {classes}, one for each class, got {len(names)}")
    id2label = {str(i): str(name) for i, name in enumerate(names)}
    label2id = _label_ids(id2label)
    return {"id2label": id2label} | ({} if label2id is None else {"label2id": label2id})


def _label_ids(id2label: Any) -> dict[str, int] | None:
    """label2id, the inverse of id2label; None if two classes have one name, as the two cranes of ImageNet."""
    if not isinstance(id2label, dict) or not id2label:
        return None
    found = {str(name): int(i) for i, name in id2label.items()}
    return found if len(found) == len(id2label) else None


def _plain_json(value: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ModelError(f"{what}: expected values that JSON can hold ({error})") from error


# ---- what builds the model


def find_architecture(deployed: nn.Module, given: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The name and arguments, given or known, that build a deployed model; None if none do."""
    record = record_of(deployed)
    candidates = [given, _remembered(deployed).get("timm"), getattr(deployed, "architecture", None)]
    try:
        if isinstance(deployed, HuggingFace):
            candidates.append(architecture_of(deployed, ""))
        elif record.get("architecture"):
            state = _float_state(deployed)
            size = geometry(deployed).image_size
            candidates.append(architecture_of_state(state, str(record["architecture"]), image_size=size))
    except MaskaqError:  # a name that timm does not know
        pass
    return next((dict(found) for found in candidates if found and not _misfit(found, deployed)), None)


def _remembered(model: nn.Module) -> dict[str, Any]:
    """The config of a model that came from `from_pretrained`."""
    config = getattr(model, "maskaq_config", None)
    return config if isinstance(config, dict) else {}


def _misfit(architecture: Mapping[str, Any], deployed: nn.Module) -> str:
    """Why an architecture does not build a model with bit-identical outputs; empty if it does."""
    try:
        name = architecture["name"]
        args = dict(architecture.get("args", {}))
        exposed = expose(load_shape(name, args), geometry(deployed).task)
        shapes = {key: tuple(value.shape) for key, value in exposed.state_dict().items()}
        own = {key: tuple(value.shape) for key, value in _float_state(deployed).items()}
        if shapes != own:
            key = next(key for key in (*own, *shapes) if own.get(key) != shapes.get(key))
            return f"{key} would be {shapes.get(key, 'absent')} and is {own.get(key, 'absent')}"
        built = _built(_described(deployed, architecture), _stored(deployed), None)
    except (KeyError, TypeError) as error:
        return f"expected name and args ({error!r})"
    except MaskaqError as error:
        return str(error)
    spec = geometry(deployed)
    image = torch.linspace(-2, 2, spec.channels * spec.image_size[0] * spec.image_size[1])
    image = image.sin().view(1, spec.channels, *spec.image_size)
    with torch.no_grad():
        pairs = zip(tensors_of(built(image)), tensors_of(deployed(image)), strict=True)
        same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return "" if same else "its shapes fit, its outputs differ: an argument that changes no shape is missing"


def _check_size(architecture: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """ModelError for arguments that ask for a larger model than the tensors can fill, before it is built."""
    for key, value in architecture["args"].items():
        numbers = list(value) if isinstance(value, list | tuple) else []
        blocks = sum(n for n in numbers or [value] if isinstance(n, int)) if key.startswith("depth") else 0
        if max(len(numbers), blocks) > len(tensors):  # a block has several tensors
            raise ModelError(
                f"{key} in {CONFIG}: expected at most {len(tensors)}, as many as {WEIGHTS} has tensors, found "
                f"{_short(json.dumps(value))}"
            )
    if architecture["name"] in zoo.embedded_names():
        return
    shape = load_shape(architecture["name"], dict(architecture["args"]))
    wanted = sum(value.numel() for value in shape.state_dict().values())
    room = 4 * sum(value.nbytes for value in tensors.values())  # codes have 2 bits or more
    if wanted > room:
        raise ModelError(
            f"{CONFIG} describes a model of {wanted} numbers: expected at most {room}, which {WEIGHTS} has bytes for"
        )


def _built(config: Mapping[str, Any], tensors: Mapping[str, Tensor], like: nn.Module | None) -> nn.Module:
    """Build the deployed model of a config and load its tensors."""
    with torch.random.fork_rng(devices=[]):  # building draws random weights, which are replaced
        model = rebuild(config["timm"]) if like is None else copy.deepcopy(like)
    if (classes := getattr(model, "num_classes", None)) is not None:
        update_record_(model, num_classes=classes)
    update_record_(model, **{key: tuple(v) if isinstance(v := config[key], list) else v for key in PREPARATION})
    if config.get("id2label"):
        update_record_(model, label_names=[config["id2label"][str(i)] for i in range(config["num_labels"])])
    model = expose(model, config.get("task", "classification"))
    model = rotate_online_(rotate(model, config["quantization_config"].get("rotate", ()), blank=True), blank=True)
    if config["quantization_config"].get("mlp") == "relu":
        put_relu_(model)
    _deploy_blank(model, config["quantization_config"])
    model = model.float().eval().requires_grad_(False)  # float32, whatever torch's default is
    again = _described(model, config["timm"])
    if different := _differences(again, {key: config.get(key) for key in again}):
        raise ModelError(f"{CONFIG} contradicts the model that it names: {different}")
    _fill(model, tensors)
    model.maskaq_config = {key: value for key, value in config.items() if key != "weights"}  # type: ignore[assignment]
    return model


def _deploy_blank(model: nn.Module, scheme: Mapping[str, Any]) -> None:
    """Replace every linear layer, convolution and product of an exposed model by an empty deployed layer."""
    sites = scheme["sites"]
    found = {name: (module, kind) for name, (module, kind) in layers(model).items() if type(module) is kind.float_type}
    plan = QuantPlan.from_dict(scheme["plan"]) if "plan" in scheme else QuantPlan()
    if found.keys() != sites.keys():
        odd = sorted(found.keys() ^ sites.keys())
        raise ModelError(f"{len(odd)} sites are in the model or in {CONFIG} alone, {odd[0]!r} first")
    for name, (module, kind) in found.items():
        keys = [f"{slot}_bits" for slot in kind.slots]
        site = sites[name]
        if not isinstance(site, dict) or site.keys() != set(keys):
            raise ModelError(f"site {name!r}: expected {' and '.join(keys)}, found {site!r}")
        for key, bits in site.items():
            if bits is not None and (type(bits) is not int or bits not in WIDTHS):
                raise ModelError(f"site {name!r}: expected {key} from 2 to 8 or null, found {bits!r}")
        for slot in kind.slots:
            if (planned := plan.get(name, slot)) is not None and planned.bits != site[f"{slot}_bits"]:
                raise ModelError(f"site {name!r}: sites and plan of {CONFIG} differ in the bits of {slot}")
        bits_of = (site[key] for key in keys)
        parts = (None if b is None else (b, plan.get(name, slot)) for b, slot in zip(bits_of, kind.slots, strict=True))
        replace_module(model, name, kind.deployed.blank(module, *parts))


# ---- tensors


def _coded(model: nn.Module) -> dict[str, CodedWeight]:
    """Name of each tensor of codes in the state dict -> the module that owns it."""
    modules = model.named_modules(remove_duplicate=False)  # CoaT's blocks share their position convolutions
    return {f"{name}.codes": module for name, module in modules if isinstance(module, CodedWeight)}


def _stored(deployed: nn.Module) -> dict[str, Tensor]:
    """The tensors of the file: codes packed, the rest as it is."""
    coded = _coded(deployed)
    stored = {}
    for name, value in deployed.state_dict().items():
        if name in coded:
            stored[name] = pack(value, coded[name].bits)
            continue
        if value.dtype not in (torch.float32, torch.int64):  # int64: tables of indices
            raise ModelError(f"{name}: expected float32, found {value.dtype}; a model is saved in the precision it has")
        if not bool(torch.isfinite(value).all()):
            raise ModelError(f"{name} has NaN or Inf: set the ranges first (maskaq.init_ranges_), or check the weights")
        stored[name] = value
    return stored


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of a file into a blank deployed model; ModelError unless all are there and fit."""
    coded = _coded(model)
    own = model.state_dict()
    expected = {name: (value.dtype, tuple(value.shape)) for name, value in own.items()}
    expected |= {name: (torch.uint8, (packed_bytes(owner.codes.numel(), owner.bits),)) for name, owner in coded.items()}
    found = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    if expected != found:
        name = next(name for name in (*expected, *found) if expected.get(name) != found.get(name))
        count = sum(expected.get(name) != found.get(name) for name in expected | found)
        raise ModelError(
            f"{count} tensors of {WEIGHTS} do not fit {CONFIG}, first {name!r}: expected "
            f"{_words(expected.get(name))}, found {_words(found.get(name))}"
        )
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ModelError(f"{name!r} in {WEIGHTS} has NaN or Inf: expected numbers")
    unpacked = {name: unpack(tensors[name], owner.bits, owner.codes.shape) for name, owner in coded.items()}
    model.load_state_dict({**tensors, **unpacked})


def _words(tensor: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{str(tensor[0]).removeprefix('torch.')} {tensor[1]}"


def _float_state(deployed: nn.Module) -> dict[str, Tensor]:
    """The tensors of a deployed model that correspond to those of the full-precision one, under its names."""
    state = dict(deployed.state_dict())
    for name, module in deployed.named_modules(remove_duplicate=False):
        if isinstance(module, FixedGrid):
            for own, _ in module.named_buffers():
                del state[f"{name}.{own}"]
        elif isinstance(module, CodedWeight):
            del state[f"{name}.scale"]
            state[name] = state.pop(f"{name}.codes")
        elif isinstance(module, FloatWeight):
            state[name] = state.pop(f"{name}.values")
    return rotated(deployed).original_keys(state)


# ---- reading


def _read(root: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a folder, verified to have been saved together."""
    config = _read_config(root)
    path = root / WEIGHTS
    data = _read_bytes(path)
    recorded = config.get("weights")
    expected = recorded.get("sha256") if isinstance(recorded, dict) else None
    found = sha256(data).hexdigest()
    if expected != found:
        raise PretrainedError(
            f"{path} is not the file that was saved: {CONFIG} expects sha256 {str(expected)[:12]}..., found "
            f"{found[:12]}... in {len(data)} bytes; {_AGAIN}"
        )
    try:
        tensors, metadata = files.unseal(data, path, _AGAIN)
        described = json.loads(metadata["config"])
    except RunFolderError as error:
        raise PretrainedError(str(error)) from error
    except (KeyError, ValueError, RecursionError):
        described = None
    if not isinstance(described, dict):
        raise PretrainedError(f"{path} was not saved by save_pretrained: it does not say what it holds; {_AGAIN}")
    if "id2label" in described:  # else it was saved by maskaq 0.1.0
        described["label2id"] = _label_ids(described["id2label"])
    if different := _differences(described, {key: config.get(key) for key in described}):
        raise PretrainedError(f"{root / CONFIG} was changed after the model was saved: {different}; {_AGAIN}")
    return config, tensors


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """In words, the first value in which two trees differ, and the number of such values; empty if there is none."""
    was, now = ({key: json.dumps(value) for key, value in runfolder.dotted(tree).items()} for tree in (expected, found))
    keys = [key for key in was | now if was.get(key) != now.get(key)]
    if not keys:
        return ""
    shown = [_short(side.get(keys[0], "nothing")) for side in (was, now)]
    more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
    return f"{keys[0]}: expected {shown[0]}, found {shown[1]}{more}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _read_config(root: Path) -> dict[str, Any]:
    path = root / CONFIG
    if not os.path.isdir(root):
        what = "is a file" if os.path.exists(root) else "does not exist"
        raise PretrainedError(f"{root} {what}: {_EXPECTED}")
    try:
        config = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path} is not JSON ({error}): {_AGAIN}") from error
    if not isinstance(config, dict) or config.get("model_type") != "maskaq":
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise PretrainedError(
            f'{path} is not of a maskaq model: expected model_type "maskaq", found {_short(json.dumps(found))}. A '
            f"transformers model is given as hf:{root}"
        )
    if type(version := config.get("format_version")) is not int or version != FORMAT:
        raise PretrainedError(
            f"{path} has format_version {_short(json.dumps(version))}, maskaq {maskaq.__version__} reads {FORMAT}: "
            f"use the maskaq that saved it ({_short(str(config.get('maskaq_version', 'unknown')))})"
        )
    if not isinstance(made := config.setdefault("made", {}), dict):
        raise PretrainedError(f"{path}: expected made to be an object, found {_short(json.dumps(made))}")
    return config


def _read_bytes(path: Path) -> bytes:
    try:
        return files.read_regular(path)
    except FileNotFoundError:
        raise PretrainedError(f"{path} is missing: {_EXPECTED}") from None
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error.strerror}") from error


def _path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder) or "\0" in os.fspath(folder):
        raise PretrainedError(f"expected the path of a folder, got {folder!r}")
    return Path(folder)


def _check_replaceable(root: Path) -> None:
    """PretrainedError if the target exists and is not an earlier saved model."""
    if not os.path.exists(root) or (root.is_dir() and not any(root.iterdir())):
        return
    others = [path.name for path in root.iterdir() if path.name not in (CONFIG, WEIGHTS, CARD)] if root.is_dir() else []
    try:
        config = json.loads(_read_bytes(root / CONFIG))
    except (ValueError, RecursionError, PretrainedError):
        config = None
    if not isinstance(config, dict) or config.get("model_type") != "maskaq" or others:
        also = f" (it also holds {', '.join(sorted(others)[:3])})" if others else ""
        raise PretrainedError(f"{root} is not a saved maskaq model alone{also}: choose another folder, or empty it")
