"""A dashboard as Grafana's JSON (schema 39, Grafana 10 and later)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from telemetry.dashboards import links
from telemetry.dashboards.measures import PANELS
from telemetry.dashboards.panel import INFINITY, Dashboard, Panel

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAG = "headrace"
WIDTH = 24
HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8, "table": 8}


def numbers(dashboard: Dashboard) -> dict[str, int]:
    """Return the id of each panel by its title. Rows have numbers too."""
    titles = [title for row in dashboard.rows for title in (None, *(panel.title for panel in row.panels))]
    return {title: number for number, title in enumerate(titles, 1) if title is not None}


def build(dashboard: Dashboard, all_of_them: Sequence[Dashboard], docs: str = "") -> dict[str, Any]:
    """Return the whole dashboard, ready for an import or for provisioning; its links lead to panels of all of them, and
    to pages at `docs`, a URL."""
    ids = {(one.name, title): number for one in all_of_them for title, number in numbers(one).items()}
    titles = {one.name: one.title for one in all_of_them}
    return {
        "uid": f"headrace-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "templating": {"list": [*_variables(), _pages(docs or links.DOCS)]},
        "annotations": {"list": list(_annotations())},
        "links": [
            {
                "type": "dashboards",
                "title": "Headrace",
                "tags": [TAG],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": list(_panels(dashboard, ids, titles)),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, label, family in (
        ("model", "Model", "headrace_build_info"),
        ("worker", "Worker", "headrace_kv_pool_blocks"),
    ):
        query = f"label_values({family}, {name})"
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _pages(docs: str) -> dict[str, Any]:
    """Where the pages are that panels link to: whoever looks can say so, and the dashboards tell each other."""
    chosen = {"text": docs, "value": docs}
    return {
        "name": "docs",
        "label": "Pages",
        "description": "Where the project's docs folder is served: what links of panels begin with.",
        "type": "textbox",
        "query": docs,
        "current": chosen,
        "options": [{"selected": True, **chosen}],
    }


def _links(
    dashboard: Dashboard, row: str, panel: Panel, ids: Mapping[tuple[str, str], int], titles: Mapping[str, str]
) -> list[dict[str, Any]]:
    name, title = links.following(dashboard, panel.title)
    where = "" if name == dashboard.name else f"{titles[name].removeprefix('Headrace: ')}: "
    here = f"/d/headrace-{name}?viewPanel={ids[name, title]}"
    return [
        {
            "title": "What this shows, and what to do",
            "url": f"${{docs:raw}}/{links.page(dashboard, row)}",
            "targetBlank": True,
        },
        {"title": f"Next: {where}{title}", "url": here + "&${__url_time_range}&${__all_variables}"},
    ]


def _annotations() -> Iterator[dict[str, Any]]:
    lost = PANELS.series("worker_losses_total", how="lost|given_up")
    leaving = PANELS.series("worker_state", state="draining")
    for name, color, expr in (
        ("Worker lost", "red", f"increase({lost}[1m]) > 0"),
        ("Worker leaves", "blue", f"{leaving} == 1"),
    ):
        yield {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": color,
            "expr": expr,
            "step": "15s",
            "titleFormat": "{{peer}}",
            "textFormat": "{{role}}",
        }


def _panels(
    dashboard: Dashboard, ids: Mapping[tuple[str, str], int], titles: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Lay out rows from top to bottom and, within a row, panels from left to right, wrapped at Grafana's 24 columns."""
    number, top = 1, 0
    for row in dashboard.rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
            "panels": [],
        }
        number, top, left, tallest = number + 1, top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, tallest = top + tallest, 0, 0
            height = HEIGHTS[panel.kind]
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            leads = _links(dashboard, row.title, panel, ids, titles)
            yield _panel(panel) | {"id": number, "gridPos": place, "links": leads}
            number, left, tallest = number + 1, left + panel.width, max(tallest, height)
        top += tallest


def _panel(panel: Panel) -> dict[str, Any]:
    is_table = panel.kind == "table"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "range": not is_table,
                "instant": is_table,
                "format": {"table": "table", "heatmap": "heatmap"}.get(panel.kind, "time_series"),
            }
            for at, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
    }


def _field(panel: Panel) -> dict[str, Any]:
    field: dict[str, Any] = {
        "unit": panel.unit,
        "noValue": "no traffic",
        "mappings": [
            {"type": "value", "options": {f"{value:g}": {"text": text, "index": at}}}
            for at, (value, text) in enumerate(panel.names)
        ],
    }
    if panel.kind == "timeseries":
        # The axis begins at zero where zero is the bound; an upper bound is shown only where it is a whole.
        field["min"] = panel.low if panel.low <= 0 else None
        field["max"] = 1 if panel.high == 1 else None
        field["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
    if panel.high == 0:
        field["thresholds"] = {
            "mode": "absolute",
            "steps": [{"color": "green", "value": None}, {"color": "red", "value": 0.5}],
        }
    return {key: value for key, value in field.items() if value is not None}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area" if panel.high == INFINITY else "none",
            "textMode": "auto",
        }
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "cellGap": 1}
    return {"showHeader": True}
