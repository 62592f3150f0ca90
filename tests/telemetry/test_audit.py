"""The auditor finds what does not add up, says so with all books, and costs next to nothing."""

import logging

import pytest

from engine.kv.block_pool import BlockPool, BlockState
from telemetry.audit import AuditError, Auditor
from telemetry.metrics import WorkerMetrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A ledger whose check takes its time."""

    def __init__(self, clock: Clock, cost_s: float) -> None:
        self.checks = 0
        self._clock = clock
        self._cost_s = cost_s

    def check(self) -> None:
        self.checks += 1
        self._clock.now += self._cost_s


def test_a_block_counted_twice_is_found_and_both_ledgers_are_dumped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against a leak, or a double free, that only shows as a wrong answer weeks later."""
    ours, theirs = BlockPool(8), BlockPool(4)
    metrics = WorkerMetrics("demo", "decode-0", "decode")
    auditor = Auditor({"kv": ours, "transfer": theirs}, Clock(), metrics.audit_failed)
    assert b"headrace_audit_failures_total{" in metrics.render()
    block = ours.allocate(2, BlockState.RESERVED)[0]
    auditor.audit()
    ours._free.append(block)
    with caplog.at_level(logging.CRITICAL), pytest.raises(AuditError, match=r"^the kv ledger"):
        auditor.audit()
    assert "6 free" in caplog.text and "4 free" in caplog.text
    line = next(
        line
        for line in metrics.render().decode().splitlines()
        if line.startswith("headrace_audit_failures_total")
    )
    assert line.endswith(" 1.0")


def test_audits_are_rare_and_rarer_where_they_are_dear() -> None:
    """Guards against an idle check that keeps a large pool's engine from its next request."""
    clock = Clock()
    cheap, dear = Slow(clock, 0.001), Slow(clock, 0.5)
    for ledger, every_s in ((cheap, 1.0), (dear, 50.0)):
        auditor = Auditor({"it": ledger}, clock, lambda: None)
        began_s = clock.now
        while clock.now < began_s + 500.0:
            auditor.idle()
            clock.now += 0.25
        assert ledger.checks == pytest.approx(500.0 / every_s, rel=0.3)
