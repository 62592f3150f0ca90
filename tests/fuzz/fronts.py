"""What clients and operators say: HTTP bodies and headers, gRPC messages, chats, orders to the supervisor, settings."""

import asyncio
import importlib.util
import json
from typing import Any

import httpx
from google.protobuf.message import DecodeError

from cluster.admin import AdminServer
from cluster.admin_proof import CODE_HEADER, NONCE_HEADER, new_nonce, request_code
from cluster.processes.spec import LaunchError
from engine.messages import PeerAddress, Place, decode_router_frame, encode
from engine.text.chat import ChatTemplate
from engine.text.messages import ChatMessage, ChatPrompt
from engine.types import FieldError, RequestId, SamplingParams, TooLongError
from protos import headrace_pb2 as pb
from router.config import RouterConfig
from router.front.api import ApiError, GenerateCall
from router.front.intake import to_record
from router.front.namespaces import CacheNamespaces
from router.front.validate import check_call
from router.grpc.convert import call_from_proto, positions_from_proto, tokenize_call
from router.http.adapters.messages_request import parse_count, parse_messages
from router.http.adapters.responses_request import parse_response
from router.http.openai import parse_chat, parse_completion, timeout_from
from router.http.openai_stream import positions
from router.http.tokens import IDS, parse_tokenize
from tests.fuzz.judge import Decoder
from tests.secrets_of_tests import SECRETS

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}{{ m.content | tojson }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TinyModel:
    """Only what the checks of a call ask. Fulfils the part of `router.front.output.ServedModel` that they use."""

    name = "tiny"
    vocab_size = 100
    drawable_tokens = 100
    stop_ids = frozenset({99})
    context_tokens = 64
    sampling = SamplingParams()


def _taken(call: GenerateCall) -> None:
    """A call passes the router's own checks, and its record the wire."""
    model: Any = TinyModel()
    check_call(call, model, RouterConfig())
    ids = [part for part in call.prompt if isinstance(part, int)] or [1, 2]
    namespaces = CacheNamespaces("key")
    record = to_record(call, ids, model, RouterConfig(), request=RequestId("r"), seed=1, namespaces=namespaces)
    place = Place(record=record, placement=1, prefill=PeerAddress("p", "a:1"))
    assert decode_router_frame(encode([place])) == [place]
    if not isinstance(call.prompt, str):
        _render([part for part in call.prompt if not isinstance(part, int)])


_template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})


def _render(messages: list[ChatMessage]) -> None:
    if messages:
        _template.render(ChatPrompt(messages=tuple(messages)))


def _chat_input(data: bytes) -> None:
    """Every two strings, cut at zeros, are a message; the text may hold lone surrogates."""
    parts = data.decode("utf-8", "surrogateescape").split("\0")
    _render([ChatMessage(*pair) for pair in zip(parts[::2], parts[1::2], strict=False)])


def _header(data: bytes) -> None:
    text = data.decode("latin-1")
    timeout_from(text, "x-request-timeout-s")


def _event_id(data: bytes) -> None:
    positions(data.decode("latin-1"), "t")


def _generate(data: bytes) -> None:
    _taken(call_from_proto(pb.GenerateRequest.FromString(data)))


def _tokenize(data: bytes) -> None:
    _taken(parse_tokenize(data)[0].call)


def _grpc_tokenize(data: bytes) -> None:
    _taken(tokenize_call(pb.TokenizeRequest.FromString(data)))


def _resume(data: bytes) -> None:
    positions_from_proto(pb.ResumeRequest.FromString(data))


def _vllm() -> tuple[Decoder, ...]:
    """The engine protocol of vLLM, whose messages are a package that need not be there."""
    if importlib.util.find_spec("smg_grpc_proto") is None:
        return ()
    from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

    from router.grpc.vllm.messages import call_from_vllm

    asked: Any = vllm.GenerateRequest(request_id="r", text="hi")
    asked.sampling_params.temperature, asked.sampling_params.seed, asked.sampling_params.regex = 0.5, -1, "a+"
    ids: Any = vllm.GenerateRequest(request_id="r", stream=True)
    ids.tokenized.input_ids.extend((1, 2, 3))
    ids.sampling_params.logit_bias[3] = 1.0
    seeds = tuple(one.SerializeToString() for one in (asked, ids))

    def feed(data: bytes) -> None:
        _taken(call_from_vllm(vllm.GenerateRequest.FromString(data)))

    return (Decoder("grpc-vllm", feed, (*_REFUSED, DecodeError), seeds),)


class _NoSlots:
    """A cluster that has no worker and does nothing. Fulfils what an order asks of `Cluster`."""

    keys = SECRETS

    def slots(self) -> list[object]:
        return []

    def drain(self, worker: str, timeout_s: float | None, again: bool) -> None:
        raise LaunchError(f"there is no worker {worker!r}")

    def scale(self, kind: str, count: int, timeout_s: float | None) -> None:
        raise LaunchError("a cluster of nobody")


