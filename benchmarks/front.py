"""Measures the router's data path alone: CPU per token, added latency and memory per stream, over gRPC and HTTP.

A real router (`RouterServer`, its fronts, core and links) in a process of its own stands between scripted workers and
real clients, in processes of their own too. The workers have no model: they serve the real streams (`worker.rpc`, the
handshake, `engine.messages`), accept every request, and at each step send one frame with the next token of each of
their requests, and with their load as often as a worker does. Token i reads as " %04x" in a byte-level vocabulary, and
a worker sends as i the time of the step in 0.1 ms, so a client reads from the text itself how old a token is; clients
check that no text is missing. CPU is what the kernel has counted for the router's process between two moments, so that
it does not matter who else uses the cores. `tokens a message` says how many tokens the router joined for a client.
`collector, ms`: the CPU of the longest run of the router's garbage collector, for which all its streams wait.
`--routers N` puts N of them behind one port; CPU and memory are then of all, and `a core` of one of their cores.
`bare-grpc` and `bare-sse` are servers that only write (`benchmarks/front_bare.py`): the bound of both fronts.
"""

import asyncio
import gc
import multiprocessing
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import figures, output
from benchmarks.decision import Pauses
from benchmarks.front_bare import serve_bare
from benchmarks.front_disturbed import serve_disturber
from benchmarks.front_peers import SmgFront, serve_text_workers
from benchmarks.front_workers import CONTEXT_TOKENS, SECRETS, TICK_S, VOCABULARY, serve_workers, ticks
from benchmarks.vllm_front import VllmFront
from cluster.processes.collector import spare_collector
from engine.messages import PeerAddress
from engine.native_identity import use_native_identities
from engine.text.detokenize import Detokenizer, DetokenizerFactory
from engine.text.dialect import Dialect
from engine.text.messages import ChatPrompt
from engine.types import SamplingParams
from router.background import give_way_soon
from router.config import FrontLimits, RouterConfig
from router.server import RouterServer

SETTLE_S = 1.5
WINDOWS = 5
"""Seconds with, and as many without, whoever disturbs."""
CHARACTERS = 5
"""The length of a token's text."""
TEXT = re.compile(rb'"text":"([^"]*)"')
UNOPENED = 1024
"""Streams that a client process asks for at once where they do not all arrive together: a host that has 4,096
connections waiting to be accepted resets some of those beyond."""
TIMED, TOKENS, MESSAGES, OPEN = range(4)
"""The words that a client shares with its parent: in which of two lists it shall note ages, if in any, and counts."""
SPAWN = multiprocessing.get_context("spawn")


class HexText:
    """The text side of a model whose token i reads as " %04x"."""

    name = "hex"
    vocab_size = VOCABULARY + 1
    drawable_tokens = vocab_size
    context_tokens = CONTEXT_TOKENS
    stop_ids = frozenset({VOCABULARY})
    dialect = Dialect()
    added_ids: Mapping[str, int] = {}
    model_dir: Path | None = None
    sampling = SamplingParams()

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # Words are looked up in native code: the thread that tokenizes leaves the loop alone (in `encode` it does not).
        self._words = Tokenizer(models.WordLevel({f"{i:04x}": i for i in range(VOCABULARY)}, "0000"))
        self._words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = Tokenizer(models.BPE({f"Ġ{i:04x}": i for i in range(VOCABULARY)}, []))
        tokenizer.decoder = decoders.ByteLevel()
        self._detokenizers = DetokenizerFactory(tokenizer)

    def encode(self, text: str, *, add_special: bool, is_literal: bool = False) -> list[int]:
        ids: list[int] = self._words.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def render_chat(self, chat: ChatPrompt) -> str:
        return " ".join(message.content or "" for message in chat.messages)

    def encode_chat_text(self, rendered: str) -> list[int]:
        return self.encode(rendered, add_special=False)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [f"{token:04x}" for token in ids]

    def text_of(self, ids: Sequence[int]) -> str:
        return " ".join(self.token_strings(ids))

    def tokenizer_files(self) -> dict[str, str]:
        return {"tokenizer.json": "{}"}

    def detokenizer(self, shown: frozenset[str] = frozenset()) -> Detokenizer:
        return self._detokenizers.make(shown)

    def token_bytes(self, token: int) -> tuple[bytes, bool]:
        return self._detokenizers.token_bytes(token)


# ---- the router


