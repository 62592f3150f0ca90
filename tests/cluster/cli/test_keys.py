"""`headrace keys`, the flags by which clients show credentials, and what a cluster refuses to listen on."""

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from access.authenticator import Authenticator
from access.config import AccessConfig
from cluster.cli.__main__ import main
from cluster.cli.keys import add_credential, remove_credential
from cluster.config import ClusterConfig, ConfigError, check_listening, fields
from cluster.processes.placement import RayConfig
from cluster.processes.prepare import specs
from router.config import RouterConfig


def keys(capsys: pytest.CaptureFixture[str], *words: str, fails: int = 0) -> tuple[str, str]:
    assert main(["keys", *words]) == fails
    out, err = capsys.readouterr()
    return out, err


def test_a_key_is_made_shown_once_and_taken_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.json"
    key, said = keys(capsys, "add", "acme", "--file", str(file), "--tokens-per-s", "5.5")
    key = key.strip()
    assert key.startswith("hr_") and key not in said
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and list(tmp_path.iterdir()) == [file]
    found = Authenticator(AccessConfig(keys_file=str(file)))
    assert found.caller(f"Bearer {key}", None).tenant == "acme" and found.tenant("acme").tokens_per_s == 5.5
    keys(capsys, "add", "acme", "--certificate", "acme.example", "--file", str(file))
    keys(capsys, "limit", "acme", "--concurrency", "3", "--file", str(file))
    urgent, _ = keys(capsys, "add", "acme", "--max-priority", "9", "--file", str(file))
    later = Authenticator(AccessConfig(keys_file=str(file)))
    assert later.caller(f"Bearer {urgent.strip()}", None).max_priority == 9
    assert later.caller(f"Bearer {key}", None).max_priority == 0
    assert "priority up to 9" in keys(capsys, "list", "--file", str(file))[0]
    keys(capsys, "remove", urgent.split("_")[1], "--file", str(file))
    listed, _ = keys(capsys, "list", "--file", str(file))
    assert "3 samples at once" in listed or "samples at once 3" in listed
    assert "acme.example" in listed and "tokens per second 5.5" in listed
    assert key not in listed and json.loads(file.read_text())["keys"][0]["sha256"] not in listed
    keys(capsys, "remove", key.split("_")[1], "--file", str(file))
    assert json.loads(file.read_text())["keys"] == []
    _, why = keys(capsys, "remove", key.split("_")[1], "--file", str(file), fails=1)
    assert "no key" in why
    keys(capsys, "remove", "acme", "--file", str(file))
    assert json.loads(file.read_text()) == {"tenants": {}, "keys": [], "certificates": []}


@pytest.mark.parametrize(
    "words",
    [
        ("add",),
        ("add", "acme", "--monitor"),
        ("add", "--monitor", "--weight", "2"),
        ("add", "--monitor", "--max-priority", "2"),
        ("add", "acme", "--max-priority", "101"),
        ("add", "acme", "--weight", "0"),
        ("add", "acme", "--concurrency", "-1"),
        ("add", "acme", "--cache-share", "1.5"),
        ("add", "a b\nc"),
        ("add", "acme\x1b[2J"),
        ("add", "acme", "--certificate", "acme.\u2028example"),
        ("add", "acme", "--shared-cache", "x\ty"),
        ("remove", ""),
        ("list",),
    ],
)
def test_what_cannot_be_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    file = tmp_path / "keys.json"
    _, why = keys(capsys, *words, "--file", str(file), fails=2)
    assert why.startswith("headrace: ") and not file.exists() and not list(tmp_path.iterdir())


def test_limits_are_those_of_a_tenant_that_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards a slip of the keyboard that changes nothing for the tenant that was meant, and says that it has."""
    file = tmp_path / "keys.json"
    _, why = keys(capsys, "limit", "acme", "--weight", "3", "--file", str(file), fails=1)
    assert "has no tenant 'acme'" in why and not file.exists()
    keys(capsys, "add", "acme", "--certificate", "acme.example", "--file", str(file))
    before = file.read_bytes()
    _, why = keys(capsys, "limit", "amce", "--weight", "3", "--file", str(file), fails=1)
    assert "has no tenant 'amce'" in why and file.read_bytes() == before
    keys(capsys, "limit", "acme", "--shared-cache", "x\ny", "--file", str(file), fails=2)
    assert file.read_bytes() == before
    assert keys(capsys, "limit", "acme", "--weight", "3", "--file", str(file))[0] == "acme: weight 3\n"


def test_a_spoiled_file_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{")
    _, why = keys(capsys, "add", "acme", "--file", str(file), fails=2)
    assert "is no file of keys" in why and file.read_text() == "{"


def test_two_who_add_at_once_lose_nothing(tmp_path: Path) -> None:
    """Guards a key that was shown to somebody and is not in the file."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_credential(tmp_path / "keys.json", f"t{n}", "", {}), range(24)))
    assert len(json.loads((tmp_path / "keys.json").read_text())["keys"]) == 24


