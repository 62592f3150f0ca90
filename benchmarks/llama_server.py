"""llama.cpp's own HTTP server, from the package `xllamacpp`, until standard input closes. Run by *its* interpreter:

VENV/bin/python benchmarks/llama_server.py MODEL.gguf PORT THREADS SLOTS CONTEXT [drafts]

With `drafts` it guesses by `ngram-simple`, as its own page shows it. Of its kinds that need no second model this one
was right the most often on the demo model (`ngram-mod` looks for 24 equal tokens, `ngram-cache` guessed wrong).
"""

import sys

import xllamacpp  # type: ignore[import-not-found]


def main(model: str, port: int, threads: int, slots: int, context: int, *, drafts: bool) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.kv_unified = False
    params.ui = False
    for work in (params.cpuparams, params.cpuparams_batch):
        work.n_threads = threads
    if drafts:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    path, *numbers = sys.argv[1:6]
    main(path, *map(int, numbers), drafts=sys.argv[6:] == ["drafts"])
