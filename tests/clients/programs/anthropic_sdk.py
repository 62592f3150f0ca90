"""Anthropic's own client against a front: `python anthropic_sdk.py URL`. Writes one JSON object of what it saw."""

import json
import sys
from collections.abc import Callable
from typing import Literal

import anthropic
from anthropic import Anthropic
from pydantic import BaseModel

client = Anthropic(base_url=sys.argv[1].rstrip("/"), api_key="none", max_retries=0, timeout=120)
ask = [{"role": "user", "content": "Why is the sky blue?"}]
asked = {"model": sys.argv[2], "messages": ask, "max_tokens": 12, "extra_body": {"temperature": 0}}
saw: dict[str, object] = {}


def refused(kind: type[anthropic.APIStatusError], make: Callable[[], object]) -> list[object]:
    """The status, the shape and the type of a request that must be refused, as the client sees them."""
    try:
        make()
    except kind as error:
        return [error.status_code, error.body["type"], error.body["error"]["type"]]
    raise AssertionError(f"was not refused as {kind.__name__}")


whole = client.messages.create(**asked, system="You are terse.")
saw["whole"] = [whole.role, whole.stop_reason, whole.usage.output_tokens, [one.type for one in whole.content]]
with client.messages.stream(**asked, system="You are terse.") as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
saw["streamed"] = text == whole.content[0].text == final.content[0].text != ""
usage = final.usage
saw["usage"] = [usage.output_tokens, usage.cache_read_input_tokens > 0]
saw["input"] = usage.input_tokens + usage.cache_read_input_tokens
counted = client.messages.count_tokens(model=asked["model"], messages=ask, system="You are terse.")
saw["counted"] = counted.input_tokens
stopped = client.messages.create(**(asked | {"max_tokens": 60}), stop_sequences=["."])
saw["stopped"] = [stopped.stop_reason, stopped.stop_sequence]

schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
tool = {"name": "weather", "description": "The weather of a city.", "input_schema": schema}
other = {"name": "time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
calling = asked | {"tools": [tool, other], "max_tokens": 120}
named = {"type": "tool", "name": "weather"}
called = client.messages.create(**calling, tool_choice=named)
(use,) = called.content
saw["call"] = [use.type, use.name, sorted(use.input), called.stop_reason]
saw["any"] = client.messages.create(**calling, tool_choice={"type": "any"}).content[0].type
with client.messages.stream(**calling, tool_choice=named) as stream:
    kinds = [event.type for event in stream]
    ended = stream.get_final_message()
saw["call_streamed"] = ended.content[0].input == use.input
saw["kinds"] = sorted(set(kinds))
answer = [
    *ask,
    {"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees"}]},
]
second = client.messages.create(**(calling | {"messages": answer, "max_tokens": 12}))
saw["second"] = [second.content[0].type, second.stop_reason]

class Sky(BaseModel):
    color: Literal["blue", "red"]
    is_high: bool


parsed = client.messages.parse(**(asked | {"max_tokens": 60}), output_format=Sky)
saw["parsed"] = sorted(parsed.parsed_output.model_dump())
saw["errors"] = [
    refused(anthropic.BadRequestError, lambda: client.messages.create(**(asked | {"extra_body": {"temperature": 9}}))),
    refused(anthropic.NotFoundError, lambda: client.messages.create(**(asked | {"model": "claude-x"}))),
    refused(anthropic.RequestTooLargeError, lambda: client.messages.create(**asked, system="x" * 5_000_000)),
    refused(
        anthropic.BadRequestError,
        lambda: client.messages.create(
            **(asked | {"max_tokens": 2000}), thinking={"type": "enabled", "budget_tokens": 1024}
        ),
    ),
]
print(json.dumps(saw))
