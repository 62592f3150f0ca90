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

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import figures, output
from benchmarks.front_bare import serve_bare
from benchmarks.front_clients import MESSAGES, OPEN, TIMED, TOKENS, serve_client
from benchmarks.front_disturbed import serve_disturber
from benchmarks.front_peers import SmgFront, serve_text_workers
from benchmarks.front_router import serve_router
from benchmarks.front_workers import TICK_S, VOCABULARY, serve_workers
from benchmarks.vllm_front import VllmFront

SETTLE_S = 1.5
WINDOWS = 5
"""Seconds with, and as many without, whoever disturbs."""
SPAWN = multiprocessing.get_context("spawn")


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


class Front(NamedTuple):
    """A front that is up, and whatever goes on beside it."""

    processes: list[Any]
    routers: list[Connection]
    """Those of our own routers, each of which ends with its pipe."""
    to_fleet: Any
    """Who is told the rate."""
    address: str
    http: str
    others: list[Any]


def _open(front: str, workers: int, has_http: bool, python: Path, wakes_per_s: float, routers: int) -> Front:
    """Start a front and its workers."""
    if front == "vllm":
        server = VllmFront(python, workers, TICK_S, VOCABULARY)
        return Front([server], [], server, server.address, server.address, [])
    if front == "smg":
        fleet, to_fleet = _start(serve_text_workers, workers, TICK_S, VOCABULARY)
        peer = SmgFront(python, to_fleet.recv())
        return Front([peer], [], to_fleet, peer.address, peer.address, [fleet])
    if front.startswith("bare-"):
        bare, to_bare = _start(serve_bare, front, workers, TICK_S, VOCABULARY)
        address = to_bare.recv()
        return Front([bare], [], to_bare, address, address, [])
    fleet, to_fleet = _start(serve_workers, workers)
    attached, has_http, ports = to_fleet.recv(), front == "sse" or has_http, (0, 0)
    served: list[tuple[Any, Connection]] = []
    for number in range(routers):
        # The first takes ports that are free, and the others share them.
        own_port = -1 if routers == 1 else 0
        router, to_router = _start(serve_router, attached, front, has_http, wakes_per_s, number, ports, own_port)
        grpc_address, http = to_router.recv()
        ports = _port(grpc_address), _port(http)
        served.append((router, to_router))
    address = http if front == "sse" else grpc_address
    return Front([router for router, _ in served], [pipe for _, pipe in served], to_fleet, address, http, [fleet])


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
    apart: bool = False,
) -> dict[str, Any]:
    """Return the line of so many routers behind one port, together with `streams` open streams, each of `rate` tokens a
    second; `disturb` says by whom they are disturbed while half of the ages are read. `python` has the fronts of
    others. Over gRPC, so many `calls` share a connection; `wakes_per_s` is the router's setting of that name. `apart`:
    the routers, with all their threads, have the first processor to themselves, and everybody else the others.
    """
    processors = sorted(os.sched_getaffinity(0))
    if apart:
        os.sched_setaffinity(0, processors[1:])
    up = _open(front, workers, bool(disturb), python, wakes_per_s, routers)
    pids = [process.pid for process in up.processes]
    for task in [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()] if apart else ():
        with suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task.name), processors[:1])
    up.to_fleet.send(min(20.0, 2000.0 / streams))
    time.sleep(0.5)
    empty_bytes, began_cpu_s = rss_bytes(pids), cpu_s(pids)
    shares = [streams // clients + (i < streams % clients) for i in range(clients)]
    shared = [SPAWN.Array("Q", 4, lock=False) for _ in shares]
    readers = [
        _start(serve_client, words, front, up.address, share, 0.0 if together else 2e-3, calls)
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
        disturber, to_disturber = _start(serve_disturber, disturb, up.http)
        beside.append(disturber)
    while count(OPEN) < streams:
        time.sleep(0.02)
    open_cpu_s, stream_bytes = cpu_s(pids) - began_cpu_s, (rss_bytes(pids) - empty_bytes) / streams
    up.to_fleet.send(float(rate))
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
    longest_s = [_longest_s(pipe) for pipe in up.routers]
    ages.sort()
    disturbed.sort()
    first_s.sort()
    for process in (*(process for process, _ in readers), *beside, *up.processes, *up.others):
        process.kill()
        process.join()
    os.sched_setaffinity(0, processors)
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
    parser.add_argument("--apart", action="store_true", help="one processor for the routers, the rest for all others")
    parser.add_argument("--disturb", default="", choices=["slow", "prompt"], help="by clients over HTTP")
    options = parser.parse_args()
    if options.apart and len(os.sched_getaffinity(0)) < 2:
        parser.error("--apart: there is but one processor")
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
            options.apart,
        )
        for routers in figures.numbers(options.routers)
        for front in options.fronts.split(",")
        for streams in figures.numbers(options.streams)
        for rate in figures.numbers(options.rates)
    ]
    output.tell(options, "front", {"the router's data path": lines})


if __name__ == "__main__":
    main()
