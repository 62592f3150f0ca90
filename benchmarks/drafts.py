"""One request at a time with drafts and without: what speculation gains on real text, and that it changes no answer.

    python -m benchmarks.drafts --rounds 3

A cluster for each of `engine.speculation = off, ngram, suffix` is up, each of one prefill and one decode worker, and
all are asked the same greedy requests over HTTP in turns, in another order from prompt to prompt: pieces of this
project's own pages (`text`), such pieces that are to be written once more (`quoting`), and random ids (`random`, as in
preset C). A cell is the median over requests (middle half); a gain is the time of a request without drafts over that of
the same one with them. The status is 1 where an answer differs. Nothing else may run on the machine.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import msgspec
from rich.table import Table

from benchmarks.bed import random_prompt
from benchmarks.figures import middle, show, write_json
from benchmarks.peers import free_port, headrace, running
from cluster.processes.spec import LaunchError

MODES = ("off", "ngram", "suffix")
KINDS = ("text", "quoting", "random")
PAGES = Path(__file__).parents[1] / "docs"
PIECE = 600
"""Characters of a page in a prompt."""
VOCAB = 32_000


class DraftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request on one cluster. `seconds` from its first token to its last; `same`: its answer is that without
    drafts."""

    kind: str
    mode: str
    number: int
    seconds: float
    tokens_per_s: float
    same: bool


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="four prompts of each kind in a round")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.output_tokens < 2:
        parser.error("at least 1 round, and 2 output tokens")
    try:
        rows = _all(4 * options.rounds, options.output_tokens)
    except (LaunchError, httpx.HTTPError) as error:
        print(f"drafts: {error}", file=sys.stderr)
        return 1
    show(_table(rows))
    if options.json is not None:
        settings = {"rounds": options.rounds, "output_tokens": options.output_tokens}
        write_json(options.json, "drafts", settings, rows)
    different = [f"{row.kind} {row.number} with {row.mode}" for row in rows if not row.same]
    if different:
        print(f"drafts: other answers: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


def _prompt(kind: str, number: int) -> str | list[int]:
    if kind == "random":
        return random_prompt(32, VOCAB, number)
    pages = sorted(PAGES.glob("*.md"))
    page = pages[7 * number % len(pages)].read_text()
    at = 401 * number % max(1, len(page) - PIECE)
    piece = page[at : at + PIECE]
    return piece if kind == "text" else f"{piece}\n\nThe same once more, with every word as it stands above:\n\n"


def _all(count: int, output_tokens: int) -> list[DraftRow]:
    rows: list[DraftRow] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-drafts-")))
        ports: dict[str, int] = {}
        for mode in MODES:
            port = ports[mode] = free_port()
            server = headrace(port)
            server = replace(server, argv=(*server.argv, "--set", f"engine.speculation={mode}"))
            stack.enter_context(running(server, port, stack.enter_context((folder / mode).open("wb"))))
        client = stack.enter_context(httpx.Client(timeout=600.0))
        for kind in KINDS:
            for number in range(count):
                prompt, turn = _prompt(kind, number), number % len(MODES)
                told = {mode: _ask(client, ports[mode], prompt, output_tokens) for mode in MODES[turn:] + MODES[:turn]}
                for mode, (ids, seconds) in told.items():
                    rate, same = (len(ids) - 1) / seconds, ids == told["off"][0]
                    made = DraftRow(
                        kind=kind, mode=mode, number=number, seconds=seconds, tokens_per_s=rate, same=same
                    )
                    rows.append(made)
    return rows


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
    for heading in ("prompts", "speculation", "tokens/s", "gain", "other answers"):
        table.add_column(heading, justify="right")
    without = {(row.kind, row.number): row.seconds for row in rows if row.mode == "off"}
    for kind in KINDS:
        for mode in MODES:
            mine = [row for row in rows if (row.kind, row.mode) == (kind, mode)]
            gains = [without[kind, row.number] / row.seconds for row in mine]
            table.add_row(
                kind,
                mode,
                middle([row.tokens_per_s for row in mine]).cell(),
                "" if mode == "off" else middle(gains).cell(digits=2),
                str(sum(not row.same for row in mine)),
            )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
