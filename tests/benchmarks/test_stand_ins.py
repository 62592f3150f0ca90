"""The stand-ins for packages that a machine with a GPU may not have, held against the packages themselves."""

import enum
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NewType

import msgspec
import pytest

from benchmarks.gpu.absent import FOLDER
from benchmarks.gpu.stand_ins import msgspec as stand_in
from benchmarks.gpu.stand_ins import xxhash as blake

Name = NewType("Name", str)
BOTH = pytest.mark.parametrize("library", [msgspec, stand_in], ids=["msgspec", "stand-in"])


class Why(enum.StrEnum):
    LEFT = "left"


def structs(library: ModuleType) -> dict[str, Any]:
    """The same definitions on either library: every option that the workers use."""

    class Said(library.Struct, frozen=True, tag=True):  # type: ignore[misc, name-defined]
        pass

    class Inner(library.Struct, frozen=True, omit_defaults=True, order=True):  # type: ignore[misc, name-defined]
        name: Name
        number: int = 0

    class Place(Said, kw_only=True):
        inner: Inner
        share: float
        size: int | Literal["auto"] = "auto"
        why: Why | None = None
        ids: list[int] = []  # noqa: RUF012
        more: dict[str, Any] = {}  # noqa: RUF012
        pair: tuple[int, str] = (1, "a")
        any_more: tuple[float, ...] = ()
        raw: bytes = b""
        several: tuple[bytes, ...] = ()

    class Ended(Said):
        name: Name
        ok: bool = True

    class Row(library.Struct, frozen=True, array_like=True, tag=True):  # type: ignore[misc, name-defined]
        first: int
        second: bytes = b"x"

    class Checked(library.Struct, kw_only=True):  # type: ignore[misc, name-defined]
        count: int

        def __post_init__(self) -> None:
            if self.count < 0:
                raise ValueError("negative")

    return {"Inner": Inner, "Place": Place, "Ended": Ended, "Row": Row, "Checked": Checked}


def examples(library: ModuleType) -> list[Any]:
    s = structs(library)
    full = s["Place"](
        inner=s["Inner"](Name("n"), 3), share=1, size=4, why=Why.LEFT, ids=[1, 2**63], more={"a": [1, None]},
        any_more=(0.5,), raw=b"\0\xff", several=(b"\xfe", b"a"),
    )  # fmt: skip
    return [
        full,
        s["Place"](inner=s["Inner"](Name("n")), share=0.5),
        s["Ended"](Name("é")),
        s["Row"](7),
    ]


def test_structs_become_the_same_plain_data() -> None:
    """Guards the wire: a tag, an omitted default or an order of fields that differs is a record that nobody reads."""
    for real, ours in zip(examples(msgspec), examples(stand_in), strict=True):
        assert stand_in.to_builtins(ours) == msgspec.to_builtins(real)
        assert stand_in.json.decode(msgspec.json.encode(real)) == msgspec.json.decode(
            stand_in.json.encode(ours)
        )
        assert repr(ours).rpartition(".")[2] == repr(real).rpartition(".")[2]


@BOTH
def test_what_is_written_is_read_again(library: ModuleType) -> None:
    made = examples(library)
    kinds = {type(one).__name__: type(one) for one in made}
    Place, Ended, Row = (kinds[name] for name in ("Place", "Ended", "Row"))
    tagged = list[Place | Ended | None]
    for form in (library.msgpack, library.json):
        assert form.Decoder(tagged).decode(form.encode([*made[:3], None])) == [*made[:3], None]
        assert form.decode(form.encode(made[3:]), type=list[Row | int]) == made[3:]
    changed = library.structs.replace(made[2], ok=False)
    assert (changed.name, changed.ok) == ("é", False)
    assert library.structs.asdict(made[3]) == {"first": 7, "second": b"x"}
    match made[2]:
        case Ended(name, ok):
            assert (name, ok) == ("é", True)
        case _:
            pytest.fail("a pattern with positions does not match")
    inner = type(made[0].inner)
    assert inner(Name("a"), 2) < inner(Name("b"), 1)
    with pytest.raises(AttributeError):
        made[2].ok = False


