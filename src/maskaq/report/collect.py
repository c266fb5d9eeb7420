"""Collect what a report needs from the models: predictions, attention, sites and sensitivity on synthetic images.

This happens once, at the end of a run, while its models are in memory: later the folder alone is enough.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskaq.artifact.saved import saved_digest
from maskaq.errors import RunFolderError
from maskaq.images.masks import mask_size, top_patches
from maskaq.images.sets import SyntheticSet, to_bytes, to_pixels
from maskaq.images.stored import load_images
from maskaq.images.synthesis import Synthesizer
from maskaq.losses.attention import masked_difference
from maskaq.models import class_names, geometry
from maskaq.models.structure import tensors_of
from maskaq.models.taps import taps
from maskaq.progress import Progress
from maskaq.quant.inspection import inspect_model
from maskaq.quant.kinds import layers
from maskaq.quant.layers import QuantMatmul, QuantWeightMixin
from maskaq.quant.plan import plan_of
from maskaq.quant.quantizers import Quantizer
from maskaq.quant.twin import frozen, in_float, quantizers
from maskaq.recipe.schema import Recipe
from maskaq.report.information import Figure, information_report, theorem_2_report
from maskaq.schedules import spread
from maskaq.shapes import Geometry
from maskaq.storage import files
from maskaq.storage.runfolder import QUANTIZED, RunFolder
from maskaq.tasks import Task, task_of
from maskaq.tasks.outputs import joined, on_cpu, rows
from maskaq.tasks.task import Outputs

FACTS_FILE, TENSORS_FILE = "report.json", "report.safetensors"
FORMAT = 1

SAMPLED = 512  # images that predictions and attention distances are averaged over
SHOWN = 64  # images in the grid
CHOSEN = 8  # images whose attention and rounds are shown
PROBES = 16  # images that pass the sites, and each quantized layer
_SIDE = 160  # px of the longer side of an image in the grid
SMALL_SIDE = 112  # px where there are many more: rounds, trajectories
_ROUNDS = 8  # at most so many rounds are shown
_VALUES = 1 << 16  # values of one activation that its site is judged by
_BATCH = 32

Facts = dict[str, Any]

_FORM = {
    "images": {
        "round": int,
        "shown": [
            {"number": int, "label": int, "teacher?": int, "student?": int, "confidence?": float, "similarity?": float}
        ],
        "rounds": [{"round": int, "places": [int]}],
        "names": {"*": str},
        "sampled?": int,
        "agreement?": {"*": float},
    },
    "model?": {"class": str, "parameters": int, "image_size": [int], "classes": int, "task?": str},
    "attention?": {
        "map": str,
        "layers": [{"name": str, "grid": [int]}],
        "models": [str],
        "distance": {"*": {"relative": [float], "masked": [float]}},
    },
    "sites?": [{"site": str, "role": str, "bits": int, "error": float, "saturated": float, "levels": int}],
    "sizes?": [{"name": str, "float_bytes": int, "quantized_bytes": int}],
    "sensitivity?": [{"layer": str, "kl": float, "agreement": float}],
    "information?": {"*": {"value": float, "meaning": str}},
}
"""Schema of the facts that a page computes with. "x?" may be absent or null; a float may be null."""


@dataclass(frozen=True)
class Collected:
    """`facts` are plain values, one entry for each part of the page; None is a part that could not be computed.

    An image of label -1 was made for no class; P's confidence is then of the class that P itself predicts.
    """

    facts: Facts
    tensors: dict[str, Tensor]


@torch.no_grad()
def collect(
    recipe: Recipe,
    seed: int,
    rounds: Mapping[int, SyntheticSet],
    models: Mapping[str, nn.Module],
    progress: Progress | None = None,
    labelled: SyntheticSet | None = None,
) -> Collected:
    """Collect all that a report shows of the models.

    Args:
        rounds: the first images of each round.
        labelled: images with several of each label, which information about labels is measured on; by default the
            first images of the last round.
        models: `teacher` is P: without it there are no sizes, no predictions, no attention and no sensitivity.
            `searched` is Q before calibration. `student` is Q after it: without it there are no sites.
    """
    began = time.monotonic()
    progress = progress or Progress()
    teacher, ptq, student = (models.get(name) for name in ("teacher", "searched", "student"))
    if not recipe.makes_images:  # noise, dead leaves or real images: they have no target class
        rounds = {
            round_index: replace(images, labels=torch.full_like(images.labels, -1))
            for round_index, images in rounds.items()
        }
    images = rounds[max(rounds)]
    facts: Facts = dict.fromkeys(("model", "attention", "sites", "sizes", "sensitivity", "information"))
    facts["images"], tensors = _pictures(rounds)
    if student is not None:
        facts["sites"] = _sites(student, images[:PROBES])
    if teacher is not None:
        facts["model"] = _model(teacher)
        facts["sizes"] = [
            vars(row) for row in inspect_model(teacher, recipe, plan_of(student) if student is not None else None).rows
        ]
    if teacher is not None and ptq is not None and student is not None:
        progress.stage("measure layers for the report", passes(student, len(images)))
        first = images[:SAMPLED]
        seen = {"teacher": _look(teacher, first, progress, recipe)}
        expected = seen["teacher"].outputs
        seen |= {n: _look(models[n], first, progress, recipe, expected) for n in ("searched", "student")}
        _add_predictions(facts["images"], seen, task_of(teacher), class_names(teacher) or [])
        tensors |= _drawn({name: models[name] for name in seen}, images[:CHOSEN])
        has_maps = bool(geometry(teacher).layers)
        if has_maps:
            facts["attention"], maps = _attention(recipe, seed, max(rounds), images, teacher, student, seen)
            tensors |= maps
        facts["sensitivity"] = _sensitivity(ptq, images[:PROBES], rows(expected, slice(PROBES)), progress)
        if task_of(teacher).name == "classification" and has_maps:
            sample = seen["teacher"], seen["student"], first.labels
            if labelled is not None and recipe.makes_images:
                p, q = (_look(model, labelled, Progress(), recipe) for model in (teacher, student))
                sample = p, q, labelled.labels
            facts["information"] = information(*sample)
    facts = {"format": FORMAT, "seconds": round(time.monotonic() - began, 2), **facts}
    return Collected(finite(facts), tensors)


def passes(student: nn.Module, images: int) -> int:
    """Number of forward passes: all images through three models, and the probes once per quantized layer."""
    layers = sum(isinstance(module, QuantWeightMixin | QuantMatmul) for module in student.modules())
    return 3 * min(SAMPLED, images) + (1 + layers) * min(PROBES, images)


@torch.no_grad()
def seconds_per_pass(student: nn.Module) -> float:
    """Seconds of a forward pass of the student per image, measured on a few images."""
    device = next(student.parameters()).device
    spec = geometry(student)
    count = 4
    images = torch.zeros(count, spec.channels, *spec.image_size, device=device)
    with frozen(student):
        for _ in range(2):  # the first pass sets up
            began = time.monotonic()
            tensors_of(student(images))[0].sum().item()
    return (time.monotonic() - began) / count


def write(folder: str | Path, collected: Collected) -> None:
    """Write to the run folder; the facts last, as their presence means that the tensors are complete."""
    files.write_tensors(Path(folder) / TENSORS_FILE, collected.tensors)
    saved = {"saved": saved_digest(Path(folder) / QUANTIZED)}
    files.write_json_atomic(Path(folder) / FACTS_FILE, collected.facts | saved)


def read(run: RunFolder) -> Collected | None:
    """What `write` put there; None where nothing was collected yet of the model that is in the folder now."""
    if not run.path(FACTS_FILE).exists() or not run.path(TENSORS_FILE).exists():
        return None
    facts = run.read_json(FACTS_FILE)
    remedy = "delete it, and `maskaq report` collects it again"
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or not isinstance(facts.get("images"), dict):
        raise RunFolderError(f"{run.path(FACTS_FILE)} is damaged (no images, or not format {FORMAT}): {remedy}")
    if wrong := files.misfit(facts, _FORM):
        raise RunFolderError(f"{run.path(FACTS_FILE)} is damaged ({wrong}): {remedy}")
    if run.format > 1 and facts.get("saved") != saved_digest(run.path(QUANTIZED)):
        return None
    return Collected(facts, files.read_tensors(run.path(TENSORS_FILE), remedy)[0])


def _first_of(run: RunFolder, round_index: int, count: int) -> SyntheticSet | None:
    """The images of a round with the smallest numbers, from as few shards as hold them; None where there are none."""
    found: list[SyntheticSet] = []
    for shard in run.shards(round_index):
        if sum(map(len, found)) < count:
            found.append(load_images(run, round_index, shard))
    return SyntheticSet.concatenate(found)[:count] if found else None


def images_of_rounds(run: RunFolder, recipe: Recipe) -> dict[int, SyntheticSet]:
    """Round -> its first images: many of the latest, which everything is measured on, few of those before."""
    there = [round_index for round_index in range(len(recipe.rounds)) if run.shards(round_index)]
    counts = {round_index: SAMPLED if round_index == there[-1] else CHOSEN for round_index in there}
    found = {round_index: _first_of(run, round_index, count) for round_index, count in counts.items()}
    return {round_index: images for round_index, images in found.items() if images is not None and len(images)}


def images_per_label(run: RunFolder, recipe: Recipe, classes: int) -> SyntheticSet | None:
    """About as many images of the last round as are sampled, all that there are of each label, of the first labels.

    Of many classes, the first images have one label each, and tell nothing about labels. None where they have several,
    or where no label has two images.
    """
    config = recipe.synthesis
    per_label = config.images // max(1, classes)
    there = [round_index for round_index in range(len(recipe.rounds)) if run.shards(round_index)]
    if not there or per_label < 2 or config.images <= SAMPLED or SAMPLED // classes >= per_label:
        return None
    labels = max(1, SAMPLED // per_label)
    numbers = [n for n in range(config.images) if n % classes < labels]  # classes are taken in turn
    shards = sorted({number // config.batch for number in numbers} & set(run.shards(there[-1])))
    found = SyntheticSet.concatenate(load_images(run, there[-1], shard) for shard in shards)
    return found[torch.isin(found.indices, torch.tensor(numbers))]


# ---- images


def _pictures(rounds: Mapping[int, SyntheticSet]) -> tuple[Facts, dict[str, Tensor]]:
    """Thumbnails of the latest round, and of its first images in the rounds before."""
    last = max(rounds)
    shown = rounds[last][:SHOWN]
    numbers = shown.indices[:CHOSEN]
    tensors = {"images": thumbnails(shown.images, _SIDE), "chosen": shown.images[:CHOSEN]}
    earlier = []
    for round_index in spread(sorted(rounds), _ROUNDS):
        images = rounds[round_index]
        row, column = (numbers[:, None] == images.indices).nonzero(as_tuple=True)  # one may have been lost
        tensors[f"round_{round_index:02}"] = thumbnails(images.images[column], SMALL_SIDE)
        earlier.append({"round": round_index, "places": row.tolist()})
    listed = [
        {"number": number, "label": label}
        for number, label in zip(shown.indices.tolist(), shown.labels.tolist(), strict=True)
    ]
    return {"round": last, "shown": listed, "rounds": earlier, "names": {}}, tensors


def thumbnails(images: Tensor, side: int) -> Tensor:
    """uint8 images made smaller until no side is longer."""
    factor = side / max(images.shape[-2:])
    if factor >= 1 or not len(images):
        return images.clone()
    small = F.interpolate(to_pixels(images), scale_factor=factor, mode="bilinear", antialias=True)
    return to_bytes(small)


# ---- predictions and attention


@dataclass(frozen=True)
class Seen:
    """Outputs and attention of a model for n images."""

    outputs: Outputs
    """What the model gives, by name."""
    received: dict[str, list[Tensor]]
    """`scores` and `probs` -> (n, N) attention received by each patch, one per layer, heads averaged."""
    regions: Tensor
    """(n, D) features of the informative region (Eq. 4): head outputs of the last layer, mean over its k_ir patches.

    Empty where no attention is over patches of the image.
    """


def _look(
    model: nn.Module, images: SyntheticSet, progress: Progress, recipe: Recipe, expected: Outputs | None = None
) -> Seen:
    device = next(model.parameters()).device
    spec = geometry(model).to(device)
    pixels = (spec.normalise(to_pixels(part.to(device))) for part in images.images.split(_BATCH))
    return look(model, pixels, progress, recipe, expected)


@torch.no_grad()
def look(
    model: nn.Module,
    batches: Iterable[Tensor],
    progress: Progress,
    recipe: Recipe,
    expected: Outputs | None = None,
) -> Seen:
    """What a model makes of normalised images.

    Args:
        expected: the teacher's outputs for them.
    """
    task = task_of(model)
    device = next(model.parameters()).device
    spec = geometry(model).to(device)
    outputs: list[dict[str, Tensor]] = []
    done = 0
    regions: list[Tensor] = []
    received: dict[str, list[list[Tensor]]] = {"scores": [], "probs": []}
    with frozen(model), taps(model, "scores_received", "probs_received", "heads") as seen:
        for part in batches:
            which = slice(done, done := done + len(part))
            given = None if expected is None else {n: x.to(device) for n, x in rows(expected, which).items()}
            outputs.append(on_cpu(task.run(model, part.to(device), given)))
            for kind, found in received.items():
                found.append([maps.cpu() for maps in spec.patch_attention(seen[f"{kind}_received"])])
            if spec.layers:
                regions.append(_region_features(spec, received[recipe.synthesis.map][-1], seen["heads"][-1], recipe))
            progress.advance(len(part))
    attention = {kind: [torch.cat(maps) for maps in zip(*found, strict=True)] for kind, found in received.items()}
    return Seen(joined(outputs), attention, torch.cat(regions) if regions else torch.empty(0))


def _region_features(spec: Geometry, attention: Sequence[Tensor], heads: Tensor, recipe: Recipe) -> Tensor:
    """(B, D): of the k_ir patches that the layers on the last layer's grid attend to most, their mean head outputs."""
    last = spec.layers[-1]
    alphas = [alpha for layer, alpha in zip(spec.layers, attention, strict=True) if layer.grid == last.grid]
    share = recipe.synthesis.mask.region
    k = mask_size(math.prod(last.grid), 0.0, share, share)
    region = top_patches(torch.stack(alphas).mean(dim=0), k)  # (B, N)
    patches = last.raster_heads(heads).float().cpu()  # (B, N, D)
    return (patches * region[..., None]).sum(dim=1) / k


