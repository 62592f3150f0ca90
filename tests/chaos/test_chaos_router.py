"""The router is killed while clients read: those that come back miss nothing, those that cannot are told."""

import time

import pytest

from engine.types import SamplingParams
from router.front.api import GenerateCall
from tests.chaos import faults
from tests.chaos.ground import GREEDY, Ask, Ground
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("renewed")]

LONG_TOKENS = 80
"""An answer that is still being written when the next router is up."""
SHORT_TOKENS = 20
"""One that ends while the router is frozen."""
AT_TOKEN = 4

MODES = {"greedy": GREEDY, "seeded": SamplingParams(temperature=1.0, top_k=8)}
"""A draw among few is not upset by the last bits of a sum, which depend on what else is in the batch."""

Answers = dict[tuple[str, str], Ask]


@pytest.fixture(scope="module")
def answers(ground: Ground) -> Answers:
    """The fault-free answers by prompt and mode; a shorter one is the beginning of the longer one."""
    found = {
        (name, mode): asks(ground, name, mode, LONG_TOKENS, f"reference-{mode}", resume=False)
        for name in PROMPTS
        for mode in MODES
    }
    for ask in found.values():
        ask.join(2 * END_S)
        assert ask.finished is not None, ask.error
    return found


def asks(
    ground: Ground,
    prompt: str,
    mode: str,
    count: int,
    tenant: str,
    *,
    resume: bool = True,
    stop: str = "",
) -> Ask:
    call = GenerateCall(
        prompt=PROMPTS[prompt],
        sampling=MODES[mode],
        seed=77,
        max_tokens=count,
        ignore_eos=True,
        tenant=tenant,
        stop=(stop,) if stop else (),
    )
    return Ask(ground.client, call, resume)


def stop_string(text: str) -> str:
    """A piece of the answer, behind three quarters of it, that does not occur before."""
    start = len(text) * 3 // 4
    return next(
        text[at : at + 6] for at in range(start, len(text)) if text.find(text[at : at + 6]) == at
    )


def test_clients_that_come_back_miss_nothing(ground: Ground, answers: Answers) -> None:
    """Guards the router's restart, greedy, seeded and with a stop string, while the answers are being written. And the
    client that cannot come back: it must be told at once, and its blocks must not stay."""
    stop = stop_string(answers["bystander", "seeded"].text)
    # The prompts are cached, so that all six begin at once.
    resumable = {
        (name, mode): asks(ground, name, mode, LONG_TOKENS, f"reference-{mode}")
        for name in PROMPTS
        for mode in MODES
    }
    stopped = asks(ground, "bystander", "seeded", LONG_TOKENS, "reference-seeded", stop=stop)
    plain = asks(ground, "victim", "greedy", LONG_TOKENS, "reference-greedy", resume=False)
    for ask in (*resumable.values(), stopped, plain):
        ask.wait_tokens(AT_TOKEN)
    pid = ground.pid("router")
    faults.kill(pid)
    killed_s = time.monotonic()
    assert not any(ask.over for ask in (*resumable.values(), stopped)), "over before the fault"
    plain.join(5.0)
    assert plain.error is not None and plain.error.code == "UNAVAILABLE"
    whole = answers["victim", "greedy"]
    assert plain.tokens == whole.tokens[: len(plain.tokens)] and len(plain.tokens) < LONG_TOKENS
    ground.replaced("router", pid)
    for key, ask in resumable.items():
        ask.join(2 * END_S)
        assert ask.error is None and ask.finished is not None, f"{key}: {ask.error!r}"
        assert ask.tokens == answers[key].tokens, f"{key}: wrong tokens {ask.tokens}"
        assert ask.finished.output_tokens == LONG_TOKENS
        assert ask.ended_s > killed_s
    stopped.join(2 * END_S)
    whole = answers["bystander", "seeded"]
    assert stopped.finished is not None, stopped.error
    assert stopped.finished.stop_matched == stop
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    ground.settle(SETTLE_S)


def test_the_tail_that_no_router_has_read(ground: Ground, answers: Answers) -> None:
    """Guards an answer that was complete at its worker only: the router is frozen, the worker finishes, the router is
    killed."""
    ground.settle(SETTLE_S)
    ask = asks(ground, "victim", "seeded", SHORT_TOKENS, "tail")
    ask.wait_tokens(2)
    name, pid = ground.busy("decode"), ground.pid("router")
    faults.freeze(pid)
    ground.probe(name).wait_quiet(20.0)
    had = len(ask.tokens)
    assert had < SHORT_TOKENS, "the client had the tail"
    faults.kill(pid)
    ask.join(END_S)
    assert ask.finished is not None, ask.error
    assert ask.tokens == answers["victim", "seeded"].tokens[: SHORT_TOKENS]
    ground.replaced("router", pid)
    ground.settle(SETTLE_S)


def test_router_and_decode_worker_die_together(ground: Ground, answers: Answers) -> None:
    """Guards against silence where nobody is left that knows the request, and against harm to one that is known."""
    ground.settle(SETTLE_S)
    asked = [asks(ground, name, "greedy", LONG_TOKENS, "both") for name in PROMPTS]
    for ask in asked:
        ask.wait_tokens(AT_TOKEN)
    name = ground.busy("decode")
    pids = {who: ground.pid(who) for who in (name, "router")}
    faults.freeze(pids["router"])  # or it would hear of the other death, and place the request again
    for pid in pids.values():
        faults.kill(pid)
    for ask, prompt in zip(asked, PROMPTS, strict=True):
        ask.join(2 * END_S)
        whole = answers[prompt, "greedy"].tokens
        assert ask.tokens == whole[: len(ask.tokens)]
        assert (ask.finished is not None and ask.tokens == whole) or (
            ask.error is not None and ask.error.code == "UNAVAILABLE"
        ), ask.error
    assert any(ask.error is not None for ask in asked), "the worker that died held none of them"
    for who, pid in pids.items():
        ground.replaced(who, pid)
    ground.settle(SETTLE_S)
