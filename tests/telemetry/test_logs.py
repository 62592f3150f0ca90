"""Log lines, for people and for machines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from telemetry import logs
from telemetry.log_lines import BURST, REFILL_S, KindLimit


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


FORGED = "d0\n12:00:00 error   [router] all is lost\x1b[2J\u2028\x9b1m\u202eevil\ud800"


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_name_of_a_peer_cannot_forge_an_entry(json_lines: bool) -> None:
    """Guards operators, and what reads logs for them: a worker's name is what the worker says it is."""
    stream = io.StringIO()
    logs.configure("router", json_lines=json_lines, stream=stream)
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        logging.getLogger("x").exception("worker %s is refused: %s", FORGED, error, extra={"request": FORGED})
    written = stream.getvalue()
    first, *rest = written.splitlines()
    assert "worker d0\\n12:00:00" in (json.loads(first)["message"] if json_lines else first)
    assert all(line.startswith("    | ") for line in rest)
    assert not set(written) & set("\x1b\u2028\x9b\u202e\ud800")
    written.encode()


def test_a_message_has_a_longest_length() -> None:
    """Guards a disk against one name of 60 MB."""
    stream = io.StringIO()
    logs.configure("router", stream=stream)
    logging.getLogger("x").warning("worker %s", "d" * 1_000_000)
    assert len(stream.getvalue()) < 20_000 and "characters)" in stream.getvalue()


def test_junk_cannot_flood_a_log() -> None:
    """Guards a disk, and whoever reads: a peer repeats itself thousands of times a second."""
    stream = io.StringIO()
    logs.configure("router", stream=stream)
    log = logging.getLogger("x")

    def complain(about: str) -> None:
        log.error("%s: a frame is not of this protocol", about)

    for number in range(10_000):
        complain(f"peer {number}")
        if number % 1000 == 0:
            log.warning("something else")
            log.warning("it has failed", extra={"request": f"r{number}"})
    written = stream.getvalue()
    assert BURST <= written.count("not of this protocol") < BURST + 20
    assert written.count("something else") == 10 == written.count("it has failed"), "it is of another kind"


def test_what_was_left_out_is_said() -> None:
    """Guards an operator who sees fifty complaints, and cannot know that there were thousands."""
    limit, passed = KindLimit(), []
    for at_s in [*([0.0] * (BURST + 7)), REFILL_S / 2, REFILL_S * 1.01]:
        record = logging.LogRecord("x", logging.ERROR, "file.py", 3, "from %s", ("a peer",), None)
        record.created = at_s
        if limit.filter(record):
            passed.append(record.getMessage())
    assert passed[:-1] == ["from a peer"] * BURST
    assert passed[-1] == "from a peer (before it, 8 more of its kind were left out)"


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        logs.configure("router", level="loud")
