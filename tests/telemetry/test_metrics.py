"""The families that dashboards are built on."""

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import plan
from telemetry.labels import BLOCK_STATES, HANDOFF_DROPS, OUTCOMES, STAGES
from telemetry.metrics import WorkerMetrics
from telemetry.router_metrics import RouterMetrics, WorkerView
from tests.telemetry.pages import Samples, samples
from transfer.registry import FACTORIES


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
                assert sample.name.startswith(("headrace_", "process_"))


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
    metrics.blocks({"free": 3, "cached": 0, "active": 2, "reserved": 0, "quarantined": 0}, {"0 all": 2})
    metrics.blocks({"free": 5, "cached": 0, "active": 0, "reserved": 0, "quarantined": 0}, {"0 all": 0})
    metrics.prompt_tokens(computed=10, prefix_hit=7)
    metrics.generated(4, forced=1)
    metrics.drafts(5, 2)
    metrics.draft_model(0.5, 40)
    metrics.held(0.25, filled=1, expired=2, missed=3)
    metrics.drafts_of_request(5, 2, 1.4)
    metrics.drafts_of_request(0, 0, 1.0)
    metrics.migration("ok", "shm", 0.02, 4096)
    metrics.step(8, 0.05, None)
    metrics.step(8, 0.05, 0.25)
    metrics.handoffs_dropped("receiver", {"offer: stopped": 2})
    metrics.handoffs_dropped("receiver", {"offer: stopped": 3})
    metrics.transferred(made=0, verified=9, mismatched=1, scrapped_bytes=0)
    metrics.transferred(made=0, verified=11, mismatched=1, scrapped_bytes=4096)
    metrics.quarantined(1.5)
    metrics.slots(live=30, held=48)
    metrics.forks(forked=1, inherited=0)
    metrics.forks(forked=2, inherited=0)
    metrics.orphans_expired(1)
    metrics.load(waiting=3, running=2, outstanding=0)
    metrics.inflight(1)
    seen = samples(metrics.render())
    assert seen["headrace_kv_blocks", (("state", "free"),)] == 5
    assert seen["headrace_kv_blocks", (("state", "active"),)] == 0
    assert seen["headrace_prompt_tokens_total", (("source", "prefix_hit"),)] == 7
    assert seen["headrace_generated_tokens_total", ()] == 4
    drafts = {of: seen["headrace_draft_tokens_total", (("outcome", of),)] for of in ("drawn", "rejected")}
    assert drafts == {"drawn": 2, "rejected": 3}
    assert seen["headrace_draft_model_seconds_total", ()] == 0.5
    assert seen["headrace_draft_model_read_tokens_total", ()] == 40
    held = {of: seen["headrace_held_steps_total", (("outcome", of),)] for of in ("filled", "due")}
    assert held == {"filled": 1, "due": 2} and seen["headrace_held_seconds_total", ()] == 0.25
    assert seen["headrace_itl_target_missed_total", ()] == 3
    assert seen["headrace_request_draft_acceptance_ratio_sum", ()] == 0.4
    assert seen["headrace_request_tokens_per_step_count", ()] == 2
    assert seen["headrace_kv_migration_bytes_total", ()] == 4096
    assert seen["headrace_kv_slots", (("state", "live"),)] == 30
    assert seen["headrace_kv_slots", (("state", "empty"),)] == 18
    assert seen["headrace_forks_total", (("kind", "forked"),)] == 2
    assert seen["headrace_orphans_expired_total", ()] == 1
    assert seen["headrace_queue_depth", ()] == 3
    assert seen["headrace_step_seconds_count", ()] == 2
    assert seen["headrace_step_idle_seconds_total", ()] == 0.25
    stopped = (("side", "receiver"), ("what", "offer: stopped"))
    assert seen["headrace_handoff_dropped_total", stopped] == 3
    assert seen["headrace_handoff_digests_total", (("what", "verified"),)] == 11
    assert seen["headrace_handoff_digests_total", (("what", "mismatched"),)] == 1
    assert seen["headrace_handoff_scrapped_bytes_total", ()] == 4096
    assert seen["headrace_handoff_quarantine_seconds_sum", ()] == 1.5


def test_only_a_whole_migration_is_timed() -> None:
    """Guards against attempts that failed at once being read as very fast migrations, and bytes that did land being
    lost with them."""
    metrics = WorkerMetrics("m", "decode-0", "decode")
    metrics.migration("retry", "shm", 0.0, 1024)
    metrics.migration("expired", "", 0.0, 0)
    metrics.migration("ok", "shm", 0.25, 4096)
    seen = samples(metrics.render())
    assert seen["headrace_kv_migration_seconds_count", ()] == 1
    assert seen["headrace_kv_migration_bytes_total", ()] == 5120
    unreached = (("outcome", "expired"), ("transport", "none"))
    assert seen["headrace_kv_migrations_total", unreached] == 1


def _slo(seen: Samples, slo: str) -> list[float]:
    return [
        seen["headrace_slo_requests_total", (("met", met), ("slo", slo))]
        for met in ("true", "false")
    ]


