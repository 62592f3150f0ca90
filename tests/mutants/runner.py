"""Judge mutants of one package by the tests that mirror it: `python -m tests.mutants.runner PACKAGE KEYS RESULTS JOBS
QUICK [PATHS]`.

The tests are collected once, in a process that has imported everything. Each mutant gets a fork of it, changes the
running code there and runs only the tests that enter its function: those of the file's own test file first, then the
quickest of the package's folder, and of others as long as there is time; with QUICK, as many as take so many seconds;
with PATHS, those of these folders and files alone.
Which tests enter which function is asked of one run without a mutant, and again of each file that has changed since. A
test that fails there, since the machine is busy, is named and left out; with more than FEW_FAIL of them, no mutant is
judged.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutants.catalogue import PACKAGES, ROOT, Mutant, Source, sources
from tests.mutants.patch import CannotPatch, Place, place_of, plant, running
from tests.mutants.results import Outcome, Result, Results, digest, digest_of_tests

MEMORY_BYTES = 2 << 30
"""What a mutant's process may have beyond its parent: an endless loop that collects shall end."""
CPU_S = 4.0
"""What its tests may take beyond four times what they take without a mutant."""
OTHERS_S = 6.0
"""What tests beyond those of the folder that mirrors the package may take for one mutant: the quickest are run."""
FEW_FAIL = 3
"""How many tests may fail without a mutant."""
LEFT_OUT = "not (slow or chaos or gpu or observe or parity or ray or rayup)"
UNFORKED = "not nccl"
"""The library that pretends to be NCCL has threads of its own, which a fork does not take along."""

_Entered = tuple[float, list[Place]]
"""What a test takes, in seconds, and the functions that it enters."""


@dataclass(slots=True)
class Child:
    """A process that judges one mutant. It writes the test that failed, or why it could not begin."""

    pid: int
    pipe: int
    mutant: Mutant
    tests: int
    began_s: float
    limit_s: float
    said: bytes = b""
    waited_s: float = 0.0
    """Seconds that this process, which may have been stopped meanwhile, has waited for it."""


