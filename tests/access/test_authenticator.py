"""Who a caller is, from a keys file that changes while it is in use."""

import logging
import os
from pathlib import Path

import msgspec
import pytest

from access.authenticator import RECHECK_S, Authenticator
from access.config import AccessConfig, AccessError, check_exposed
from access.keys import bearer, key_id, make_key
from access.tenants import (
    ANYONE,
    HIGHEST_PRIORITY,
    ApiKey,
    Caller,
    CertificateName,
    CredentialTable,
    DeniedError,
    Tenant,
    check_table,
)
from engine.plan import MAX_PRIORITY


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, table: CredentialTable) -> None:
    """Replace the file as its editors do: another inode, so that a change within one tick of the clock is seen."""
    partial = path.with_suffix(".new")
    partial.write_bytes(msgspec.json.encode(table))
    partial.chmod(0o600)
    partial.rename(path)


def table(*keys: ApiKey, **tenants: Tenant) -> CredentialTable:
    names = [CertificateName(name="acme.example", tenant="acme"), CertificateName(name="prom", role="monitor")]
    tenants = {"acme": Tenant(), "globex": Tenant()} | tenants
    return CredentialTable(tenants=tenants, keys=list(keys), certificates=names)


def opened(path: Path, clock: Clock, **more: str) -> Authenticator:
    return Authenticator(AccessConfig(keys_file=str(path), **more), clock)  # type: ignore[arg-type]


def refused(authenticator: Authenticator, authorization: str, names: list[str] | None = None) -> str:
    with pytest.raises(DeniedError) as raised:
        authenticator.caller(authorization, names)
    return raised.value.code


def test_a_key_tells_its_tenant_and_its_role(tmp_path: Path) -> None:
    acme, kept = make_key("acme", "tenant", "2026-11-22")
    watch, other = make_key("", "monitor", "2026-11-22")
    write(tmp_path / "keys.json", table(kept, other))
    found = opened(tmp_path / "keys.json", Clock())
    assert found.caller(f"Bearer {acme}", None) == Caller("acme", "tenant", f"key {kept.id}", 0)
    assert found.caller(f"bearer  {watch}", None).role == "monitor"


@pytest.mark.parametrize(
    "shown",
    [
        *("", "Bearer", "Bearer ", "{key}", "Basic {key}", "Bearer {key}x", "Bearer {key} x", "Bearer {upper}"),
        *("Bearer {id}", "Bearer hr_{id}_", "Bearer hr_00000000_x", "Bearer \udce9"),
    ],
)
def test_any_other_word_is_no_key(tmp_path: Path, shown: str) -> None:
    key, kept = make_key("acme", "tenant", "")
    write(tmp_path / "keys.json", table(kept))
    found = opened(tmp_path / "keys.json", Clock())
    text = shown.replace("{key}", key).replace("{id}", kept.id).replace("{upper}", key.upper())
    assert refused(found, text) == "UNAUTHENTICATED"


def test_a_revoked_key_opens_nothing_and_a_new_one_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a revocation that waits for a restart."""
    path, clock = tmp_path / "keys.json", Clock()
    old, kept = make_key("acme", "tenant", "")
    new, added = make_key("globex", "tenant", "")
    write(path, table(kept))
    found = opened(path, clock)
    write(path, table(added))
    clock.now_s += RECHECK_S
    with caplog.at_level(logging.DEBUG):
        assert refused(found, f"Bearer {old}") == "UNAUTHENTICATED"
        assert found.caller(f"Bearer {new}", None).tenant == "globex"
    assert "was read again" in caplog.text
    for secret in (old, new, kept.sha256, added.sha256):
        assert secret not in caplog.text + repr(found)


def test_a_broken_file_replaces_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards both a file half written, which must not lock everybody out, and a log that repeats its keys."""
    path, clock = tmp_path / "keys.json", Clock()
    key, kept = make_key("acme", "tenant", "")
    write(path, table(kept))
    found = opened(path, clock)
    for spoiled in (b'{"keys": [', b'{"keys": [{"id": "x"}]}', b"[]", None):
        path.unlink() if spoiled is None else path.write_bytes(spoiled)
        clock.now_s += RECHECK_S
        assert found.caller(f"Bearer {key}", None).tenant == "acme"
    assert caplog.text.count("stay in force") == 4
    write(path, table())
    clock.now_s += RECHECK_S
    assert refused(found, f"Bearer {key}") == "UNAUTHENTICATED"


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, table())
    path.chmod(0o662)
    with pytest.raises(AccessError, match="may write to it"):
        opened(path, Clock())
    with pytest.raises(AccessError, match="No such file"):
        opened(tmp_path / "other.json", Clock())


