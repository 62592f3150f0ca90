"""Commands in README and docs: each block is run by a test, here or where it says, or says why not."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.bench.options import add_arguments
from cluster.cli.command import _parsers
from cluster.cli.parser import CommandParser
from cluster.processes.leftovers import descendants, running
from cluster.rundir import start_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HERE = Path(__file__).relative_to(ROOT)
FENCE = re.compile(r"(?:^<!-- ((?:(?!-->).)*) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"(?:    )?(?:\$ )?(?:\.venv/bin/|(?:headrace|make|ray|curl|docker|kubectl|prometheus|pip|python3?|git) [a-z'./-])"
)
BIN = Path(sys.executable).parent


class Block(NamedTuple):
    page: str
    mark: str
    language: str
    text: str

    @property
    def has_commands(self) -> bool:
        return self.language in ("sh", "console") or any(map(COMMAND.match, self.text.splitlines()))


def blocks(text: str, page: str = "") -> list[Block]:
    return [Block(page, *found.groups(default="")) for found in FENCE.finditer(text)]


def everything() -> list[Block]:
    return [
        block for page in PAGES for block in blocks(page.read_text(), str(page.relative_to(ROOT)))
    ]


def faults(block: Block) -> str:
    """What is wrong with how a block of commands is marked; nothing if all is well."""
    if not block.has_commands:
        return ""
    if block.language not in ("sh", "console"):
        return "commands in a block that is not tagged sh or console"
    verb, _, said = block.mark.partition(": ")
    if verb == "not run by a test" and said:
        return ""
    if verb != "run by" or not (ROOT / said).is_file():
        return f"neither run by a test nor marked with why not: {block.mark!r}"
    return "" if block.page in (ROOT / said).read_text() else f"{said} does not know {block.page}"


def test_every_block_of_commands_is_run_or_says_why_not() -> None:
    """Guards against a page whose commands stopped working unseen."""
    found = everything()
    assert sum(block.has_commands for block in found) > 10
    assert [(b.page, fault, b.text[:60]) for b in found if (fault := faults(b))] == []
    loose = [
        (page.name, line)
        for page in PAGES
        for line in FENCE.sub("", page.read_text()).splitlines()
        if line.startswith("    ") and COMMAND.match(line)
    ]
    assert loose == [], "commands outside of a block"


def test_the_readme_says_where_the_command_is_before_it_uses_it() -> None:
    """Guards against `headrace: command not found` for who pastes line after line into a fresh clone."""
    typed = "".join(b.text for b in everything() if b.page == "README.md" and b.has_commands)
    assert ". .venv/bin/activate" in typed.partition("\nheadrace ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_text_tells_to_type_is_taken(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the README's table of what to type next, and prose: nothing runs what stands between backquotes there. A
    verb may be named without what it needs."""
    whole, bench = _parsers()[0], CommandParser(prog="headrace bench")
    add_arguments(bench)
    text = page.read_text()
    typed = re.findall(r"`headrace ([^`\n]+)`", text)
    typed += re.findall(r"^(?:\$ )?(?:\.venv/bin/)?headrace (.*)", text.replace("\\\n", " "), re.MULTILINE)
    faults = []
    for one in typed:
        words = shlex.split(re.sub(r" (?:>|&).*", "", one).replace("$!", "1"), comments=True)
        parser = bench if words[0] == "bench" else whole
        try:
            unknown = parser.parse_known_args(words[1:] if parser is bench else words)[1]
        except SystemExit:
            unknown = [said] if (said := capsys.readouterr().err) and "are required" not in said else []
        faults += [(one, unknown)] if unknown and one != "help VERB" else []
    assert faults == []


def test_the_index_has_every_page() -> None:
    """Guards against a page that nobody finds: docs/README.md links them all, and each link leads to a file."""
    index = (ROOT / "docs/README.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert linked == pages, "add a line about the new page to docs/README.md, or take one away"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Guards against a page or a heading that was renamed under the links to it."""
    lost = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file.read_text())):
            lost.append(target)
    assert lost == []


