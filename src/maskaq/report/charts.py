"""The charts of a page, as plotly figures. They name no colour: the page's theme gives them, light or dark."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from maskaq.report.record import Curve, Record

_BELOW = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}  # of many lines: free of the buttons
_GREY = "rgba(128, 128, 128, 0.7)"  # seen on both grounds


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    note: str
    figure: dict[str, Any]
    """`data` and `layout`, as plotly.js takes them."""
    group: str = ""
    """Charts of one group zoom together."""


def _chart(id: str, title: str, figure: go.Figure, note: str = "", group: str = "") -> Chart:
    legend = figure.layout.legend
    above = (
        12 if legend.orientation is None else 30 if legend.yref == "container" else 46
    )  # buttons, and a legend below
    figure.update_layout(template={}, margin={"l": 58, "r": 12, "t": above, "b": 44}, autosize=True)
    return Chart(id, title, note, figure.to_plotly_json(), group)


def _label(value: Any) -> Any:
    """A word of a run folder as plotly shows it: a name, where it would take <a>, <b> and <br> for markup."""
    return html.escape(value, quote=False) if isinstance(value, str) else value


def _lines(curves: Mapping[str, Curve], x: str, names: Sequence[str]) -> go.Figure:
    """One line for each run, in the run's colour; a legend where there are several."""
    figure = go.Figure()
    for name, curve in curves.items():
        mode = "lines+markers" if len(curve.x) < 60 else "lines"
        style = {"mode": mode, "marker": {"size": 4}, "line": {"width": 1.8}}
        figure.add_scatter(x=curve.x, y=curve.y, name=_label(name), meta={"colour": names.index(name)}, **style)
    marks = [curve.marks for curve in curves.values()]
    for mark in marks[0] if marks.count(marks[0]) == len(marks) else ():
        figure.add_vline(x=mark, line={"color": _GREY, "width": 1, "dash": "dot"})
    several = len(names) > 1
    figure.update_layout(showlegend=several, hovermode="x unified" if several else "closest", height=230)
    if several:
        figure.update_layout(height=310, legend=_BELOW)
    figure.update_xaxes(title=x)
    figure.update_yaxes(tickformat="~g")
    return figure


def curves(records: Sequence[Record]) -> dict[str, list[Chart]]:
    """Stage -> a chart for each loss term and one for the learning rate, the runs overlaid."""
    names = run_names(records)
    stages: dict[str, list[Chart]] = {"synthesis": [], "calibration": []}
    for stage, x in (("synthesis", "step"), ("calibration", "epoch")):
        terms = {term: None for record in records for term in getattr(record, stage)}
        for term in sorted(terms, key=lambda term: term == "lr"):
            found = {name: getattr(record, stage).get(term) for name, record in zip(names, records, strict=True)}
            there = {name: curve for name, curve in found.items() if curve is not None and curve.x}
            if there:
                weights = {getattr(record.recipe, stage).terms.get(term) for record in records}
                title = "learning rate" if term == "lr" else term.replace("_", " ")
                note = f"weight {weights.pop():g}" if len(weights) == 1 and None not in weights else ""
                stages[stage].append(_chart(f"{stage}-{term}", title, _lines(there, x, names), note, stage))
    rates = {name: record.synthesis_rate for name, record in zip(names, records, strict=True)}
    if rates := {name: curve for name, curve in rates.items() if curve.x}:
        figure = _lines(rates, "step", names)
        stages["synthesis"].append(_chart("synthesis-lr", "learning rate", figure, "", "synthesis"))
    return stages


