"""Links of panels and alerts lead to headings and panels that there are."""

import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from telemetry.dashboards import grafana
from telemetry.dashboards.__main__ import DASHBOARD_FOLDER, RULES_FILE, files, main
from telemetry.dashboards.alerts import ALERTS
from telemetry.dashboards.links import DOCS, NEXT, PAGES
from telemetry.dashboards.pages import DASHBOARDS
from tests.docs.test_runbook import PAGE, missing_panels

ROOT = Path(__file__).parents[2]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them: small letters, hyphens for spaces, no other signs."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_there(link: str) -> bool:
    page, _, anchor = link.partition("#")
    return (ROOT / "docs" / page).is_file() and anchor in anchors(page)


def test_an_anchor_that_is_not_there_is_seen() -> None:
    assert is_there("operations.md#headraceprocessdown") and is_there("handoff.md#digests-all-a-sample-or-none")
    assert not is_there("operations.md#headrace") and not is_there("cellar.md#wine") and not is_there("operations.md")


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_panel_links_to_its_page_and_to_the_next_panel(dashboard: grafana.Dashboard) -> None:
    """Guards a link to a heading that was renamed, one to another panel than it says, and one that leaves the chosen
    time and workers behind."""
    built = {one.name: grafana.build(one, DASHBOARDS) for one in DASHBOARDS}
    titles = {
        (f"/d/{found['uid']}", str(panel["id"])): panel["title"]
        for found in built.values()
        for panel in found["panels"]
        if panel["type"] != "row"
    }
    for panel in built[dashboard.name]["panels"]:
        if panel["type"] == "row":
            assert "links" not in panel
            continue
        page, after = panel["links"]
        assert page["url"].startswith("${docs:raw}/") and is_there(page["url"].removeprefix("${docs:raw}/")), page
        to = urlsplit(after["url"])
        (number,) = parse_qs(to.query)["viewPanel"]
        assert after["title"].removeprefix("Next: ").endswith(titles[to.path, number]), after
        assert (to.path, number) != (f"/d/{built[dashboard.name]['uid']}", str(panel["id"])), "it leads to itself"
        assert after["url"].endswith("&${__url_time_range}&${__all_variables}")


def test_nothing_is_named_that_is_not_shown() -> None:
    assert {name: set(rows) for name, rows in PAGES.items()} == {d.name: {r.title for r in d.rows} for d in DASHBOARDS}
    assert {name: set(to) for name, to in NEXT.items()} == {d.name: {p.title for p in d.panels} for d in DASHBOARDS}


def test_every_alert_has_its_part_of_the_runbook() -> None:
    """Guards a page in the night whose link leads nowhere, and a runbook that names panels of other dashboards."""
    text = PAGE.read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    parts = dict(part.split("\n", 1) for part in text.split("\n### ")[1:])
    assert list(parts) == [alert.name for alert in ALERTS], "in their order, and no other"
    for name, part in parts.items():
        (look,) = re.findall(r"(?ms)^- Look: (.+?)^- Do: ", part)
        panels = [one for one in re.split(r";\s+", " ".join(look.split()).rstrip(".")) if "*" in one]
        named = "; ".join(re.sub(r"\s*\(.*?\)", "", one) for one in panels)
        assert panels and missing_panels(named) == [], name
    shipped = yaml.safe_load((ROOT / RULES_FILE).read_text())["groups"][0]["rules"]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in shipped if "alert" in rule}
    assert set(links) == set(parts)
    for link in links.values():
        assert link.startswith("docs/") and is_there(link.removeprefix("docs/")), link


def test_links_lead_to_a_copy_of_yours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = "https://git.example.com/headrace/blob/main/docs"
    assert main(["--docs", docs + "/", "--to", str(tmp_path)]) == 0
    rules = (tmp_path / RULES_FILE).read_text()
    assert f"runbook_url: '{docs}/operations.md#headraceprocessdown'" in rules
    dashboard = (tmp_path / DASHBOARD_FOLDER / "overview.json").read_text()
    assert f'"query": "{docs}"' in dashboard and DOCS not in dashboard
    with pytest.raises(SystemExit):
        main(["--docs", docs])
    assert "--to FOLDER" in capsys.readouterr().err
    assert files() != files(docs)


def test_compose_serves_the_pages_where_links_lead() -> None:
    services = yaml.safe_load((ROOT / "deploy/docker/compose.yaml").read_text())["services"]
    assert f"../../docs:/usr/share/grafana{DOCS}:ro" in services["grafana"]["volumes"]
