"""The families that dashboards are built on."""

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.metrics import (
    BLOCK_STATES,
    HANDOFF_DROPS,
    OUTCOMES,
    STAGES,
    RouterMetrics,
    WorkerMetrics,
)


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values by (sample name, sorted labels without model, pool and worker)."""
    own = {"model", "pool", "worker"}
    return {
        (
            sample.name,
            tuple(sorted((key, value) for key, value in sample.labels.items() if key not in own)),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_every_label_set_exists_before_the_first_request() -> None:
    """Guards against panels that say "No data" until the first failure or stage occurs."""
    router = samples(RouterMetrics("m").render())
    for outcome in OUTCOMES:
        assert router["headrace_requests_total", (("outcome", outcome),)] == 0
    for stage in STAGES:
        assert router["headrace_request_stage_seconds_count", (("stage", stage),)] == 0
    worker = samples(WorkerMetrics("m", "decode-0", "decode").render())
    for state in BLOCK_STATES:
        assert worker["headrace_kv_blocks", (("state", state),)] == 0
    for side, kinds in HANDOFF_DROPS.items():
        for what in kinds:
            labels = (("side", side), ("what", what))
            assert worker["headrace_handoff_dropped_total", labels] == 0
    ok_shm = (("outcome", "ok"), ("transport", "shm"))
    assert worker["headrace_kv_migrations_total", ok_shm] == 0


def test_own_labels_are_on_every_sample() -> None:
    """Guards against a family that cannot be told apart by worker once all are scraped together."""
    for metrics in (RouterMetrics("m", "r"), WorkerMetrics("m", "prefill-1", "prefill")):
        for family in text_string_to_metric_families(metrics.render().decode()):
            for sample in family.samples:
                assert {"model", "pool", "worker"} <= sample.labels.keys()
                assert sample.name.startswith("headrace_")


def test_a_request_is_counted_once_in_each_family() -> None:
    """Guards against a gap counted as a request, or a missing first token counted as zero seconds."""
    metrics = RouterMetrics("m")
    metrics.request("stop", 0.2, [0.01, 0.03], 0.5, {"admit": 0.001, "decode_run": 0.3})
    metrics.request("cancelled", None, [], 0.1, {})
    seen = samples(metrics.render())
    assert seen["headrace_requests_total", (("outcome", "stop"),)] == 1
    assert seen["headrace_request_ttft_seconds_count", ()] == 1
    assert seen["headrace_request_itl_seconds_count", ()] == 2
    assert seen["headrace_request_itl_seconds_sum", ()] == pytest.approx(0.04)
    assert seen["headrace_request_e2e_seconds_count", ()] == 2
    assert seen["headrace_request_stage_seconds_sum", (("stage", "decode_run"),)] == 0.3


def test_worker_figures() -> None:
    metrics = WorkerMetrics("m", "decode-0", "decode")
    metrics.blocks({"free": 3, "active": 2})
    metrics.blocks({"free": 5, "active": 0})
    metrics.prompt_tokens(computed=10, prefix_hit=7)
    metrics.generated(4)
    metrics.migration("ok", "shm", 0.02, 4096)
    metrics.step(8, 0.05)
    metrics.handoffs_dropped("receiver", {"offer: stopped": 2})
    metrics.handoffs_dropped("receiver", {"offer: stopped": 3})
    metrics.transferred(made=0, verified=9, mismatched=1, scrapped_bytes=0)
    metrics.transferred(made=0, verified=11, mismatched=1, scrapped_bytes=4096)
    metrics.quarantined(1.5)
    seen = samples(metrics.render())
    assert seen["headrace_kv_blocks", (("state", "free"),)] == 5
    assert seen["headrace_kv_blocks", (("state", "active"),)] == 0
    assert seen["headrace_prompt_tokens_total", (("source", "prefix_hit"),)] == 7
    assert seen["headrace_generated_tokens_total", ()] == 4
    assert seen["headrace_kv_migration_bytes_total", ()] == 4096
    assert seen["headrace_step_seconds_count", ()] == 1
    stopped = (("side", "receiver"), ("what", "offer: stopped"))
    assert seen["headrace_handoff_dropped_total", stopped] == 3
    assert seen["headrace_handoff_digests_total", (("what", "verified"),)] == 11
    assert seen["headrace_handoff_digests_total", (("what", "mismatched"),)] == 1
    assert seen["headrace_handoff_scrapped_bytes_total", ()] == 4096
    assert seen["headrace_handoff_quarantine_seconds_sum", ()] == 1.5


def test_two_in_one_process_do_not_share_a_registry() -> None:
    """Guards against the process-wide default registry, where a second worker is a name clash."""
    first, second = WorkerMetrics("m", "a", "prefill"), WorkerMetrics("m", "b", "decode")
    first.generated(1)
    assert samples(second.render())["headrace_generated_tokens_total", ()] == 0


def test_the_port_answers_and_closes(free_port: int) -> None:
    """Guards against a thread or a port that outlives its worker."""
    metrics = RouterMetrics("m")
    assert metrics.serve("127.0.0.1", free_port) == free_port
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=5) as answer:
        assert b"headrace_build_info" in answer.read()
    with pytest.raises(OSError):
        RouterMetrics("other").serve("127.0.0.1", free_port)
    metrics.close()
    metrics.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=1)
