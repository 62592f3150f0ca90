"""The peer beside which docs/benchmarks.md shows its figures: transformers on the same model file, same prompts.

    python -m benchmarks.peer --preset A

Static batches of the preset's concurrency, greedy, 32-bit, every core. It runs alone: stop a cluster first. Needs the
`dev` extra; the product itself never imports transformers.
"""

import argparse
import json
import sys
import time

from benchmarks.checkpoint import read
from cluster.bench.environment import describe
from cluster.bench.workloads import PRESETS, prompts


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=0, help="fewer than the preset's")
    arguments = parser.parse_args(argv)

    import torch

    torch.set_num_threads(arguments.threads)
    began_s = time.perf_counter()
    model = read()
    load_s = time.perf_counter() - began_s

    preset = PRESETS[arguments.preset]
    (at_once,) = preset.concurrency
    asked = prompts(preset.workload, arguments.requests or preset.requests, "peer")
    output_tokens = preset.workload.output_tokens
    ttfts_s, spent_s = [], 0.0
    with torch.inference_mode():
        for start in range(0, len(asked), at_once):
            ids = torch.tensor(asked[start : start + at_once])
            limits = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            began_s = time.perf_counter()
            model.generate(ids, max_new_tokens=1, **limits)
            ttfts_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            model.generate(ids, max_new_tokens=output_tokens, **limits)
            spent_s += time.perf_counter() - began_s
    figures = {
        "preset": arguments.preset,
        "at_once": at_once,
        "requests": len(asked),
        "load_s": load_s,
        "ttft_s": sum(ttfts_s) / len(ttfts_s),
        "output_tokens_per_s": len(asked) * output_tokens / spent_s,
        "environment": describe(),
    }
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
