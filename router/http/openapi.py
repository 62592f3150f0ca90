"""Describes the HTTP front: `python -m router.http.openapi` writes docs/openapi.json, `--check` says if it is true.

Bodies are described from what the parsers read them into and from the limits that the checks hold their values to; the
routes must be those that the application has. So a field, a limit or a route that is added is in the description, or
the check fails.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
from starlette.routing import Route

from engine.plan import LENGTH_PENALTIES, LOGIT_BIASES, MAX_BEAM_WIDTH, MAX_LOGPROBS, MAX_PRIORITY, SAMPLING_RANGES
from router.client.requests import MAX_TIMEOUT_S
from router.config import RouterConfig
from router.front import validate
from router.front.frontend import Frontend
from router.http import chat_fields, openai, tokens
from router.http.adapters import messages_request, responses_request
from router.http.adapters.described import MessageErrorReply, MessageReply, ResponseReply
from router.http.answers import RESUME_TOKEN_HEADER
from router.http.fields import FieldsReader
from router.http.openai_reply import Reply, ReplyChoice
from router.http.openai_stream import FIELD
from router.http.routes import LABEL_LIMIT_CHARS, ServerState, build_app
from router.http.schemas import ErrorEnvelope, Schema, SchemaWriter

FILE = Path(__file__).parents[2] / "docs" / "openapi.json"


def _within(least: float, most: float) -> Schema:
    return {"minimum": least, "maximum": most}


_COUNT = _within(1, validate.MAX_COUNT)
LIMITS: dict[str, Schema] = {
    **{name: _within(*ends) for name, ends in SAMPLING_RANGES.items()},
    "n": _within(1, RouterConfig().max_samples),
    "max_tokens": _within(0, validate.MAX_COUNT),
    "max_completion_tokens": _COUNT,
    "min_tokens": _within(0, validate.MAX_COUNT),
    "top_k": _within(-1, validate.MAX_COUNT),
    "MessagesRequest.top_k": _within(0, validate.MAX_COUNT),
    "seed": _within(0, 2**64 - 1),
    "priority": _within(-MAX_PRIORITY, MAX_PRIORITY),
    "beam_width": _within(1, MAX_BEAM_WIDTH),
    "length_penalty": _within(*LENGTH_PENALTIES),
    "timeout": {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
    "stop": {"minLength": 1, "maxItems": validate.MAX_STOP_STRINGS},
    "stop_sequences": {"minLength": 1, "maxItems": validate.MAX_STOP_STRINGS},
    "max_output_tokens": _COUNT,
    "MessagesRequest.max_tokens": _COUNT,
    "input": {"minLength": 1, "minItems": 1, "maxItems": responses_request.MAX_ITEMS},
    "stop_token_ids": {"minimum": 0, "maxItems": validate.MAX_STOP_TOKEN_IDS},
    "messages": {"minItems": 1, "maxItems": validate.MAX_MESSAGES},
    "Message.role": {"enum": list(chat_fields.ROLES)},
    "ContentPart.type": {"enum": [chat_fields.TEXT_PART]},
    "prompt": {"minimum": 0},
    "best_of": _within(1, RouterConfig().max_samples),
    "tokens": {"minimum": 0},
    "truncate_prompt_tokens": {"minimum": -1},
    "cache_salt": {"maxLength": validate.MAX_SALT_BYTES},
    **dict.fromkeys(("logprobs", "top_logprobs"), _within(0, MAX_LOGPROBS)),
    "prompt_logprobs": _within(0, MAX_LOGPROBS),
    "logit_bias": _within(*LOGIT_BIASES),
    "allowed_token_ids": {"minimum": 0, "maxItems": validate.MAX_ALLOWED_IDS},
    "tenant": {"maxLength": validate.MAX_LABEL_CHARS},
}
"""What the checks behind the frontend say of a field's values."""
NEUTRAL = {
    "Message": chat_fields.OF_MESSAGES,
    "ContentPart": chat_fields.OF_PARTS,
}
"""Unsupported fields of what bodies hold, by struct."""
_REFUSED = {
    "400": "A field is wrong, named by `param`.",
    "401": "No credential, or an unknown one.",
    "403": "The credential does not allow it.",
    "404": "Another model is asked for.",
    "408": "The timeout passed.",
    "413": "The body is too large.",
    "429": "Too much waits, or the tenant's limits are reached; `Retry-After` says when to come back.",
    "499": "The request was cancelled.",
    "500": "A fault of the server.",
    "503": "No worker, or one was lost.",
}
_EVENTS: Schema = {"text/event-stream": {"schema": {"description": "Server-sent events, each with data in JSON."}}}
_EVENTS_OF = {
    "MessageReply": "`message_start`, blocks that begin, grow and end, `message_delta`, `message_stop`",
    "ResponseReply": "`response.created`, items that are added, grow and are done, `response.completed`",
}
_OF_TOKENS = ("400", "401", "403", "404", "413", "429", "499", "503")
_LABEL: Schema = {
    "name": "x-request-id",
    "in": "header",
    "schema": {"type": "string"},
    "description": f"The caller's name for the request, sent back if it has at most {LABEL_LIMIT_CHARS} characters.",
}


