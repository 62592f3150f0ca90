"""What the client of an undisturbed run sees, from its request alone: the judge of all that a schedule says.

Tokens and their likelihoods are drawn as the shadow memory draws them; that is the simulated model. When an answer is
over, what may not be drawn before that, and what a beam search finds are said here anew, as plainly as they can be,
however slow: nothing of that is asked of the engine, which would judge itself.
"""

from collections.abc import Sequence
from itertools import pairwise

from engine.types import Beam, EarlyStopping, FinishReason, RequestRecord, TokenLogprobs
from tests.sim import grammar
from tests.sim.shadow import STOP_IDS, VOCAB, candidates, draw, log_probs, mix, root, rows_of, shown


def ends_answer(record: RequestRecord, token: int) -> bool:
    """Return True for a token behind which nothing comes."""
    return token in record.stop_token_ids or (token in STOP_IDS and not record.ignore_eos)


def barred(record: RequestRecord, answered: int) -> tuple[int, ...]:
    """Return the tokens that may not come behind `answered` ones."""
    if answered >= record.min_tokens:
        return ()
    return tuple([token for token in range(VOCAB) if ends_answer(record, token)])


def expected_output(record: RequestRecord, windows: Sequence[int] = ()) -> list[int]:
    """Return the whole answer, or all of it before a dead end of its constraint, from the tokens alone."""
    rows = rows_of(record, record.tokens[: record.prompt_tokens])
    output: list[int] = []
    while len(output) < record.max_tokens and not (output and ends_answer(record, output[-1])):
        key = (record.seed, record.sample_index, record.prompt_tokens + len(output))
        choices = () if record.constraint is None else grammar.allowed(record.constraint, output)
        if record.constraint is not None and not choices:
            break
        output.append(draw(shown(rows, windows), key, barred(record, len(output)), choices))
        rows.append(mix(rows[-1], output[-1]))
    return output


def expected_reason(record: RequestRecord, output: Sequence[int]) -> FinishReason:
    """Return why an answer is over that is all of `expected_output`."""
    return FinishReason.STOP if ends_answer(record, output[-1]) else FinishReason.LENGTH


def expected_logprobs(record: RequestRecord, windows: Sequence[int] = ()) -> list[TokenLogprobs]:
    """Return what is said of the answer's tokens; nothing where it is not asked."""
    if record.logprobs is None:
        return []
    rows, told = rows_of(record, record.tokens[: record.prompt_tokens]), []
    output = expected_output(record, windows)
    for at, token in enumerate(output):
        is_forced = record.constraint is not None and len(grammar.allowed(record.constraint, output[:at])) == 1
        row = shown(rows, windows)
        told.append(TokenLogprobs(token, 0.0) if is_forced else log_probs(row, token, record.logprobs))
        rows.append(mix(rows[-1], token))
    return told


def expected_prompt_logprobs(record: RequestRecord) -> list[TokenLogprobs]:
    """Return what is said of the prompt's tokens; nothing where it is not asked."""
    if record.prompt_logprobs is None:
        return []
    past, told = root(record), []
    for token, after in pairwise(record.tokens[: record.prompt_tokens]):
        past = mix(past, token)
        told.append(log_probs(past, after, record.prompt_logprobs))
    return told


def expected_answers(record: RequestRecord, windows: Sequence[int] = ()) -> list[Beam]:
    """Return the answers of a beam search, as many as it is wide: every continuation of every hypothesis is looked at,
    in all of the vocabulary."""
    assert record.beams is not None
    prompt, width = record.tokens[: record.prompt_tokens], record.beams.width
    alive: list[tuple[list[int], float]] = [([], 0.0)]
    answers: list[Beam] = []
    for length in range(1, record.max_tokens + 1):
        ways = []
        for ids, log_prob in alive:
            row = shown(rows_of(record, [*prompt, *ids]), windows)
            ways += [([*ids, t], log_prob + more) for t, more in candidates(row, VOCAB, barred(record, len(ids)))]
        ways.sort(key=lambda way: way[1], reverse=True)
        scale = float(length) ** record.beams.length_penalty
        for ids, log_prob in ways[:width]:
            reason = expected_reason(record, ids)
            if reason is FinishReason.STOP or length == record.max_tokens:
                answers.append(Beam(ids, log_prob / scale, reason))
        answers = sorted(answers, key=lambda answer: answer.score, reverse=True)[:width]
        alive = [(ids, log_prob) for ids, log_prob in ways if not ends_answer(record, ids[-1])][:width]
        if not alive or (len(answers) == width and _is_hopeless(record, alive[0][1], length, answers[-1].score)):
            break
    return answers


def _is_hopeless(record: RequestRecord, log_prob: float, length: int, worst: float) -> bool:
    """Return whether a search of which all answers are there ends: `log_prob` is that of the best hypothesis."""
    assert record.beams is not None
    penalty = record.beams.length_penalty
    match record.beams.early_stopping:
        case EarlyStopping.FULL:
            return True
        case EarlyStopping.NEVER if penalty > 0:
            return log_prob / float(record.max_tokens) ** penalty <= worst
        case _:
            return log_prob / float(length) ** penalty <= worst
