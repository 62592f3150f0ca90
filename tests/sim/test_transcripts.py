"""The handoff's behaviour as readable stories. `python -m tests.sim.test_transcripts --update` rewrites them."""

import sys
from pathlib import Path

import pytest

from tests.sim.scenarios import SCENARIOS
from tests.sim.trace import tell
from tests.sim.world import World

FOLDER = Path(__file__).parent / "transcripts"


def story(name: str) -> tuple[str, World]:
    """A scenario's text, and the world after it."""
    about, plan = SCENARIOS[name]
    for fault in plan.faults:
        fault.armed = fault.struck = False
    world = World(plan)
    return "\n".join([f"# {about}", "", *tell(world), ""]), world


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_story_is_as_it_was(name: str) -> None:
    """Guards against unnoticed changes of behaviour: whoever changes a story rewrites it, and reads it."""
    text, world = story(name)
    assert not world.failure
    assert all(fault.struck for fault in world.plan.faults), "the fault did not take effect"
    assert text == (FOLDER / f"{name}.txt").read_text()


def test_every_story_is_of_a_scenario() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(SCENARIOS)
    assert len(SCENARIOS) >= 15


if __name__ == "__main__" and "--update" in sys.argv:
    FOLDER.mkdir(exist_ok=True)
    for known in FOLDER.glob("*.txt"):
        known.unlink()
    for scenario in SCENARIOS:
        text, world = story(scenario)
        (FOLDER / f"{scenario}.txt").write_text(text)
        quiet = [str(fault) for fault in world.plan.faults if not fault.struck]
        print(scenario, world.failure or "ok", *quiet)