def _anchors(text: str) -> set[str]:
    """Return what GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "text",
    [
        "```\nheadrace up\n```\n",
        "```sh\nheadrace up\n```\n",
        "<!-- not run by a test -->\n```sh\nheadrace up\n```\n",
        "<!-- run by: tests/no_such_file.py -->\n```sh\nheadrace up\n```\n",
        "<!-- run by: tests/docs/handoff_tables.py -->\n```sh\nheadrace up\n```\n",
    ],
)
def test_a_block_without_its_mark_is_seen(text: str) -> None:
    (block,) = blocks(text, "docs/nowhere.md")
    assert faults(block)


def ours(page: str) -> list[Block]:
    return [b for b in everything() if b.page == page and b.mark == f"run by: {HERE}"]


class Place:
    """A folder like the repository's root after `make setup`, with the ports of the pages replaced by free ones."""

    def __init__(self, cache: Path, folder: Path, **more: str) -> None:
        """`more` are settings by the end of their variables' names."""
        self._ports = {"8000": _free_port(), "50051": _free_port()}
        settings = {
            "NAME": "pages",
            "RUN_DIR": str(folder / "run"),
            "CACHE_DIR": str(cache),
            "LAUNCHER": "process",
            "ROUTER__HTTP_PORT": self._ports["8000"],
            "ROUTER__GRPC_PORT": self._ports["50051"],
            "ROUTER__DEFAULT_MAX_TOKENS": "8",
            "PREFILL__ENGINE__POOL_BYTES": str(64 << 20),
            "DECODE__ENGINE__POOL_BYTES": str(64 << 20),
            "STOP_GRACE_S": "2",
            **more,
        }
        self.grpc_port, self.http_port = self._ports["50051"], self._ports["8000"]
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        self._environ |= {f"HEADRACE_{key}": value for key, value in settings.items()}
        self._environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
        self._environ["PYTHONPATH"] = str(ROOT)

    def __call__(self, commands: str, **replaced: str) -> str:
        """What bash prints for the lines of a page."""
        usual = {". .venv/bin/activate": ":", ".venv/bin/": "", **self._ports}
        for old, new in (usual | replaced).items():
            commands = commands.replace(old, new)
        done = subprocess.run(
            ["bash", "-ec", commands],
            cwd=ROOT,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=180.0,
            check=False,
        )
        assert done.returncode == 0, (commands, done.stdout, done.stderr)
        return done.stdout


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@pytest.fixture
def place(tmp_path: Path, demo_cache: Path) -> Iterator[Place]:
    one = Place(demo_cache, tmp_path)
    supervisor = 0
    try:
        one("headrace up --detach")
        supervisor = int(
            one(
                "headrace status --json | python -c 'import json, sys; print(json.load(sys.stdin)[\"pid\"])'"
            )
        )
        yield one
    finally:
        if supervisor and start_of(supervisor) is not None:
            below = descendants(supervisor)
            os.kill(supervisor, signal.SIGKILL)
            for pid in running(below):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the pages call curl")
def test_what_is_typed_beside_a_running_cluster(place: Place) -> None:
    """README.md and docs/http.md: questions, then every verb of the list, the last of which take it down."""
    ask, look = ours("README.md")
    assert "data: [DONE]" in place(ask.text)
    (http,) = ours("docs/http.md")
    assert "data: [DONE]" in place(http.text)

    latest = ""
    deadline_s = time.monotonic() + 10.0
    while not latest and time.monotonic() < deadline_s:
        found = re.findall(r"\b[0-9a-f]{16}\b", place("headrace trace"))
        latest = found[0] if found else ""
    # Live until it is interrupted, and no request is called REQUEST.
    told = place(look.text, **{"headrace top ": "headrace top --once ", "REQUEST": latest})
    assert f"{latest} on router" in told and "decode-2" in told
    assert "no shared memory is left" in told and " 0 failed" in told


@pytest.mark.parametrize("shown", ours("docs/capacity.md"), ids=lambda block: block.text[2:40])
def test_a_transcript_is_what_is_printed(shown: Block) -> None:
    """docs/capacity.md: the lines under a command are what it prints."""
    lines = shown.text.removeprefix("$ ").splitlines()
    end = next(at for at, line in enumerate(lines, 1) if not line.endswith("\\"))
    typed, printed = "\n".join(lines[:end]), lines[end:]
    done = subprocess.run(
        ["bash", "-ec", typed.replace("headrace", f"{sys.executable} -m cluster.cli", 1)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
    )
    assert [line.rstrip() for line in done.stdout.splitlines() if line.strip()] == [
        line.rstrip() for line in printed if line.strip()
    ]