def distances(records: Sequence[Record]) -> list[Chart]:
    """Attention distance between P and Q, layer by layer, before and after calibration."""
    figures = {kind: go.Figure() for kind in ("relative", "masked")}
    several = len(records) > 1
    for number, (name, record) in enumerate(zip(run_names(records), records, strict=True)):
        attention = record.facts.get("attention")
        if attention is None:
            continue
        layers = [_label(layer["name"]) for layer in attention["layers"]]
        for model, when in (("searched", "before calibration"), ("student", "after calibration")):
            for kind, figure in figures.items():
                figure.add_scatter(
                    x=list(range(1, len(layers) + 1)),
                    y=attention["distance"][model][kind],
                    text=layers,
                    name=f"{_label(name)}, {when.split()[0]}" if several else when,
                    mode="lines+markers",
                    line={"dash": "dot" if model == "searched" else "solid", "width": 2},
                    marker={"size": 6},
                    meta={"colour": number} if several else None,
                )
    charts = []
    for kind, title, note in (
        ("relative", "relative distance", "sum |P - Q| / sum P over the patches, softmax attention"),
        ("masked", "distance inside m'", "L_align of Eq. 14 on the recipe's maps, one layer at a time"),
    ):
        figure = figures[kind]
        if figure.data:
            above = {"orientation": "h", "y": 1.0, "yanchor": "bottom"}
            figure.update_layout(height=360 if several else 300, legend=_BELOW if several else above)
            figure.update_layout(hovermode="x unified")
            figure.update_xaxes(title="attention layer", dtick=1 if len(figure.data[0].x) <= 12 else None)
            figure.update_yaxes(rangemode="tozero", tickformat="~g")
            charts.append(_chart(f"distance-{kind}", title, figure, note, "distance"))
    return charts


def layers(record: Record) -> dict[str, Chart | None]:
    """Error of every site, size of every layer, sensitivity to every layer; None where there is no data."""
    charts: dict[str, Chart | None] = dict.fromkeys(("sites", "sizes", "sensitivity"))
    if sites := record.facts.get("sites"):
        figure = go.Figure()
        for role, symbol in (("weight", "circle"), ("activation", "diamond")):
            chosen = [(i, site) for i, site in enumerate(sites, 1) if site["role"] == role]
            figure.add_scatter(
                x=[i for i, _ in chosen],
                y=[site["error"] for _, site in chosen],
                text=[_label(site["site"]) for _, site in chosen],
                customdata=[[_label(site[key]) for key in ("bits", "saturated", "unused")] for _, site in chosen],
                hovertemplate="%{text}<br>error %{y:.3%}, %{customdata[0]} bits<br>saturated %{customdata[1]:.2%}, "
                "unused levels %{customdata[2]}<extra></extra>",
                name=f"{role}s",
                mode="markers",
                marker={"symbol": symbol, "size": 8},
            )
        figure.update_layout(height=320, legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"})
        figure.update_yaxes(type="log", title="relative squared error", tickformat="~p", dtick="D2")
        figure.update_xaxes(title="site, in the model's order")
        charts["sites"] = _chart("sites-error", "error of every site", figure)
    if rows := [row for row in record.facts.get("sizes") or () if row["float_bytes"]]:
        names = [_label(row["name"]) for row in rows]
        figure = make_subplots(rows=2, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.07)
        for key, label in (("float_bytes", "float32"), ("quantized_bytes", "quantized")):
            figure.add_bar(x=names, y=[row[key] / 1e3 for row in rows], name=label, row=1, col=1)
        bits = [32 if row["weight_bits"] == "float" else int(row["weight_bits"]) for row in rows]
        figure.add_bar(x=names, y=bits, name="bits", showlegend=False, row=2, col=1)
        figure.update_layout(
            height=380, barmode="group", bargap=0.2, legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"}
        )
        figure.update_yaxes(title="kB", row=1, col=1)
        figure.update_yaxes(title="bits", row=2, col=1)
        figure.update_xaxes(showticklabels=len(names) <= 40, tickfont={"size": 9}, tickangle=-60, row=2, col=1)
        charts["sizes"] = _chart("layer-sizes", "bytes and bits of every layer", figure)
    if sensitive := record.facts.get("sensitivity"):
        single = sensitive[1:]
        figure = go.Figure()
        figure.add_bar(
            x=[_label(row["layer"]) for row in single],
            y=[row["kl"] for row in single],
            customdata=[_label(row["agreement"]) for row in single],
            hovertemplate="%{x}<br>%{y:.4f}, agreement %{customdata:.1%}<extra></extra>",
            showlegend=False,
        )
        figure.update_layout(height=320)
        figure.update_yaxes(title=record.task.distance_name)
        figure.update_xaxes(showticklabels=len(single) <= 40, tickfont={"size": 9}, tickangle=-60)
        charts["sensitivity"] = _chart("layer-sensitivity", "sensitivity to every layer", figure)
    return charts


def run_names(records: Sequence[Record]) -> list[str]:
    """A name for each run: its folder's, numbered where several folders are called the same."""
    names = [record.name for record in records]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]
