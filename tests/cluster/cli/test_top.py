"""What `top`, `status` and `trace` show, from records made by hand."""

from io import StringIO
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from cluster.admin import Flights, ProcessStatus, Status
from cluster.cli.__main__ import main
from cluster.cli.hints import hints
from cluster.cli.status_view import duration, print_status, ranks_lines
from cluster.cli.top import frame, run_top
from cluster.cli.trace_view import print_latest, print_trace, request_of
from engine.messages import Load, RankUse
from router.status.journal import Recent
from router.status.overview import Overview, WorkerOverview
from telemetry.flight import FlightRecorder
from tests.router.http.fakes import CHAT, HI, TEXT, FakeFrontend, ask


def load(**given: object) -> Load:
    blocks = dict.fromkeys(("free", "cached", "active", "reserved", "quarantined"), 0)
    blocks |= {state: given.pop(f"{state}") for state in list(blocks) if state in given}  # type: ignore[misc]
    return Load(step=7, **{f"{state}_blocks": count for state, count in blocks.items()}, **given)  # type: ignore[arg-type]


def view(name: str, role: str, load: Load) -> WorkerOverview:
    return WorkerOverview(
        name=name,
        role=role,
        address="h:1",
        incarnation="0" * 16,
        host="h",
        pid=1,
        metrics_address="",
        block_size=16,
        blocks=120,
        age_s=0.25,
        load=load,
    )


def process(name: str, state: str = "up", **given: object) -> ProcessStatus:
    kind = name.partition("-")[0]
    return ProcessStatus(name=name, kind=kind, state=state, **given)  # type: ignore[arg-type]


STATUS = Status(
    name="one",
    state="running",
    pid=11,
    launcher="process",
    model="the demo model",
    up_s=3725.0,
    grpc="127.0.0.1:50051",
    processes=[
        process("prefill-0", pid=12, address="h:1"),
        process("decode-0", pid=13, deaths=2, why="killed by SIGKILL"),
        process("decode-1", "failed", deaths=6, why="OSError: no [model] file"),
        process("router", pid=14),
    ],
)
OVERVIEW = Overview(
    model="fake-model",
    ready=True,
    waiting=3,
    open=9,
    workers=[
        view(
            "prefill-0", "prefill", load(waiting_tokens=321, waiting_requests=4, s_per_token=0.004)
        ),
        view(
            "decode-0",
            "decode",
            load(active=60, cached=20, quarantined=1, running_requests=8, s_per_token=0.0421),
        ),
    ],
    recent=Recent(
        outcomes={"stop": 5, "error": 1},
        output_tokens=120,
        ttft_p50_s=0.0912,
        ttft_p99_s=0.4,
        migrated_requests=4,
        migrated_blocks=60,
        migrated_bytes=60 << 20,
        migration_s=0.06,
    ),
)


def shown(what: RenderableType) -> list[str]:
    console = Console(width=80, file=StringIO(), highlight=False)
    console.print(what)
    return text_of(console).splitlines()


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_frame_shows_pools_batches_blocks_migrations_and_latency() -> None:
    """Guards against figures that are cut off at 80 columns, and a worker that is missing because it is down."""
    lines = shown(frame(STATUS, OVERVIEW))
    assert all(len(line) <= 80 for line in lines) and not any("…" in line for line in lines)
    text = "\n".join(lines)
    assert "headrace one  running 1 h 2 min" in text
    assert "fake-model  ready  open 9, waiting for room 3" in text
    assert "ended: 1 error, 5 stop  output 2.0 tokens/s" in text
    assert "TTFT         91.2 ms median, 400.0 ms p99" in text
    assert "inter-token  – median, – p99" in text
    assert "60 blocks of 4 requests, 60 MiB in 60.0 ms (1,000 MiB/s)" in text
    rows = {line.split()[0]: line.split() for line in lines if line[1:8] in ("prefill", "decode-")}
    assert rows["prefill-0"] == [
        *["prefill-0", "up", "0", "4", "321", "0/120", "··········", "250", "tok/s", "0.2s"]
    ]
    assert rows["decode-0"] == [
        *["decode-0", "up", "8", "0", "61/120", "█████!░░··", "42.1", "ms", "0.2s"]
    ]
    assert rows["decode-1"][:2] == ["decode-1", "failed"]
    assert "layer group" not in text


def test_a_frame_shows_what_is_held_of_each_layer_group() -> None:
    held = {"0 all": 40, "1 window 512": 20}
    grouped = view("decode-0", "decode", load(active=60, group_blocks=held))
    lines = shown(frame(STATUS, msgspec.structs.replace(OVERVIEW, workers=[OVERVIEW.workers[0], grouped])))
    assert [line.strip() for line in lines if "layer group" in line] == [
        "decode-0 holds by layer group: 0 all: 40, 1 window 512: 20"
    ]


