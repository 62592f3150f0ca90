"""A prefill and a decode worker of one model whose blocks differ in size are a pair, and have a tree each."""

from engine.identity import chain, root
from engine.messages import Accepted, NeedPrefill, PeerAddress, Place, UsePrefill
from router.core.events import Command, Connected
from tests.router.bench import A, B, Bench, ended, is_told
from tests.router.fake_cluster import load, worker_info

TOKENS = 100
THEIRS = 32


def bench() -> Bench:
    """`p0` has blocks of 32 tokens, `d0` of 16; nobody else."""
    found = Bench(prefills=0)
    info = worker_info("p0", "prefill", block_size=THEIRS)
    found.do(Connected(PeerAddress("p0", "p0:1"), info))
    return found


def identities(size: int) -> list[bytes]:
    return chain(root(b"", "f"), list(range(TOKENS)), size)


def held(found: Bench) -> tuple[int, int]:
    """How many of the prompt's blocks each is believed to hold, in blocks of its own."""
    index = found.router.index
    return index.match("p0", identities(THEIRS)), index.match("d0", identities(16))


def prefill_of(commands: list[Command]) -> str:
    (place,) = [c for c in commands if is_told(c, Place)]
    return place.record.prefill.name


def test_they_are_a_pair_and_each_is_believed_to_hold_its_own_blocks() -> None:
    """Guards against a decode worker that prefills alone, since nobody has blocks of its size."""
    found = bench()
    assert prefill_of(found.submit(tokens=TOKENS)) == "p0"
    found.accept()
    assert held(found) == (3, 6)
    found.hear(ended(output_tokens=1, prompt_tokens=TOKENS))
    found.submit(B, tokens=TOKENS)
    call = found.router._calls[B]
    assert (call.believed_prefill_tokens, call.believed_decode_blocks) == (96, 6)


def test_each_tree_is_corrected_in_its_own_blocks() -> None:
    """Guards against a count of one worker's blocks that is taken for the other's."""
    found = bench()
    found.submit(tokens=TOKENS)
    found.accept()
    found.hear(load(evicted=[identities(THEIRS)[1]]), "p0")
    assert held(found) == (1, 6)
    found.hear(load(evicted=[identities(16)[4]]))
    assert held(found) == (1, 4)
    found.hear(ended(output_tokens=1, prompt_tokens=TOKENS))
    found.submit(B, tokens=TOKENS)
    found.hear(Accepted(B, 1, 16))
    assert held(found) == (3, 6), "what it has accepted it is about to hold"


def test_another_block_size_serves_a_request_that_lost_its_prefill_worker() -> None:
    found = bench()
    found.do(Connected(PeerAddress("p1", "p1:1"), worker_info("p1", "prefill", block_size=24)))
    first = prefill_of(found.submit(tokens=TOKENS))
    found.accept()
    (command,) = found.hear(NeedPrefill(A, 1, first))
    assert is_told(command, UsePrefill)
    other = {"p0": "p1", "p1": "p0"}[first]
    assert command.record == UsePrefill(A, 1, PeerAddress(other, f"{other}:1"))
    size = {"p0": THEIRS, "p1": 24}[other]
    assert found.router.index.match(other, identities(size)) == TOKENS // size
