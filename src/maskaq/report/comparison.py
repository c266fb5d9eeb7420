"""Methods side by side: one page with images, attention and figures, a Markdown table and a LaTeX table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import maskaq
from maskaq.errors import DependencyError
from maskaq.report.collect import Collected, thumbnails

CLASSES = 8
"""Rows of images: classes that all methods made images for."""
_SIDE = 112


@dataclass(frozen=True)
class TableRow:
    """One line of the table, in words."""

    bits: str
    method: str
    images: str
    figures: tuple[str, ...]
    """One for each folder of evaluation images."""
    mean: str
    difference: str
    kl: str
    seconds: str
    note: str = ""


@dataclass(frozen=True)
class Column:
    """One method on the page."""

    title: str
    collected: Collected | None
    caption: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    folders: tuple[str, ...]
    rows: tuple[TableRow, ...]
    about: tuple[str, ...]
    """Sentences below the table: how many images, what the errors are of."""
    columns: tuple[Column, ...] = ()
    real: Mapping[int, Tensor] = field(default_factory=dict)
    """Class -> a real image (C, H, W) uint8, where evaluation images were given."""
    names: Mapping[int, str] = field(default_factory=dict)
    headline: str = "top-1 %"
    """What the figures are."""
    distance: str = "KL"
    """What tells how far Q's outputs are from P's."""


def head(page: Page) -> list[str]:
    """The table's column titles."""
    figures = (f"mean {page.headline}", "against the first", page.distance, "seconds")
    return ["bits", "method", "images x steps", *page.folders, *figures]


def markdown(page: Page) -> str:
    """The table as Markdown, with its sentences."""
    titles = head(page)
    lines = [f"# {_cell(page.title)}", "", _line(titles), _line(["---"] * len(titles))]
    lines += [_line(cells(row)) for row in page.rows]
    notes = [f"* {_cell(row.method)} {row.bits}: {_cell(row.note)}" for row in page.rows if row.note]
    return "\n".join([*lines, "", *(f"{_cell(text)}" for text in page.about), *([""] if notes else []), *notes, ""])


def latex(page: Page) -> str:
    """The table for a paper: booktabs, the best mean of each width without real images in bold."""
    columns = "ll" + "c" * (len(page.folders) + 4)
    titles = [title for title in head(page) if title != "images x steps"]
    best: dict[str, tuple[float, str]] = {}
    for row in page.rows:
        value = _number(row.mean)
        if value is not None and not row.note and value > best.get(row.bits, (-1.0, ""))[0]:
            best[row.bits] = (value, row.method)
    lines = ["% needs \\usepackage{booktabs}", f"\\begin{{tabular}}{{{columns}}}", "\\toprule"]
    lines += [" & ".join(_tex(word) for word in titles) + " \\\\", "\\midrule"]
    for before, row in zip((None, *page.rows), page.rows, strict=False):
        if before is not None and before.bits != row.bits:
            lines.append("\\midrule")
        bold = best.get(row.bits, (0, None))[1] == row.method
        mean = f"\\textbf{{{_tex(row.mean)}}}" if bold else _tex(row.mean)
        method = _tex(row.method) + "$^{*}$" * bool(row.note)
        difference = _tex(row.difference).replace("-", "$-$")  # a minus sign, not a hyphen
        cells = [row.bits, method, *map(_tex, row.figures), mean, difference, _tex(row.kl), _tex(row.seconds)]
        lines.append(" & ".join(cells) + " \\\\")
    notes = [f"{_tex(row.method)} {row.bits}: {_tex(row.note)}" for row in page.rows if row.note]
    lines += ["\\bottomrule", *(f"\\multicolumn{{{len(titles)}}}{{l}}{{$^{{*}}$ {note}}} \\\\" for note in notes)]
    return "\n".join([*lines, "\\end{tabular}", ""])


