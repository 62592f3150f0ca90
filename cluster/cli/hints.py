"""The rule of thumb for two pools: late first tokens are the prefill side's, slow tokens the decode side's."""

from router.status.overview import Overview

TTFT_S = 0.5
ITL_S = 0.05

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
    """Suggest which pool to enlarge, by the last minute's figures; a person decides. Empty while they are good, or
    missing."""
    recent = overview.recent
    said = []
    if recent.ttft_p50_s is not None and recent.ttft_p50_s > TTFT_S:
        before = {name: recent.stages.get(name, 0.0) for name in _CAUSES}
        longest = max(before, key=lambda name: before[name])
        said.append(f"TTFT is over {TTFT_S * 1e3:.0f} ms, most of it {longest}: {_CAUSES[longest]}")
    if recent.itl_p50_s is not None and recent.itl_p50_s > ITL_S:
        running = [w.load.running_requests for w in overview.workers if w.role == "decode" and w.load]
        said.append(
            f"inter-token time is over {ITL_S * 1e3:.0f} ms with up to {max(running, default=0)} "
            "requests in a batch: decode pressure; add a decode worker, or lower decode.max_batch"
        )
    return said