def _model(teacher: nn.Module) -> Facts:
    spec = geometry(teacher)
    return {
        "class": type(teacher).__name__,
        "parameters": sum(p.numel() for p in teacher.parameters()),
        "image_size": list(spec.image_size),
        "classes": spec.classes,
        "task": spec.task,
    }


def _add_predictions(pictures: Facts, seen: Mapping[str, Seen], task: Task, names: list[str]) -> None:
    """Add the predictions of both models to the entries of the images, as the task describes them."""
    p, q = seen["teacher"].outputs, seen["student"].outputs
    agreement = {name: task.agreement(p, seen[name].outputs).mean().item() for name in seen}
    pictures |= {"sampled": len(p[task.output]), "agreement": agreement}
    for i, picture in enumerate(pictures["shown"]):
        picture |= task.describe(rows(p, slice(i, i + 1)), rows(q, slice(i, i + 1)), picture["label"])
        named = (picture.get(key, -1) for key in ("label", "teacher", "student"))
        pictures["names"] |= {str(c): names[c] for c in named if names and c >= 0}
    if task.has_layouts:  # any class may be among those that are drawn
        pictures["names"] = {str(c): name for c, name in enumerate(names)}


def _drawn(models: Mapping[str, nn.Module], images: SyntheticSet) -> dict[str, Tensor]:
    """What each model finds in the chosen images, drawn on them, for tasks whose findings have a place."""
    found = {}
    for name, model in models.items():
        device = next(model.parameters()).device
        pixels = geometry(model).to(device).normalise(to_pixels(images.images.to(device)))
        if (pictures := task_of(model).drawn(model, pixels)) is not None:
            found[f"drawn_{name}"] = pictures
    return found


