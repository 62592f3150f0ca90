"""Stands in for `msgspec` where it is not installed: as much of it as workers and their processes use, in plain Python,
and slower.

A struct is a dataclass. What msgspec writes as MessagePack is written by `marshal` here: both ends of a stream must be
of one Python, and trust each other, as the processes of one benchmark do. Checked against the real one by
`tests/benchmarks/test_stand_ins.py`.
"""

import base64
import dataclasses
import enum
import inspect
import json as _json
import marshal
import types
import typing
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any, ClassVar, Generic, Literal, TypeVar

T = TypeVar("T")


class MsgspecError(Exception):
    pass


class DecodeError(MsgspecError):
    pass


class ValidationError(DecodeError):
    pass


class Raw(bytes):
    """JSON that is passed on as it is."""


class Struct:
    _array_like: ClassVar[bool] = False
    _frozen: ClassVar[bool] = False
    _omit_defaults: ClassVar[bool] = False
    _is_tagged: ClassVar[bool] = False
    _tag: ClassVar[str | None] = None

    def __init_subclass__(
        cls,
        *,
        frozen: bool | None = None,
        tag: bool | str = False,
        array_like: bool = False,
        omit_defaults: bool = False,
        order: bool = False,
        kw_only: bool = False,
        dict: bool = False,
        forbid_unknown_fields: bool = False,
        gc: bool = True,
    ) -> None:
        cls._frozen = cls._frozen if frozen is None else frozen
        cls._array_like |= array_like
        cls._omit_defaults |= omit_defaults
        cls._is_tagged |= tag is True
        cls._tag = tag if isinstance(tag, str) else cls.__name__ if cls._is_tagged else None
        for name in inspect.get_annotations(cls):
            default = vars(cls).get(name)
            if isinstance(default, list | set | MutableMapping):
                setattr(cls, name, dataclasses.field(default_factory=type(default)))
        dataclasses.dataclass(frozen=cls._frozen, order=order, kw_only=kw_only)(cls)


def to_builtins(value: Any) -> Any:
    """Turn structs into dicts, or lists where they are `array_like`; enums into their values; bytes into base64."""
    return _in_text(_builtins(value))


def _in_text(plain: Any) -> Any:
    if isinstance(plain, bytes):
        return base64.b64encode(plain).decode()
    if isinstance(plain, dict):
        return {key: _in_text(item) for key, item in plain.items()}
    if isinstance(plain, list | tuple):
        return type(plain)(map(_in_text, plain))
    return plain


def _builtins(value: Any) -> Any:
    """Do the same as `to_builtins`, but leave bytes what they are."""
    kind = type(value)
    if kind in (int, str, float, bool, bytes, types.NoneType):
        return value
    if isinstance(value, Struct):
        return _plain(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_builtins(key): _builtins(item) for key, item in value.items()}
    if isinstance(value, Raw):
        return _json.loads(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, tuple):
        return tuple(map(_builtins, value))
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_builtins(item) for item in value]
    raise TypeError(f"Encoding objects of type {kind.__name__} is unsupported")


def _plain(value: Struct) -> Any:
    cls: Any = type(value)
    tag = [] if cls._tag is None else [("type", cls._tag)]
    fields = [(name, getattr(value, name)) for name in _fields(cls)]
    if cls._array_like:
        return [_builtins(item) for _, item in (*tag, *fields)]
    if cls._omit_defaults:
        missing = object()
        fields = [(name, item) for name, item in fields if item != _fields(cls)[name](missing)]
    return {name: _builtins(item) for name, item in (*tag, *fields)}


@cache
def _fields(cls: Any) -> dict[str, Callable[[object], object]]:
    """Return, by name, a function that makes the field's default, given what stands for none. Fields for keywords alone
    come last."""
    found: dict[str, Callable[[object], object]] = {}
    for one in sorted(dataclasses.fields(cls), key=lambda one: one.kw_only is True):
        if one.default_factory is not dataclasses.MISSING:
            found[one.name] = lambda _, make=one.default_factory: make()  # type: ignore[misc]
        elif one.default is not dataclasses.MISSING:
            found[one.name] = lambda _, default=one.default: default  # type: ignore[misc]
        else:
            found[one.name] = lambda missing: missing
    return found


def convert(value: Any, type: Any) -> Any:
    """Turn plain data into `type`. Raises ValidationError where it does not fit."""
    return _reader(type)(value)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, typing.NewType):
        return _reader(kind.__supertype__)
    if origin is Literal:
        return lambda value: value if value in arguments else _refuse(kind, value)
    if origin in (typing.Union, types.UnionType):
        return _union(kind, arguments)
    if origin is tuple and arguments[-1] is not ...:
        return lambda value: tuple(
            _reader(of)(item)
            for of, item in zip(arguments, _sized(kind, value, arguments), strict=True)
        )
    if origin in (list, tuple, set, frozenset) or kind in (list, tuple, set, frozenset):
        made = origin or kind
        of = _reader(arguments[0] if arguments else Any)
        return lambda value: made(map(of, _sequence(kind, value)))
    if origin is dict or kind is dict:
        keys, items = map(_reader, arguments or (Any, Any))
        return lambda value: {keys(k): items(v) for k, v in _mapping(kind, value).items()}
    if isinstance(kind, type):
        if issubclass(kind, Struct):
            return lambda value: _struct(kind, value)
        if issubclass(kind, enum.Enum):
            members = {member.value: member for member in kind}
            return lambda value: members[value] if value in members else _refuse(kind, value)
        return _SCALARS.get(kind, lambda value: value)
    return lambda value: value


