"""One request at a time with drafts and without: what speculation gains on real text, and that it changes no answer.

    python -m benchmarks.drafts --rounds 3
    python -m benchmarks.drafts --rounds 1 --draft-layers 30,10

A cluster for each of `engine.speculation = off, ngram, suffix` is up, each of one prefill and one decode worker, and
all are asked the same greedy requests over HTTP in turns, in another order from prompt to prompt: pieces of this
project's own pages (`text`), such pieces that are to be written once more (`quoting`), and random ids (`random`, as in
preset C). `--draft-layers` adds a cluster with a draft model for each number: the demo model with its first so many
layers (`benchmarks.truncated`), of which all 30 are the model itself. A cell is the median over requests (middle half);
a gain is the time of a request without drafts over that of the same one with them; `drawn` is the share of all drafts,
and `tokens a step` the mean of the decode worker's steps. The status is 1 where an answer differs. Nothing else may run
on the machine.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from benchmarks import truncated
from benchmarks.bed import random_prompt
from benchmarks.figures import middle, show, write_json
from benchmarks.peers import free_port, headrace, metrics_page, running
from cluster.processes.spec import LaunchError

MODES = ("off", "ngram", "suffix")
KINDS = ("text", "quoting", "random")
PAGES = Path(__file__).parents[1] / "docs"
PIECE = 600
"""Characters of a page in a prompt."""
VOCAB = 32_000
COUNTED_S = 10.0
"""The longest that a worker may take to count a request that has ended."""


class DraftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request on one cluster. `seconds` from its first token to its last; `same`: its answer is that without
    drafts. `tokens_per_step`: as its decode worker counts."""

    kind: str
    mode: str
    number: int
    seconds: float
    tokens_per_s: float
    same: bool
    drafted: int = 0
    drawn: int = 0
    tokens_per_step: float = 1.0