class UsageDetails(msgspec.Struct):
    cached_tokens: int


class ReasoningDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageReport(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: UsageDetails
    completion_tokens_details: ReasoningDetails | msgspec.UnsetType = msgspec.UNSET


class WorkerPart(msgspec.Struct):
    worker: str
    cached_tokens: int


class MigrationPart(msgspec.Struct):
    blocks: int
    bytes: int
    seconds: float
    transport: str


class TimingPart(msgspec.Struct):
    ttft_s: float
    itl_mean_s: float
    itl_p99_s: float
    e2e_s: float
    stages: dict[str, float]


class HeadracePart(msgspec.Struct):
    """What this server adds to OpenAI's answer, as `router/http/openai_reply.py` writes it."""

    request_id: str
    prefill: WorkerPart
    decode: WorkerPart
    migration: MigrationPart
    timing: TimingPart
    stop_matched: str


def _redescribed(kind: type[msgspec.Struct], **others: object) -> Any:
    """Return a struct with the fields of `kind`, some of which are of other types: those that it leaves open, or that
    msgspec can write but not read."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        type_ = others.get(field.name, field.type)
        fields.append((field.name, type_) if field.required else (field.name, type_, msgspec.UNSET))
    return msgspec.defstruct(kind.__name__, fields, kw_only=True)


def _with_options(reader: FieldsReader[Any], name: str) -> FieldsReader[Any]:
    """Return a reader of what /tokenize takes: a generating route's fields, and two of its own."""
    own: Any = msgspec.defstruct(
        name,
        [(field.name, field.type, None) for field in msgspec.structs.fields(tokens.TokenizeOptions)],
        bases=(reader.kind,),
        kw_only=True,
    )
    return FieldsReader(own, reader.unsupported)


class WrittenFunction(msgspec.Struct):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class WrittenCall(msgspec.Struct):
    function: WrittenFunction
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType = msgspec.UNSET


class WrittenMessage(msgspec.Struct):
    """A chat's answer, or the new part of it."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    refusal: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[WrittenCall] | msgspec.UnsetType = msgspec.UNSET


class InputTokens(msgspec.Struct):
    input_tokens: int


class TextReply(msgspec.Struct):
    prompt: str


class ModelCard(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


class HealthReply(msgspec.Struct):
    status: str


class ReadyReply(msgspec.Struct):
    ready: bool


class VersionReply(msgspec.Struct):
    version: str


class TargetGroup(msgspec.Struct):
    targets: list[str]
    labels: dict[str, str]


def describe() -> dict[str, Any]:
    """Return the whole document."""
    writer = SchemaWriter(LIMITS, NEUTRAL)
    errors = _json(writer.of(ErrorEnvelope))
    message = WrittenMessage | msgspec.UnsetType
    choice: Any = _redescribed(ReplyChoice, message=message, delta=message)
    usage, headrace = UsageReport | msgspec.UnsetType | None, HeadracePart | msgspec.UnsetType
    whole = writer.of(_redescribed(Reply, choices=list[choice], usage=usage, headrace=headrace))

    def refusals(*statuses: str, content: Schema = errors) -> Schema:
        return {status: {"description": _REFUSED[status], "content": content} for status in statuses}

    def generates(summary: str, reader: FieldsReader[Any], reply: Schema = whole, faults: Schema = errors) -> Schema:
        answers = {
            **_json(reply),
            **_EVENTS,
        }
        kind = reply["$ref"].rpartition("/")[2]
        stream = f"The answer, or with `stream` its events: {_EVENTS_OF.get(kind, 'each a `Reply` with what is new')}."
        token = {"schema": {"type": "string"}, "description": "Of a resumable stream: its secret name."}
        return {
            "post": {
                "summary": summary,
                "parameters": [
                    _LABEL,
                    {
                        "name": "x-request-timeout-s",
                        "in": "header",
                        "schema": {"type": "number", **LIMITS["timeout"]},
                        "description": "A limit in seconds; the shorter of it and `timeout` counts.",
                    },
                    {
                        "name": "x-headrace-session",
                        "in": "header",
                        "schema": {"type": "string", "maxLength": validate.MAX_LABEL_CHARS},
                        "description": "Names a conversation, whose requests go where the last one went.",
                    },
                ],
                "requestBody": {"required": True, "content": _json(writer.body(reader))},
                "responses": {
                    "200": {"description": stream, "content": answers, "headers": {RESUME_TOKEN_HEADER: token}},
                    **refusals(*_REFUSED, content=faults),
                },
            }
        }

    def shows(summary: str, kind: object, *statuses: str, parameters: Iterable[Schema] = ()) -> Schema:
        answer = {"200": {"description": summary, "content": _json(writer.of(kind))}, **refusals(*statuses)}
        return {"get": {"summary": summary, "parameters": list(parameters), "responses": answer}}

    def counts(
        summary: str, bodies: list[Schema], kind: object, *statuses: str, faults: Schema = errors
    ) -> Schema:
        body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        refused = refusals(*statuses, content=faults)
        answer = {"200": {"description": summary, "content": _json(writer.of(kind))}, **refused}
        asked = {"required": True, "content": _json(body)}
        return {"post": {"summary": summary, "requestBody": asked, "responses": answer}}

    secret = {"name": "token", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[^/]+$"}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ready = shows("Whether requests can be taken", ReadyReply)
    ready["get"]["responses"]["503"] = {"description": "Not yet.", "content": _json(writer.of(ReadyReply))}
    metrics = {"200": {"description": "As text.", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    page = {"description": "A chat.", "content": {"text/html": {"schema": {"type": "string"}}}}
    rest = {"description": "The rest of the stream.", "content": _EVENTS}
    where = [
        {"name": FIELD, "in": "header", "schema": {"type": "string"}, "description": "The last event received."},
        {"name": "last_event_id", "in": "query", "schema": {"type": "string"}, "description": "The same."},
    ]
    anthropics = _json(writer.of(MessageErrorReply))
    message_reply, response_reply = writer.of(MessageReply), writer.of(ResponseReply)
    text = writer.body(_with_options(openai.COMPLETION, "TokenizeText"))
    paths: dict[str, Schema] = {
        "/v1/chat/completions": generates("Go on with a chat", openai.CHAT),
        "/v1/completions": generates("Go on with a text or token ids", openai.COMPLETION),
        "/v1/responses": generates("OpenAI's newer shape", responses_request.RESPONSES, response_reply),
        "/v1/messages": generates("Anthropic's shape", messages_request.MESSAGES, message_reply, anthropics),
        "/v1/messages/count_tokens": counts(
            "The tokens of a message's prompt",
            [writer.body(messages_request.COUNTING)],
            InputTokens,
            *_OF_TOKENS,
            faults=anthropics,
        ),
        "/v1/streams/{token}": {
            "parameters": [secret],
            "get": {
                "summary": "Go on with a resumable stream behind the last event received",
                "parameters": where,
                "responses": {"200": rest, "204": {"description": "No rest."}, **refusals(*_REFUSED)},
            },
            "delete": {
                "summary": "End it",
                "responses": {"204": {"description": "Ended."}, **refusals("401", "403", "404", "503")},
            },
        },
        "/tokenize": counts(
            "The tokens that a generating route would read",
            [writer.body(_with_options(openai.CHAT, "TokenizeChat")), text],
            tokens.TokenizeReply,
            *_OF_TOKENS,
        ),
        "/detokenize": counts("The text of tokens", [writer.body(tokens.IDS)], TextReply, *_OF_TOKENS),
        "/v1/models": shows("The models served", ModelList, "401"),
        "/v1/models/{name}": shows("One of them", ModelCard, "401", "404", parameters=[name]),
        "/health": shows("Whether the process lives", HealthReply),
        "/ready": ready,
        "/metrics": {"get": {"summary": "The router's metrics", "responses": metrics | refusals("401", "403")}},
        "/sd": shows("What Prometheus is to scrape", list[TargetGroup], "401", "403"),
        "/version": shows("The version", VersionReply, "401"),
        "/": {"get": {"summary": "A page to chat with", "responses": {"200": page}}},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": "1",
            "description": "The HTTP front of the router; docs/http.md tells the rest.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:8000"}],
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(writer.components.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def undescribed(document: dict[str, Any]) -> list[str]:
    """Return how the described routes and those of the application differ."""
    app = build_app(cast(Frontend, None), cast(ServerState, None))
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or _methods(document, route.path)
    }
    described = {
        (path, method) for path, item in document["paths"].items() for method in item if method != "parameters"
    }
    ours = {(path, method) for path, method in served if method != "head"}
    return [
        *(f"{method} {path} is not described" for path, method in sorted(ours - described)),
        *(f"{method} {path} is described and not served" for path, method in sorted(described - ours)),
    ]


def _methods(document: dict[str, Any], path: str) -> list[str]:
    """Return those of a route that takes any, as an endpoint does that judges by itself."""
    return [method for method in document["paths"].get(path, {"get": {}}) if method != "parameters"]


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def main() -> int:
    parser = argparse.ArgumentParser(description="Describe the HTTP front in docs/openapi.json.")
    parser.add_argument("--check", action="store_true", help="only say whether the file is what would be written")
    check = parser.parse_args().check
    document = describe()
    if faults := undescribed(document):
        print("\n".join(faults), file=sys.stderr)
        return 1
    text = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    if not check:
        FILE.write_bytes(text)
    elif not FILE.is_file() or FILE.read_bytes() != text:
        print("docs/openapi.json has drifted: python -m router.http.openapi", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