def _attention(
    recipe: Recipe,
    seed: int,
    round_index: int,
    images: SyntheticSet,
    teacher: nn.Module,
    student: nn.Module,
    seen: Mapping[str, Seen],
) -> tuple[Facts, dict[str, Tensor]]:
    """Maps of the chosen images, their masks, and the distance between P and Q layer by layer."""
    layers = geometry(teacher).layers
    kind = recipe.synthesis.map
    chosen = images[:CHOSEN]
    synthesizer = Synthesizer(teacher, student, recipe, seed=seed)
    found = synthesizer.last_masks(seen["teacher"].received[kind], images.indices[:SAMPLED], round_index)
    regions, masks, thinned = found
    tensors: dict[str, Tensor] = {}
    for i in range(len(layers)):
        maps = torch.stack([seen[name].received[kind][i][: len(chosen)] for name in seen])  # (models, images, N)
        low, high = maps.amin(dim=(0, 2), keepdim=True), maps.amax(dim=(0, 2), keepdim=True)
        tensors[f"attention_{i:02}"] = to_bytes((maps - low) / (high - low).clamp(min=1e-12))
    for grid in thinned:
        name = "{}x{}".format(*grid)
        tensors[f"region_{name}"] = regions[grid][: len(chosen)].to(torch.uint8)
        tensors[f"mask_{name}"] = masks[grid][: len(chosen)].to(torch.uint8)
        tensors[f"thinned_{name}"] = thinned[grid][: len(chosen)].to(torch.uint8)

    def distances(name: str) -> Facts:
        relative, masked = [], []
        for i, layer in enumerate(layers):
            p, q = (seen[model].received["probs"][i] for model in ("teacher", name))
            relative.append(((p - q).abs().sum(dim=1) / p.sum(dim=1)).mean().item())
            p, q = (seen[model].received[kind][i] for model in ("teacher", name))
            masked.append(masked_difference(p, q, thinned[layer.grid].float()).mean().item())
        return {"relative": relative, "masked": masked}

    facts = {
        "map": kind,
        "layers": [{"name": layer.attention, "grid": list(layer.grid)} for layer in layers],
        "models": list(seen),
        "sampled": len(images[:SAMPLED]),
        "distance": {name: distances(name) for name in seen if name != "teacher"},
    }
    return facts, tensors


