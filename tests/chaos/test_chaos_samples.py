"""Parallel samples whose decode worker is killed: every sample goes on where it was, from real processes."""


import pytest

from engine.types import SamplingParams
from router.front.api import Delta, Finished, GenerateCall, GenerateEvent
from tests.chaos import faults
from tests.chaos.ground import Ground
from tests.chaos.strike import PROMPTS, SETTLE_S

pytestmark = pytest.mark.chaos

SAMPLES, OUTPUT_TOKENS = 3, 16
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded with penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3
    ),
}
Answers = list[tuple[list[int], str, str, str]]
"""Tokens, text, finish reason and stop string by sample."""


def sampling_call(mode: str, tenant: str, stop: tuple[str, ...] = ()) -> GenerateCall:
    return GenerateCall(
        prompt=PROMPTS["victim"],
        n=SAMPLES,
        sampling=SAMPLINGS[mode],
        seed=77,
        max_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        tenant=tenant,
        stop=stop,
    )


def _answers(events: list[GenerateEvent]) -> Answers:
    tokens: list[list[int]] = [[] for _ in range(SAMPLES)]
    texts, ends = [""] * SAMPLES, [("", "")] * SAMPLES
    for event in events:
        if isinstance(event, Delta):
            tokens[event.sample] += event.token_ids
            texts[event.sample] += event.text
        elif isinstance(event, Finished):
            ends[event.sample] = (event.reason.value, event.stop_matched)
    return [(ids, text, *end) for ids, text, end in zip(tokens, texts, ends, strict=True)]


def sampled(ground: Ground, call: GenerateCall, kill_at: int | None = None, rank: int = 0) -> Answers:
    """All samples to their ends. With `kill_at`, whoever serves them is killed, in this rank's process, when so many
    tokens of all of them together have come."""
    events: list[GenerateEvent] = []
    came, victim, pid = 0, "", 0
    for event in ground.client.generate(call):
        events.append(event)
        came += len(event.token_ids) if isinstance(event, Delta) else 0
        if kill_at is not None and came >= kill_at and not victim:
            victim = ground.busy("decode")
            pid = ground.pid(victim)
            faults.kill(ground.rank_pid(victim, rank) if rank else pid)
    if kill_at is not None:
        assert victim, "it was over before the fault"
        ground.replaced(victim, pid)
    ground.settle(SETTLE_S)
    return _answers(events)


@pytest.mark.parametrize("mode", list(SAMPLINGS))
@pytest.mark.parametrize("kill_at", [1, 8, 20, 33])
def test_every_sample_of_a_lost_worker_is_exact(ground: Ground, mode: str, kill_at: int) -> None:
    """Guards recovery of a group: each sample goes on behind its own tokens, and all share one prompt again on another
    worker; with penalties, which count what each has said."""
    whole = sampled(ground, sampling_call(mode, f"whole {mode}"))
    assert all(len(answer[0]) == OUTPUT_TOKENS for answer in whole)
    assert mode == "greedy" or len({answer[1] for answer in whole}) == SAMPLES, "they are alike"
    assert sampled(ground, sampling_call(mode, f"broken {mode} {kill_at}"), kill_at) == whole


@pytest.mark.parametrize("mode", list(SAMPLINGS))
def test_stop_strings_are_found_by_sample_across_a_loss(ground: Ground, mode: str) -> None:
    """Guards the text of each sample: a stop string that begins before the loss and ends behind it ends its own."""
    text = sampled(ground, sampling_call(mode, f"whole {mode}"))[-1][1]
    stop = (text[len(text) // 2 :][:8],)
    whole = sampled(ground, sampling_call(mode, f"stopped {mode}", stop))
    assert whole[-1][2:] == ("stop", stop[0])
    assert sampled(ground, sampling_call(mode, f"broken, stopped {mode}", stop), 4) == whole


def test_the_prompt_moves_once_for_all_samples(ground: Ground) -> None:
    """Guards sharing through the whole system: blocks are migrated for sample 0, and for nobody else."""
    events = list(ground.client.generate(sampling_call("greedy", "once")))
    ends = {event.sample: event for event in events if isinstance(event, Finished)}
    prompt = len(PROMPTS["victim"])
    assert ends[0].stats.migrated_blocks == -(-prompt // 16)
    assert [ends[at].stats.migrated_blocks for at in (1, 2)] == [0, 0]
    assert [ends[at].cached_tokens for at in range(SAMPLES)] == [0, prompt - 1, prompt - 1]
    ground.settle(SETTLE_S)