def test_a_certificate_tells_its_tenant(tmp_path: Path) -> None:
    write(tmp_path / "keys.json", table())
    found = opened(tmp_path / "keys.json", Clock(), client_ca_file="ca.pem")
    assert found.caller("", ["acme.example", "acme"]).tenant == "acme"
    assert found.caller("", ["x", "prom"]).role == "monitor"
    assert refused(found, "", ["acme"]) == "PERMISSION_DENIED"
    assert refused(found, "", None) == "UNAUTHENTICATED"


def test_without_a_keys_file_the_authority_names_tenants() -> None:
    found = Authenticator(AccessConfig(client_ca_file="ca.pem"))
    assert found.caller("", ["acme.example", "acme"]).tenant == "acme.example"
    found.caller("", ["acme.example"]).check_monitor()
    assert refused(found, "", []) == "PERMISSION_DENIED"


def test_key_and_certificate_may_not_contradict_each_other(tmp_path: Path) -> None:
    key, kept = make_key("globex", "tenant", "")
    write(tmp_path / "keys.json", table(kept))
    found = opened(tmp_path / "keys.json", Clock(), client_ca_file="ca.pem")
    assert refused(found, f"Bearer {key}", ["acme.example"]) == "PERMISSION_DENIED"
    assert refused(found, f"Bearer {key}", None) == "UNAUTHENTICATED", "mutual TLS was asked for"
    assert found.caller(f"Bearer {key}", ["gateway"]).tenant == "globex", "a gateway brings others' keys"


def test_a_credential_says_how_high_a_priority_may_be(tmp_path: Path) -> None:
    """Guards against a tenant that outranks all others because it says so: a key that says nothing allows 0."""
    (plain, kept), (high, granted) = make_key("acme", "tenant", ""), make_key("acme", "tenant", "")
    content = table(kept, msgspec.structs.replace(granted, max_priority=7))
    write(tmp_path / "keys.json", content)
    found = opened(tmp_path / "keys.json", Clock())
    assert [found.caller(f"Bearer {key}", None).max_priority for key in (plain, high)] == [0, 7]
    assert ANYONE.max_priority == HIGHEST_PRIORITY == MAX_PRIORITY
    without = Authenticator(AccessConfig(client_ca_file="ca.pem"))
    assert without.caller("", ["acme"]).max_priority == HIGHEST_PRIORITY, "there is no file to say otherwise"
    for wrong in (-101, 101):
        with pytest.raises(AccessError, match="max_priority"):
            check_table(table(msgspec.structs.replace(granted, max_priority=wrong)))