def _union(kind: Any, arguments: Sequence[Any]) -> Callable[[Any], Any]:
    structs = {
        one._tag: one for one in arguments if isinstance(one, type) and issubclass(one, Struct)
    }
    others = [_reader(one) for one in arguments if one not in structs.values()]

    def read(value: Any) -> Any:
        tag: Any = None
        if isinstance(value, dict):
            tag = value.get("type")
        elif isinstance(value, list) and value:
            tag = value[0]
        elif isinstance(value, Struct):
            return value
        if isinstance(tag, str | None) and tag in structs and isinstance(value, dict | list):
            return _struct(structs[tag], value)
        for other in others:
            try:
                return other(value)
            except ValidationError:
                continue
        return _refuse(kind, value)

    return read


@cache
def _readers(cls: Any) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {name: _reader(hints[name]) for name in _fields(cls)}


def _struct(cls: Any, value: Any) -> Any:
    if isinstance(value, cls):
        return value
    readers = _readers(cls)
    if cls._array_like:
        given = list(_sequence(cls, value))
        if cls._tag is not None and given[:1] != [cls._tag]:
            _refuse(cls, value)
        value = dict(zip(readers, given[cls._tag is not None :], strict=False))
    elif not isinstance(value, dict) or (cls._tag and value.get("type", cls._tag) != cls._tag):
        _refuse(cls, value)
    missing = object()
    for name, default in _fields(cls).items():
        if name not in value and default(missing) is missing:
            raise ValidationError(f"Object missing required field `{name}`: {cls.__name__}")
    try:
        return cls(**{name: read(value[name]) for name, read in readers.items() if name in value})
    except (TypeError, ValueError) as error:
        raise ValidationError(str(error)) from error


def _refuse(kind: Any, value: Any) -> Any:
    raise ValidationError(f"Expected `{kind}`, got `{type(value).__name__}`")


def _sequence(kind: Any, value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple | set | frozenset):
        _refuse(kind, value)
    return typing.cast("Iterable[Any]", value)


def _sized(kind: Any, value: Any, like: Sequence[Any]) -> Sequence[Any]:
    found = list(_sequence(kind, value))
    return found if len(found) == len(like) else typing.cast("list[Any]", _refuse(kind, value))


def _mapping(kind: Any, value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else typing.cast("dict[Any, Any]", _refuse(kind, value))


def _scalar(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if type(value) is kind else _refuse(kind, value)


def _float(value: Any) -> Any:
    return float(value) if type(value) in (int, float) else _refuse(float, value)


def _bytes(value: Any) -> Any:
    """Encode bytes for JSON, which has them in base64."""
    return base64.b64decode(value) if type(value) is str else _scalar(bytes)(value)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    int: _scalar(int),
    str: _scalar(str),
    bool: _scalar(bool),
    types.NoneType: _scalar(types.NoneType),
    float: _float,
    bytes: _bytes,
    Raw: lambda value: Raw(_write_json(value)),
}


class _Form:
    """A way to write plain data as bytes, with the functions and classes that msgspec has for each."""

    def __init__(
        self, name: str, write: Callable[[Any], bytes], read: Callable[[Any], Any]
    ) -> None:
        class Encoder:
            def encode(self, value: Any) -> bytes:
                return write(_builtins(value))

        class Decoder(Generic[T]):
            def __init__(self, type: Any = Any, *, ext_hook: Any = None) -> None:
                self._type = type

            def decode(self, data: Any) -> Any:
                try:
                    plain = read(data)
                except (ValueError, EOFError, TypeError) as error:
                    raise DecodeError(f"not {name}: {error}") from error
                return convert(plain, self._type)

        self.Encoder, self.Decoder = Encoder, Decoder

    def encode(self, value: Any) -> bytes:
        return self.Encoder().encode(value)

    def decode(self, data: Any, *, type: Any = Any) -> Any:
        return self.Decoder(type).decode(data)


def _write_json(plain: Any) -> bytes:
    text = _json.dumps(
        plain,
        ensure_ascii=False,
        separators=(",", ":"),
        default=lambda raw: base64.b64encode(raw).decode(),
    )
    return text.encode()


class structs:
    """The namespace of that name, as the module is in msgspec."""

    replace = staticmethod(dataclasses.replace)
    force_setattr = staticmethod(object.__setattr__)

    @staticmethod
    def asdict(struct: Any) -> dict[str, Any]:
        cls: Any = type(struct)
        return {name: getattr(struct, name) for name in _fields(cls)}


def _write_frame(plain: Any) -> bytes:
    """Write equal data in equal bytes, which both ends of a transfer make a chunk's key of: from version 3 on,
    `marshal` lets it depend on which objects happen to be one."""
    return marshal.dumps(plain, 2)


json = _Form("JSON", _write_json, _json.loads)
msgpack = _Form("a frame", _write_frame, marshal.loads)