@dataclass
class MutantRunner:
    """A plugin of pytest that runs the collected tests many times, once for each mutant."""

    package: str
    mutants: list[Mutant]
    results: Results
    jobs: int
    sources: dict[str, Source]
    quick_s: float = 0.0
    """The seconds that one mutant's tests may take; 0.0: all of them are run."""
    only: Sequence[str] = ()
    """The places of the tests; none: those of the package."""
    tests: str = ""
    """A digest of the tests as they were collected."""
    enters: dict[Place, list[tuple[str, float]]] = field(default_factory=dict)
    """The tests that enter a function, with the seconds that each takes."""

    def pytest_sessionstart(self) -> None:
        # Here, since pytest warns of plugins that were imported before it.
        from hypothesis import Phase, settings

        # A mutant's failure need not be the smallest, and must not be remembered for the next.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.get_profile("headrace"), phases=phases, database=None)
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Failed("the tests cannot be collected")
        self.tests = digest_of_tests(self.package, quick_s=self.quick_s, only=self.only)
        files = {str(ROOT / path) for path in self.sources}
        functions = running(files)
        self._measure(session, files)
        items = {item.nodeid: item for item in session.items}
        waiting = iter(self.mutants)
        children: list[Child] = []
        while True:
            while len(children) < self.jobs and (mutant := next(waiting, None)) is not None:
                chosen = self._chosen(mutant)
                if not chosen:
                    self._note(mutant, Outcome.SURVIVED, "no test enters it", 0.0)
                    continue
                limit_s = CPU_S + 4 * sum(seconds for _, seconds in chosen)

                def judge(mutant: Mutant = mutant, chosen: list[tuple[str, float]] = chosen) -> None:
                    plant(self.sources[mutant.file], mutant, functions)
                    session.items[:] = [items[name] for name, _ in chosen]

                pid, pipe = _fork(session, judge, limit_s)
                children.append(Child(pid, pipe, mutant, len(chosen), time.monotonic(), limit_s))
            if not children:
                return True
            self._collect(children)

    def _measure(self, session: pytest.Session, files: set[str]) -> None:
        """Note what enters what: run the tests of each file once without a mutant, if it has changed since the last
        time. Raises Failed where too much fails."""
        helpers = [path for path in map(Path, _paths(PACKAGES[self.package])) if not path.name.startswith("test_")]
        shared = digest([self.package, *map(str, helpers)])
        items: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            name = f"enters-{shared}-{digest([item.nodeid.partition('::')[0]])}.json"
            items.setdefault(self.results.folder / name, []).append(item)
        changed = {known: of_file for known, of_file in items.items() if not known.exists()}
        if changed:
            told = self._enter(session, [item for of_file in changed.values() for item in of_file], files)
            self.results.folder.mkdir(parents=True, exist_ok=True)
            for known, of_file in changed.items():
                known.write_text(json.dumps({one.nodeid: told[one.nodeid] for one in of_file if one.nodeid in told}))
        for known in items:
            entered: dict[str, _Entered] = json.loads(known.read_bytes())
            for name, (seconds, places) in entered.items():
                for file, function, line in places:
                    self.enters.setdefault((file, function, line), []).append((name, seconds))

    def _enter(self, session: pytest.Session, items: list[pytest.Item], files: set[str]) -> dict[str, _Entered]:
        """Run `items` without a mutant; return what each enters. Those that fail are left out."""
        watch = _Watch(files)

        def prepare() -> None:
            session.config.pluginmanager.register(watch)
            session.config.option.maxfail = 0
            session.items[:] = items

        pid, pipe = _fork(session, prepare, 3_600, watch.told)
        said = b"".join(iter(lambda: os.read(pipe, 1 << 16), b""))
        os.close(pipe)
        os.waitpid(pid, 0)
        if not said.startswith(b"{"):
            raise session.Failed(f"no test can be run: {said.decode() or 'it died'}")
        failed, entered = json.loads(said)["failed"], json.loads(said)["tests"]
        for name in failed:
            print(f"{self.package}: fails without a mutant: {name}", flush=True)
        if len(failed) > FEW_FAIL:
            raise session.Failed(f"{len(failed)} tests fail without a mutant")
        return {name: told for name, told in entered.items() if name not in failed}

    def _chosen(self, mutant: Mutant) -> list[tuple[str, float]]:
        path = str(ROOT / mutant.file)
        entered: dict[str, float] = {}
        for (file, name, _), tests in self.enters.items():
            # A table is looked up by any function, so everything is run for it.
            if (file == path and name == mutant.function) or not mutant.function:
                entered.update(tests)
        mirror, own = f"/test_{Path(mutant.file).name}::", f"{PACKAGES[self.package][0]}/"
        ranked = sorted(
            entered.items(), key=lambda test: (mirror not in test[0], own not in test[0], test[1], test[0])
        )
        chosen, others_s = [], 0.0
        for name, seconds in ranked:
            others_s += 0.0 if own in name else seconds
            if others_s <= OTHERS_S:
                chosen.append((name, seconds))
        if self.quick_s:
            sums = accumulate(seconds for _, seconds in chosen)
            chosen = [test for test, sum_s in zip(chosen, sums, strict=True) if sum_s <= self.quick_s] or chosen[:1]
        return chosen

    def _collect(self, children: list[Child]) -> None:
        began_s = time.monotonic()
        ready, _, _ = select.select([child.pipe for child in children], [], [], 1.0)
        polled_s = min(time.monotonic() - began_s, 1.0)
        for child in list(children):
            child.waited_s += polled_s
            if child.pipe in ready:
                more = os.read(child.pipe, 1 << 16)
                child.said += more
                if more:
                    continue
            # A process that sleeps uses no processor time.
            elif child.waited_s < 10 * child.limit_s:
                continue
            else:
                os.kill(child.pid, signal.SIGKILL)
                child.said = b"found it hangs"
            os.close(child.pipe)
            _, status = os.waitpid(child.pid, 0)
            children.remove(child)
            outcome, _, by = child.said.decode().partition(" ")
            if not outcome and os.WIFSIGNALED(status):
                outcome, by = "found", f"it ends by {signal.Signals(os.WTERMSIG(status)).name}"
            if outcome == "survived":
                by = f"{child.tests} tests"
            self._note(child.mutant, Outcome(outcome or "unmade"), by, time.monotonic() - child.began_s)

    def _note(self, mutant: Mutant, outcome: Outcome, by: str, seconds: float) -> None:
        line = next(line for known, line in self.sources[mutant.file].mutants if known == mutant)
        self.results.add(Result(mutant.key, mutant, line, outcome, "tests", by, round(seconds, 2), self.tests))
        print(f"{outcome.value:9} {seconds:5.1f} s  {mutant.file}:{line} {mutant.change}  [{by}]", flush=True)


