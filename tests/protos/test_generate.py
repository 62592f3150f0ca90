"""The committed protobuf code and the rules of the public schema."""

import pytest

from protos import headrace_pb2 as pb


def test_committed_code_matches_its_source() -> None:
    """Guards against a `.proto` edited without regenerating: the API would not be what it says."""
    generate = pytest.importorskip("protos.generate", reason="needs grpcio-tools")
    assert generate.drift() == []


def test_every_optional_scalar_knows_absence() -> None:
    """Guards against a scalar that reads 0 when unset: temperature 0 is greedy, absent is not."""
    for message in (pb.GenerateRequest, pb.Sampling):
        for field in message.DESCRIPTOR.fields:
            if not field.is_repeated:
                assert field.has_presence, field.full_name


def test_enums_begin_with_unspecified() -> None:
    """Guards against a zero value with a meaning: an unset reason would read as one."""
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
