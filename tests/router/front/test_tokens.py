"""Tokenize and detokenize, prompts cut to a length, and salts: behind both fronts."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from engine.identity import owner
from engine.kv.shares import CacheShares
from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, GenerateCall
from router.front.intake import Arrival, Intake
from router.front.namespaces import CacheNamespaces
from tests.router.fake_cluster import END, ByteText

CHAT = [ChatMessage("user", "hi")]


def with_intake(body: Callable[[Intake], Awaitable[object]], **config: object) -> object:
    async def go() -> object:
        intake = Intake(ByteText(), RouterConfig(namespace_key="secret", **config))  # type: ignore[arg-type]
        try:
            return await body(intake)
        finally:
            intake.close()

    return asyncio.run(go())


def take(call: GenerateCall, **config: object) -> Arrival:
    arrival = with_intake(lambda intake: intake.take(call), **config)
    assert isinstance(arrival, Arrival)
    return arrival


@pytest.mark.parametrize("inline_bytes", [0, 10_000])
def test_what_is_counted_is_what_is_read(inline_bytes: int) -> None:
    """Guards against a count that differs from the prompt of the same request, in a thread or on the loop."""
    for prompt in ("héllo<end>", CHAT):
        call = GenerateCall(prompt=prompt)  # type: ignore[arg-type]
        read = take(call).record.tokens
        found = with_intake(
            lambda intake, call=call: intake.tokenize(call, add_special=None, strings=True),  # type: ignore[misc]
            tokenize_inline_bytes=inline_bytes,
        )
        assert found.ids == read  # type: ignore[attr-defined]
        assert found.strings == ByteText().token_strings(read)  # type: ignore[attr-defined]


def test_ids_become_text_with_the_names_of_control_tokens() -> None:
    assert with_intake(lambda intake: intake.detokenize([104, 105, END])) == "hi<end>"


def ids_of(prompt: str, model: str = "bytes") -> Callable[[Intake], Awaitable[object]]:
    call = GenerateCall(prompt=prompt, model=model)
    return lambda intake: intake.tokenize(call, add_special=None, strings=False)


@pytest.mark.parametrize(
    ("work", "code", "field"),
    [
        (ids_of("x" * 513), "OUT_OF_RANGE", "prompt"),
        (ids_of(""), "INVALID_ARGUMENT", "prompt"),
        (ids_of("x", "other"), "NOT_FOUND", "model"),
        (lambda i: i.detokenize([1, 300]), "INVALID_ARGUMENT", "token_ids[1]"),
        (lambda i: i.detokenize([1] * 513, field="tokens"), "OUT_OF_RANGE", "tokens"),
        (lambda i: i.detokenize([1], "other"), "NOT_FOUND", "model"),
        (lambda i: i.detokenize([1], tenant="t" * 129), "INVALID_ARGUMENT", "tenant"),
    ],
)
def test_what_cannot_be_counted_names_its_field(
    work: Callable[[Intake], Awaitable[object]], code: str, field: str
) -> None:
    with pytest.raises(ApiError) as refused:
        with_intake(work)
    assert (refused.value.code, refused.value.field) == (code, field)


# ---- truncation


@pytest.mark.parametrize("prompt", ["0123456789", list(b"0123456789")])
def test_a_cut_prompt_keeps_its_end(prompt: str | list[int]) -> None:
    """Guards against the beginning being kept, and against a length that counts what was cut."""
    record = take(GenerateCall(prompt=prompt, truncate_prompt_tokens=4)).record
    assert (bytes(record.tokens), record.prompt_tokens) == (b"6789", 4)
    assert bytes(take(GenerateCall(prompt=prompt, truncate_prompt_tokens=40)).record.tokens) == b"0123456789"


@pytest.mark.parametrize("prompt", ["x" * 5000 + "y", [120] * 5000 + [121]])
def test_a_prompt_is_cut_to_what_the_context_leaves(prompt: str | list[int]) -> None:
    """Guards `-1`: the answer's room is kept, whether it is asked for or the server's default."""
    asked = take(GenerateCall(prompt=prompt, truncate_prompt_tokens=-1, max_tokens=12)).record
    assert (asked.prompt_tokens, asked.max_tokens, asked.tokens[-1]) == (500, 12, 121)
    default = take(GenerateCall(prompt=prompt, truncate_prompt_tokens=-1)).record
    assert (default.prompt_tokens, default.max_tokens) == (256, 256)


def test_a_cut_chat_is_no_beginning_of_a_later_turn() -> None:
    """Guards the chat's next turn: it would begin with ids whose text is gone."""
    call = GenerateCall(prompt=[ChatMessage("user", "a" * 100)], resumable=True, truncate_prompt_tokens=16)
    arrival = take(call)
    assert (len(arrival.record.tokens), arrival.chat) == (16, None)
    assert take(GenerateCall(prompt=CHAT, truncate_prompt_tokens=100)).chat is not None


