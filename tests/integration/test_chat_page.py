"""The page at `/` of a real cluster, in a real browser."""

import re
from pathlib import Path

import pytest

from tests.integration.chat_picture import TURNS, converse, serving_page
from tests.router.http.browser import MISSING, browsing, chromium


@pytest.mark.skipif(chromium() is None, reason=MISSING)
def test_two_turns_name_both_workers_and_what_was_cached(demo_model: Path, tmp_path: Path) -> None:
    with serving_page(demo_model) as address, browsing(tmp_path) as browser:
        tab = browser.open(address)
        converse(tab)
        figures = tab.run("Array.from(document.querySelectorAll('.figures'), (one) => one.innerText)")
        assert tab.complaints() == []
    assert len(figures) == len(TURNS)
    for text in figures:
        assert "prefill-0 → decode-0" in text
    first, second = (re.search(r"cached tokens: (\d+) of (\d+) on prefill-0, (\d+)", text) for text in figures)
    assert first is not None and second is not None
    # The second turn begins with the first and its answer, which both workers have.
    assert int(second[1]) >= int(first[2]) - 16
    assert int(second[3]) > 0