def test_a_caller_is_held_to_its_tenant_and_role() -> None:
    tenant, monitor = Caller("acme", "tenant"), Caller("", "monitor")
    assert [tenant.tenant_for(asked) for asked in ("", "acme")] == ["acme", "acme"]
    assert ANYONE.tenant_for("x") == "x" and ANYONE.tenant_for("") == ""
    for asks in (lambda: tenant.tenant_for("globex"), lambda: monitor.tenant_for(""), tenant.check_monitor):
        with pytest.raises(DeniedError) as raised:
            asks()
        assert raised.value.code == "PERMISSION_DENIED"
    monitor.check_monitor()


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenants": {"": {}}},
        {"tenants": {"a": {"weight": 0}}},
        {"tenants": {"a": {"tokens_per_s": -1}}},
        {"tenants": {"a": {"cache_share": 2}}},
        {"tenants": {"a": {"burst_tokens": 2}}},
        {"tenants": {"a": {"wieght": 2}}},
        {"tenants": {"a": {"concurrency": 2**53 + 1}}},
        {"tenants": {"a": {"concurrency": -1}}},
        {"keys": [{"id": "x", "sha256": "0" * 64, "tenant": "nobody"}]},
        {"tenants": {"a": {}}, "keys": [{"id": "x", "sha256": "0" * 64, "tenant": "a", "role": "monitor"}]},
        {"tenants": {"a": {}}, "keys": [{"id": "x", "sha256": "hunter2", "tenant": "a"}]},
        {"tenants": {"a": {}}, "keys": [{"id": "x", "sha256": "0" * 64, "tenant": "a"}] * 2},
    ],
)
def test_a_wrong_file_is_refused_whole(tmp_path: Path, wrong: object) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(msgspec.json.encode(wrong))
    path.chmod(0o600)
    with pytest.raises(AccessError, match=r"keys\.json"):
        opened(path, Clock())


def test_keys_differ_and_name_their_record() -> None:
    made = [make_key("acme", "tenant", "") for _ in range(50)]
    assert len({key for key, _ in made}) == 50
    assert all(key_id(key) == kept.id and key not in repr(kept) for key, kept in made)
    assert key_id("hr_" + "a" * 300) == "" == bearer("Basic x")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.com", "127.0.0.1.example.com"])
def test_beyond_loopback_nothing_is_open_that_was_not_named(host: str) -> None:
    """Guards a cluster that serves its network because somebody set an address."""
    keys, tls = {"keys_file": "k"}, {"cert_file": "c", "key_file": "k"}
    nobody = {"insecure": "plaintext"}
    for wrong, what in (({}, "keys add"), (tls, "keys add"), (keys, "plaintext"), (nobody, "keys add")):
        with pytest.raises(AccessError, match=what):
            check_exposed(host, AccessConfig(**wrong), "the router")
    for right in (keys | tls, tls | {"client_ca_file": "a"}, keys | {"insecure": "plaintext"}, {"insecure": "open"}):
        check_exposed(host, AccessConfig(**right), "the router")


def test_loopback_is_open_unless_told_otherwise() -> None:
    for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"):
        check_exposed(host, AccessConfig(), "the router")
    for half in ({"cert_file": "c"}, {"key_file": "k"}, {"client_ca_file": "a"}):
        with pytest.raises(AccessError, match="access"):
            check_exposed("127.0.0.1", AccessConfig(**half), "the router")


def test_the_file_is_looked_at_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a `stat` for every request of a flood."""
    path, clock = tmp_path / "keys.json", Clock()
    key, kept = make_key("acme", "tenant", "")
    write(path, table(kept))
    found = opened(path, clock)
    looks: list[object] = []
    real = os.stat
    monkeypatch.setattr("access.authenticator.os.stat", lambda at: looks.append(at) or real(at))
    for _ in range(100):
        found.caller(f"Bearer {key}", None)
        clock.now_s += RECHECK_S / 50
    assert 1 <= len(looks) <= 3


@pytest.mark.parametrize("limit", ["concurrency", "burst_tokens"])
@pytest.mark.parametrize("sign", ["", "-"])
def test_whole_numbers_beyond_any_float_are_refused(limit: str, sign: str) -> None:
    """Guards a running router, which goes on with its old table only where the new one is refused."""
    table = CredentialTable(tenants={"a": Tenant(**{limit: int(f"{sign}1{'0' * 400}")})})
    with pytest.raises(AccessError, match="tenant 'a'"):
        check_table(table)