class _Counts(NamedTuple):
    """What a decode worker has counted since it began."""

    ended: float
    tokens_per_step: float
    drawn: float
    rejected: float


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="four prompts of each kind in a round")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--draft-layers", type=_numbers, default=[], metavar="N,N", help="draft models of so many")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.output_tokens < 2:
        parser.error("at least 1 round, and 2 output tokens")
    try:
        rows = _all(4 * options.rounds, options.output_tokens, options.draft_layers)
    except (LaunchError, ValueError, httpx.HTTPError) as error:
        print(f"drafts: {error}", file=sys.stderr)
        return 1
    show(_table(rows))
    if options.json is not None:
        settings = {"rounds": options.rounds, "output_tokens": options.output_tokens}
        settings["draft_layers"] = options.draft_layers
        write_json(options.json, "drafts", settings, rows)
    different = [f"{row.kind} {row.number} with {row.mode}" for row in rows if not row.same]
    if different:
        print(f"drafts: other answers: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _prompt(kind: str, number: int) -> str | list[int]:
    if kind == "random":
        return random_prompt(32, VOCAB, number)
    pages = sorted(PAGES.glob("*.md"))
    page = pages[7 * number % len(pages)].read_text()
    at = 401 * number % max(1, len(page) - PIECE)
    piece = page[at : at + PIECE]
    return piece if kind == "text" else f"{piece}\n\nThe same once more, with every word as it stands above:\n\n"


def _all(count: int, output_tokens: int, draft_layers: list[int]) -> list[DraftRow]:
    rows: list[DraftRow] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-drafts-")))
        client = stack.enter_context(httpx.Client(timeout=600.0))
        settings: dict[str, tuple[str, ...]] = {mode: (f"engine.speculation={mode}",) for mode in MODES}
        for layers in draft_layers:
            truncated.write(path := folder / f"first-{layers}.gguf", layers)
            settings[f"model-{layers}"] = ("engine.speculation=model", f"engine.draft_model={path}")
        ports: dict[str, int] = {}
        pages: dict[str, str] = {}
        for mode, own in settings.items():
            port = ports[mode] = free_port()
            server = headrace(port)
            server = replace(server, argv=(*server.argv, *(word for one in own for word in ("--set", one))))
            stack.enter_context(running(server, port, stack.enter_context((folder / mode).open("wb"))))
            pages[mode] = metrics_page(port)
        modes = [*settings]
        for kind in KINDS:
            for number in range(count):
                prompt, turn = _prompt(kind, number), number % len(modes)
                told: dict[str, tuple[list[int], float, _Counts]] = {}
                for mode in modes[turn:] + modes[:turn]:
                    before = _counts(client, pages[mode])
                    ids, seconds = _ask(client, ports[mode], prompt, output_tokens)
                    # Without a drafter nobody counts steps: each draws one token.
                    counts = _Counts(1, 1.0, 0, 0) if mode == "off" else _since(client, pages[mode], before)
                    told[mode] = ids, seconds, counts
                for mode, (ids, seconds, counts) in told.items():
                    rate, same = (len(ids) - 1) / seconds, ids == told["off"][0]
                    made = DraftRow(
                        kind=kind, mode=mode, number=number, seconds=seconds, tokens_per_s=rate, same=same,
                        drafted=int(counts.drawn + counts.rejected), drawn=int(counts.drawn),
                        tokens_per_step=counts.tokens_per_step,
                    )  # fmt: skip
                    rows.append(made)
    return rows


def _counts(client: httpx.Client, page: str) -> _Counts:
    answer = client.get(page)
    answer.raise_for_status()
    seen = {
        (one.name.removeprefix("headrace_"), one.labels.get("outcome", "")): one.value
        for family in text_string_to_metric_families(answer.text)
        for one in family.samples
    }
    steps = (seen["request_tokens_per_step_count", ""], seen["request_tokens_per_step_sum", ""])
    return _Counts(*steps, seen["draft_tokens_total", "drawn"], seen["draft_tokens_total", "rejected"])


def _since(client: httpx.Client, page: str, before: _Counts) -> _Counts:
    """Return what one request has added, when its worker has counted it."""
    until_s = time.monotonic() + COUNTED_S
    while (now := _counts(client, page)).ended == before.ended:
        if time.monotonic() > until_s:
            raise LaunchError(f"{page}: the request that has ended is not counted")
        time.sleep(0.05)
    return _Counts(*(new - old for new, old in zip(now, before, strict=True)))


def _ask(client: httpx.Client, port: int, prompt: str | list[int], output_tokens: int) -> tuple[list[int], float]:
    """Return the answer, and the seconds from its first token to its last."""
    body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    ids: list[int] = []
    first_s = last_s = 0.0
    with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = msgspec.json.decode(line[6:]).get("choices") or [{}]
            if said := choices[0].get("token_ids"):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                ids += said
    if len(ids) != output_tokens:
        raise LaunchError(f"{len(ids)} of {output_tokens} tokens came")
    return ids, last_s - first_s


def _table(rows: list[DraftRow]) -> Table:
    table = Table(title="one request at a time: medians over requests (middle half)", title_justify="left")
    for heading in ("prompts", "speculation", "tokens/s", "gain", "drawn", "tokens a step", "other answers"):
        table.add_column(heading, justify="right")
    without = {(row.kind, row.number): row.seconds for row in rows if row.mode == "off"}
    modes = [*dict.fromkeys(row.mode for row in rows)]
    for kind in KINDS:
        for mode in sorted(modes, key=[*MODES, *modes].index):
            mine = [row for row in rows if (row.kind, row.mode) == (kind, mode)]
            drafted = sum(row.drafted for row in mine)
            gains = [without[kind, row.number] / row.seconds for row in mine]
            table.add_row(
                kind,
                mode,
                middle([row.tokens_per_s for row in mine]).cell(),
                "" if mode == "off" else middle(gains).cell(digits=2),
                f"{sum(row.drawn for row in mine) / drafted:.0%}" if drafted else "",
                f"{sum(row.tokens_per_step for row in mine) / len(mine):.2f}",
                str(sum(not row.same for row in mine)),
            )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
