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
    """Answers with as many tokens as were asked for, two at a time; fails the request numbered `broken`."""

    def __init__(self, broken: int = -1, missing: int = 0) -> None:
        self.calls: list[GenerateCall] = []
        self.busiest = 0
        self._running = 0
        self._broken = broken
        self._missing = missing

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
            count = call.max_tokens - self._missing
            for index in range(0, count, 2):
                await asyncio.sleep(0.002)
                yield Delta("", (5,) * min(2, count - index))
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
    server = serving(frontend) if kind == "http" else serving_grpc(frontend)
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
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert "usage: headrace bench" in capsys.readouterr().err


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
