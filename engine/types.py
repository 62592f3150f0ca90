"""The vocabulary every package shares: ids, addresses, sampling parameters and the request record. No torch."""

from enum import StrEnum
from typing import NewType

import msgspec

from engine.identity import space

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
Incarnation = NewType("Incarnation", int)
"""A random 64-bit number drawn when a process starts: two lives of one worker name never share it."""


def host_port(host: str, port: int) -> str:
    """`host:port`, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class FinishReason(StrEnum):
    """The reason why a request ended; also the `outcome` label of the request counters."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REJECTED = "rejected"
    ERROR = "error"


class FieldError(ValueError):
    """The caller's fault: `field` names the offending request field, the message says what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class TooLongError(FieldError):
    """A prompt (with the room its answer needs) that the model's context cannot hold."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters by which the next token is drawn. `temperature` 0 is greedy; 0 for `top_k` and 1.0 for `top_p`
    switch them off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class EarlyStopping(StrEnum):
    """Says when a beam search that has as many answers as it is wide stops looking for better ones."""

    FULL = "full"
    """Stops at once."""
    HEURISTIC = "heuristic"
    """Stops when the best hypothesis, were it to end as it is, would be no better than the worst answer."""
    NEVER = "never"
    """Stops when no hypothesis can become better any more, whatever its length."""


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """Search `width` hypotheses side by side instead of drawing, and return the best `answers` of them. A positive
    `length_penalty` favours long answers: scores are log probabilities / length ** length_penalty."""

    width: int
    answers: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


class Beam(msgspec.Struct, frozen=True):
    """One answer of a beam search."""

    ids: list[int]
    score: float
    reason: FinishReason


class ConstraintKind(StrEnum):
    """The language in which a constraint is written. Choices, any JSON object and EBNF are turned into one of these
    when a call is taken in (`engine/constraints/text.py`)."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Constraint(msgspec.Struct, frozen=True):
    """What an answer must be like, to the token: every token is drawn from those with which it can still become so."""

    kind: ConstraintKind
    text: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token, and of the likeliest ones in its place, likeliest first: the model's own, before
    anything that sampling does to them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


DrawnToken = int | TokenLogprobs
"""A token that was drawn, with its log probabilities where its record asks for them."""


def id_of(token: DrawnToken) -> int:
    return token if isinstance(token, int) else token.token


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that any worker needs to run, or to resume, a request. It travels whole in every placement.

    `tokens[:prompt_tokens]` is the prompt; what follows are tokens already emitted by an earlier placement, which are
    history: they count for penalties and limits and are never sampled again. Random draws are keyed by
    (seed, sample_index, absolute position), so there is no sampler state to carry.
    """

    request: RequestId
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    seed: int
    sampling: SamplingParams = SamplingParams()
    sample_index: int = 0
    group: str = ""
    """The group that the samples of one call share; empty where there is but one."""
    priority: int = 0
    """The order in which requests give their blocks away when a decode worker's pool is exhausted: the lowest first."""
    beams: BeamParams | None = None
    """Beam search, in place of `sampling`. Its answers come with the request's end, no token before."""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    """What is added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all."""
    logprobs: int | None = None
    """So many alternatives are wanted beside the log probability of each output token; None: no log probabilities."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, from the second on. All of the prompt is computed for it, whatever is cached."""
    emitted_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the tokens behind the prompt, where a router may come that has not heard them."""
    constraint: Constraint | None = None
    """What the answer must be like. Where it stands in its grammar is a function of the tokens behind the prompt."""
    namespace: bytes = b""
    """The part of the cache that its blocks are found in: a tenant's, or nobody's, or a part of either that a salt
    sets apart (`engine.identity.owner`)."""
    adapter: str = ""
    """The digest of the adapter under which its KV is computed (`engine.model.files.adapter`); empty for none."""
    cache_share: float = 0.0
    """The part of each worker's blocks, up to 1, that are its namespace's own (`engine.kv.shares`); 0: what is left."""
    remaining_s: float | None = None
    """Time left to the caller's deadline when the record was sent: a duration, since clocks are never compared."""
    context: bytes = b""
    """All that another router needs to go on with this request after a restart; opaque to workers, and secret. Empty
    where no client can come back."""

    resume_key: bytes = b""
    """By this a router asks for it whose client has come back with a token that it does not know: a digest of that
    token, empty where no client can come back."""
    traceparent: str = ""
    """The W3C trace context under which workers say what they did; empty where nobody traces."""

    @property
    def space(self) -> bytes:
        """The part of the cache that its blocks are in (`engine.identity.space`)."""
        return space(self.namespace, self.adapter)

    def __repr__(self) -> str:
        """Leave out the caller's text, and what lets others read the answer."""
        return (
            f"RequestRecord({self.request}: {self.prompt_tokens} prompt tokens, "
            f"{len(self.tokens) - self.prompt_tokens} emitted, at most {self.max_tokens})"
        )
