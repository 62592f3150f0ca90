"""A prefill process and a decode process on the one card: real workers, real schedulers, real migration. Their tokens
are compared with those of the same model on the CPU, by the rule in `judge`."""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.judge import Judge
from benchmarks.gpu.random_model import save_checkpoint
from benchmarks.gpu.workers import running
from engine.config import EngineConfig, TierConfig
from engine.messages import Load
from engine.model.config import ModelError
from engine.model.prepared.cache import prepare
from transfer.config import NcclConfig, TransferConfig
from worker.config import DecodeConfig, PrefillConfig

SMALL = {
    "num_hidden_layers": 32,
    "hidden_size": 960,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "intermediate_size": 2560,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
"""The shape of a model of 360 million parameters: one that a CPU can follow."""
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
JOIN_S = 10.0
"""How long a way of NCCL may take to show that it works."""
WAYS = {
    "cuda_ipc": TransferConfig(transport="cuda_ipc"),
    "nccl, multi_rank": TransferConfig(
        transport="nccl", nccl=NcclConfig(share_gpu="multi_rank", join_s=JOIN_S)
    ),
    "nccl, two_hosts": TransferConfig(
        transport="nccl", nccl=NcclConfig(share_gpu="two_hosts", join_s=JOIN_S)
    ),
}
DRY_WAYS = {"shm": TransferConfig(transport="shm", digest_algorithm="wp64")}
TEXTS = ("The river turned the wheel, and", "Three things that float:", "1, 2, 3, 5, 8, 13,")


def cluster(card: Card) -> Iterator[Line]:
    """A random model, over every way between two processes of one card. Where NCCL does not do it, the line says so;
    where `cuda_ipc` does not, this raises."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "random"
        save_checkpoint(source, TINY if _is_dry(card) else SMALL, seed=6)
        lengths = (5, 33, 70) if _is_dry(card) else (17, 64, 200, 511, 1000, 2048)
        vocab = (TINY if _is_dry(card) else SMALL)["vocab_size"]
        draw = Random(6)
        prompts = [[draw.randrange(vocab) for _ in range(n)] for n in lengths]
        yield from _over_all(card, str(source), prompts, Path(folder), WAYS)


def demo(card: Card) -> Iterator[Line]:
    """Answer with the demo's model, where its package and a reader of its file are installed: otherwise return a line
    that says so."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model_dir = prepare(None, Path(folder), "float32")
        except (ModelError, ModuleNotFoundError) as error:
            yield {"way": "none", "absent": str(error)}
            return
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        prompts = [tokenizer.encode(text).ids for text in TEXTS]
        yield from _over_all(card, None, prompts, Path(folder), {"cuda_ipc": WAYS["cuda_ipc"]})


def _over_all(
    card: Card,
    source: str | None,
    prompts: list[list[int]],
    folder: Path,
    ways: Mapping[str, TransferConfig],
) -> Iterator[Line]:
    dry = _is_dry(card)
    answer_tokens = 4 if dry else 32
    dtype = "float32" if dry else "bfloat16"
    engine = EngineConfig(
        model_dir=str(prepare(source, folder, dtype, mapped=dry)),
        dtype=dtype,
        device=str(card.device),
        # The kernels of a GPU, interpreted, where that takes seconds; those of the CPU for a whole model.
        attention="triton" if source else "auto",
        block_size=16 if dry else 64,
        pool_bytes=(1 << 22 if source else 1 << 26) if dry else 1 << 31,
        threads=1 if dry else 4,
    )
    if not dry:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    context = max(map(len, prompts)) * 2 + 2 * answer_tokens
    judge = Judge(prepare(source, folder, "float32"), Path(engine.model_dir), context)
    try:
        for way, transfer in (DRY_WAYS if dry else ways).items():
            began_s = time.monotonic()
            log = folder / f"{way}.log"
            try:
                yield _line(way, engine, transfer, prompts, answer_tokens, judge, log)
            except RuntimeError as error:
                said = log.read_text(errors="replace").splitlines() if log.exists() else []
                print(f"{way}:", *said, sep="\n", file=sys.stderr, flush=True)
                if transfer.transport != "nccl":
                    raise
                # Why two workers do not reach each other, the workers say.
                why = [
                    str(error),
                    *(line for line in said if " error " in line or " warning " in line),
                ]
                took_s = time.monotonic() - began_s
                yield {"way": way, "works": 0, "why": "; ".join(why[:4]), "took_s": took_s}
    finally:
        judge.close()


def _line(
    way: str,
    engine: EngineConfig,
    transfer: TransferConfig,
    prompts: list[list[int]],
    answer_tokens: int,
    judge: Judge,
    log: Path,
) -> Line:
    tiers = TierConfig(host_bytes=0)
    prefill = PrefillConfig(engine=engine, transfer=transfer, tiers=tiers, chunk_tokens=512)
    decode = DecodeConfig(engine=engine, transfer=transfer, tiers=tiers, max_batch=8)
    began_s = time.monotonic()
    with running(prefill, decode, log) as pair:
        start_s = time.monotonic() - began_s
        answers = pair.ask(prompts, answer_tokens)
        # A next turn: what the decode worker has of it, up to the middle of a block, is not moved again.
        longest = max(answers, key=lambda answer: len(answer.prompt))
        turn = [*longest.prompt, *longest.tokens, *prompts[0]]
        answers += pair.ask([turn], answer_tokens)
        loads = pair.wait_quiet()
    largest = longest.stats
    if any(a.stats.transport != transfer.transport or not a.stats.migrated_blocks for a in answers):
        raise RuntimeError(f"nothing was moved over {way}: {[a.stats for a in answers]}")
    steps = [b - a for it in answers for a, b in zip(it.heard_s, it.heard_s[1:], strict=False)]
    return {
        "way": way,
        "works": 1,
        "start_s": start_s,
        "prompts": len(answers),
        "blocks": sum(answer.stats.migrated_blocks for answer in answers),
        "mib": sum(answer.stats.migrated_bytes for answer in answers) / 2**20,
        "longest_mib": largest.migrated_bytes / 2**20,
        "longest_migrate_ms": largest.migration_s * 1e3,
        "longest_gib_per_s": largest.migrated_bytes / largest.migration_s / 2**30,
        "cached_tokens": answers[-1].stats.decode_cached_tokens,
        "ttft_ms": statistics.median(answer.heard_s[0] for answer in answers) * 1e3,
        "itl_ms": statistics.median(steps) * 1e3,
        "pools": ", ".join(f"{role}: {_left(load)}" for role, load in loads.items()),
        **judge.verdict(answers),
    }


def _left(load: Load) -> str:
    return f"{load.free_blocks} free + {load.cached_blocks} cached"


def _is_dry(card: Card) -> bool:
    return card.device.type == "cpu"
