"""The folder by which verbs find a cluster: one supervisor of a name, no stranger's files, processes told apart."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, ConfigError
from cluster.processes.spec import LaunchError
from cluster.rundir import ProcessIdentity, RunDir


def rundir(folder: Path, name: str = "one") -> RunDir:
    return RunDir(ClusterConfig(name=name, run_dir=str(folder / "run")), {})


def test_there_is_one_supervisor_of_a_name(tmp_path: Path) -> None:
    """Guards against two clusters on one host that take each other's orders."""
    first, second = rundir(tmp_path), rundir(tmp_path)
    assert not second.is_held
    with first.hold():
        assert second.is_held
        with pytest.raises(LaunchError, match="a cluster named 'one' runs here already"), second.hold():
            pytest.fail("held twice")
        with rundir(tmp_path, "two").hold():
            pass
    assert not second.is_held
    with second.hold():
        assert first.is_held


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    """Guards against a host that must be restarted because a supervisor was killed outright."""
    code = (
        "import sys, time; from pathlib import Path; from tests.cluster.test_rundir import rundir\n"
        "with rundir(Path(sys.argv[1])).hold(): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert rundir(tmp_path).is_held
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert not rundir(tmp_path).is_held


def test_a_holder_is_found_while_it_closes_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `down` after a full disk, which finds the supervisor by its lock alone: its descriptors come and go while
    they are read."""
    code = (
        "import sys; from pathlib import Path; from tests.cluster.test_rundir import rundir\n"
        "with rundir(Path(sys.argv[1])).hold(): print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        seen: list[str] = []

        def readlink(path: str) -> str:
            seen.append(path)
            if len(seen) == 1:
                raise FileNotFoundError(path)
            return plain(path)

        plain = os.readlink
        monkeypatch.setattr(os, "readlink", readlink)
        found = [one.pid for one in rundir(tmp_path).processes()]
        monkeypatch.undo()
        holder.kill()
    assert len(seen) > 1 and holder.pid in found


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """Guards against a socket in a folder of the temporary one that somebody else has made first."""
    (tmp_path / "run").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="is not a folder of this user alone"), rundir(tmp_path).hold():
        pytest.fail("held")
    other = tmp_path / "theirs"
    other.mkdir(mode=0o700)
    (tmp_path / "run").rmdir()
    (tmp_path / "run").symlink_to(other)
    with pytest.raises(ConfigError, match="is a symbolic link"), rundir(tmp_path).hold():
        pytest.fail("held")


def test_a_folder_that_cannot_be_made_is_told_by_its_setting(tmp_path: Path) -> None:
    """Guards an error of Python's about a file, of which nobody knows whence it comes."""
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"^run_dir: {run} is a symbolic link"):
        rundir(tmp_path).make()
    run.unlink()
    run.touch()
    with pytest.raises(ConfigError, match=f"^run_dir: {run} is not a folder of this user alone"):
        rundir(tmp_path).make()
    with pytest.raises(ConfigError, match=f"^run_dir: {run}/run: Not a directory"):
        rundir(run).make()
    rundir(run).forget()
    assert rundir(run).take_fault() == "", "there is no cluster to end, and that is all"


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_names_that_cannot_be_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a cluster's files"):
        rundir(tmp_path, name)
    with pytest.raises(ConfigError, match="too long for a socket's path"):
        rundir(tmp_path, "x" * 100)


def test_the_default_folder_is_the_users(tmp_path: Path) -> None:
    config = ClusterConfig()
    assert RunDir(config, {"XDG_RUNTIME_DIR": "/run/x"}).socket == Path("/run/x/headrace/headrace.sock")
    assert str(os.getuid()) in RunDir(config, {}).folder.name


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    """Guards against `down` killing a stranger that has got the pid of a dead worker."""
    one = rundir(tmp_path)
    with one.hold():
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            mine = ProcessIdentity.of("decode-0", child.pid)
            assert mine is not None and mine.runs
            later = ProcessIdentity(name="decode-0", pid=child.pid, started=mine.started + 1)
            assert not later.runs
            one.write([mine, later])
            assert one.processes() == [mine]
            child.kill()
            child.wait()
            assert not mine.runs and one.processes() == []
        assert ProcessIdentity.of("decode-0", child.pid) is None


def test_the_key_of_namespaces_is_made_once_and_is_its_users_alone(tmp_path: Path) -> None:
    """Guards against namespaces that others of the host can compute, and against a cache lost by a restart."""
    with rundir(tmp_path).hold():
        key = rundir(tmp_path).namespace_key()
    path = rundir(tmp_path).folder / "one.key"
    assert len(key) == 64 and path.stat().st_mode & 0o777 == 0o600
    with rundir(tmp_path).hold(), rundir(tmp_path, "two").hold():
        assert rundir(tmp_path).namespace_key() == key != rundir(tmp_path, "two").namespace_key()
    path.write_text(key[:10])  # a full disk cut it short
    with rundir(tmp_path).hold():
        assert rundir(tmp_path).namespace_key() not in (key, key[:10])
        path.chmod(0o640)
        with pytest.raises(ConfigError, match="not a file of this user alone"):
            rundir(tmp_path).namespace_key()
