"""The real router that `benchmarks.front` measures, prepared as a cluster's is, with a vocabulary of its own.

Token i reads as " %04x" in a byte-level vocabulary, so that a client sees in the text which tokens came.
"""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.decision import Pauses
from benchmarks.front_workers import CONTEXT_TOKENS, MODEL, SECRETS, VOCABULARY
from cluster.processes.collector import spare_collector
from cluster.processes.spec import child_environment
from engine.messages import PeerAddress
from engine.native_identity import use_native_identities
from engine.text.detokenize import Detokenizer, DetokenizerFactory
from engine.text.dialect import Dialect
from engine.text.messages import ChatPrompt
from engine.types import SamplingParams
from router.background import give_way_soon
from router.config import FrontLimits, RouterConfig
from router.server import RouterServer


class HexText:
    """The text side of a model whose token i reads as " %04x"."""

    name = MODEL
    vocab_size = VOCABULARY + 1
    drawable_tokens = vocab_size
    context_tokens = CONTEXT_TOKENS
    stop_ids = frozenset({VOCABULARY})
    dialect = Dialect()
    added_ids: Mapping[str, int] = {}
    model_dir: Path | None = None
    sampling = SamplingParams()

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # Words are looked up in native code: the thread that tokenizes leaves the loop alone (in `encode` it does not).
        self._words = Tokenizer(models.WordLevel({f"{i:04x}": i for i in range(VOCABULARY)}, "0000"))
        self._words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = Tokenizer(models.BPE({f"Ġ{i:04x}": i for i in range(VOCABULARY)}, []))
        tokenizer.decoder = decoders.ByteLevel()
        self._detokenizers = DetokenizerFactory(tokenizer)

    def encode(self, text: str, *, add_special: bool, is_literal: bool = False) -> list[int]:
        ids: list[int] = self._words.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def render_chat(self, chat: ChatPrompt) -> str:
        return " ".join(message.content or "" for message in chat.messages)

    def encode_chat_text(self, rendered: str) -> list[int]:
        return self.encode(rendered, add_special=False)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [f"{token:04x}" for token in ids]

    def text_of(self, ids: Sequence[int]) -> str:
        return " ".join(self.token_strings(ids))

    def tokenizer_files(self) -> dict[str, str]:
        return {"tokenizer.json": "{}"}

    def detokenizer(self, shown: frozenset[str] = frozenset(), *, continues: bool = False) -> Detokenizer:
        return self._detokenizers.make(shown, continues=continues)

    def token_bytes(self, token: int) -> tuple[bytes, bool]:
        return self._detokenizers.token_bytes(token)


def serve_router(
    pipe: Connection,
    workers: dict[str, list[PeerAddress]],
    front: str,
    has_http: bool,
    wakes_per_s: float,
    number: int,
    ports: tuple[int, int],
    own_port: int,
) -> None:
    """Serve until the pipe closes; its first word is the two addresses, and whatever is said to it is answered with the
    longest run of the garbage collector, in seconds of CPU. `front`, the one that is measured, has nearly
    all descriptors of the process. `ports`, gRPC's and HTTP's, 0: any; `own_port`, -1: it has them alone."""
    # As `cluster.processes` has a router.
    os.environ.update(child_environment(1, os.environ))
    use_native_identities()
    give_way_soon()
    of_http, of_grpc = (16_384, 64) if front == "sse" else (64, 16_384)
    limits = FrontLimits(
        connections=of_http, grpc_connections=of_grpc, connections_per_address=of_http, calls_per_address=of_grpc
    )
    config = RouterConfig(
        name=f"router-{number}",
        grpc_port=ports[0],
        http_port=ports[1] if has_http else -1,
        own_port=own_port,
        limits=limits,
        max_waiting=16_384,
        default_max_tokens=CONTEXT_TOKENS // 2,
        wakes_per_s=wakes_per_s,
    )
    text = HexText()
    text.detokenizer().push(range(VOCABULARY))  # as a router that has served for a while: each token was met before
    server = RouterServer(config, "", SECRETS, text=text)
    addresses = server.start()
    server.set_workers(workers["prefill"], workers["decode"])
    while not server.ready():
        time.sleep(0.02)
    spare_collector()
    pauses = Pauses()
    gc.callbacks.append(pauses)
    pipe.send((addresses.grpc, addresses.http))
    with suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(pauses.longest_s)
    os._exit(0)
