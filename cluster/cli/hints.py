"""The rule of thumb for two pools: late first tokens are the prefill side's, slow tokens the decode side's."""

from router.status.overview import Overview

GOAL = 0.9
"""The share of requests that is to meet a target, as for the alerts and the dashboards' word about the pools."""

_CAUSES = {
    "admit": "the router itself is late: long texts to tokenize, or too little processor for it",
    "route": "requests stand in the router's line: no decode worker has room; add a decode worker, or larger pools",
    "reserve": "decode workers refuse for want of blocks; add a decode worker, or larger pools",
    "prefill_queue": "prompts wait for a prefill worker; add one",
    "prefill_run": "prompts take long to compute: more prefill workers do not shorten a single one; "
    "look at prompt lengths, and at how much of them is cached",
    "migrate": "KV takes long to move: look at the transport, and at the network between the pools",
}
"""The likely cause of a late first token, by the stage before it that is the longest."""


def hints(overview: Overview) -> list[str]:
    """Suggest which pool to enlarge, by the last minute's figures and the cluster's targets; a person decides. Empty
    while targets are met, or figures missing."""
    recent, ttft_s, itl_s = overview.recent, overview.slo_ttft_s, overview.slo_itl_s
    said = []
    if recent.ttft_p50_s is not None and recent.ttft_p50_s > ttft_s:
        before = {name: recent.stages.get(name, 0.0) for name in _CAUSES}
        longest = max(before, key=lambda name: before[name])
        said.append(f"TTFT is over {ttft_s * 1e3:.0f} ms, most of it {longest}: {_CAUSES[longest]}")
    elif (share := _share(overview, "ttft")) < GOAL:
        said.append(
            f"only {share:.0%} of the first tokens came within {ttft_s * 1e3:.0f} ms, although the median is good: "
            "bursts, or some long prompts before short ones; `headrace trace` shows single requests"
        )
    if recent.itl_p50_s is not None and recent.itl_p50_s > itl_s:
        running = [w.load.running_requests for w in overview.workers if w.role == "decode" and w.load]
        said.append(
            f"inter-token time is over {itl_s * 1e3:.0f} ms with up to {max(running, default=0)} "
            "requests in a batch: decode pressure; add a decode worker, or lower decode.max_batch"
        )
    elif (share := _share(overview, "itl")) < GOAL:
        said.append(
            f"only {share:.0%} of the answers came with {itl_s * 1e3:.0f} ms between tokens, although the median is "
            "good: some batches are large, or prompts are read between; `headrace trace` shows single requests"
        )
    return said


def _share(overview: Overview, target: str) -> float:
    met, count = overview.recent.in_time.get(target, (0, 0))
    return met / count if count else 1.0
