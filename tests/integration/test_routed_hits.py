"""What a conversation finds in the caches when its turns reach different routers, beside one whose turns reach one."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from router.config import RouterConfig

TURNS = 4
TALKS = 6
GAP_S = 0.4
"""Between two turns: a worker's report that has nothing else to say comes within 0.25 s."""


def reused(cluster: Cluster, names: list[str]) -> float:
    """The share of prompt tokens found in a cache by later turns of conversations whose turns go to these routers in
    turn."""
    cached = prompts = 0
    texts = [f"{'/'.join(names)} {talk} " * 20 for talk in range(TALKS)]
    for turn in range(TURNS):
        url = f"http://{cluster.routers[names[turn % len(names)]].own}/v1/completions"

        def ask(text: str, url: str = url) -> dict[str, Any]:
            body = {"prompt": text, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
            return httpx.post(url, json=body, timeout=60).json()  # type: ignore[no-any-return]

        with ThreadPoolExecutor(TALKS) as pool:  # at once, so that they are spread over the workers
            replies = list(pool.map(ask, texts))
        if turn:
            cached += sum(reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies)
            prompts += sum(reply["usage"]["prompt_tokens"] for reply in replies)
        said = [reply["choices"][0]["text"] for reply in replies]
        texts = [text + more + f" and then {turn}" * 4 for text, more in zip(texts, said, strict=True)]
        time.sleep(GAP_S)
    return cached / prompts


def test_a_conversation_finds_as_much_whichever_router_its_turns_reach(demo_model: Path) -> None:
    """Guards what routers learn from workers of each other's requests: without it a turn goes to any of three workers
    of a pool, of which one has its beginning."""
    config = ClusterConfig(
        launcher="process",
        routers=2,
        prefill_workers=0,
        decode_workers=3,
        stop_grace_s=1.0,
        router=RouterConfig(grpc_port=0, http_port=0),
    )
    with Cluster(config, make_launcher("process"), model_dir=str(demo_model)) as cluster:
        cluster.start()
        alone = reused(cluster, ["router-0"])
        spread = reused(cluster, ["router-0", "router-1"])
    print(f"reused: {alone:.3f} at one router, {spread:.3f} over two")
    assert alone > 0.6, "nothing to compare with"
    assert spread > alone - 0.03
