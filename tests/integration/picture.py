"""Draws the overview dashboard from live answers: `python -m tests.integration.picture FILE`.

Not Grafana: matplotlib (the extra `picture`) draws the dashboard's panels, each at its place, from the answers to its
queries. A prefill and a decode worker are killed under steady load, at the dashed line, and every request is answered:
else nothing is drawn.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.model.prepared.cache import prepare
from telemetry.dashboards.grafana import WIDTH, build
from telemetry.dashboards.overview import OVERVIEW
from telemetry.dashboards.pages import DASHBOARDS
from tests.integration.prometheus import Points, Prometheus
from tests.integration.scene import Scene

BUSY_S = 30.0
CLIENTS = 4
TEXT, FAINT, FAULT = "#24292f", "#8c959f", "#cf222e"
GOOD_KEYS = ("#0969da", "#1a7f37", "#bf8700", "#8250df", "#cf222e", "#6e7781")
GOOD_KEYS += ("#0a7ea4", "#a475f9", "#e16f24", "#57ab5a")


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        scene = Scene(prepare(None, folder / "models"), folder)
        try:
            lost = scene.play_kills(BUSY_S, CLIENTS)
            assert scene.prometheus is not None
            if lost:
                raise SystemExit(f"requests were lost, so the picture would not show a kill alone: {dict(lost)}")
            draw(target, scene.prometheus, scene.began_s, scene.fault_s, scene.ended_s)
        finally:
            scene.close()


def draw(
    target: Path, prometheus: Prometheus, began_s: float, fault_s: float, ended_s: float
) -> None:
    """Write the picture of the time from `began_s` to `ended_s`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    panels = build(OVERVIEW, DASHBOARDS)["panels"]
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    pyplot.rcParams.update({"font.size": 8, "text.color": TEXT, "axes.edgecolor": "#d0d7de"})
    figure = pyplot.figure(figsize=(15, lines * 0.3), facecolor="#f6f8fa")
    for panel in panels:
        place = panel["gridPos"]
        if panel["type"] == "row":
            middle = 1 - (place["y"] + 0.6) / lines
            figure.text(0.006, middle, panel["title"], va="center", fontsize=12, color=FAINT)
            continue
        axes = figure.add_axes(
            (
                (place["x"] + 0.7) / WIDTH,
                1 - (place["y"] + place["h"] - 0.9) / lines,
                (place["w"] - 1.0) / WIDTH,
                (place["h"] - 2.0) / lines,
            )
        )
        axes.set_title(panel["title"], loc="left", fontsize=9, fontweight="bold", color=TEXT)
        series = [
            (_legend(query["legendFormat"], labels), [(at - began_s, v) for at, v in points])
            for query in panel["targets"]
            for labels, points in prometheus.over(_filled(query["expr"]), began_s + 3, ended_s)
            if points
        ]
        field = panel["fieldConfig"]["defaults"]
        if panel["type"] == "stat":
            _stat(axes, field, series)
        else:
            _lines(axes, field, series, fault_s - began_s)
    figure.savefig(target, dpi=80)
    # A plot has few colours: a palette of them makes the file a third as large.
    with Image.open(target) as drawn:
        drawn.convert("RGB").quantize(64).save(target, optimize=True)


def _filled(expr: str) -> str:
    for variable in ("$model", "$worker"):
        expr = expr.replace(variable, ".*")
    return expr.replace("$__rate_interval", "10s")


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), form)


def _stat(axes: Any, field: dict[str, Any], series: list[tuple[str, Points]]) -> None:
    axes.axis("off")
    words = {key: o["text"] for m in field["mappings"] for key, o in m["options"].items()}
    for at, (legend, points) in enumerate(series):
        value = points[-1][1]
        shown = words.get(f"{value:g}") or _amount(value, field["unit"])
        left = (at + 0.5) / len(series)
        size = 15 if len(shown) < 8 else 10
        axes.text(left, 0.45, shown, ha="center", va="center", fontsize=size, fontweight="bold")
        axes.text(left, 0.0, legend.replace("__auto", ""), ha="center", color=FAINT)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    if len(series) == 1 and not words:
        ((_, points),) = series
        first, span = points[0][0], points[-1][0] - points[0][0]
        highest = max(value for _, value in points) or 1.0
        across = [(at - first) / span for at, _ in points]
        axes.fill_between(across, [v / highest for _, v in points], color=GOOD_KEYS[0], alpha=0.2)


def _lines(
    axes: Any, field: dict[str, Any], series: list[tuple[str, Points]], fault_s: float
) -> None:
    axes.set_facecolor("white")
    axes.grid(color="#eaeef2", linewidth=0.6)
    axes.tick_params(length=0, labelsize=7, labelcolor=FAINT)
    if field["custom"]["stacking"]["mode"] == "normal":
        times = sorted({at for _, points in series for at, _ in points})
        heights = [[dict(points).get(at, 0.0) for at in times] for _, points in series]
        axes.stackplot(
            times, heights, labels=[legend for legend, _ in series], colors=GOOD_KEYS, alpha=0.75
        )
    else:
        for color, (legend, points) in zip(GOOD_KEYS, series, strict=False):
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.3, label=legend)
    axes.axvline(fault_s, color=FAULT, linewidth=0.9, linestyle="--")
    axes.set_ylim(bottom=0, top=1.02 if field.get("max") == 1 else None)
    axes.yaxis.set_major_formatter(lambda value, _: _amount(value, field["unit"]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.legend(
        loc="upper left", fontsize=6, frameon=True, framealpha=0.7, edgecolor="none", ncols=2
    )


def _amount(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
    if unit == "percentunit":
        return f"{value * 100:.0f} %"
    if unit == "Bps":
        return f"{value / 2**20:.1f} MiB/s"
    if unit == "reqps":
        return f"{value:.1f} /s"
    return f"{value:g}" if abs(value) < 10 else f"{value:.0f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
