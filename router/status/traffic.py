"""The latest requests by their shapes, and the speeds fitted of the workers: what another arrangement of the same
workers can be judged by (`cluster.report`). No prompt, no token, no tenant."""

from collections import deque
from collections.abc import Sequence

import msgspec

from engine.messages import RequestStats
from engine.types import FinishReason
from router.core.registry import Registry

KEPT_SHAPES = 256


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request, on the router's clock. `ttft_s` is None if no token came."""

    request: str
    outcome: FinishReason
    at_s: float
    e2e_s: float
    ttft_s: float | None
    gaps_s: Sequence[float]
    stages: dict[str, float]
    stats: RequestStats | None = None


class RequestShape(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended well. `arrived_s` is on the router's clock; `itl_s` is the mean gap between its tokens. The
    two `cached_tokens` are those of its prompt that either worker had; `is_local`: the decode worker read it."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    prefill_cached_tokens: int
    decode_cached_tokens: int
    ttft_s: float
    itl_s: float
    queue_s: float
    prefill_s: float
    migrate_s: float
    is_local: bool


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """`shapes` in the order of their ends. The times are means over the workers that have measured any, 0.0 without: of
    a prompt token where prompts are read, of a decode step without rows, and of each row in it. `silent`: routers that
    could not be asked, and why; no router says that itself."""

    shapes: list[RequestShape] = []
    prefill_workers: int = 0
    decode_workers: int = 0
    local_prefill: str = "never"
    s_per_token: float = 0.0
    alone_s: float = 0.0
    s_per_row: float = 0.0
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0
    silent: dict[str, str] = {}


class TrafficWindow:
    """Mutable state: the latest shapes. Owner: the router's event loop."""

    def __init__(self) -> None:
        self._shapes: deque[RequestShape] = deque(maxlen=KEPT_SHAPES)

    def ended(self, end: RequestSummary) -> None:
        """Keep the shape of a request, if it ended well with tokens, and its account is there."""
        stats, first_s = end.stats, end.ttft_s
        if stats is None or first_s is None or end.outcome not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        stages = end.stages
        shape = RequestShape(
            arrived_s=end.at_s - end.e2e_s,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            prefill_cached_tokens=stats.prefill_cached_tokens,
            decode_cached_tokens=stats.decode_cached_tokens,
            ttft_s=first_s,
            itl_s=sum(end.gaps_s) / len(end.gaps_s) if end.gaps_s else 0.0,
            queue_s=stages.get("prefill_queue", 0.0),
            prefill_s=stages.get("prefill_run", 0.0),
            migrate_s=stages.get("migrate", 0.0),
            is_local=stats.prefill_worker in ("", stats.decode_worker),
        )
        self._shapes.append(shape)

    @property
    def shapes(self) -> list[RequestShape]:
        return list(self._shapes)


def traffic(
    shapes: list[RequestShape], registry: Registry, local_prefill: str, slo_ttft_s: float, slo_itl_s: float, now: float
) -> Traffic:
    """Make the record, on the event loop of the registry."""
    # One that is ejected is part of the arrangement, one that leaves is none of what comes.
    prefills, decodes = ([w for w in registry.live(role, now) if not w.leaving] for role in ("prefill", "decode"))
    fitted = registry.fitted
    lines = [fitted.step(w.name, w.load.s_per_token if w.load else 0.0) for w in decodes]
    speeds = [fitted.s_per_token(worker.name) for worker in prefills or decodes]
    return Traffic(
        shapes=shapes,
        prefill_workers=len(prefills),
        decode_workers=len(decodes),
        local_prefill=local_prefill,
        s_per_token=_mean(speeds),
        alone_s=_mean([alone_s for alone_s, _ in lines]),
        s_per_row=_mean([s_per_row for _, s_per_row in lines]),
        slo_ttft_s=slo_ttft_s,
        slo_itl_s=slo_itl_s,
    )


def together(told: Sequence[Traffic]) -> Traffic:
    """Return one record of those of several routers of one host, whose clock is one; at least one."""
    shapes = sorted((shape for one in told for shape in one.shapes), key=lambda shape: shape.arrived_s)
    times = {
        name: _mean([getattr(one, name) for one in told]) for name in ("s_per_token", "alone_s", "s_per_row")
    }
    return msgspec.structs.replace(told[0], shapes=shapes[-KEPT_SHAPES:], **times)


def _mean(figures: list[float]) -> float:
    known = [figure for figure in figures if figure]
    return sum(known) / len(known) if known else 0.0
