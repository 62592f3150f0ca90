"""`headrace bench` against small servers that answer by rule: what it sends, measures, writes and returns."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.bench.command import main
from cluster.bench.driver import measure
from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.api import ApiError, Delta, Finished, GenerateCall, GenerateEvent, Started
from router.grpc.service import Service
from tests.router.http.fakes import FakeFrontend, serving


class Counting:
    """Answers with as many tokens as were asked for, two at a time; fails the request numbered `broken`. No answer
    begins before `together` requests have come."""

    def __init__(self, broken: int = -1, missing: int = 0, together: int = 0) -> None:
        self.calls: list[GenerateCall] = []
        self.busiest = 0
        self._running = 0
        self._broken = broken
        self._missing = missing
        self._together = together

    async def generate(self, call: GenerateCall, outlet: object = None) -> AsyncGenerator[GenerateEvent, None]:
        assert isinstance(call.prompt, list) and call.max_tokens is not None
        number = len(self.calls)
        self.calls.append(call)
        self._running += 1
        self.busiest = max(self.busiest, self._running)
        try:
            if number == self._broken:
                raise ApiError("RESOURCE_EXHAUSTED", "the line is full", retry_after_s=1.0)
            yield Started(f"r{number}", "tiny", len(call.prompt))
            while len(self.calls) < self._together:
                await asyncio.sleep(0.002)
            count = call.max_tokens - self._missing
            for index in range(0, count, 2):
                await asyncio.sleep(0.002)
                yield Delta("", (number,) * min(2, count - index))
            yield Finished(
                reason=FinishReason.LENGTH,
                prompt_tokens=len(call.prompt),
                output_tokens=count,
                cached_tokens=len(call.prompt) // 2,
                stats=RequestStats(
                    stages={"route": 0.25}, migrated_blocks=3, migrated_bytes=300, migration_s=0.5
                ),
                ttft_s=0.0,
                itl_mean_s=0.0,
                itl_p99_s=0.0,
                e2e_s=0.0,
            )
        finally:
            self._running -= 1


@contextmanager
def serving_grpc(frontend: Counting) -> Iterator[int]:
    """The port of the real gRPC service over `frontend`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[Service, int]:
        service = Service(frontend, lambda: True)  # type: ignore[arg-type]
        return service, await service.start("127.0.0.1", 0, 4 * 1024 * 1024)

    service, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(service.stop(0.1), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def target(kind: str, frontend: Counting) -> Iterator[list[str]]:
    """The flags that aim at a server of this kind."""
    server = serving(frontend, connections=400) if kind == "http" else serving_grpc(frontend)
    with server as port:
        yield ["--target", kind, "--address", f"127.0.0.1:{port}"]


SMALL = ["--input-tokens", "10", "--output-tokens", "5", "--requests", "6", "--seed", "3"]


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_run_over_both_fronts(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against fronts that measure differently: all counts are the same over gRPC and HTTP."""
    frontend, file = Counting(), tmp_path / "figures.json"
    with target(kind, frontend) as aim:
        flags = [*aim, *SMALL, "--concurrency", "1,3", "--warmup", "2", "--json", str(file)]
        assert main(flags) == 0
    assert len(frontend.calls) == 2 + 6 + 6
    assert frontend.busiest == 3
    call = frontend.calls[-1]
    assert (call.max_tokens, call.ignore_eos, call.sampling.temperature) == (5, True, 0.0)
    assert len({str(call.prompt) for call in frontend.calls}) == 14
    report = json.loads(file.read_bytes())
    assert report["environment"]["cores"] >= 1
    assert report["plan"]["workload"]["input_tokens"] == 10
    assert [level["concurrency"] for level in report["levels"]] == [1, 3]
    for level in report["levels"]:
        summary = level["summary"]
        assert (summary["requests"], summary["failed"]) == (6, 0)
        assert (summary["prompt_tokens"], summary["output_tokens"]) == (60, 30)
        assert (summary["hit_rate"], summary["migrated_blocks"]) == (0.5, 18)
        assert (summary["stages"], summary["migration_s"]["mean"]) == ({"route": 0.25}, 0.5)
        assert 0.002 <= summary["ttft_s"]["p50"] <= summary["e2e_s"]["p50"]
        assert summary["output_tokens_per_s"] == pytest.approx(30 / summary["wall_s"])
    assert "output tok/s" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_failed_request_fails_the_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a throughput that looks good because requests were refused."""
    with target(kind, Counting(broken=3)) as aim:
        assert main([*aim, *SMALL, "--warmup", "0"]) == 1
    assert "1 x RESOURCE_EXHAUSTED: the line is full" in capsys.readouterr().out


def test_short_answers_fail_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a server that ignores `ignore_eos` and looks fast for it."""
    with target("http", Counting(missing=1)) as aim:
        assert main([*aim, *SMALL, "--warmup", "0"]) == 1
    assert "6 x SHORT_OUTPUT: 4 of 5 output tokens" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_no_server_is_one_line(
    kind: str, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target", kind, "--address", f"127.0.0.1:{free_port}", *SMALL]) == 1
    said = capsys.readouterr().err
    assert said.startswith("bench: UNAVAILABLE: the warm-up failed")
    assert said.count("\n") == 1


def test_memory_of_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    with target("http", Counting()) as aim:
        flags = [*aim, *SMALL, "--json", str(file)]
        assert main([*flags, "--pid", str(os.getpid())]) == 0
        assert main([*flags, "--pid", "999999999"]) == 1
    level = json.loads(file.read_bytes())["levels"][0]
    assert 10 * 2**20 < level["peak_pss_bytes"] < 4 * 2**30
    assert "no process 999999999" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--requests", "0"],
        ["--concurrency", "0"],
        ["--concurrency", "two"],
        ["--concurrency", ""],
        ["--workload", "stream", "--concurrency", "2"],
        ["--token-range", "9"],
        ["--token-range", "9:3"],
        ["--input-tokens", "0"],
        ["--timeout-s", "nan"],
        ["--preset", "Z"],
    ],
)
def test_wrong_usage_exits_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(flags, capsys).endswith("(`headrace help bench` says what it takes)")


def refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of flags that are refused, in one line."""
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    return " ".join(capsys.readouterr().err.split())


SLO = ["--slo", "ttft=1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--concurrency", "two"], "--concurrency: 'two'"),
        (["--rate", "0"], "--rate: '0': each must be above zero and finite"),
        (["--rate", "-1"], "above zero"),
        (["--rate", "inf"], "finite"),
        (["--rate", "fast"], "--rate: 'fast'"),
        (["--rate", "2,2"], "twice"),
        (["--concurrency", "8,4,8"], "--concurrency: '8,4,8': the same one twice would send the same prompts again"),
        (["--rate", "1", "--concurrency", "2"], "--concurrency is of the closed loop"),
        (["--rate", "1", "--workload", "stream"], "the stream workload runs one request at once"),
        (["--rate", "1", "--burstiness", "0"], "the burstiness must lie in 0.05"),
        (["--burstiness", "1"], "--burstiness needs --rate"),
        (["--slo", "ttft=-1"], "--slo: 'ttft=-1': ttft=-1 is not a time above zero"),
        (["--slo", "foo=1"], "'foo=1' is not LIMIT=TIME with a limit of ttft, itl, e2e"),
        (["--search"], "--search needs --slo"),
        (["--attainment", "0.5", *SLO], "--attainment needs --search"),
        (["--search", *SLO, "--attainment", "90"], "the attainment must be above 0 and at most 1"),
        (["--search", *SLO, "--tolerance", "0"], "the tolerance must be above 0"),
        (["--search", *SLO, "--rate", "1,2"], "--search begins at one rate"),
        (["--search", *SLO, "--rate", "9", "--max-rate", "3"], "--search begins above --max-rate"),
        (["--search", *SLO, "--probe-s", "0"], "--probe-s"),
        (["--token-range", "abc"], "--token-range: 'abc': must be two whole numbers, LOW:HIGH"),
        (["--json", "/"], "--json /: is a folder"),
        (["--json", "/nowhere/to/be.json"], "--json /nowhere/to/be.json: there is no such folder"),
        (["--think", "1"], "only the chat workload has turns"),
        (["--workload", "chat", "--think", "-1"], "the time to think must be at least 0"),
        (["--workload", "chat", "--turns", "0"], "a chat needs at least 1 turn"),
        (["--workload", "trace"], "invalid choice: 'trace'"),
        (["--trace-speed", "2"], "--trace-speed needs --trace"),
        (["--trace", "/nowhere/to/be/found"], "No such file or directory: '/nowhere/to/be/found'"),
    ],
)
def test_wrong_loops_and_limits_are_explained(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(flags, capsys)


ROW = '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}'


@pytest.mark.parametrize(
    ("lines", "flags", "said"),
    [
        (["", ""], [], "the trace is empty"),
        ([ROW, "", ROW[:40]], [], "line 3: Input data was truncated"),
        ([ROW, ROW.replace("600", '"600"')], [], "line 2: Expected `int`, got `str` - at `$.input_length`"),
        ([ROW.replace('"timestamp": 0, ', "")], [], "line 1: Object missing required field `timestamp`"),
        ([ROW, ROW.replace("[1, 2]", "[1]")], [], "line 2: 1 hash_ids, and 600 tokens are 2 blocks of 512"),
        ([ROW, ROW.replace("}", f', "more": {"[" * 9999}{"]" * 9999}}}')], [], "line 2: values are nested too deeply"),
        ([ROW.replace("600", "-1")], [], "line 1: a time or a length below zero"),
        ([ROW, ROW.replace(": 2,", ": 0,")], [], "row 2: no prompt or no answer"),
        ([ROW], ["--trace-speed", "0"], "--trace-speed: '0': each must be above zero"),
        ([ROW], ["--rate", "2"], "--rate and --trace exclude each other"),
        ([ROW], ["--preset", "A"], "--preset and --trace exclude each other"),
        ([ROW], ["--think", "1"], "--think and --trace exclude each other"),
        ([ROW], ["--requests", "0"], "requests must be above zero"),
        ([ROW, ROW], ["--search", *SLO], "all requests come at once, and no speed changes that"),
    ],
)
def test_a_trace_that_cannot_be_played_is_explained(
    lines: list[str], flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "some.jsonl"
    trace.write_text("\n".join(lines))
    assert said in refused(["--trace", str(trace), *flags], capsys)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_an_open_loop_over_both_fronts(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a client, or a connection, that has room for so many requests only: nobody is answered before all
    have come."""
    frontend, file = Counting(together=200), tmp_path / "figures.json"
    with target(kind, frontend) as aim:
        flags = [*aim, *SMALL, "--requests", "200", "--rate", "400", "--warmup", "0", "--timeout-s", "20"]
        assert main([*flags, *SLO, "--json", str(file)]) == 0
    assert frontend.busiest == 200
    assert {call.max_tokens for call in frontend.calls} == {5}
    report = json.loads(file.read_bytes())
    assert (report["plan"]["loads"], report["plan"]["burstiness"], report["plan"]["slo"]) == ([400], 1, {"ttft_s": 1})
    (level,) = report["levels"]
    assert (level["rate_per_s"], level["concurrency"]) == (400, None)
    assert level["slo"]["met"] / 200 == level["slo"]["share"]
    assert level["slo"]["goodput_per_s"] == pytest.approx(level["slo"]["met"] / level["summary"]["wall_s"])
    assert 0 <= level["summary"]["late_s"]["p50"] <= level["summary"]["late_s"]["p99"]
    said = capsys.readouterr().out
    assert all(word in said for word in ("400/s", "attainment", "goodput, requests/s", "client late ms", "TTFT ms"))


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_chats_over_both_fronts(kind: str) -> None:
    frontend = Counting()
    chat = ["--workload", "chat", "--turns", "3", "--think", "0.01", "--warmup", "1"]
    with target(kind, frontend) as aim:
        assert main([*aim, *SMALL, *chat, "--rate", "300"]) == 0
        assert main([*aim, *SMALL, *chat, "--concurrency", "1", "--seed", "4"]) == 0
    prompts = [call.prompt for call in frontend.calls]
    assert all(isinstance(prompt, list) for prompt in prompts)
    assert sorted(map(len, prompts)) == [10] * 6 + [25] * 4 + [40] * 4
    for prompt in prompts:
        if len(prompt) > 10:
            (asked,) = (other for other in prompts if other == prompt[:-15])
            assert prompt[-15:-10] == [prompts.index(asked)] * 5, "what that request was answered"


def test_a_trace_over_grpc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROW, ROW.replace("0,", "2000,", 1), ROW.replace("0,", "4000,", 1).replace("600", "30").replace(", 2]", "]")]
    trace, file = tmp_path / "some.jsonl", tmp_path / "figures.json"
    trace.write_text("\n".join(rows))
    frontend = Counting()
    with target("grpc", frontend) as aim:
        flags = [*aim, "--trace", str(trace), "--trace-speed", "20,40", "--warmup", "1", "--json", str(file)]
        assert main(flags) == 0
    assert [len(call.prompt) for call in frontend.calls] == [600, 600, 600, 30, 600, 600, 30]
    warm, one, two, three, four, *_ = (call.prompt for call in frontend.calls)
    assert one == two and one[:30] == three and not set(map(str, [warm, four])) & {str(one)}
    assert {call.max_tokens for call in frontend.calls} == {2}
    report = json.loads(file.read_bytes())
    assert [level["trace_speed"] for level in report["levels"]] == [20, 40]
    assert [level["rate_per_s"] for level in report["levels"]] == [15, 30]
    assert report["plan"]["workload"]["kind"] == "trace" and report["plan"]["requests"] == 3
    assert "speed 20 (15/s)" in capsys.readouterr().out


def test_a_search_writes_all_its_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    with target("grpc", Counting()) as aim:
        flags = [*aim, *SMALL, "--warmup", "0", "--json", str(file), "--probe-s", "0.1", "--search", "--slo", "e2e=10"]
        assert main([*flags, "--rate", "50", "--max-rate", "200"]) == 0
    report = json.loads(file.read_bytes())
    assert report["search"] == {"passed": 200, "missed": None, "stopped": ""}
    assert [level["rate_per_s"] for level in report["levels"]] == [50, 100, 200]
    assert [level["summary"]["requests"] for level in report["levels"]] == [6, 10, 20]
    assert report["plan"]["search"] == {"attainment": 0.9, "tolerance": 0.1, "most": 200, "probe_s": 0.1}
    said = capsys.readouterr().out
    assert "goodput: at least 200 requests/s: there at least 90 % of the requests kept e2e 10000 ms; more" in said
    assert "100/s: 100.0% of 10 requests kept the limits" in said


def test_a_search_over_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its loads are speeds, and it says that four seconds of a trace are no proof."""
    trace, file = tmp_path / "some.jsonl", tmp_path / "figures.json"
    trace.write_text(f"{ROW}\n{ROW.replace('0,', '4000,', 1)}\n")
    with target("grpc", Counting()) as aim:
        flags = [*aim, "--trace", str(trace), "--trace-speed", "20", "--search", "--slo", "e2e=10", "--warmup", "0"]
        assert main([*flags, "--max-rate", "80", "--json", str(file)]) == 0
    assert [level["trace_speed"] for level in json.loads(file.read_bytes())["levels"]] == [20, 40, 80]
    said = capsys.readouterr().out
    assert "goodput: at least 80 times the trace's speed: there at least 90 % of the requests kept e2e 10000 ms" in said
    assert "; the trace was over in 0 s, and only 111 s show a server that falls behind" in said


def test_a_search_that_finds_none_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with target("grpc", Counting()) as aim:
        flags = [*aim, *SMALL, "--warmup", "0", "--probe-s", "0.1", "--search", "--slo", "ttft=1ms"]
        assert main([*flags, "--rate", "100"]) == 1
    said = capsys.readouterr().out
    assert "goodput: none found: at 100 requests/s, the lowest tried, less than 90 % of the requests kept" in said


def test_a_request_that_hangs_counts_as_late() -> None:
    frontend = FakeFrontend(Started("r", "m", 1), 3600.0)

    class Hanging:
        def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
            return frontend.generate(call)

        async def close(self) -> None: ...

    call = GenerateCall(prompt=[1], max_tokens=1, timeout_s=0.05)
    sample = asyncio.run(measure(Hanging(), call))
    assert sample.error == "DEADLINE_EXCEEDED"
    assert frontend.open == 0