def serve_router(
    pipe: Connection,
    workers: dict[str, list[PeerAddress]],
    front: str,
    has_http: bool,
    wakes_per_s: float,
    number: int,
    ports: tuple[int, int],
    own_port: int,
) -> None:
    """Serve until the pipe closes; its first word is the two addresses, and whatever is said to it is answered with the
    longest run of the garbage collector, in seconds of CPU. `front`, the one that is measured, has nearly
    all descriptors of the process. `ports`, gRPC's and HTTP's, 0: any; `own_port`, -1: it has them alone."""
    # As `cluster.processes` has a router.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    use_native_identities()
    give_way_soon()
    of_http, of_grpc = (16_384, 64) if front == "sse" else (64, 16_384)
    limits = FrontLimits(
        connections=of_http, grpc_connections=of_grpc, connections_per_address=of_http, calls_per_address=of_grpc
    )
    config = RouterConfig(
        name=f"router-{number}",
        grpc_port=ports[0],
        http_port=ports[1] if has_http else -1,
        own_port=own_port,
        limits=limits,
        max_waiting=16_384,
        default_max_tokens=CONTEXT_TOKENS // 2,
        wakes_per_s=wakes_per_s,
    )
    text = HexText()
    text.detokenizer().push(range(VOCABULARY))  # as a router that has served for a while: each token was met before
    server = RouterServer(config, "", SECRETS, text=text)
    addresses = server.start()
    server.set_workers(workers["prefill"], workers["decode"])
    while not server.ready():
        time.sleep(0.02)
    spare_collector()
    pauses = Pauses()
    gc.callbacks.append(pauses)
    pipe.send((addresses.grpc, addresses.http))
    with suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(pauses.longest_s)
    os._exit(0)


# ---- clients


class ClientCounts:
    """What one client process has received; all but the ages and times is in `shared`, which its parent reads."""

    def __init__(self, shared: Any) -> None:
        self.shared = shared
        self.ages: tuple[list[int], list[int]] = ([], [])
        self.first_s: list[float] = []

    def opened(self, asked_s: float) -> None:
        self.shared[OPEN] += 1
        self.first_s.append(time.monotonic() - asked_s)

    def took(self, text: str) -> None:
        count, rest = divmod(len(text), CHARACTERS)
        assert not rest, f"text is missing: {text!r}"
        self.shared[TOKENS] += count
        self.shared[MESSAGES] += 1
        if window := self.shared[TIMED]:
            now = ticks()
            sent = [int(text[at + 1 : at + 5], 16) for at in range(0, len(text), CHARACTERS)]
            self.ages[window - 1].extend([(now - at) % VOCABULARY for at in sent])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def read_grpc(address: str, tally: ClientCounts, calls: int = 1) -> None:
    """So many calls on one connection. The few frames of HTTP/2 that they take are written out here: gRPC's own
    client costs more CPU a message than its server, and with it this would measure the clients."""
    from protos import headrace_pb2 as pb

    host, _, port = address.rpartition(":")
    asked_s = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    named = {
        ":method": "POST", ":scheme": "http", ":path": "/headrace.v1.Headrace/Generate", ":authority": address,
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    head = b"".join(b"\0%c%b%c%b" % (len(k), k.encode(), len(v), v.encode()) for k, v in named.items())
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])).SerializeToString()
    window = (1 << 30).to_bytes(4, "big")
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"\0\4" + window) + _frame(8, 0, 0, window))
    for call in range(1, 2 * calls, 2):
        asked = b"\0" + len(message).to_bytes(4, "big") + message
        writer.write(_frame(1, 4, call, head) + _frame(0, 1, call, asked))
    data, bodies, opened = b"", dict.fromkeys(range(1, 2 * calls, 2), b""), set[int]()
    while came := await reader.read(65536):
        data += came
        at = 0
        while len(data) - at >= 9 and len(data) - at >= (end := 9 + int.from_bytes(data[at : at + 3], "big")):
            kind, flags, payload = data[at + 3], data[at + 4], data[at + 9 : at + end]
            call = int.from_bytes(data[at + 5 : at + 9], "big")
            at += end
            if kind == 0:
                body = bodies[call] + payload
                while len(body) >= 5 and len(body) >= (end := 5 + int.from_bytes(body[1:5], "big")):
                    text, body = pb.GenerateResponse.FromString(body[5:end]).delta.text, body[end:]
                    if text:
                        if call not in opened:
                            tally.opened(asked_s)
                            opened.add(call)
                        tally.took(text)
                bodies[call] = body
            elif kind in (3, 7) or (kind == 1 and flags & 1):
                raise RuntimeError(f"the call has ended, frame {kind}: {payload!r}")
            elif kind in (4, 6) and not flags & 1:
                writer.write(_frame(kind, 1, 0, payload if kind == 6 else b""))
        data = data[at:]


