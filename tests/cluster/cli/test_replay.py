"""`headrace replay`: equal to the last bit, or the line and the difference; and what others would have chosen."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from cluster.cli import __main__ as cli
from cluster.cli.replay import replay
from router.core.decisions import VERSION, Decision, RepeatablePolicy
from router.core.policies import POLICIES, make_policy
from router.core.policy import PrefillView
from router.decision_log import line_of
from tests.router.core.made_decisions import made


def logged(folder: Path, decisions: list[Decision]) -> str:
    path = folder / "log"
    path.write_bytes(b"".join(map(line_of, decisions)))
    return str(path)


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    """The status of the verb, and what it prints as JSON."""
    status = cli.main(["replay", *words, "--json"])
    printed: dict[str, object] = json.loads(capsys.readouterr().out)
    return status, printed


@pytest.mark.parametrize("name", POLICIES)
def test_a_log_of_any_policy_is_repeated(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the promise: every decision again, also over restarts of the router and across lines that are missing."""
    decisions = [*made(name, 60), *made(name, 40, seed=8)]
    del decisions[10:13]
    status, report = replayed(capsys, logged(tmp_path, decisions))
    assert (status, report["decisions"], report["equal"], report["missing"]) == (0, 97, 97, 3)
    assert report["policies"] == {name: 97} and report["first_difference"] is None


def test_a_changed_choice_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a replay that compares too little: one cost term, by its last bit."""
    decisions = made(times=20)
    chosen = decisions[4].choice
    assert chosen is not None
    cost = msgspec.structs.replace(chosen.cost, compute_s=math.nextafter(chosen.cost.compute_s, math.inf))
    decisions[4] = msgspec.structs.replace(decisions[4], choice=msgspec.structs.replace(chosen, cost=cost))
    path = logged(tmp_path, decisions)
    assert cli.main(["replay", path]) == 1
    told = capsys.readouterr().out
    assert "20 decisions (20 by least-cost), 19 repeated bit for bit" in told
    assert "first difference: line 5 (request r4): cost.compute_s was " in told


def test_a_changed_view_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a replay that does not look at what was given: in every view of every decision."""
    decisions = made(times=20)
    for at, decision in enumerate(decisions):
        chosen = decision.choice
        assert chosen is not None
        for changed in decision.prefills:
            # Nobody is dearer than this one; and nobody was, if it is not the one that was chosen.
            queue = 10**9 if changed.name == chosen.prefill.name else -(10**9)
            prefills: list[PrefillView] = [
                msgspec.structs.replace(view, queue_tokens=queue, load_s=0.0) if view is changed else view
                for view in decision.prefills
            ]
            wrong = [*decisions]
            wrong[at] = msgspec.structs.replace(decision, prefills=prefills)
            status, report = replayed(capsys, logged(tmp_path, wrong))
            first = report["first_difference"]
            assert status == 1 and report["equal"] == 19 and isinstance(first, dict) and first["line"] == at + 1


def test_other_constants_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the reader of a difference that is due to another version's constants."""
    (decision,) = made("affinity-threshold", 1)
    changed = msgspec.structs.replace(decision, choice=None, settings=decision.settings | {"affinity_share": 0.5})
    assert cli.main(["replay", logged(tmp_path, [changed])]) == 1
    assert "other settings" in capsys.readouterr().out


def test_another_policy_is_judged_by_predicted_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the figures that a policy is chosen by; least-cost itself loses nothing, and others never gain on it."""
    decisions = made(times=200)
    words = [logged(tmp_path, decisions), "--policy", "least-cost", "random", "--policy", "prefill-tokens"]
    status, report = replayed(capsys, *words)
    others = report["others"]
    assert status == 0 and isinstance(others, dict) and list(others) == ["least-cost", "random", "prefill-tokens"]
    assert others["least-cost"]["otherwise"] == 0 and others["least-cost"]["cost_p99_s"] == 0.0
    policy, lost_s = make_policy("random", 7), []
    for decision in decisions:
        choice = policy.choose(decision.demand, decision.prefills, decision.decodes)
        assert choice is not None and decision.choice is not None
        lost_s.append(choice.cost.total_s - decision.choice.cost.total_s)
    random = others["random"]
    assert random["decisions"] == 200 and 50 < random["otherwise"] < 200
    assert random["cost_mean_s"] == pytest.approx(sum(lost_s) / 200)
    assert (random["cost_p50_s"], random["cost_p99_s"]) == (sorted(lost_s)[100], sorted(lost_s)[198])
    assert cli.main(["replay", *words]) == 0
    assert f"random chooses otherwise in {random['otherwise']} of 200" in capsys.readouterr().out


def test_a_torn_last_line_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the log of a killed router, cut at every byte of its last line."""
    path = Path(logged(tmp_path, made(times=3)))
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    for end in range(last + 1, len(data) - 1):
        path.write_bytes(data[:end])
        report = replay(path)
        assert (report.decisions, report.equal, report.is_torn) == (2, 2, True)
    assert cli.main(["replay", str(path)]) == 0 and "the last line is torn" in capsys.readouterr().out
    for whole in (data, data[:-1]):
        path.write_bytes(whole)
        assert replayed(capsys, str(path))[1]["is_torn"] is False


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"", b"", "no decision"),
        (
            f'"version":{VERSION}'.encode(),
            b'"version":3',
            f"line 2: it is of version 3; this program reads version {VERSION}",
        ),
        (b'"outstanding"', b'"outstandin', "line 2: it is no decision"),
        (b'"blocks":64', b'"blocks":65', "line 2: it is not as it was written: its checksum differs"),
    ],
)
def test_a_broken_line_is_named(
    old: bytes, new: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(logged(tmp_path, made(times=3)))
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(old, new) + third if old else b"")
    assert cli.main(["replay", str(path)]) == 1
    error = capsys.readouterr().err
    assert told in error and str(path) in error and error.count("\n") == 1


def test_unknown_files_and_policies_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = logged(tmp_path, [msgspec.structs.replace(decision, policy="mine") for decision in made(times=1)])
    for words, status, told in (
        (["replay", str(tmp_path / "none")], 1, "none"),
        (["replay", str(tmp_path)], 1, "directory"),
        (["replay", path], 1, "line 1: this program has no policy 'mine'"),
        (["replay", path, "--policy", "best"], 2, "'best' is none of least-cost, "),
    ):
        assert cli.main(words) == status
        error = capsys.readouterr().err
        assert error.startswith("headrace: ") and told in error and error.count("\n") == 1


def test_a_policy_that_fails_on_its_own_log_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the verb against a traceback in the place of a line."""
    path = logged(tmp_path, made(times=2))

    def fail(*given: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(RepeatablePolicy, "choose", fail)
    assert cli.main(["replay", path]) == 1
    assert "line 1 (request r0): the policy fails: ZeroDivisionError: odd" in capsys.readouterr().out