def test_a_link_to_the_file_stays_one_and_the_file_is_changed(tmp_path: Path) -> None:
    # Renaming over the link would revoke nothing for a router that reads the file by its own name.
    (tmp_path / "data").mkdir()
    file, link = tmp_path / "data" / "keys.json", tmp_path / "keys.json"
    add_credential(file, "acme", "", {})
    link.symlink_to(file)
    remove_credential(link, "acme")
    assert link.is_symlink() and list(file.parent.iterdir()) == [file]
    assert json.loads(file.read_text()) == {"tenants": {}, "keys": [], "certificates": []}


def test_a_mode_that_was_given_is_kept(tmp_path: Path) -> None:
    """Guards a router of another user, which cannot read the file any more once a key was added."""
    file = tmp_path / "keys.json"
    add_credential(file, "a", "", {})
    file.chmod(0o640)
    add_credential(file, "b", "", {})
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_root_leaves_the_file_to_its_owner(tmp_path: Path) -> None:
    """Guards a key that root takes away, and that opens all that it did: the router of another user cannot read the new
    file, and goes on with the old one."""
    file = tmp_path / "keys.json"
    add_credential(file, "a", "", {})
    os.chown(file, 65534, 65533)
    remove_credential(file, "a")
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 65533, 0o600)
    assert json.loads(file.read_text())["keys"] == []


def test_a_file_that_cannot_be_left_to_its_owner_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a verb that says that a key opens nothing more, and a router that cannot read so."""
    file = tmp_path / "keys.json"
    add_credential(file, "a", "", {})
    before, tried = file.read_bytes(), []

    def fchown(descriptor: int, user: int, group: int) -> None:
        tried.append((user, group))
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", fchown)
    with pytest.raises(ConfigError, match="left as it was"):
        remove_credential(file, "a")
    assert tried == [(file.stat().st_uid, file.stat().st_gid)]
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_flags_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", "--server", "127.0.0.1:1", "x"]
    for words in (["--cert", "c"], ["--cert", "c", "--key", "k"], ["--api-key", f"@{tmp_path / 'none'}"]):
        assert main([*ask, *words]) == 2
        assert capsys.readouterr().err.startswith("headrace: ")
    assert main([*ask, "--ca", str(tmp_path / "none.pem")]) == 1
    assert "none.pem" in capsys.readouterr().err


def test_every_process_gets_the_clusters_access_and_nobody_sets_it_apart() -> None:
    access = AccessConfig(keys_file="/keys.json", insecure="plaintext", internal_ca_file="/ca.pem")
    made = specs(ClusterConfig(access=access), "model")
    assert [spec.config["access"] for spec in made] == [msgspec.to_builtins(access)] * 3
    assert sorted(key for key, _, _ in fields() if "access" in key or "keys_file" in key) == [
        f"access.{name}" for name in sorted(AccessConfig.__struct_fields__)
    ]


@pytest.mark.parametrize(
    "config",
    [
        ClusterConfig(router=RouterConfig(host="0.0.0.0")),
        ClusterConfig(worker_host="10.0.0.3"),
        ClusterConfig(ray=RayConfig(address="auto")),
    ],
)
def test_no_part_of_a_cluster_is_open_to_others_unasked(config: ClusterConfig) -> None:
    import msgspec

    with pytest.raises(ConfigError, match="access"):
        check_listening(config)
    check_listening(msgspec.structs.replace(config, access=AccessConfig(insecure="open")))
    check_listening(ClusterConfig())


def test_a_file_that_no_router_takes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards a key that opens nothing, since others may write to its file."""
    file = tmp_path / "keys.json"
    add_credential(file, "acme", "", {})
    capsys.readouterr()
    before = file.read_bytes()
    file.chmod(0o666)
    for words in (("add", "acme"), ("list",)):
        out, why = keys(capsys, *words, "--file", str(file), fails=2)
        assert not out and "others than its owner may write to it" in why
    assert file.read_bytes() == before
