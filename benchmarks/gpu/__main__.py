"""Measures all that a GPU can show, in one command: `python3 -m benchmarks.gpu --out DIR`, under eight minutes.

Checks the kernels against 64 bits, measures them beside torch's own and beside what the card can copy, moves blocks,
runs decode steps of a whole model, and has a prefill process and a decode process answer prompts. Needs neither Ray nor
a model's files. Writes `gpu.json` with the card and all versions. A part that fails is told, does not stop the others,
and makes the status 1; without a GPU the status is 2. `--dry-run` runs all of it on tiny shapes without a GPU, in
Triton's interpreter.
"""

import sys

from benchmarks.gpu.absent import stand_in

if __name__ == "__main__":
    stand_in()
    from benchmarks.gpu.command import main

    sys.exit(main())