class _Verdict:
    """A plugin that remembers which tests fail, each once."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


class _Watch:
    """A plugin that notes which functions of `files` each test enters."""

    def __init__(self, files: set[str]) -> None:
        self._files = files
        self._tests: dict[str, _Entered] = {}

    def told(self, failed: list[str]) -> str:
        return json.dumps({"failed": failed, "tests": self._tests})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        entered: set[CodeType] = set()
        files = self._files

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code not in entered and frame.f_code.co_filename in files:
                entered.add(frame.f_code)

        began_s = time.process_time()
        sys.setprofile(note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            seconds = time.process_time() - began_s
            self._tests[item.nodeid] = (seconds, [place_of(code) for code in entered])


def _fork(
    session: pytest.Session, prepare: Callable[[], None], limit_s: float, told: Callable[[list[str]], str] | None = None
) -> tuple[int, int]:
    """Run the session's tests in a child after `prepare`, until one fails. Returns its id and a pipe with its verdict,
    which `told` may put into words."""
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.close(read)
    said = "unmade it ended early"
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 2))
        memory = _size_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        verdict = _Verdict()
        session.config.pluginmanager.register(verdict)
        prepare()
        from _pytest.main import pytest_runtestloop

        with contextlib.suppress(session.Failed):
            pytest_runtestloop(session)
        said = (told or _said)(verdict.failed)
    except CannotPatch as error:
        said = f"unmade {error}"
    except BaseException as error:
        said = f"found {type(error).__name__} outside a test"
    finally:
        rest = said.encode()
        while rest:
            rest = rest[os.write(write, rest) :]
        os._exit(0)


def _paths(places: Iterable[str]) -> Iterator[str]:
    """The Python files of `places`, folders or files, as they are named from the root."""
    for place in places:
        at = ROOT / place
        for path in sorted(at.rglob("*.py")) if at.is_dir() else [at]:
            yield path.relative_to(ROOT).as_posix()


def _said(failed: list[str]) -> str:
    return f"found {failed[0]}" if failed else "survived"


def _size_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(package: str, keys: Path, results: Path, jobs: int, quick_s: float, only: Sequence[str]) -> int:
    wanted = set(keys.read_text().split())
    own = {source.path: source for source in sources() if source.path.startswith(f"{package}/")}
    mutants = [mutant for source in own.values() for mutant, _ in source.mutants if mutant.key in wanted]
    runner = MutantRunner(package, mutants, Results(results), jobs, own, quick_s, only)
    options = ["-x", "-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    places = [str(ROOT / place) for place in only or PACKAGES[package]]
    return int(pytest.main([*options, "-m", LEFT_OUT, "-k", UNFORKED, *places], plugins=[runner]))


if __name__ == "__main__":
    package, keys, results, jobs, quick_s, *only = sys.argv[1:]
    sys.exit(main(package, Path(keys), Path(results), int(jobs), float(quick_s), only))
