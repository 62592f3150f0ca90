"""A request under an adapter goes where that adapter is, and believes nothing of blocks that were made without it."""

import msgspec
import pytest

from engine.messages import Accepted
from engine.types import RequestId
from tests.router.core.parts import Parts, request_record


def parts(**adapters: list[str]) -> Parts:
    made = Parts()
    for name, found in adapters.items():
        worker = made.join(name)
        worker.info = msgspec.structs.replace(worker.info, adapters=found)
    return made


def test_it_goes_to_workers_that_have_its_adapter() -> None:
    """Guards a request that the base model would answer in its adapter's place."""
    made = parts(p0=[], p1=["5ad0"], d0=[], d1=["5ad0", "5ad1"])
    call = made.offer(adapter="5ad0")
    assert (call.decode, call.prefill) == ("d1", "p1")


def test_it_waits_for_nobody_who_will_not_come() -> None:
    made = parts(p0=["5ad0"], d0=["5ad1"])
    fault = made.placer.impossible(request_record(adapter="5ad0"), 0.0)
    assert fault is not None and (fault.code, fault.field) == ("NOT_FOUND", "adapter")
    assert fault.message == "adapter: no decode worker has 5ad0"
    assert made.placer.impossible(request_record(), 0.0) is None


@pytest.mark.parametrize("adapter", ["", "5ad1"])
def test_it_is_not_sent_after_another_adapters_blocks(adapter: str) -> None:
    made = parts(p0=["5ad0", "5ad1"], d0=["5ad0", "5ad1"])
    first = made.run("a", adapter="5ad0")
    made.view.accepted(first, Accepted(RequestId("a"), 1, 0))
    held = made.index.held_blocks("d0")
    assert held > 0
    other = made.offer("b", adapter=adapter)
    assert other.believed_decode_blocks == 0
    same = made.offer("c", adapter="5ad0")
    assert same.believed_decode_blocks == held


def test_one_that_has_the_adapter_must_hold_the_request_too() -> None:
    """Guards the line: a worker without the adapter was large enough, so the request waited for ever, and all others
    with it."""
    made = parts(p0=["5ad0"], d0=[])
    small = made.join("d1", blocks=4)
    small.info = msgspec.structs.replace(small.info, adapters=["5ad0"])
    fault = made.placer.impossible(request_record(tokens=100, adapter="5ad0"), 0.0)
    assert fault is not None and fault.code == "OUT_OF_RANGE" and fault.message.endswith("64 tokens of KV memory")


def test_a_leaving_worker_yields_nothing_that_nobody_else_has_the_adapter_for() -> None:
    made = parts(p0=["5ad0"], d0=["5ad0"], d1=[], d2=[])
    call = made.run("a", 1, adapter="5ad0")
    home = made.registry.get("d0")
    assert home is not None and call.decode == "d0" and not made.placer.has_room_elsewhere(call, home, 0, 0.0)
    other = made.registry.get("d1")
    assert other is not None
    other.info = msgspec.structs.replace(other.info, adapters=["5ad0"])
    assert made.placer.has_room_elsewhere(call, home, 0, 0.0)