async def read_sse(address: str, tally: ClientCounts, calls: int = 1) -> None:
    assert calls == 1, "HTTP/1.1 has one answer at a time"
    host, _, port = address.rpartition(":")
    asked_s, is_first = time.monotonic(), True
    reader, writer = await asyncio.open_connection(host, int(port))
    body = msgspec.json.encode(
        {"model": HexText.name, "prompt": [1, 2, 3], "stream": True, "max_tokens": CONTEXT_TOKENS // 8}
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(status.decode())
    left = b""
    while data := await reader.read(65536):
        *events, left = (left + data).split(b"\n\n")
        for event in events:
            if (found := TEXT.search(event)) is not None:
                if is_first:
                    tally.opened(asked_s)
                    is_first = False
                tally.took(found[1].decode())


READERS: dict[str, Callable[[str, ClientCounts, int], Any]] = {
    "grpc": read_grpc,
    "sse": read_sse,
    "smg": read_sse,
    "vllm": read_sse,
    "bare-grpc": read_grpc,
    "bare-sse": read_sse,
}


def serve_client(
    pipe: Connection, shared: Any, front: str, address: str, streams: int, pause_s: float, calls: int
) -> None:
    """Open `streams` streams, `calls` on each connection, `pause_s` apart (0: all at once); answer the closing pipe's
    one word with ages and first tokens."""

    async def main() -> None:
        tally = ClientCounts(shared)
        tasks: list[asyncio.Task[None]] = []
        for at in range(0, streams, calls):
            while pause_s and at - shared[OPEN] >= UNOPENED and not any(task.done() for task in tasks):
                await asyncio.sleep(0.02)
            tasks.append(asyncio.create_task(READERS[front](address, tally, min(calls, streams - at))))
            await asyncio.sleep(pause_s)
        while not pipe.poll():
            await asyncio.sleep(0.02)
            for task in tasks:
                if task.done():
                    task.result()
                    raise RuntimeError("a stream has ended")
        pipe.send((tally.ages, tally.first_s))

    asyncio.run(_ending(main(), pipe))


async def _ending(work: Any, pipe: Connection) -> None:
    try:
        await work
    except Exception as error:
        pipe.send(error)
        raise
    os._exit(0)


# ---- the measurement


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds that processes have used, user and system, all threads."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def rss_bytes(pids: Sequence[int]) -> int:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * resource.getpagesize()


def _start(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _opened(
    front: str, workers: int, has_http: bool, python: Path, wakes_per_s: float, routers: int
) -> tuple[list[Any], Any, str, str, list[Any]]:
    """Start a front and its workers. Return its processes, who is told the rate, the address that is measured, that of
    HTTP, and what else is to be ended."""
    if front == "vllm":
        server = VllmFront(python, workers, TICK_S, VOCABULARY)
        return [server], server, server.address, server.address, []
    if front == "smg":
        fleet, to_fleet = _start(serve_text_workers, workers, TICK_S, VOCABULARY)
        peer = SmgFront(python, to_fleet.recv())
        return [peer], to_fleet, peer.address, peer.address, [fleet]
    if front.startswith("bare-"):
        bare, to_bare = _start(serve_bare, front, workers, TICK_S, VOCABULARY)
        address = to_bare.recv()
        return [bare], to_bare, address, address, []
    fleet, to_fleet = _start(serve_workers, workers)
    attached, has_http, ports = to_fleet.recv(), front == "sse" or has_http, (0, 0)
    served: list[Any] = []
    for number in range(routers):
        # The first takes ports that are free, and the others share them.
        own_port = -1 if routers == 1 else 0
        router, to_router = _start(serve_router, attached, front, has_http, wakes_per_s, number, ports, own_port)
        grpc_address, http = to_router.recv()
        ports = _port(grpc_address), _port(http)
        router.pipe = to_router  # the router ends with it
        served.append(router)
    return served, to_fleet, http if front == "sse" else grpc_address, http, [fleet]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2] or 0)


def measure(
    front: str,
    workers: int,
    streams: int,
    rate: int,
    seconds: float,
    clients: int,
    together: bool,
    disturb: str = "",
    python: Path = Path(sys.executable),
    calls: int = 1,
    wakes_per_s: float = 12_000.0,
    routers: int = 1,
) -> dict[str, Any]:
    """Return the line of so many routers behind one port, together with `streams` open streams, each of `rate` tokens a
    second; `disturb` says by whom they are disturbed while half of the ages are read. `python` has the fronts of
    others. Over gRPC, so many `calls` share a connection; `wakes_per_s` is the router's setting of that name.
    """
    served, to_fleet, address, http, others = _opened(front, workers, bool(disturb), python, wakes_per_s, routers)
    pids = [process.pid for process in served]
    to_fleet.send(min(20.0, 2000.0 / streams))
    time.sleep(0.5)
    empty_bytes, began_cpu_s = rss_bytes(pids), cpu_s(pids)
    shares = [streams // clients + (i < streams % clients) for i in range(clients)]
    shared = [SPAWN.Array("Q", 4, lock=False) for _ in shares]
    readers = [
        _start(serve_client, words, front, address, share, 0.0 if together else 2e-3, calls)
        for words, share in zip(shared, shares, strict=True)
    ]

    def count(word: int) -> int:
        """Sum up one word of all clients. Raises RuntimeError where one has failed."""
        for _, pipe in readers:
            if pipe.poll():
                raise RuntimeError("a client has failed") from pipe.recv()
        return int(sum(words[word] for words in shared))

    beside = []
    if disturb:
        disturber, to_disturber = _start(serve_disturber, disturb, http)
        beside.append(disturber)
    while count(OPEN) < streams:
        time.sleep(0.02)
    open_cpu_s, stream_bytes = cpu_s(pids) - began_cpu_s, (rss_bytes(pids) - empty_bytes) / streams
    to_fleet.send(float(rate))
    time.sleep(SETTLE_S)
    tokens, messages, began_s, router_s = count(TOKENS), count(MESSAGES), time.monotonic(), cpu_s(pids)
    time.sleep(seconds)
    tokens, messages = count(TOKENS) - tokens, count(MESSAGES) - messages
    took_s, router_s = time.monotonic() - began_s, cpu_s(pids) - router_s
    # Ages are read in a second of their own, as it costs the clients time.
    for window in (1, 2) * WINDOWS if disturb else (1,):
        if disturb:
            to_disturber.send(window == 2)
            time.sleep(0.5)
        for words in shared:
            words[TIMED] = window
        time.sleep(1.0)
        for words in shared:
            words[TIMED] = 0
    ages: list[int] = []
    disturbed: list[int] = []
    first_s: list[float] = []
    for _, pipe in readers:
        pipe.send("tell")
        told = pipe.recv()
        ages += told[0][0]
        disturbed += told[0][1]
        first_s += told[1]
    longest_s = [_longest_s(process.pipe) for process in served if hasattr(process, "pipe")]
    ages.sort()
    disturbed.sort()
    first_s.sort()
    for process in (*(process for process, _ in readers), *beside, *served, *others):
        process.kill()
        process.join()
    return {
        "front": front,
        "routers": routers,
        "streams": streams,
        "asked/s": rate * streams,
        "tokens/s": round(tokens / took_s),
        "CPU %": router_s / took_s * 100,
        "µs a token": router_s / max(tokens, 1) * 1e6,
        "a core, tokens/s": round(tokens / max(router_s, 1e-3)),
        "a message, tokens": tokens / max(messages, 1),
        "late p50, ms": _ms(ages, 0.5),
        "late p99, ms": _ms(ages, 0.99),
        **({"disturbed p50": _ms(disturbed, 0.5), "disturbed p99, ms": _ms(disturbed, 0.99)} if disturb else {}),
        "TTFT p99, ms": first_s[int(0.99 * (len(first_s) - 1))] * 1e3,
        "open, CPU ms": open_cpu_s / streams * 1e3,
        **({"collector, ms": max(longest_s) * 1e3} if longest_s else {}),
        "KiB a stream": stream_bytes / 1024,
    }


def _longest_s(pipe: Connection) -> float:
    pipe.send("tell")
    return float(pipe.recv())


def _ms(ages: list[int], share: float) -> float:
    return ages[int(share * (len(ages) - 1))] * TICK_S * 1e3 if ages else float("nan")


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("--fronts", default="grpc,sse", help="several of grpc, sse, bare-grpc, bare-sse, smg, vllm")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="where smg, or vLLM, is installed")
    parser.add_argument("--streams", default="128", help="open streams, one after the other: 128,1024")
    parser.add_argument("--rates", default="25,100,400", help="tokens a second of each stream")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--routers", default="1", help="processes behind one port, one number after the other: 1,2")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--calls", type=int, default=1, help="over gRPC: streams that share a connection")
    parser.add_argument(
        "--wakes-per-s", type=float, default=12_000.0, help="router.wakes_per_s: above it tokens are joined"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--together", action="store_true", help="all streams arrive at once")
    parser.add_argument("--disturb", default="", choices=["slow", "prompt"], help="by clients over HTTP")
    options = parser.parse_args()
    lines = [
        measure(
            front,
            options.workers,
            streams,
            rate,
            options.seconds,
            options.clients,
            options.together,
            options.disturb,
            options.python,
            options.calls if "grpc" in front else 1,
            options.wakes_per_s,
            routers if front in ("grpc", "sse") else 1,
        )
        for routers in figures.numbers(options.routers)
        for front in options.fronts.split(",")
        for streams in figures.numbers(options.streams)
        for rate in figures.numbers(options.rates)
    ]
    output.tell(options, "front", {"the router's data path": lines})


if __name__ == "__main__":
    main()
