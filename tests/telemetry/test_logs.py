"""Log lines, for people and for machines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from telemetry import logs


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_json_lines_carry_worker_and_request() -> None:
    """Guards against a multi-line exception or a newline in a message splitting one entry in two."""
    stream = io.StringIO()
    logs.configure("decode-0", json_lines=True, stream=stream)
    try:
        raise ValueError("broken\nblock")
    except ValueError:
        about = {"request": "r7", "facts": {"tokens": 3}}
        logging.getLogger("x").exception("request %s\nfailed", 7, extra=about)
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["worker"], entry["request"], entry["level"]) == ("decode-0", "r7", "error")
    assert "broken" in entry["exception"] and entry["facts"] == {"tokens": 3}


def test_plain_lines_and_levels() -> None:
    """Guards against a second set-up doubling every line."""
    stream = io.StringIO()
    logs.configure("router", level="warning", stream=io.StringIO())
    logs.configure("router", level="warning", stream=stream)
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud", extra={"request": "r1"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("warning [router r1] loud")


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        logs.configure("router", level="loud")
