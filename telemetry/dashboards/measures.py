"""Queries that several dashboards and rules share."""

from telemetry.dashboards.promql import Scope, share

PANELS = Scope("$__rate_interval", 'model=~"$model"', 'worker=~"$worker"')
RULES = Scope("5m")

UP = 'up{pool=~"supervisor|router|prefill|decode"}'
"""1 for each target of `/sd` that Prometheus reaches, 0 for the others."""
TARGET = "worker, pool"

GOAL = 0.9
"""The share of requests that is to meet a target, for alerts and for a word about the pools."""
HINTS = (
    (1.0, "add a prefill worker"),
    (0.0, "nothing: targets are met"),
    (-1.0, "add a decode worker"),
    (2.0, "target missed, neither pool is short"),
)


def slo_met(s: Scope) -> str:
    """The share of requests that met each target."""
    return share(
        s.rate("slo_requests_total", "slo", met="true"), s.rate("slo_requests_total", "slo")
    )


def failed(s: Scope) -> str:
    """The share of requests that ended in an error or too late."""
    return share(s.rate("requests_total", outcome="error|deadline"), s.rate("requests_total"))


def rejected(s: Scope) -> str:
    return share(s.rate("requests_total", outcome="rejected"), s.rate("requests_total"))


def kv_used(s: Scope, by: str) -> str:
    """The share of blocks that no eviction frees."""
    held = s.sum("kv_blocks", by, state="active|reserved|quarantined")
    return f"{held} / {s.sum('kv_blocks', by)}"


def migrations_failed(s: Scope) -> str:
    return share(
        s.rate("kv_migrations_total", outcome="retry|failed"),
        s.rate("kv_migrations_total", outcome="ok|retry|failed"),
    )


def honesty(s: Scope) -> str:
    """The share of the expected prefix hits that came true."""
    return share(
        s.rate("router_actual_hit_tokens_total"), s.rate("router_expected_hit_tokens_total")
    )


def busy(s: Scope, by: str) -> str:
    """The share of their time that engines spend in steps: 1 at most, since both are of one page and one moment."""
    return share(s.rate("engine_seconds_total", by, state="busy"), s.rate("engine_seconds_total", by))


def spent(s: Scope, name: str, label: str) -> str:
    """The share of the time that a thread of a worker spends on each kind of a thing, mean of the workers. What has
    begun before the window and ends in it counts in full: a long one would come out above 1."""
    return f"clamp_max(avg by ({label}) ({s.rate(name, f'{TARGET}, {label}')}), 1)"


def _mean_s(s: Scope, before: str, stage: str) -> str:
    """Write the mean seconds of a stage, with those of the one before it, over the requests that came to it."""
    spent = s.rate("request_stage_seconds", part="sum", stage=f"{before}|{stage}")
    return share(spent, s.rate("request_stage_seconds", part="count", stage=stage))


def prefill_pressure(s: Scope) -> str:
    """Mean time until a prompt is read, in units of the TTFT target."""
    return f"{_mean_s(s, 'prefill_queue', 'prefill_run')} / scalar(max({s.series('slo_target_seconds', slo='ttft')}))"


def decode_pressure(s: Scope) -> str:
    """The larger of two ratios: the mean gap between tokens in units of its target, and the mean wait for room on a
    decode worker, in the router's line or for the worker's word, in units of the TTFT target."""
    targets = {
        slo: f"scalar(max({s.series('slo_target_seconds', slo=slo)}))" for slo in ("ttft", "itl")
    }
    gap = f"({s.mean('request_itl_seconds')} / {targets['itl']})"
    wait = f"({_mean_s(s, 'route', 'reserve')} / {targets['ttft']})"
    return f"(({gap} >= {wait}) or {wait})"


def hint(s: Scope) -> str:
    """Which pool to enlarge. 1: add a prefill worker; -1: add a decode worker; 0: neither is above its target."""
    prefill, decode = f"({prefill_pressure(s)})", decode_pressure(s)
    return (
        f"({prefill} > bool 1) * ({prefill} > bool {decode})"
        f" - ({decode} > bool 1) * ({decode} >= bool {prefill})"
    )


def verdict(s: Scope) -> str:
    """What `hint` says, and 2 where it has nothing to say although too few requests meet a target."""
    return f"({hint(s)}) + 2 * (({hint(s)}) == bool 0) * (min({slo_met(s)}) < bool {GOAL:g})"


def certificate_left_s(s: Scope) -> str:
    """Seconds for which certificates are still good; ten years where there is none that could end."""
    return f"clamp_max({s.series('certificate_expires_timestamp_seconds')} - time(), 10 * 365 * 86400)"


def files_used(s: Scope) -> str:
    return f"{s.series('process_open_fds')} / {s.series('process_max_fds')}"
