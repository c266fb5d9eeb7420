"""The page: records of runs -> one HTML file that needs nothing else, and a Markdown file for a pull request."""

import base64
import html as markup
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import maskaq
from maskaq.errors import DependencyError
from maskaq.report import record as records_of
from maskaq.report.collect import SMALL_SIDE, finite, thumbnails
from maskaq.report.record import Record
from maskaq.schedules import spread
from maskaq.tasks import CALIBRATED, FULL_PRECISION, RTN, share_recovered
from maskaq.tasks.drawing import GROUND, colour

try:
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    from maskaq.report import charts
except ImportError as error:
    raise DependencyError(
        f'a report needs {error.name}, which is not installed: pip install "maskaq[report]", then maskaq report RUN'
    ) from error

_TRAJECTORIES = 4  # trajectories of at most so many rounds: they are many frames
_LOSSLESS_SIDE = 64  # px: smaller images are shown enlarged, pixel by pixel


def html(records: Sequence[Record]) -> str:
    """One self-contained page: of one run in full, of several side by side."""
    context = _context(records)
    figures = [*_all_charts(context)]
    data = {
        "figures": {chart.id: chart.figure for chart in figures},
        "groups": {chart.id: chart.group for chart in figures if chart.group},
        "attention": context.get("maps"),
    }
    return (
        _environment(autoescape=True)
        .get_template("report.html.j2")
        .render(**context, data=finite(data), plotly_js=get_plotlyjs())
    )


MADE_BY = "made by maskaq report"
"""In a comment that Markdown begins with, and the page after its doctype: such a file may be overwritten."""
_OURS = re.compile(rf"(<!DOCTYPE html>\n)?<!-- {MADE_BY} -->\n".encode())
_OURS_0_1_0 = re.compile(
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n(<meta [^>]*>\n)*<title>[^<]* \N{MIDDLE DOT} maskaq</title>\n'.encode()
)
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, jinja2.TemplateError)
"""Errors that a page may raise for records that were edited by hand."""


def is_ours(file: bytes) -> bool:
    """Whether a file with this beginning was written by `maskaq report`; a mention of the marker is not enough."""
    return bool(_OURS.match(file) or _OURS_0_1_0.match(file))


def markdown(records: Sequence[Record]) -> str:
    """The same without pictures. Whatever a run folder says is text in it, never markup."""
    environment = _environment(autoescape=False)
    environment.finalize = lambda value: value if isinstance(value, Markup) else inline(value)
    return environment.get_template("report.md.j2").render(**_context(records, pictures=False))


def _environment(autoescape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("maskaq.report"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"duration": duration, "size": size, "figure": figure, "cell": cell, "code": code, "block": block}
    environment.filters |= filters  # type: ignore[assignment]
    return environment


def _context(records: Sequence[Record], pictures: bool = True) -> dict[str, Any]:
    names = charts.run_names(records)
    context: dict[str, Any] = {
        "made_by": MADE_BY,
        "version": maskaq.__version__,
        "names": names,
        "records": records,
        "several": len(records) > 1,
        "title": f"{records[0].model} {records[0].recipe.quantization.bits}" if len(records) == 1 else "Runs compared",
        "differences": records_of.differences(records),
        "curves": charts.curves(records) if pictures else {},
        "distances": charts.distances(records) if pictures else [],
        "recovered": [_recovered(record) for record in records],
        "headlines": " or ".join({record.task.columns[record.task.headline].title: None for record in records}),
        "worst": [worst(record) for record in records],
        "sensitive": [sensitive(record) for record in records],
        "leads": [lead(record) for record in records],
        "settings": {key: None for record in records for key in record.settings},
    }
    if pictures:
        context["layers"] = charts.layers(records[0]) if len(records) == 1 else {}
        context["grids"] = [_grid(record, len(records)) for record in records]
        if len(records) == 1:
            context |= {
                "rounds": _rounds(records[0]),
                "drawn": _drawn(records[0]),
                "legend": _legend(records[0]),
                "trajectories": _trajectories(records[0]),
                "maps": _maps(records[0]),
            }
    return context


def _all_charts(context: Mapping[str, Any]) -> list["charts.Chart"]:
    stages = [chart for found in context["curves"].values() for chart in found]
    return [*stages, *context["distances"], *filter(None, context["layers"].values())]


# ---- text and tables


def lead(record: Record) -> str:
    """A sentence about the images that the model was calibrated on."""
    images, folder = record.recipe.synthesis.images, record.recipe.synthesis.folder
    return {
        "synthetic": f"made from {images} images synthesised from the model itself: no real image was used.",
        "noise": f"made from {images} images of Gaussian noise: no real image was used.",
        "dead_leaves": f"made from {images} images of random shapes (dead leaves): no real image was used.",
        "real": f"calibrated on {images} REAL images of {folder}: an upper bound for the method, NOT data-free.",
    }[record.kind]


def _recovered(record: Record) -> float | None:
    """Share of the accuracy lost by round to nearest that maskaq recovers."""
    rows = record.accuracy
    headline = record.task.headline
    full, rtn, ours = (rows.get(name, {}).get(headline) for name in (FULL_PRECISION, RTN, CALIBRATED))
    if full is None or rtn is None or ours is None:
        return None
    noise = math.hypot(*(rows[name]["standard_error"] or 0.0 for name in (FULL_PRECISION, RTN)))
    return share_recovered(full, rtn, ours, noise)


def worst(record: Record, count: int = 10) -> list[dict[str, Any]]:
    """The sites with the largest relative error."""
    sites = record.facts.get("sites") or []
    return sorted(sites, key=lambda site: -(site["error"] or 0.0))[:count]


def sensitive(record: Record, count: int = 10) -> list[dict[str, Any]]:
    """The layers that hurt most when they alone are quantized."""
    rows = record.facts.get("sensitivity") or []
    return sorted(rows[1:], key=lambda row: -(row["kl"] or 0.0))[:count]


def duration(seconds: float | None) -> str:
    """90 -> 1:30; 5000 -> 1:23:20; below ten seconds with a decimal."""
    if seconds is None:
        return "not recorded"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02} h" if hours else f"{minutes}:{s:02} min"


