"""Measures how long a stream stands still when its worker is killed: `python -m benchmarks.recovery`.

Real processes, two prefill and two decode workers, one request at a time. Killed with SIGKILL: the decode worker when
the client has its k-th token, or the prefill worker halfway through the prompt. Measured by the client's clock: the
gap between two tokens into which the kill falls, or the next, less the usual gap; for a prefill worker, the time to
first token less the undisturbed one. Every token is compared with an undisturbed run's, and a kill that changed
nothing, as it came too late, is made again; the fourth in a row fails the run.

The bound beside it: the tokens that a prefill worker computed from the kill on, counted, at this run's own prefill
speed, and one usual gap (for a prefill worker: less what was still to come). The rest is detection, placing, moving the
blocks, and waiting for steps.
"""

import argparse
import os
import signal
import sys
import threading
import time
from bisect import bisect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks.bed import Bed, TimedAnswer, Watch, random_prompt, transfer_config
from benchmarks.figures import Middle, middle, numbers, show, write_json
from cluster.processes.spec import model_cache
from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare

TOKENS = (1, 256, 1500)
KILLED_AT = (1, 8, 24)
OUTPUT_TOKENS = 40
TRIES = 4
SETTLE_S = 1.0
"""How long to wait after a replacement is up, until the router is connected to it."""


class KillResult(msgspec.Struct, frozen=True):
    """One kill that took effect."""

    recovery_s: float
    bound_s: float
    recomputed_tokens: int
    """Tokens that the living prefill workers computed, from the kill on."""
    exact: bool


class RecoveryLine(msgspec.Struct, frozen=True, kw_only=True):
    """All kills of one kind. `at_token` 0: while the prompt is prefilled and sent."""

    role: str
    prompt_tokens: int
    at_token: int
    recovery_s: Middle
    bound_s: Middle
    recomputed_tokens: Middle
    undisturbed_ttft_s: float
    exact: int
    kills: int


class NoEffectError(RuntimeError):
    """A worker was killed and the request did not notice: what was measured is no recovery."""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    model_dir = prepare(options.model, options.cache_dir)
    lines = measure(model_dir, options.tokens, options.at, options.kills, options.output_tokens)
    show(_table(lines))
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, "recovery", settings, lines)
    return 0 if all(line.exact == line.kills for line in lines) else 1


def measure(
    model_dir: Path,
    lengths: list[int],
    at_tokens: list[int],
    kills: int,
    output_tokens: int,
    engine: EngineConfig | None = None,
) -> list[RecoveryLine]:
    """Kill decode workers, for each length, at each of `at_tokens`, then prefill workers while they send."""
    vocab = ModelConfig.load(model_dir).vocab
    lines = []
    with Bed(
        model_dir,
        prefill=2,
        decode=2,
        transfer=transfer_config("auto", True),
        engine=engine or EngineConfig(),
    ) as bed:
        longest = max(lengths)
        speed = longest / bed.ask(random_prompt(longest, vocab, "speed"), 1, "speed").ttft_s
        for tokens in lengths:
            prompt = random_prompt(tokens, vocab, tokens)
            calm = [bed.ask(prompt, output_tokens, f"calm-{tokens}-{n}") for n in range(3)][1:]
            trial = _Trial(bed, prompt, calm, speed)
            for at in at_tokens:
                found = [_in_time(partial(trial.kill_decode, at)) for _ in range(kills)]
                lines.append(_line("decode", tokens, at, trial, found))
            # A shorter prompt is sent in one piece: there is no time at which its worker is sending.
            if tokens > bed.config.prefill.chunk_tokens:
                found = [_in_time(trial.kill_prefill) for _ in range(kills)]
                lines.append(_line("prefill", tokens, 0, trial, found))
    return lines


def _in_time(kill: Callable[[], KillResult]) -> KillResult:
    """Kill, and once more as often as it came too late. Raises NoEffectError where it always does."""
    for _ in range(TRIES - 1):
        with suppress(NoEffectError):
            return kill()
    return kill()


