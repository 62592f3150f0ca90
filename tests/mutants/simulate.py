"""Run the simulator with a mutant in its cores: `python -m tests.mutants.simulate KEY --seconds 60 --seed 7`.

Everything behind the key is the simulator's own, and so are the output and the exit status: not 0 when a schedule
failed. Status 3: the mutant cannot be put into this process.
"""

import importlib
import sys
from collections.abc import Callable

from tests.mutants.catalogue import ROOT, Mutant, Source, sources
from tests.mutants.patch import CannotPatch, plant, running

UNMADE = 3


def find(key: str) -> tuple[Source, Mutant]:
    """Raises KeyError where no file has that mutant (any more)."""
    for source in sources():
        for mutant, _ in source.mutants:
            if mutant.key == key:
                return source, mutant
    raise KeyError(key)


def main(key: str, arguments: list[str]) -> int:
    source, mutant = find(key)
    run: Callable[[], int] = importlib.import_module("tests.sim.__main__").main
    try:
        plant(source, mutant, running({str(ROOT / source.path)}))
    except CannotPatch as error:
        print(error)
        return UNMADE
    sys.argv = ["tests.sim", *arguments]
    return run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