def html(page: Page) -> str:
    """One self-contained page."""
    try:
        from maskaq.report import page as pages
    except DependencyError as error:
        raise DependencyError(f"{error}; the Markdown and LaTeX tables need nothing") from error
    shown = [column for column in page.columns if column.collected is not None]
    classes = _labels(shown)
    of_classes = bool(classes)
    labels = classes or list(range(CLASSES))  # images that are made for no class are shown by their numbers
    context: dict[str, Any] = {
        "made_by": pages.MADE_BY,
        "version": maskaq.__version__,
        "page": page,
        "head": head(page),
        "table": [cells(row) for row in page.rows],
        "of_classes": of_classes,
        "some_without": of_classes and not all(_labels([column]) for column in shown),
        "labels": [_named(label, page.names) if of_classes else f"image {label + 1}" for label in labels],
        "real": [pages.data_uri(_small(page.real[n])) if of_classes and n in page.real else None for n in labels],
        "columns": [_column(column, labels, pages.data_uri) for column in shown],
    }
    template = pages._environment(autoescape=True).get_template("compare.html.j2")
    return template.render(**context)


def _named(label: int, names: Mapping[int, str]) -> str:
    return names.get(label, f"class {label}").split(",")[0]


def _labels(columns: Sequence[Column]) -> list[int]:
    """The classes to show: those that most methods have images of, in order."""
    counts: dict[int, int] = {}
    for column in columns:
        assert column.collected is not None
        for label in {picture["label"] for picture in column.collected.facts["images"]["shown"]} - {-1}:
            counts[label] = counts.get(label, 0) + 1
    return sorted(sorted(counts, key=lambda label: (-counts[label], label))[:CLASSES])


def _column(column: Column, labels: Sequence[int], uri: Any) -> dict[str, Any]:
    """A method's images of these classes, and the attention of P and Q over its first ones."""
    assert column.collected is not None
    facts, tensors = column.collected.facts, column.collected.tensors
    shown = facts["images"]["shown"]
    places: list[int | None] = []
    for number, label in enumerate(labels):
        found = [i for i, picture in enumerate(shown) if picture["label"] == label]
        unlabelled = number if number < len(shown) and shown[number]["label"] < 0 else None
        places.append(found[0] if found else unlabelled)
    images = [None if place is None else uri(_small(tensors["images"][place])) for place in places]
    return {
        "title": column.title,
        "caption": column.caption,
        "images": images,
        "attention": _attention(facts, tensors, uri),
    }


def _attention(
    facts: Mapping[str, Any], tensors: Mapping[str, Tensor], uri: Any, count: int = 4
) -> list[dict[str, str]]:
    """Of the first images: the image, and the attention that each patch receives in P and Q in the middle layer."""
    about = facts.get("attention")
    if about is None:
        return []
    middle = len(about["layers"]) // 2
    rows, columns = about["layers"][middle]["grid"]
    maps = tensors[f"attention_{middle:02}"]  # (models, images, N)
    order = {name: i for i, name in enumerate(about["models"])}
    found = []
    for number in range(min(count, maps.shape[1], len(tensors["chosen"]))):
        heat = {name: _heat(maps[order[name], number].view(rows, columns)) for name in ("teacher", "student")}
        image = uri(_small(tensors["chosen"][number]))
        found.append({"image": image, "teacher": uri(heat["teacher"]), "student": uri(heat["student"])})
    return found


def _heat(values: Tensor) -> Tensor:
    """(rows, columns) uint8 -> (3, H, W) uint8, from black over red to white."""
    x = values.float()[None, None] / 255
    x = F.interpolate(x, scale_factor=max(1, _SIDE // max(values.shape)), mode="nearest")[0, 0]
    colours = torch.stack([(3 * x).clamp(0, 1), (3 * x - 1).clamp(0, 1), (3 * x - 2).clamp(0, 1)])
    return (colours * 255).round().to(torch.uint8)


def _small(image: Tensor) -> Tensor:
    return thumbnails(image[None], _SIDE)[0]


def cells(row: TableRow) -> list[str]:
    return [row.bits, row.method, row.images, *row.figures, row.mean, row.difference, row.kl, row.seconds]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "&#96;")


_TEX = {
    "\\": "\\textbackslash{}",
    "±": "$\\pm$",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    "\n": " ",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in str(text))


def _number(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None
