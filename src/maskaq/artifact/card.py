"""The model card of a saved model, from its config alone: what it is, how good, how to load it, how it was made."""

from typing import Any

from maskaq.tasks import TASKS, Task

REAL_IMAGES = "REAL images: an upper bound, NOT data-free"


def model_card(config: dict[str, Any]) -> str:
    """The text of README.md, in the format of the Hugging Face hub."""
    parts = [_front_matter(config), _what(config), _accuracy(config), _loading(config), _quantization(config)]
    return "\n".join(part for part in [*parts, _made(config), _limits()] if part)


def _name(config: dict[str, Any]) -> str:
    return str((config["timm"] or {}).get("name") or config["architectures"][0])


def _kind(config: dict[str, Any]) -> str:
    """The class of the model; of transformers the one that our wrapper holds."""
    name = _name(config)
    return name.removeprefix("hf:") if name.startswith("hf:") else str(config["architectures"][0])


def _data_free(config: dict[str, Any]) -> bool | None:
    """Whether the model was made without real data, according to its config; None if the config does not record it."""
    recorded = config["made"].get("data_free")
    return recorded if isinstance(recorded, bool) else None


def caveat_of(config: dict[str, Any]) -> str:
    """A warning for result tables if the model was calibrated on real images; empty if they were synthetic."""
    return REAL_IMAGES if _data_free(config) is False else ""


def bits_of(config: dict[str, Any]) -> str:
    """The bit widths of most layers, as wXaY."""
    scheme = config["quantization_config"]
    return f"w{scheme['weight_bits']}a{scheme['activation_bits']}"


_PIPELINES = {
    "classification": "image-classification",
    "features": "image-feature-extraction",
    "segmentation": "image-segmentation",
    "detection": "object-detection",
}
"""Task -> what the hub calls it."""


def _front_matter(config: dict[str, Any]) -> str:
    pipeline = _PIPELINES[_task(config).name]
    library = "transformers" if _name(config).startswith("hf:") else "timm"
    lines = [f"library_name: {library}", f"pipeline_tag: {pipeline}"]
    tags = [pipeline, library, "quantization", "maskaq"] + ["data-free"] * (_data_free(config) is True)
    lines += ["tags:", *(f"- {tag}" for tag in tags)]
    name = _name(config)
    if "." in name:  # with its tag it is the name of one set of weights, which the hub has
        lines += [f"base_model: timm/{name}", "base_model_relation: quantized"]
    if _results(config) and config["num_labels"]:
        lines += ["metrics:", "- accuracy"]
    return "\n".join(["---", *lines, "---", ""])


def _what(config: dict[str, Any]) -> str:
    weights = config["weights"]
    channels, height, width = config["input_size"]
    before, after = weights["float32_bytes"], weights["bytes"]
    how = {True: " without an image of its training data", False: f" on {REAL_IMAGES}", None: ""}[_data_free(config)]
    smaller = f"{before / after:.1f} times smaller than the {before / 1e6:.2f} MB of the model in float32"
    labels = config["num_labels"]
    gives = f"with {labels} classes" if labels else "that gives features: an embedding of the image"
    return f"""# {_name(config)}, {bits_of(config)}

A {_kind(config)} for images of {height} x {width} with {channels} channels, {gives},
quantized by maskaq{how}.
`model.safetensors` has {after / 1e6:.2f} MB, {smaller}.
"""


def _results(config: dict[str, Any]) -> dict[str, Any]:
    """Row title -> figures, for the rows that were measured. Entries that cannot be read are skipped."""
    rows = _object(_object(config["made"].get("metrics")).get("accuracy"))
    return {name: row for name, row in rows.items() if _task(config).is_row(row)}