def test_status_and_top_say_of_which_processes_a_worker_is() -> None:
    """Guards ranks that an operator cannot find, a line beyond 80 columns, and workers of one process that are said to
    be ranks."""
    ranks = [RankUse(pid, 61 << 20) for pid in (12, 4194301, 4194302)]
    line = "prefill-0 is 3 ranks: pids 12, 4194301, 4194302; 61 MiB of weights each"
    first, *others = STATUS.processes
    console = Console(width=80, file=StringIO())
    processes = [msgspec.structs.replace(first, ranks=ranks), *others]
    print_status(msgspec.structs.replace(STATUS, processes=processes), console)
    assert line in text_of(console).splitlines() and text_of(console).count("ranks") == 1
    worker, *rest = OVERVIEW.workers
    workers = [msgspec.structs.replace(worker, ranks=ranks), *rest]
    lines = shown(frame(STATUS, msgspec.structs.replace(OVERVIEW, workers=workers)))
    assert line in lines and sum("ranks" in one for one in lines) == 1
    ranks[1] = RankUse(4194301, 62 << 20)
    assert ranks_lines("w", ranks) == ["w is 3 ranks: pids 12, 4194301, 4194302; 61 MiB to 62 MiB of weights each"]


def test_status_and_top_say_how_ranks_on_gpus_add_up() -> None:
    """Guards a worker that goes the slow way, and an operator who does not know why."""
    ranks = [RankUse(pid, 61 << 20, "by NCCL alone: rank 1: no atomics") for pid in (12, 13)]
    line = "prefill-0 adds up over its ranks by NCCL alone: rank 1: no atomics"
    console, (first, *others) = Console(width=80, file=StringIO()), STATUS.processes
    processes = [msgspec.structs.replace(first, ranks=ranks), *others]
    print_status(msgspec.structs.replace(STATUS, processes=processes), console)
    assert line in text_of(console).splitlines()
    worker, *rest = OVERVIEW.workers
    workers = [msgspec.structs.replace(worker, ranks=ranks), *rest]
    assert line in shown(frame(STATUS, msgspec.structs.replace(OVERVIEW, workers=workers)))