class _Trial:
    """One prompt, its undisturbed answers, and kills during repetitions of it under names of their own."""

    def __init__(self, bed: Bed, prompt: list[int], calm: list[TimedAnswer], prefill_tokens_per_s: float) -> None:
        self._bed, self._prompt, self._output_tokens = bed, prompt, len(calm[0].tokens)
        self._want = calm[0].tokens
        self.ttft_s = middle([answer.ttft_s for answer in calm]).median
        self._gap_s = middle([gap for answer in calm for gap in answer.gaps_s]).median
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._number = 0

    def kill_decode(self, at: int) -> KillResult:
        """Kill the decode worker when the client has `at` tokens."""
        has_tokens = threading.Event()
        answer, victim, killed_s, again = self._killed("decode", has_tokens, Watch(at, has_tokens))
        if answer.finished.stats.decode_worker == victim:
            raise NoEffectError(f"{victim} was killed at token {at} and ended the request all the same")
        # A token may have been on its way when the worker died.
        first = bisect(answer.arrivals_s, killed_s) - 1
        return self._result(answer, max(answer.gaps_s[first : first + 2]) - self._gap_s, again, self._gap_s)

    def kill_prefill(self) -> KillResult:
        """Kill the prefill worker halfway to the first token."""
        answer, victim, killed_s, again = self._killed("prefill", threading.Event(), None)
        if answer.finished.stats.prefill_worker == victim:
            raise NoEffectError(f"{victim} was killed and had sent everything")
        return self._result(answer, answer.ttft_s - self.ttft_s, again, killed_s - self.ttft_s)

    def _killed(
        self, role: str, when: threading.Event, watch: Watch | None
    ) -> tuple[TimedAnswer, str, float, int]:
        """Return the answer, who was killed, when (seconds after the request was sent), and how many tokens the prefill
        workers that live computed from then on."""
        self._number += 1
        before = {name: cpu_ns(pid) for name, pid in self._bed.pids(role).items()}
        box: list[TimedAnswer | BaseException] = []

        def ask() -> None:
            try:
                tenant = f"{role}-{len(self._prompt)}-{self._number}"
                box.append(self._bed.ask(self._prompt, self._output_tokens, tenant, watch))
            except BaseException as error:
                box.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        began_s = time.perf_counter()
        thread.start()
        when.wait(60.0 if watch is not None else self.ttft_s / 2)
        pids = self._bed.pids(role)
        # Nobody else works: the busier of the two is the one that has the request.
        victim = max(pids, key=lambda name: cpu_ns(pids[name]) - before[name])
        counted = self._bed.counts("prefill")
        killed_s = time.perf_counter() - began_s
        os.kill(pids[victim], signal.SIGKILL)
        thread.join(120.0)
        if not box:
            raise TimeoutError(f"no end within 120 s after {victim} was killed")
        if isinstance(box[0], BaseException):
            raise box[0]
        again = sum(
            counts.since(counted[name]).computed_tokens
            for name, counts in self._bed.counts("prefill").items()
            if name != victim
        )
        self._bed.replaced(victim, pids[victim])
        time.sleep(SETTLE_S)
        return box[0], victim, killed_s, again

    def _result(self, answer: TimedAnswer, recovery_s: float, again: int, besides_s: float) -> KillResult:
        return KillResult(
            recovery_s=recovery_s,
            bound_s=max(0.0, again / self._prefill_tokens_per_s + besides_s),
            recomputed_tokens=again,
            exact=answer.tokens == self._want,
        )


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process so far; 0 for one that is gone."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _line(role: str, tokens: int, at: int, trial: _Trial, found: list[KillResult]) -> RecoveryLine:
    return RecoveryLine(
        role=role,
        prompt_tokens=tokens,
        at_token=at,
        recovery_s=middle([kill.recovery_s for kill in found]),
        bound_s=middle([kill.bound_s for kill in found]),
        recomputed_tokens=middle([float(kill.recomputed_tokens) for kill in found]),
        undisturbed_ttft_s=trial.ttft_s,
        exact=sum(kill.exact for kill in found),
        kills=len(found),
    )


def _table(lines: list[RecoveryLine]) -> Table:
    table = Table(title="Recovery after SIGKILL", title_justify="left")
    for name in (
        "killed",
        "prompt tokens",
        "when",
        "recovery ms: median (middle half)",
        "worst",
        "bound ms",
        "computed again",
        "TTFT undisturbed ms",
        "exact",
    ):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.role,
            str(line.prompt_tokens),
            f"token {line.at_token}" if line.at_token else "sending",
            line.recovery_s.cell(1e3, 0),
            f"{line.recovery_s.worst * 1e3:.0f}",
            f"{line.bound_s.median * 1e3:.0f}",
            f"{line.recomputed_tokens.median:.0f}",
            f"{line.undisturbed_ttft_s * 1e3:.0f}",
            f"{line.exact} of {line.kills}",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", help="a GGUF file or a directory; default: the demo's")
    add("--cache-dir", type=Path, default=model_cache(), help="of prepared models")
    add("--tokens", type=numbers, default=list(TOKENS), help="prompt lengths")
    add("--at", type=numbers, default=list(KILLED_AT), help="kill decode workers at these tokens")
    add("--kills", type=int, default=10, help="of each kind")
    add("--output-tokens", type=int, default=OUTPUT_TOKENS)
    add("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
