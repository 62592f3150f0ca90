"""`python -m tests.chaos.blackhole MODEL_DIR CASE`: a worker's network swallows everything while it serves a request.

In a process of its own, since it leaves the machine's network (`tests.chaos.far`). What it found is JSON on its
standard output; exit status 77: not allowed here.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from engine.messages import Load
from tests.chaos import faults
from tests.chaos.far import FarLauncher, leave_the_network
from tests.chaos.ground import Ground
from tests.chaos.rows import ANSWER_TOKENS
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S, Reference, sending
from tests.integration.probe import is_quiet

NOT_ALLOWED = 77
STALL_S = 3.0


@dataclass(frozen=True)
class Case:
    """`role`: whose network; `data_only`: its control stream lives on; `token`: when, 0 while blocks are sent."""

    role: str
    data_only: bool = False
    token: int = 0


CASES = {
    "prefill": Case("prefill"),
    "prefill-data": Case("prefill", data_only=True),
    "decode": Case("decode"),
    "decode-token": Case("decode", token=3),
}


class FarGround(Ground):
    """A cluster without proxies, whose workers of one role are far away."""

    def load(self, name: str) -> Load | None:
        alive = faults.process_state(self.pid(name)) not in ("", "Z")
        return self.probe(name).load if alive else None

    def look_anew(self, name: str) -> None:
        """The probe's own stream was swallowed too."""
        self._probes.pop((name, self.pid(name))).close()


def run(model_dir: Path, case: Case, mode: str) -> dict[str, object]:
    far = FarLauncher(case.role, 2)
    ground = FarGround(model_dir, launcher=far, transport="tcp", stall_s=STALL_S)
    try:
        reference = Reference()
        reference.make(ground)
        ground.settle(SETTLE_S)
        lives = {name: up.incarnation for name, up in ground.cluster.workers.items()}
        ask = ground.ask(PROMPTS["victim"], mode, ANSWER_TOKENS, "victim")
        prefill = ground.busy("prefill")
        victim = prefill if case.role == "prefill" else ground.busy("decode")
        if case.token:
            ask.wait_tokens(case.token)
        else:
            sending(ground, prefill)
        (other,) = (name for name in ground.of(case.role) if name != victim)
        place = far.places[victim]
        wires = [place.data] if case.data_only else [place.control, place.data]
        for wire in wires:
            wire.swallow()
        began_s = time.monotonic()
        was_over = ask.over
        while not (ask.over or _is_busy(ground, other)):
            time.sleep(0.005)
        noticed_s = time.monotonic() - began_s
        ask.join(END_S)
        ending = reference.judge(ask, "victim", mode)
        dropped = [wire.dropped() for wire in wires]
        for wire in wires:
            wire.heal()
        ground.look_anew(victim)
        ground.settle(SETTLE_S)
        same = {name: up.incarnation for name, up in ground.cluster.workers.items()} == lives
        return {
            "was_over": was_over,
            "noticed_s": noticed_s,
            "ending": str(ending),
            "dropped": dropped,
            "nobody_died": same,
        }
    finally:
        ground.close()


def _is_busy(ground: Ground, name: str) -> bool:
    load = ground.load(name)
    return load is not None and not is_quiet(load)


def main(argv: list[str]) -> int:
    try:
        leave_the_network()
    except OSError as error:
        print(f"no network of its own: {error}", file=sys.stderr)
        return NOT_ALLOWED
    model_dir, name, mode = argv
    print(json.dumps(run(Path(model_dir), CASES[name], mode)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
