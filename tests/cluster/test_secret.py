"""The secret's file, and the ways by which a secret could be seen by others."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cluster.config import ConfigError
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.prepare import specs
from cluster.processes.spec import Sealed
from cluster.secret import SecretFile, drawn, opened, write
from tests.cluster.processes.test_launchers import CONFIG

ONE, TWO = b"1" * 32, b"2" * 32


def test_a_file_is_made_for_its_owner_alone_and_read_by_all_that_name_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first, second = opened(str(path)), opened(str(path))
    assert first.valid() == second.valid() and len(first.valid()) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert opened("").valid() != opened("").valid()
    assert list(tmp_path.iterdir()) == [path]


def test_a_change_is_taken_over_and_nonsense_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a rotation, at which nobody restarts; and a cluster against a file that was half written."""
    path = tmp_path / "secret"
    write(path, (ONE,))
    file = SecretFile(path)
    write(path, (TWO, ONE))
    assert file.valid() == (TWO, ONE)
    path.write_text("short\n")
    assert file.valid() == (TWO, ONE) and "stay as they were" in caplog.text
    assert "short" not in caplog.text
    path.unlink()
    assert file.valid() == (TWO, ONE)
    write(path, (TWO,))
    assert file.valid() == (TWO,)


def test_a_file_that_stays_bad_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a log that an idle cluster fills, as streams ask for the secrets all the time; and what is said of a file
    that became bad in another way, or again."""
    path = tmp_path / "secret"
    write(path, (ONE,))
    file = SecretFile(path)
    steps: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: path.write_text("short\n"), "64 hexadecimal digits"),
        (lambda: path.chmod(0o644), "others can read it"),
        (path.unlink, "No such file"),
        (lambda: write(path, (TWO,)), ""),
        (path.unlink, "No such file"),
    )
    for change, told in steps:
        change()
        caplog.clear()
        for _ in range(3):
            file.valid()
        assert len(caplog.records) == bool(told) and told in caplog.text
    assert file.valid() == (TWO,)


def test_a_rotation_says_that_the_file_was_not_read(tmp_path: Path) -> None:
    """Guards an operator who took the old line out, was told that it was done, and left the old secret valid."""
    path = tmp_path / "secret"
    write(path, (TWO, ONE))
    cluster = Cluster(msgspec.structs.replace(CONFIG, secret_file=str(path)), make_launcher("process"))
    noted: list[tuple[bytes, ...]] = []
    path.write_text(TWO.decode())
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        cluster.rotate(noted.append)
    path.chmod(0o600)
    path.write_text("a\nb\nc\n")
    with pytest.raises(ConfigError, match="has 3 secrets"):
        cluster.rotate(noted.append)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        cluster.rotate(noted.append)
    assert noted == [] and cluster.keys.valid() == (TWO, ONE)
    write(path, (TWO,))
    cluster.rotate(noted.append)
    assert noted == [(TWO,)]


def test_words_will_do_if_they_are_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("\n  correct horse battery staple, and some more  \n\n")
    assert SecretFile(path).valid() == (b"correct horse battery staple, and some more",)


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "has 0 secrets"), ("a\nb\nc\n", "has 3 secrets"), ("aa" * 31, "64 hexadecimal digits"), ("x", "at least")],
)
def test_a_file_without_a_secret_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        SecretFile(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    write(path, (ONE,))
    path.chmod(mode)
    with pytest.raises(ConfigError, match="others can read it"):
        SecretFile(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file as Kubernetes mounts it")
def test_a_secret_that_kubernetes_mounts_is_taken(tmp_path: Path) -> None:
    inside = tmp_path / "..2026"
    inside.mkdir()
    write(inside / "secret", (ONE,))
    (inside / "secret").chmod(0o440)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "secret").symlink_to("..data/secret")
    assert SecretFile(tmp_path / "secret").valid() == (ONE,)
    (inside / "secret").chmod(0o442)
    with pytest.raises(ConfigError, match="others can read it"):
        SecretFile(tmp_path / "secret")


def test_no_secret_is_printed() -> None:
    """Guards logs and tracebacks, which print what a process is started with."""
    secret = drawn()
    sealed = Sealed.of((secret,))
    (spec, *_) = specs(CONFIG, "x")
    for shown in (repr(sealed), repr(msgspec.structs.replace(spec, secrets=sealed))):
        assert secret.hex() not in shown and "secrets" in shown
    assert sealed.open() == (secret,)