def _order(data: bytes) -> None:
    """Both orders are answered, and no answer is our fault."""
    cluster: Any = _NoSlots()
    unused: Any = None
    app = AdminServer(cluster, unused, (), "process", lambda: None)._app()

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for path in ("/drain", "/scale"):
                nonce = new_nonce()
                code = request_code(SECRETS.valid()[0], "POST", path, nonce, data)
                answer = await client.post(path, content=data, headers={NONCE_HEADER: nonce, CODE_HEADER: code})
                assert answer.status_code in (400, 409, 413), answer.text
                answer.json()

    asyncio.run(ask())


_BODY = {"model": "tiny", "max_tokens": 4, "stop": ["x"], "seed": 1, "temperature": 0.5, "n": 2, "stream": True}
_CHAT = json.dumps({**_BODY, "messages": [{"role": "user", "content": [{"type": "text", "text": "h\u00e9"}]}]}).encode()
_TEXT = json.dumps({**_BODY, "prompt": [1, 2, 3], "stream_options": {"include_usage": True}}).encode()
_PROTO = pb.GenerateRequest(
    chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")]), max_tokens=4, stop=["x"], tenant="a"
).SerializeToString()
_REFUSED = (ApiError, FieldError, TooLongError)

_RESUME = pb.ResumeRequest(resume_token="t", next_index=3).SerializeToString()
_BLOCKS = [{"type": "text", "text": "h\u00e9"}]
_RESULT = b'{"messages":[{"role":"user","content":[{"type":"tool_result","content":"x"}]}],"max_tokens":4}'
_MESSAGES = {"system": "s", "messages": [{"role": "user", "content": _BLOCKS}], "tool_choice": {"type": "auto"}}
_MESSAGES["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
_COUNT = json.dumps(_MESSAGES | {"thinking": {"type": "disabled"}}).encode()
_ASKED = json.dumps({**_MESSAGES, "max_tokens": 4, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 3}).encode()
_INPUT = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
_FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
_RESPONSE = json.dumps({"input": _INPUT, "instructions": "i", "text": _FORMAT, "max_output_tokens": 4}).encode()
_NO_TEXT = _RESPONSE.replace(b'"object"', b'"obj\xffect"')
"""A schema is not looked into while the body is read, and then repeated."""
_TOKENIZE = json.dumps({"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}).encode()
_PROTO_TOKENIZE = pb.TokenizeRequest(prompt="hi", add_special_tokens=True).SerializeToString()
_DEEP = b'{"messages":' + b"[" * 100_000
_DRAIN, _SCALE = b'{"worker":"decode-0","replace":true,"timeout_s":1}', b'{"prefill":2,"decode":1}'
_NO_ORDERS = (b'{"worker":"\xff"}', b"[" * 100_000, b'{"prefill":' + b"9" * 5000 + b"}")

FRONTS = (
    Decoder("http-chat", lambda data: _taken(parse_chat(data).call), _REFUSED, (_CHAT,), (_DEEP,)),
    Decoder("http-completion", lambda data: _taken(parse_completion(data).call), _REFUSED, (_TEXT, b'{"prompt":"hi"}')),
    Decoder("http-messages", lambda data: _taken(parse_messages(data).call), _REFUSED, (_ASKED,), (_DEEP, _RESULT)),
    Decoder("http-count", lambda data: _taken(parse_count(data)), _REFUSED, (_COUNT,), (_DEEP,)),
    Decoder("http-responses", lambda data: _taken(parse_response(data).call), _REFUSED, (_RESPONSE,), (_NO_TEXT,)),
    Decoder("http-tokenize", _tokenize, _REFUSED, (_TOKENIZE, b'{"prompt":"hi"}'), (_DEEP, b'{"prompt":[1]}')),
    Decoder("http-detokenize", IDS.read, _REFUSED, (b'{"tokens":[1,2],"model":"tiny"}',), (b'{"tokens":[-1e9]}',)),
    Decoder("http-timeout", _header, _REFUSED, (b"1.5",), (b"nan", b"1e400")),
    Decoder("http-event-id", _event_id, _REFUSED, (b"t.1.2.3", b"t.1.2.3.4.5.6"), (b"t." + b"1" * 5000 + b".2.3",)),
    Decoder("grpc-generate", _generate, (*_REFUSED, DecodeError), (_PROTO,)),
    Decoder("grpc-resume", _resume, (DecodeError,), (_RESUME,)),
    Decoder("grpc-tokenize", _grpc_tokenize, (*_REFUSED, DecodeError), (_PROTO_TOKENIZE,)),
    *_vllm(),
    Decoder("chat-input", _chat_input, (FieldError,), (b"user\0hi\0assistant\0yes",), (b"tool\0x", b"user\0\xff")),
    Decoder("admin-order", _order, (), (_DRAIN, _SCALE), _NO_ORDERS),
)