def size(bytes: float) -> str:
    return f"{bytes / 1e6:.2f} MB" if bytes >= 1e6 else f"{bytes / 1e3:.1f} kB"


def figure(value: float | None, format: str = ".3g") -> str:
    return "-" if value is None else f"{value:{format}}"


def cell(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(cell(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else "-" if value in (None, "") else str(value)


def inline(text: Any) -> str:
    """Text for a line or a table cell of Markdown, where it can begin no HTML, no code, no link and no other cell."""
    return _text(text).replace("|", "\\|")


def code(text: Any) -> "Markup":
    """Code in a line of Markdown: between backticks where nothing in it could end or break them."""
    plain = str(text)
    return Markup(
        f"`{plain}`" if _is_one_line(plain) and not set(plain) & set("`<|") else f"<code>{inline(plain)}</code>"
    )


def block(text: Any) -> "Markup":
    """A code block of Markdown."""
    plain = str(text)
    return Markup(
        f"```\n{plain}\n```" if _is_one_line(plain) and not set(plain) & set("`<") else f"<pre>{_text(plain)}</pre>"
    )


def _is_one_line(text: str) -> bool:
    """Not empty, and without any of the characters that end a line, of which \\n is one among many."""
    return text.splitlines() == [text]


def _text(text: Any) -> str:
    """In one line, with entities for what is HTML, code or a link."""
    line = markup.escape(" ".join(str(text).split()), quote=False)
    return line.replace("`", "&#96;").replace("](", "]&#40;")


# ---- pictures


def data_uri(image: Tensor) -> str:
    """(C, H, W) uint8 -> an image inside the page: exact where it is small, WebP where it is not."""
    channels = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)  # no screen shows more than three
    picture = Image.fromarray(channels.permute(1, 2, 0).contiguous().numpy())
    file = io.BytesIO()
    exact = max(image.shape[-2:]) <= _LOSSLESS_SIDE
    picture.save(file, *(("PNG",) if exact else ("WEBP",)), **({"optimize": True} if exact else {"quality": 75}))
    kind = "png" if exact else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _name(record: Record, label: int) -> str:
    return str(record.facts["images"]["names"].get(str(label), f"class {label}")).split(",")[0]


def _known_as(record: Record, picture: Mapping[str, Any]) -> str:
    """Name of an image's target class; without a target, of the class that P predicts, if known."""
    if picture["label"] >= 0:
        return _name(record, picture["label"])
    return f"P says {_name(record, picture['teacher'])}" if "teacher" in picture else f"image {picture['number']}"


def _similar(record: Record, similarity: float | None) -> str:
    """How much Q agrees with P on an image, where that is a matter of degree."""
    if similarity is None:
        return ""
    shown = record.task.show_agreement(similarity)
    return f"cosine {shown}" if record.task.name == "features" else f"Q as P: {shown}"


def _grid(record: Record, runs: int) -> list[dict[str, Any]]:
    """The images with their labels and the predictions of teacher and student."""
    pictures = record.facts["images"]["shown"]
    if runs > 1:
        pictures = pictures[:8]
    return [
        picture
        | {
            "src": data_uri(image),
            "name": _known_as(record, picture),
            "similar": _similar(record, picture.get("similarity")),
            "teacher_name": _name(record, picture.get("teacher", -1)),
            "student_name": _name(record, picture.get("student", -1)),
        }
        for picture, image in zip(pictures, record.collected.tensors["images"], strict=False)
    ]


_WHO = {"teacher": "full precision (P)", "searched": "searched ranges", "student": "maskaq (Q)"}
"""Model -> what the page calls it."""


def _drawn(record: Record) -> list[dict[str, Any]]:
    """Model by model, what it finds in the first images, drawn on them; empty where nothing can be drawn."""
    tensors = record.collected.tensors
    return [
        {"name": title, "images": [data_uri(image) for image in tensors[f"drawn_{model}"]]}
        for model, title in _WHO.items()
        if f"drawn_{model}" in tensors
    ]


def _legend(record: Record) -> list[tuple[str, str]]:
    """Name and CSS colour of each class in the drawings; empty where nothing is drawn or classes have no names."""
    if not record.task.has_layouts:
        return []
    return [
        (f"{name}: left as it is", "transparent") if name == GROUND else (name, f"rgb{colour(int(number))}")
        for number, name in record.facts["images"]["names"].items()
    ]


def _rounds(record: Record) -> list[dict[str, Any]]:
    """Round by round, the same images."""
    rows = []
    for entry in record.facts["images"]["rounds"]:
        images = record.collected.tensors[f"round_{entry['round']:02}"]
        shown = {place: data_uri(image) for place, image in zip(entry["places"], images, strict=True)}
        rows.append({"round": entry["round"] + 1, "images": shown})
    return rows if len(rows) > 1 else []


def _trajectories(record: Record) -> list[dict[str, Any]]:
    """One image from its start to final, and over the refreshes."""
    trajectories = []
    shown = {picture["number"]: picture for picture in record.facts["images"]["shown"]}
    for round_index in spread(sorted(record.trajectories), _TRAJECTORIES):
        trajectory = record.trajectories[round_index]
        images = thumbnails(trajectory.images, SMALL_SIDE)
        frames = [{"src": data_uri(image), "step": step} for image, step in zip(images, trajectory.steps, strict=True)]
        known = shown.get(trajectory.number)
        whose = f"image #{trajectory.number}" + (
            f" of the grid: {_known_as(record, known)}" if known else ", not in the grid"
        )
        trajectories.append({"round": round_index + 1, "whose": whose, "frames": frames})
    return trajectories


def _maps(record: Record) -> dict[str, Any] | None:
    """Data for the attention viewer: maps and masks as bytes, and the images below them."""
    facts = record.facts.get("attention")
    tensors = record.collected.tensors
    if facts is None:
        return None
    shown = record.facts["images"]["shown"]
    layers = []
    for i, layer in enumerate(facts["layers"]):
        grid = "{}x{}".format(*layer["grid"])
        layers.append({**layer, "maps": _bytes(tensors[f"attention_{i:02}"]), "masks": grid})
    grids = {layer["masks"] for layer in layers}
    return {
        "map": facts["map"],
        "models": facts["models"],
        "images": [
            {"src": data_uri(image), "name": _known_as(record, picture), "number": picture["number"]}
            for image, picture in zip(tensors["chosen"], shown, strict=False)
        ],
        "layers": layers,
        "region": {grid: _bytes(tensors[f"region_{grid}"]) for grid in grids},
        "mask": {grid: _bytes(tensors.get(f"mask_{grid}", tensors[f"region_{grid}"])) for grid in grids},
        "thinned": {grid: _bytes(tensors[f"thinned_{grid}"]) for grid in grids},
    }


def _bytes(values: Tensor) -> str:
    return base64.b64encode(values.to(torch.uint8).contiguous().numpy().tobytes()).decode()