# ---- layers


def _sites(student: nn.Module, images: SyntheticSet) -> list[Facts]:
    """Error, range and use of the levels, for every weight and every activation that is quantized."""
    device = next(student.parameters()).device
    rows: dict[str, Facts] = {}
    handles = []
    for name, module in student.named_modules():
        if isinstance(module, QuantWeightMixin) and isinstance(module.weight_quantizer, Quantizer):
            rows[f"{name}.weight_quantizer"] = _site(module.weight_quantizer, module.weight)

    def listener(name: str) -> Any:
        return lambda module, inputs: rows.update({name: _site(module, module.sample(inputs[0], _VALUES))})

    try:
        for name, quantizer in quantizers(student).items():
            if quantizer.site.role == "activation":
                handles.append(quantizer.register_forward_pre_hook(listener(name)))
        with frozen(student):
            student(geometry(student).to(device).normalise(to_pixels(images.images.to(device))))
    finally:
        for handle in handles:
            handle.remove()
    return [rows[name] for name in quantizers(student) if name in rows]


def _site(quantizer: Quantizer, x: Tensor) -> Facts:
    codes = quantizer.codes(x)
    low, high = (quantizer.dequantize(torch.full_like(codes, code)) for code in (quantizer.low, quantizer.high))
    half = (high - low) / (quantizer.high - quantizer.low) * 0.5001  # a value half a step out is rounded, not cut
    error = (x - quantizer.dequantize(codes)).square().mean() / x.square().mean().clamp(min=1e-30)
    levels = quantizer.high - quantizer.low + 1
    return {
        "site": quantizer.site.name,
        "role": quantizer.site.role,
        "bits": quantizer.site.bits,
        "low": low.min().item(),
        "high": high.max().item(),
        "smallest": x.min().item(),
        "largest": x.max().item(),
        "error": error.item(),
        "saturated": ((x > high + half) | (x < low - half)).float().mean().item(),
        "unused": levels - len(codes.unique()),
        "levels": levels,
    }