def test_every_transport_that_there_is_is_counted_from_zero() -> None:
    """Guards against a transport that was added, and whose first failure is no increase that an alert could see."""
    seen = samples(WorkerMetrics("m", "decode-0", "decode").render())
    for transport in FACTORIES:
        assert (
            seen["headrace_kv_migrations_total", (("outcome", "failed"), ("transport", transport))]
            == 0
        )


def test_one_pool_has_no_empty_prefill_pool() -> None:
    """Guards a cluster without prefill workers, or whose last one was scaled away, against an alert for ever; one whose
    prefill workers are lost has it."""
    metrics, role = RouterMetrics("m"), (("role", "prefill"),)
    here, lost = WorkerView("decode-0", "decode", "ready", 7), WorkerView("prefill-0", "prefill", "lost", 0)
    for workers, shown in ((([here]), None), ([here, lost], 0), ([here], None)):
        metrics.cluster(0, 0, workers)
        seen = samples(metrics.render())
        assert seen.get(("headrace_pool_ready_workers", role)) == shown
        assert seen["headrace_pool_ready_workers", (("role", "decode"),)] == 1


def test_targets_are_judged_exactly() -> None:
    """Guards against goodput read off bucket bounds, and against callers' faults that spoil it."""
    metrics = RouterMetrics("m", slo_ttft_s=0.3, slo_itl_s=0.02)
    metrics.request("stop", 0.3, [0.01, 0.03], 0.5, {})
    metrics.request("length", 0.31, [0.02, 0.03], 0.5, {})
    metrics.request("error", None, [], 0.5, {})
    metrics.request("deadline", None, [], 0.5, {})
    metrics.request("cancelled", None, [], 0.5, {})
    metrics.request("rejected", None, [], 0.5, {})
    seen = samples(metrics.render())
    assert _slo(seen, "ttft") == [1, 3]
    assert _slo(seen, "itl") == [1, 1]
    assert seen["headrace_slo_target_seconds", (("slo", "itl"),)] == 0.02


def test_a_worker_that_is_gone_leaves_no_gauge_behind() -> None:
    """Guards against a drained worker that is shown as draining for ever."""
    metrics = RouterMetrics("m")
    metrics.expected_worker("decode-1", "decode")
    here = WorkerView("decode-1", "decode", "draining", 7)
    metrics.cluster(2, 5, [WorkerView("prefill-0", "prefill", "ready", 3), here])
    seen = samples(metrics.render())
    draining = (("peer", "decode-1"), ("role", "decode"), ("state", "draining"))
    assert seen["headrace_worker_state", draining] == 1
    assert seen["headrace_pool_ready_workers", (("role", "prefill"),)] == 1
    assert seen["headrace_pool_ready_workers", (("role", "decode"),)] == 0
    lost = (("how", "lost"), ("peer", "decode-1"), ("role", "decode"))
    assert seen["headrace_worker_losses_total", lost] == 0
    metrics.cluster(0, 0, [WorkerView("prefill-0", "prefill", "ready", 3)])
    seen = samples(metrics.render())
    assert ("headrace_worker_state", draining) not in seen
    assert seen["headrace_worker_losses_total", lost] == 0


def test_gauges_of_workers_are_made_anew_only_where_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the processor under a scrape of a thousand workers, each with five gauges that were made again; and what
    they show against a state or a count of before."""
    metrics, cleared = RouterMetrics("m"), list[str]()
    monkeypatch.setattr(metrics._states, "clear", lambda clear=metrics._states.clear: (cleared.append("all"), clear()))
    for step, (state, blocks, others) in enumerate(
        [("ready", 3, 1), ("ready", 3, 1), ("draining", 3, 1), ("draining", 9, 1), ("ready", 0, 2), ("ready", 0, 1)]
    ):
        here = WorkerView("d0", "decode", state, blocks)
        more = [WorkerView(f"p{at}", "prefill", "ready", 1) for at in range(others)]
        metrics.cluster(0, 0, [here, *more])
        seen = samples(metrics.render())
        states = {dict(labels)["peer"]: dict(labels)["state"] for (name, labels), value in seen.items()
                  if name == "headrace_worker_state" and value}  # fmt: skip
        assert states == {"d0": state} | {one.peer: "ready" for one in more}
        assert seen["headrace_router_index_blocks", (("peer", "d0"),)] == blocks
        assert len(cleared) == (1, 1, 1, 1, 2, 3)[step]


def test_two_in_one_process_do_not_share_a_registry() -> None:
    """Guards against the process-wide default registry, where a second worker is a name clash."""
    first, second = WorkerMetrics("m", "a", "prefill"), WorkerMetrics("m", "b", "decode")
    first.generated(1, forced=0)
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


def test_the_stages_are_those_that_are_timed() -> None:
    """Guards the second list of them: telemetry imports nothing of ours."""
    assert (*plan.STAGES, "unattributed") == STAGES
