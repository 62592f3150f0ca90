"""Stories for every alert, one that makes it fire and one that ends it, in the notation of `promtool test rules`.

Values come once a minute: `0+3x10` is ten steps up by 3, `1x5` is 1 and five times the same. `fires_m` and `calm_m` are
the minutes at which the alert must be firing, and must be over.
"""

from dataclasses import dataclass

OWN = 'model="m",worker="decode-0",pool="decode"'
ROUTER = 'model="m",worker="router",pool="router"'


@dataclass(frozen=True)
class Case:
    series: dict[str, str]
    fires_m: int
    calm_m: int
    count: int = 1


def _rates(name: str, labels: str, values: dict[str, str]) -> dict[str, str]:
    """Series of one family that differ by one label."""
    return {f"headrace_{name}{{{ROUTER},{labels}{key}}}": value for key, value in values.items()}


def _stage(stage: str, total: str, count: str) -> dict[str, str]:
    labels = f'{ROUTER},stage="{stage}"'
    return {
        f"headrace_request_stage_seconds_sum{{{labels}}}": total,
        f"headrace_request_stage_seconds_count{{{labels}}}": count,
    }


def pressure(prefill_sum: str, gap_sum: str) -> dict[str, str]:
    """60 requests and gaps a minute against targets of 0.5 s and 0.05 s."""
    every = "0+60x60"
    return {
        f'headrace_slo_target_seconds{{{ROUTER},slo="ttft"}}': "0.5x60",
        f'headrace_slo_target_seconds{{{ROUTER},slo="itl"}}': "0.05x60",
        **_stage("prefill_queue", "0x60", every),
        **_stage("prefill_run", prefill_sum, every),
        **_stage("reserve", "0x60", every),
        f"headrace_request_itl_seconds_sum{{{ROUTER}}}": gap_sum,
        f"headrace_request_itl_seconds_count{{{ROUTER}}}": every,
    }


def _blocks(active: str) -> dict[str, str]:
    states = {"free": "100x60", "cached": "0x60", "reserved": "0x60", "quarantined": "0x60"}
    return {
        f'headrace_kv_blocks{{{OWN},state="{state}"}}': value
        for state, value in (states | {"active": active}).items()
    }


def _died(cause: str) -> dict[str, str]:
    labels = 'model="m",worker="supervisor",pool="supervisor",role="decode"'
    return {f'headrace_process_deaths_total{{{labels},cause="{cause}"}}': "0x4 1x55"}


def starts(peer: str, role: str, values: str) -> dict[str, str]:
    """Starts of a process, as its supervisor counts them."""
    labels = 'model="m",worker="supervisor",pool="supervisor"'
    return {f'headrace_process_starts_total{{{labels},peer="{peer}",role="{role}"}}': values}


def _outcomes(**values: str) -> dict[str, str]:
    return _rates("requests_total", "", {f'outcome="{key}"': v for key, v in values.items()})


# Bad for half an hour, then well: at 25 minutes whatever takes its time has fired; at 55 it is over.
LATE = {"fires_m": 25, "calm_m": 55}

CASES = {
    "HeadraceProcessDown": Case({'up{worker="decode-0",pool="decode"}': "1x4 0x9 1x45"}, 8, 20),
    "HeadracePoolEmpty": Case(
        _rates(
            "pool_ready_workers", "", {'role="decode"': "2x4 0x9 2x45", 'role="prefill"': "1x60"}
        ),
        8,
        20,
    ),
    "HeadraceWorkerRestarts": Case(starts("decode-0", "decode", "1x4 2+1x5 7x50"), 12, 40),
    "HeadraceRequestsFail": Case(
        _outcomes(stop="0+60x60", error="0+6x30 180x30", deadline="0x60"), **LATE
    ),
    "HeadraceRequestsRefused": Case(
        _outcomes(stop="0+60x60", error="0x60", rejected="0+6x30 180x30"), **LATE
    ),
    "HeadracePoisonousRequest": Case(
        {f"headrace_requests_poisonous_total{{{ROUTER}}}": "0x4 1x55"}, 8, 25
    ),
    "HeadraceFirstTokenLate": Case(
        _rates(
            "slo_requests_total",
            'slo="ttft",',
            {'met="true"': "0+30x30 960+60x30", 'met="false"': "0+30x30 900x30"},
        ),
        **LATE,
    ),
    "HeadraceTokensSlow": Case(
        _rates(
            "slo_requests_total",
            'slo="itl",',
            {'met="true"': "0+30x30 960+60x30", 'met="false"': "0+30x30 900x30"},
        ),
        **LATE,
    ),
    "HeadraceAddPrefill": Case(pressure("0+60x30 1806+6x30", "0+1x60"), **LATE),
    "HeadraceAddDecode": Case(pressure("0+6x60", "0+6x30 181+1x30"), **LATE),
    "HeadraceRequestsWait": Case({f"headrace_queue_depth{{{ROUTER}}}": "0x4 3x10 0x45"}, 10, 25),
    "HeadraceKvNearlyFull": Case(_blocks("9900x30 0x30"), **LATE),
    "HeadraceKvLedgerBroken": Case(_died("ledger"), 8, 25),
    "HeadraceAuditFailed": Case(_died("audit"), 8, 25),
    "HeadraceBlocksQuarantined": Case(
        {f'headrace_kv_blocks{{{OWN},state="quarantined"}}': "0x4 3x10 0x45"}, 12, 25
    ),
    "HeadraceMigrationsFail": Case(
        {
            f'headrace_kv_migrations_total{{{OWN},transport="shm",outcome="ok"}}': "0+60x60",
            f'headrace_kv_migrations_total{{{OWN},transport="shm",outcome="retry"}}': "0+6x30 180x30",
        },
        **LATE,
    ),
    "HeadraceDigestMismatch": Case(
        {f'headrace_handoff_digests_total{{{OWN},what="mismatched"}}': "0x4 1x55"}, 8, 25
    ),
    "HeadraceRouterSlow": Case(
        {
            f'headrace_event_loop_lag_seconds_bucket{{{ROUTER},le="0.1"}}': "0x30 0+60x30",
            f'headrace_event_loop_lag_seconds_bucket{{{ROUTER},le="0.5"}}': "0+60x60",
            f'headrace_event_loop_lag_seconds_bucket{{{ROUTER},le="+Inf"}}': "0+60x60",
        },
        **LATE,
    ),
    "HeadraceCacheBeliefsWrong": Case(
        {
            f"headrace_router_expected_hit_tokens_total{{{ROUTER}}}": "0+60x60",
            f"headrace_router_actual_hit_tokens_total{{{ROUTER}}}": "0+6x30 240+60x30",
        },
        **LATE,
    ),
    "HeadraceFilesRunOut": Case(
        {f"process_open_fds{{{OWN}}}": "10x4 900x10 10x45", f"process_max_fds{{{OWN}}}": "1000x60"},
        10,
        25,
    ),
    "HeadraceCertificateEnds": Case(
        {
            f'headrace_certificate_expires_timestamp_seconds{{{OWN},certificate="front"}}': "1000000x20 9000000x40",
            f'headrace_certificate_expires_timestamp_seconds{{{OWN},certificate="internal"}}': "9000000000x60",
        },
        10,
        25,
    ),
}