def _sensitivity(ptq: nn.Module, images: SyntheticSet, expected: Outputs, progress: Progress) -> list[Facts]:
    """What quantizing one layer alone, weights and inputs, does to the teacher's outputs; the whole model first."""
    task = task_of(ptq)
    device = next(ptq.parameters()).device
    pixels = geometry(ptq).to(device).normalise(to_pixels(images.images.to(device)))

    given = {name: x.to(device) for name, x in expected.items()}

    def row(name: str) -> Facts:
        found = on_cpu(task.run(ptq, pixels, given))
        distance = task.distance(expected, found).mean()
        agreement = task.agreement(expected, found).mean()
        progress.advance(len(pixels))
        return {"layer": name, "kl": max(0.0, distance.item()), "agreement": agreement.item()}

    rows = [row("all")]
    with in_float(ptq):
        for name, (layer, _) in layers(ptq).items():
            own = [part for part in layer.children() if isinstance(part, Quantizer)]
            for quantizer in own:
                quantizer.drop = 0.0
            if own:
                rows.append(row(name))
            for quantizer in own:
                quantizer.drop = 1.0
    return rows


def information(teacher: Seen, student: Seen, labels: Tensor) -> dict[str, Facts] | None:
    """Name -> {value, meaning} of the estimates of Sec. 2.4, from predictions and the features of P's regions."""
    known = labels.cpu() if (labels >= 0).all() else None
    p, q = (seen.outputs["logits"].softmax(dim=1) for seen in (teacher, student))
    return _plain(information_report(p, q, known, teacher.regions))