def _task(config: dict[str, Any]) -> Task:
    return TASKS.get(str(config.get("task")), TASKS["classification"])


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _accuracy(config: dict[str, Any]) -> str:
    rows = _results(config)
    if not rows:
        return "## Accuracy\n\nNot measured yet: `maskaq evaluate FOLDER --data IMAGES` does.\n"
    data = config["made"]["metrics"].get("data")
    titles = [column.title for column in _task(config).columns.values()]
    lines = [
        "## Accuracy",
        "",
        f"On n images of `{data}`, with the standard error of {titles[0].removesuffix(' %')}:",
        "",
    ]
    lines += [f"| model | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    lines += [f"| {name} | {' | '.join(_task(config).cells(row))} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def _loading(config: dict[str, Any]) -> str:
    _, height, width = config["input_size"]
    like = "" if config["timm"] else ", like=model"
    why = "" if config["timm"] else "\n`model` is one of the same architecture, which this folder does not name.\n"
    return f"""## Use

```python
import maskaq

model = maskaq.from_pretrained("FOLDER"{like})  # an nn.Module in eval mode
```
{why}
Images: {config["interpolation"]} resize, {config["crop_mode"]} crop of {config["crop_pct"]} to {height} x {width},
normalised with mean {config["mean"]} and standard deviation {config["std"]}.
"""


def _quantization(config: dict[str, Any]) -> str:
    scheme = config["quantization_config"]
    lines = [
        "## Quantization",
        "",
        f"* Weights: {scheme['weight_bits']} bits, symmetric, one scale for each output channel.",
        f"* Activations at the input of every linear map and both operands of both attention products: "
        f"{scheme['activation_bits']} bits, one scale and zero point for each tensor.",
        "* In float: biases, norms, embeddings, softmax.",
    ]
    if grids := _object(scheme.get("log_activations")).get("grids"):
        what = "of the softmax or behind GELU"
        lines.append(f"* {len(grids)} activations, {what}, on a logarithmic grid: levels are integers from 0 to 255.")
    if grids := _object(scheme.get("per_head_activations")).get("grids"):
        lines.append(f"* {len(grids)} operands of attention products: one scale and zero point for each head.")
    if scheme.get("rotate"):
        names = ", ".join(scheme["rotate"])
        lines.append(f"* Channels rotated before they are quantized, where the structure allows it: {names}.")
    for name, site in scheme["exceptions"].items():
        words = (f"{key.replace('_', ' ')}: {'float' if bits is None else bits}" for key, bits in site.items())
        lines.append(f"* Exception `{name}`: {', '.join(words)}.")
    return "\n".join(lines) + "\n"


def _made(config: dict[str, Any]) -> str:
    made, lines = config["made"], ["## How it was made", ""]
    if made.get("command"):
        lines += ["```bash", str(made["command"]), "```", ""]
    entries = {key: made.get(key) for key in ("seed", "commit", "device", "platform")}
    entries["versions"] = ", ".join(f"{name} {version}" for name, version in _object(made.get("versions")).items())
    lines += [f"* {key}: {value}" for key, value in entries.items() if value not in (None, "")]
    if made.get("recipe"):
        lines.append("* recipe: `made.recipe` in `config.json`")
    lines.append(f"* saved with maskaq {config['maskaq_version']}")
    lines += _handover(_object(made.get("handover")))
    return "\n".join(lines) + "\n"


def _handover(found: dict[str, Any]) -> list[str]:
    """What calibration did to the model, on images that it did not see."""
    figures = [found.get(key) for key in ("start", "end")]
    if not all(isinstance(figure, int | float) for figure in figures):
        return []
    which = {"start": "**the model before calibration, which was better**", "end": "the calibrated model"}
    return [
        f"* handed over: {which.get(str(found.get('kept')), 'not recorded')} "
        f"({found.get('distance', 'KL to the full-precision model')} on "
        f"{found.get('images')} synthetic images that calibration did not see: {figures[0]:.4g} before, "
        f"{figures[1]:.4g} after)"
    ]


def _limits() -> str:
    return """## Limits

Loaded with torch it computes in float32 on exactly the values that the integer codes stand for: as accurate as integers
and as small on disk, but no faster than the full-precision model.
"""
