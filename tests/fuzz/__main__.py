"""Feeds every decoder broken inputs: `make fuzz SECONDS=60`, or `python -m tests.fuzz --decoder gguf --seconds 600`.

Each decoder has a process of its own and its part of the time. Where `atheris` is installed (`pip install atheris`), it
looks for inputs that reach new lines of our code; otherwise inputs are changed at random from a seed. What breaks the
contract (`tests.fuzz.judge`) is printed with its bytes, for the decoder's `found`. Exit status 1: something broke.
"""

import argparse
import importlib.util
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

from tests.fuzz.judge import Decoder, judge
from tests.fuzz.mutation import mutated

ROOM_BYTES = 2 << 30
"""Address space that a decoder's process may have beyond what it has when it begins."""
OURS = ["access", "cluster", "engine", "router", "telemetry", "transfer", "gguf"]
"""The packages whose lines guide atheris."""
LATE_S = 60
"""An input that does not come back ends its process so long after the process's time."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all decoders together (default 60)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--decoder", action="append", help="only this one; may be given again")
    parser.add_argument("--plain", action="store_true", help="without atheris, though it is there")
    arguments = parser.parse_args()
    guided = not arguments.plain and importlib.util.find_spec("atheris") is not None
    known = _decoders(guided)
    names = arguments.decoder or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"no decoder {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    how = "guided by atheris" if guided else "changed at random: no atheris here"
    print(f"{len(names)} decoders, inputs {how}", flush=True)
    broken = []
    until_s = time.monotonic() + arguments.seconds
    for at, name in enumerate(names):
        seconds = max(0.2, (until_s - time.monotonic()) / (len(names) - at))
        if not _held(known[name], seconds, arguments.seed, guided):
            broken.append(name)
    print(f"{len(names) - len(broken)} held, {len(broken)} broken {' '.join(broken)}")
    return 1 if broken else 0


def _decoders(guided: bool) -> dict[str, Decoder]:
    if not guided:
        from tests.fuzz.decoders import decoders

        return decoders()
    import atheris

    with atheris.instrument_imports(include=OURS):
        from tests.fuzz.decoders import decoders
    return decoders()


def _held(decoder: Decoder, seconds: float, seed: int, guided: bool) -> bool:
    """Fuzz one decoder in a process forked for it, whose output is shown where it broke."""
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as folder:
        told = Path(folder) / "told"
        child = os.fork()
        if not child:
            out = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            # Not caught, so that it also ends a call in C that does not come back.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(seconds) + LATE_S)
            status = 1
            try:
                status = _guided(decoder, seconds, seed, folder) if guided else _at_random(decoder, seconds, seed)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        lines = told.read_text(errors="replace")
    summary = next((line for line in lines.splitlines() if line.startswith("fed ")), "")
    print(f"{'BROKEN' if ended else 'held  '} {decoder.name:20} {summary}", flush=True)
    if ended:
        print(f"{lines[-4000:]}\nended with {ended}", flush=True)
    return not ended


class _Feeder:
    """Judges input after input, and counts. Mutable state: the two counts."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._fed = self._taken = 0
        for data in decoder.inputs:
            self.feed(data)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))

    def feed(self, data: bytes) -> None:
        try:
            # To count memory takes several times as long as not to.
            self._taken += judge(self._decoder, data, count_memory=self._fed % 16 == 0)
        except BaseException:
            print(f"{len(data)} bytes: {data[:4096]!r}", flush=True)
            raise
        self._fed += 1

    def report(self) -> None:
        print(f"fed {self._fed:,} inputs, {self._taken:,} taken", flush=True)


def _at_random(decoder: Decoder, seconds: float, seed: int) -> int:
    feeder, draw = _Feeder(decoder), Random(f"{seed} {decoder.name}")
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        feeder.feed(mutated(draw, decoder.inputs))
    feeder.report()
    return 0


def _guided(decoder: Decoder, seconds: float, seed: int, folder: str) -> int:
    import atheris

    corpus = Path(folder) / "corpus"
    corpus.mkdir()
    for at, data in enumerate(decoder.inputs):
        (corpus / f"seed-{at}").write_bytes(data)
    feeder = _Feeder(decoder)
    until_s = time.monotonic() + seconds

    def feed(data: bytes) -> None:
        # The library ends by the whole second, and its process without Python's own end.
        if time.monotonic() > until_s:
            feeder.report()
            os._exit(0)
        feeder.feed(data)

    options = [f"-seed={seed}", "-timeout=20", "-verbosity=0", "-rss_limit_mb=0", "-max_len=65536"]
    atheris.Setup(["fuzz", *options, f"-artifact_prefix={folder}/", str(corpus)], feed)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
