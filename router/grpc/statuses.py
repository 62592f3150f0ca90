"""What the trailing metadata of a refused call says. Pure.

Everything is said twice: in plain metadata, which any client reads without a schema, and as `google.rpc.Status` in
`grpc-status-details-bin`, which clients of richer libraries expect: the field at fault as `BadRequest`, the time after
which to come back as `RetryInfo`, the caller's label as `RequestInfo`.
"""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from router.front.api import ApiError

FIELD_KEY = "headrace-field"
RETRY_KEY = "retry-after-ms"
ENDED_KEY = "headrace-ended"
"""Marks every status that we give, as opposed to those that gRPC makes of a broken connection."""
LABEL_KEY = "x-request-id"
DETAILS_KEY = "grpc-status-details-bin"

LABEL_CHARS = 128
DETAILS_CHARS = 1024
"""Most of a message that is repeated in the details: they travel as headers, which clients bound at 8 KiB."""


def usable_label(text: str) -> str:
    """Return the caller's own name for a request if it can travel as metadata, else nothing."""
    return text if len(text) <= LABEL_CHARS and text.isascii() and text.isprintable() else ""


def trailing_metadata(error: ApiError, label: str = "") -> tuple[tuple[str, str | bytes], ...]:
    """Return all that a client is told of an error beside its code and its message."""
    told: list[tuple[str, str | bytes]] = [(ENDED_KEY, "1")]
    if error.field:
        told.append((FIELD_KEY, error.field))
    if error.retry_after_s is not None:
        told.append((RETRY_KEY, str(round(error.retry_after_s * 1e3))))
    if label:
        told.append((LABEL_KEY, label))
    told.append((DETAILS_KEY, details(error, label).SerializeToString()))
    return tuple(told)


def details(error: ApiError, label: str = "") -> Status:
    """Return the same as `google.rpc.Status`."""
    message = error.message[:DETAILS_CHARS]
    status = Status(code=Code.Value(error.code), message=message)
    parts: list[Message] = []
    if error.field:
        described = message.removeprefix(f"{error.field}: ")
        parts.append(BadRequest(field_violations=[BadRequest.FieldViolation(field=error.field, description=described)]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        parts.append(RetryInfo(retry_delay=delay))
    if label:
        parts.append(RequestInfo(request_id=label))
    for part in parts:
        status.details.add().Pack(part)
    return status
