"""The cache namespaces of tenants, as routers name them to workers."""

import json
from dataclasses import dataclass

import pytest

from engine.types import RequestId, RequestRecord
from router.config import RouterConfig
from router.core.sessions import SESSION_BYTES, TENANT_BYTES
from router.front.api import GenerateCall
from router.front.intake import to_record
from router.front.namespaces import CacheNamespaces
from router.http.openai import parse_chat, parse_completion
from tests.router.http.test_fuzz import Model


def _record(tenant: str, key: str = "key") -> RequestRecord:
    call = GenerateCall(prompt=[1, 2], tenant=tenant)
    namespaces = CacheNamespaces(key)
    return to_record(call, [1, 2], Model(), RouterConfig(), request=RequestId("r"), seed=1, namespaces=namespaces)


def test_every_tenant_has_a_namespace_of_its_own() -> None:
    """Guards the key of the cache: one tenant's prompts are no other's hits, whatever names they choose."""
    tenants = ["", "a", "b", "a ", "A", "\0", "a" * 100]
    spaces = [_record(tenant, "secret").namespace for tenant in tenants]
    assert len(set(spaces)) == len(tenants)
    assert spaces == [_record(tenant, "secret").namespace for tenant in tenants]
    assert spaces[0] == b"", "who names no tenant shares with all who name none"
    assert all(len(space) == 16 for space in spaces[1:])


def test_a_session_is_its_tenants_and_says_nothing_to_who_has_no_key() -> None:
    """Guards conversations: their names are the caller's text, and travel between processes hashed alone."""
    one, same, other = CacheNamespaces("key"), CacheNamespaces("key"), CacheNamespaces("another")
    talk = one.session("acme", "chat")
    assert talk == same.session("acme", "chat") and len(talk) == SESSION_BYTES
    different = {one.session("acme", "chat 2"), one.session("globex", "chat"), one.session("", "chat")}
    assert len({talk, *different, other.session("acme", "chat")}) == 5
    assert talk[:TENANT_BYTES] == one.session("acme", "chat 2")[:TENANT_BYTES] != one.of("acme")


def test_nobody_can_name_a_namespace_without_the_key() -> None:
    assert _record("a", "secret").namespace != _record("a", "guess").namespace != b"a"


@pytest.mark.parametrize(
    ("parse", "prompt"),
    [(parse_completion, {"prompt": "x"}), (parse_chat, {"messages": [{"role": "user", "content": "x"}]})],
)
def test_a_tenant_over_http_is_the_same_as_over_grpc(parse, prompt) -> None:  # type: ignore[no-untyped-def]
    """Guards HTTP requests of all tenants in one namespace."""
    bodies = [{"model": "tiny", **prompt, **named} for named in ({}, {"tenant": "a"}, {"tenant": "b"})]
    calls = [parse(json.dumps(body).encode()).call for body in bodies]
    assert [call.tenant for call in calls] == ["", "a", "b"]
    assert len({_record(call.tenant).namespace for call in calls}) == 3


@dataclass(frozen=True)
class Terms:
    cache_share: float = 0.0
    shared_cache: str = ""


def test_a_cache_is_shared_only_where_both_records_say_so() -> None:
    """Guards against a tenant that is drawn into another's cache, by that one's record or by a clever name."""
    records = {"a": Terms(0.25, "team"), "b": Terms(0.5, "team"), "c": Terms(0.5), "d": Terms(shared_cache="c")}
    namespaces = CacheNamespaces("key", lambda tenant: records.get(tenant, Terms()))
    assert namespaces.of("a") == namespaces.of("b")
    apart = [namespaces.of(tenant) for tenant in ("a", "c", "d", "team", "")]
    assert len(set(apart)) == len(apart), "the cache of `team` is nobody's who only has its name"
    assert [namespaces.share(tenant) for tenant in ("a", "c", "nobody", "")] == [0.0, 0.5, 0.0, 0.0]


def test_without_a_key_one_is_drawn() -> None:
    """Guards against namespaces that anybody can compute, because nobody has configured a key."""
    one, other = CacheNamespaces(""), CacheNamespaces("")
    assert one.of("a") == one.of("a") != other.of("a")