@pytest.mark.parametrize("silent", [{}, {"router-1": "did not answer in 10 s"}], ids=["all", "one silent"])
def test_top_says_which_router_its_figures_leave_out(
    silent: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards figures of half of the requests that are taken for those of all."""
    overview = msgspec.structs.replace(OVERVIEW, silent=silent)
    client: Any = SimpleNamespace(status=lambda: STATUS, overview=lambda: overview)
    assert run_top(client, once=True, interval_s=1.0) == bool(silent)
    said = "router-1 could not be asked: did not answer in 10 s"
    assert (said in capsys.readouterr().out) == bool(silent)


def test_what_is_there_is_seen_in_the_bar() -> None:
    """Guards one quarantined block of a large pool, which rounds to nothing."""
    lines = shown(frame(STATUS, OVERVIEW))
    assert any("!" in line for line in lines if line.startswith(" decode-0"))


def test_status_says_what_a_worker_died_of() -> None:
    console = Console(width=120, file=StringIO())
    print_status(STATUS, console)
    text = text_of(console)
    assert "one: running for 1 h 2 min, supervisor 11, process launcher, the demo model" in text
    assert "decode-0 died last of: killed by SIGKILL" in text
    assert "decode-1 died last of: OSError: no [model] file" in text


def test_what_others_wrote_is_printed_as_it_is() -> None:
    """Guards hosts that are IPv6 addresses, which vanished, or came out with signs: to rich, brackets are markup and
    `:a:` is an emoji."""
    address, grpc, http, model = "[fd12:a:b::7]:41231", "[fd00::5]:50051", "[fe80:b:1::1]:8000", "/models/[q4]/x.gguf"
    one = msgspec.structs.replace(STATUS.processes[0], address=address)
    status = msgspec.structs.replace(STATUS, grpc=grpc, http=http, model=model, processes=[one])
    console = Console(width=120, file=StringIO())
    print_status(status, console)
    assert all(said in text_of(console) for said in (address, grpc, http, model))
    recorder, said = FlightRecorder("router"), "no decode worker has [/x] of [fd00:a::1]"
    recorder.note("[red]", "failed", 1.0, message=said)
    told = Flights(flights=recorder.told(""), silent={"decode-0": said})
    for show in (print_trace, print_latest):
        console = Console(width=120, file=StringIO())
        show(told, console)
        assert text_of(console).count(said) == 2 and "[red]" in text_of(console), show


def test_a_trace_is_told_process_by_process() -> None:
    """Guards a timeline whose moments are another process's."""
    router, decode = FlightRecorder("router"), FlightRecorder("decode-0")
    router.note("ab12", "submitted", 100.0, prompt_tokens=36)
    decode.note("ab12", "placed", 5.0)
    router.note("ab12", "ended", 101.5, outcome="stop")
    told = Flights(
        flights=router.told("") + decode.told(""), silent={"prefill-0": "did not answer in 10 s"}
    )
    console = Console(width=100, file=StringIO())
    print_trace(told, console)
    print_latest(told, console)
    text = text_of(console)
    assert "ab12 on router" in text and "ab12 on decode-0" in text
    assert "0.0 ms  submitted                prompt_tokens=36" in text
    assert "1500.0 ms  ended                    outcome=stop" in text
    assert "prefill-0 could not be asked: did not answer in 10 s" in text


@pytest.mark.parametrize("silent", ["router", "router-1", "decode-0", ""])
@pytest.mark.parametrize("words", [(), ("ab12",), ("nobody",)], ids=["latest", "known", "unknown"])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_trace_says_who_could_not_be_asked(
    words: tuple[str, ...],
    silent: str,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards an empty list, or a request that nobody remembers, where the router that knows it does not answer."""
    recorder = FlightRecorder("prefill-0")
    recorder.note("ab12", "placed", 5.0)

    class Client:
        def __init__(self, rundir: object) -> None: ...
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None: ...

        def flights(self, request: str) -> Flights:
            return Flights(flights=recorder.told(request), silent={silent: "did not answer in 10 s"} if silent else {})

    monkeypatch.setattr("cluster.admin_client.AdminClient", Client)
    status = main(["trace", *words, *(["--json"] if as_json else [])])
    out, err = capsys.readouterr()
    assert status == (silent.startswith("router") or words == ("nobody",))
    if silent and as_json:
        assert silent in msgspec.json.decode(out)["silent"]
    else:
        assert (f"{silent} could not be asked: did not answer in 10 s" in out) == bool(silent)
    assert ("no process remembers 'nobody'" in err) == (words == ("nobody",))
    assert ("of those that could be asked" in err) == (words == ("nobody",) and bool(silent))


def test_a_trace_is_asked_for_by_the_id_of_any_answer() -> None:
    """Guards an id that is copied from an answer, whichever API it came by."""
    fields = {"messages": HI, "prompt": "hi", "input": "hi"}
    for path, names in (
        (CHAT, ("messages",)),
        (TEXT, ("prompt",)),
        ("/v1/responses", ("input",)),
        ("/v1/messages", ("messages", "max_tokens")),
    ):
        body = {name: fields.get(name, 5) for name in names}
        answer = ask(FakeFrontend(), "POST", path, json={"model": "tiny", **body}).json()
        assert answer["id"] != "r1" and request_of(answer["id"]) == "r1", path
    assert request_of("r1") == "r1"


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.2, 59, 60, 3600, 90061)] == [
        *["0 s", "59 s", "1 min", "1 h", "1 d 1 h"]
    ]


@pytest.mark.parametrize(
    ("recent", "expected"),
    [
        (Recent(), []),
        (Recent(ttft_p50_s=0.5, itl_p50_s=0.05), []),
        (
            Recent(ttft_p50_s=0.51, stages={"prefill_queue": 0.3, "prefill_run": 0.2}),
            ["prefill_queue: prompts wait for a prefill worker; add one"],
        ),
        (
            Recent(ttft_p50_s=2.0, stages={"route": 1.5, "prefill_run": 0.2, "decode_run": 9.0}),
            ["most of it route: requests stand in the router's line"],
        ),
        (Recent(itl_p50_s=0.051), ["with up to 8 requests in a batch: decode pressure"]),
        # Medians that are good, beside targets that too many miss.
        (
            Recent(ttft_p50_s=0.2, itl_p50_s=0.02, in_time={"ttft": (6, 10), "itl": (8, 10)}),
            ["only 60% of the first tokens came within 500 ms", "only 80% of the answers"],
        ),
        (Recent(ttft_p50_s=0.2, itl_p50_s=0.02, in_time={"ttft": (9, 10), "itl": (0, 0)}), []),
        (
            Recent(ttft_p50_s=0.6, itl_p50_s=0.06, stages={"migrate": 0.5}),
            ["most of it migrate", "decode pressure"],
        ),
    ],
)
def test_the_rule_of_thumb(recent: Recent, expected: list[str]) -> None:
    """TTFT above 500 ms is the prefill side's (or what it waits for), 50 ms between tokens the decode side's. A missed
    target is never passed over in silence."""
    said = hints(msgspec.structs.replace(OVERVIEW, recent=recent))
    assert len(said) == len(expected)
    assert all(part in hint for part, hint in zip(expected, said, strict=True))
    shown_text = "\n".join(shown(frame(STATUS, msgspec.structs.replace(OVERVIEW, recent=recent))))
    assert shown_text.count("→") == len(expected)


def test_hints_go_by_the_targets_of_the_cluster() -> None:
    """Guards against targets that somebody set, and against which nobody is measured."""
    recent = Recent(ttft_p50_s=0.6, itl_p50_s=0.06)
    slow = msgspec.structs.replace(OVERVIEW, recent=recent, slo_ttft_s=1.0, slo_itl_s=0.1)
    assert hints(slow) == []
    quick = msgspec.structs.replace(OVERVIEW, recent=Recent(ttft_p50_s=0.3), slo_ttft_s=0.2)
    assert ["TTFT is over 200 ms" in hint for hint in hints(quick)] == [True]