@pytest.mark.parametrize("kept", [0, -2, 512])
def test_a_length_that_makes_no_sense_is_refused(kept: int) -> None:
    with pytest.raises(ApiError) as refused:
        take(GenerateCall(prompt="x", truncate_prompt_tokens=kept))
    assert (refused.value.code, refused.value.field) == ("INVALID_ARGUMENT", "truncate_prompt_tokens")


# ---- salts


def test_a_salt_only_parts_a_tenants_cache() -> None:
    """Guards against a salt that leads into another tenant's cache, or into the one of all."""
    spaces = CacheNamespaces("secret")
    names = ("", "a", "b")
    found = {(tenant, salt): spaces.of(tenant, salt) for tenant in names for salt in ("", "x", "y")}
    assert len(set(found.values())) == len(found), "two of them share a cache"
    assert spaces.of("a", "x") == found["a", "x"], "the same salt shares"
    for tenant in ("a", "b"):
        assert {owner(found[tenant, salt]) for salt in ("", "x", "y")} == {found[tenant, ""]}
    assert owner(found["", "x"]) not in (found["a", ""], found["b", ""], b"")
    # Whatever is written into a salt, what comes out begins with the tenant's own name.
    stolen = found["b", ""].decode("latin-1")
    assert spaces.of("a", stolen).startswith(found["a", ""]) and spaces.of("a", stolen) != found["b", ""]


def test_a_salt_reaches_the_record_and_the_beginnings_of_chats() -> None:
    async def body(intake: Intake) -> None:
        first = await intake.take(GenerateCall(prompt=CHAT, tenant="a", cache_salt="x"))
        odd = [0xF0, 0x9F]
        assert first.chat is not None

        def turn(text: str) -> ChatMessage:
            return ChatMessage("assistant", text)

        chats, made = intake.conversations, (first.chat, first.record.namespace, first.prompt, turn)
        chats.keep(chats.finished(*made, "??", odd))
        turn = [*CHAT, ChatMessage("assistant", "??"), ChatMessage("user", "more")]
        for salt, is_known in (("x", True), ("", False), ("y", False)):
            again = await intake.take(GenerateCall(prompt=turn, tenant="a", cache_salt=salt))
            assert again.record.namespace == intake.namespaces.of("a", salt)
            assert (bytes(odd) in bytes(t % 256 for t in again.record.tokens)) is is_known, salt

    with_intake(body)


def test_salts_of_one_tenant_count_as_one() -> None:
    """Guards fairness: by a new salt for each request a tenant would fill the cache as if it were many."""
    spaces = CacheNamespaces("secret")
    shares: CacheShares[int] = CacheShares(100)
    shares.entitle(spaces.of("a"), 0.1)
    for block in range(12):
        space = spaces.of("a", f"salt {block}")
        shares.took(space, 1)
        assert shares.excess(space) == max(0, block + 1 - 10)
        shares.let_go(space, block)
    assert shares.pop(spaces.of("a", "whichever")) == 0, "the oldest goes, whatever its salt"
    shares.gave(spaces.of("a"))
    shares.check({spaces.of("a", f"salt {block}"): 1 for block in range(1, 12)})


@pytest.mark.parametrize(("salt", "is_taken"), [("x" * 1024, True), ("x" * 1025, False), ("\ud800", False)])
def test_salts_have_a_limit(salt: str, is_taken: bool) -> None:
    if is_taken:
        assert take(GenerateCall(prompt="x", cache_salt=salt))
        return
    with pytest.raises(ApiError) as refused:
        take(GenerateCall(prompt="x", cache_salt=salt))
    assert refused.value.field == "cache_salt"
