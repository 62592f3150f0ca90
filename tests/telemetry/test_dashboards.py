"""The generated dashboards as files: complete, consistent, asking only for what there is. What they show of a real
cluster is proven in `tests/integration/test_dashboards.py`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from telemetry.dashboards.__main__ import DASHBOARD_FOLDER, drifted, files
from telemetry.dashboards.catalog import catalog
from telemetry.dashboards.measures import PANELS, RULES
from telemetry.dashboards.pages import DASHBOARDS, UNPLOTTED
from telemetry.dashboards.promql import QueryError
from telemetry.dashboards.reference import askers, render

ROOT = Path(__file__).parents[2]
NAMES = [dashboard.name for dashboard in DASHBOARDS]


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / DASHBOARD_FOLDER / f"{name}.json").read_text())
    return found


def test_committed_files_are_what_is_generated() -> None:
    assert drifted(ROOT, files()) == []


def test_drift_is_seen(tmp_path: Path) -> None:
    """Guards the check itself: a changed, a missing and a left-over file are all named."""
    wanted = files()
    for path, text in wanted.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert drifted(tmp_path, wanted) == []
    changed, missing = [tmp_path / DASHBOARD_FOLDER / f"{name}.json" for name in NAMES[:2]]
    changed.write_text(changed.read_text().replace("Headrace", "Tailrace"))
    missing.unlink()
    (tmp_path / DASHBOARD_FOLDER / "old.json").write_text("{}")
    assert len(drifted(tmp_path, wanted)) == 3


def test_every_family_is_asked_for_or_excused() -> None:
    """Guards against metrics that are kept up and never looked at, and against excuses that are out of date."""
    unasked = {family for family, places in askers().items() if not places}
    assert unasked == set(UNPLOTTED)
    assert set(UNPLOTTED) <= set(catalog())


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("no_such_total", {}),
        ("requests_total", {"outcome": "stopped"}),
        ("requests_total", {"stage": "admit"}),
        ("request_stage_seconds", {"stage": "migrate|sleep"}),
        ("request_ttft_seconds", {}),
    ],
)
def test_a_query_for_what_is_not_shown_cannot_be_written(name: str, labels: dict[str, str]) -> None:
    """Guards against dead panels: half of those that others ship ask for names that are gone."""
    with pytest.raises(QueryError):
        PANELS.series(name, **labels)


def test_scopes_select() -> None:
    assert PANELS.series("requests_total", outcome="stop|length") == (
        'headrace_requests_total{model=~"$model",outcome=~"stop|length"}'
    )
    assert PANELS.series("kv_pool_blocks") == (
        'headrace_kv_pool_blocks{model=~"$model",worker=~"$worker"}'
    )
    assert RULES.rate("generated_tokens_total", "worker") == (
        "sum by (worker) (rate(headrace_generated_tokens_total[5m]))"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_can_be_imported(name: str) -> None:
    """What Grafana's own linter asks for: a data source variable, unique ids, units, words for every panel, windows
    left to Grafana, no two panels in one place."""
    dashboard = load(name)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "model", "worker", "docs"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            windows = re.findall(r"\brate\([^\[]*\[([^\]]*)\]", target["expr"])
            assert set(windows) <= {"$__rate_interval"}, target["expr"]


@pytest.mark.parametrize("path", [*files()], ids=str)
def test_no_file_names_what_is_not_shown(path: Path) -> None:
    """Guards variables and annotations too, whose names nothing else checks."""
    known = {name for family in catalog().values() for name in family.samples}
    known |= set(catalog())  # the page names whole families
    named = set(re.findall(r"\b(?:headrace|process)_[a-z0-9_]+\b", (ROOT / path).read_text()))
    assert named and named <= known, named - known


def test_dashboards_have_names_of_their_own() -> None:
    assert len({dashboard["uid"] for dashboard in map(load, NAMES)}) == len(NAMES)
    titles = [(d.name, p.title) for d in DASHBOARDS for p in d.panels]
    assert len(set(titles)) == len(titles)


def test_the_page_of_metrics_has_every_family() -> None:
    """Guards readers of the page: two families of processes that no part of it was about were left out."""
    page = render()
    assert [name for name in catalog() if f"| `{name}` |" not in page] == []