@BOTH
def test_equal_records_are_written_alike(library: ModuleType) -> None:
    """Guards a chunk's key, which both ends of a transfer make of the same record's bytes: here of one string that two
    fields share, of two that are equal, and of one that was read."""
    Row = type(examples(library)[3])
    Ended = type(examples(library)[2])
    name = "".join(["long", "er"])
    encode, decode = library.msgpack.encode, library.msgpack.Decoder(list[Ended]).decode
    once = [Ended(name), Ended(name)]
    twice = [Ended("".join(["long", "er"])), Ended("".join(["lon", "ger"]))]
    assert encode(once) == encode(twice) == encode(decode(encode(twice)))
    assert encode(Row(2**40, name.encode())) == encode(Row(2**20 * 2**20, b"longer"))


@BOTH
@pytest.mark.parametrize(
    "plain",
    [
        {"inner": {"name": 5}, "share": 1.0, "type": "Place"},
        {"inner": {"name": "n"}, "type": "Place"},
        {"inner": {"name": "n"}, "share": "1", "type": "Place"},
        {"inner": {"name": "n"}, "share": 1.0, "size": "all", "type": "Place"},
        {"inner": {"name": "n"}, "share": 1.0, "why": "right", "type": "Place"},
        {"inner": {"name": "n"}, "share": 1.0, "ids": [True], "type": "Place"},
        {"inner": {"name": "n"}, "share": 1.0, "pair": [1], "type": "Place"},
        {"inner": {"name": "n"}, "share": 1.0, "type": "Ended"},
        [],
    ],
)
def test_what_does_not_fit_is_refused(library: ModuleType, plain: object) -> None:
    with pytest.raises(library.ValidationError):
        library.convert(plain, structs(library)["Place"])


@BOTH
def test_what_a_struct_refuses_is_refused(library: ModuleType) -> None:
    with pytest.raises(library.ValidationError, match="negative"):
        library.convert({"count": -1}, structs(library)["Checked"])
    with pytest.raises(library.DecodeError):
        library.json.decode(b"{")
    with pytest.raises(library.MsgspecError):
        library.msgpack.decode(b"")


def test_a_worker_speaks_through_them() -> None:
    """Guards the modules that a worker imports, all of which must be made of what the stand-in has; the records of the
    protocol and the configuration are read again as they were."""
    script = """
import msgspec, xxhash
import cluster.processes.child, decode_worker.role, prefill_worker.role, cluster.processes.process_launcher
from worker.config import DecodeConfig
from engine import messages
from engine.types import RequestId, RequestRecord
assert "stand_ins" in msgspec.__file__ and "stand_ins" in xxhash.__file__
record = RequestRecord(
    request=RequestId("a"), tokens=[1], prompt_tokens=1, max_tokens=3, seed=2**64 - 1, namespace=b"x"
)
said = [messages.Place(record=record, placement=1, prefill=messages.PeerAddress("p", "q"))]
assert messages.decode_router_frame(messages.encode(said)) == said
config = DecodeConfig(max_batch=3)
assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(config)), DecodeConfig) == config
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((FOLDER, str(Path(FOLDER).parents[2]))),
    }
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_digests_depend_on_every_byte_and_the_seed() -> None:
    whole = blake.xxh3_64(b"ab")
    piece = blake.xxh3_64(b"a")
    piece.update(b"b")
    assert whole.intdigest() == piece.intdigest() == blake.xxh3_64_intdigest(b"ab") < 2**64
    assert (
        len(
            {blake.xxh3_64_intdigest(b"ab", seed=s) for s in (0, 1)}
            | {blake.xxh3_64_intdigest(b"ac")}
        )
        == 3
    )
    assert len(blake.xxh3_128(b"ab").hexdigest()) == 32
