"""llama.cpp's own HTTP server, from the package `xllamacpp`, until standard input closes. Run by *its* interpreter:

VENV/bin/python benchmarks/llama_server.py MODEL.gguf PORT THREADS SLOTS CONTEXT
"""

import sys

import xllamacpp  # type: ignore[import-not-found]


def main(model: str, port: int, threads: int, slots: int, context: int) -> None:
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
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