def against_real(
    recipe: Recipe,
    teacher: nn.Module,
    student: nn.Module,
    synthetic: SyntheticSet,
    real: Iterable[tuple[Tensor, Tensor]],
    progress: Progress | None = None,
) -> dict[str, Facts]:
    """What Theorem 2 compares, on synthetic images and on a folder of labelled real ones: name -> {value, meaning}.

    P gives the regions of both, as it does in synthesis.
    """
    progress = progress or Progress()
    batches = list(real)
    labels = torch.cat([found for _, found in batches])
    progress.stage("compare with real images", 2 * len(synthetic) + len(labels))
    own = _look(teacher, synthetic, progress, recipe)
    quantized = _look(student, synthetic, progress, recipe)
    seen = look(teacher, (images for images, _ in batches), progress, recipe)
    probs = (found.outputs["logits"].softmax(dim=1) for found in (quantized, seen))
    q, p = probs
    return _plain(theorem_2_report(q, synthetic.labels, own.regions, p, labels, seen.regions))


def _plain(found: Mapping[str, Figure]) -> dict[str, Facts]:
    return {name.replace("_", " "): {"value": x.value, "meaning": x.meaning} for name, x in found.items()}


def finite(value: Any) -> Any:
    """The same tree with None for what is not a finite number: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
