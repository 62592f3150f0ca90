"""OpenAI's own client calls tools over a front: `python openai_tools.py URL`. Writes one JSON object of what it saw."""

import json
import sys
from typing import Literal

import openai
from openai import OpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


class Sky(BaseModel):
    color: Literal["blue", "red"]
    is_high: bool


client = OpenAI(base_url=f"{sys.argv[1]}v1", api_key="none", max_retries=0, timeout=120)
model = client.models.list().data[0].id
weather = openai.pydantic_function_tool(Weather)
sky = openai.pydantic_function_tool(Sky)
ask = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = {"model": model, "messages": ask, "tools": [weather, sky], "max_tokens": 120, "temperature": 0}
named = {"type": "function", "function": {"name": "Weather"}}
saw: dict[str, object] = {}

# What is demanded: any tool, and one by its name, whole and typed.
required = client.chat.completions.parse(**asked, tool_choice="required", parallel_tool_calls=False).choices[0]
saw["required"] = [required.finish_reason, required.message.content, len(required.message.tool_calls)]
saw["required_typed"] = type(required.message.tool_calls[0].function.parsed_arguments).__name__
whole = client.chat.completions.parse(**asked, tool_choice=named)
call = whole.choices[0].message.tool_calls[0]
saw["named"] = [call.function.name, call.function.parsed_arguments.model_dump(), call.type]

# The same, streamed.
with client.chat.completions.stream(
    **asked, tool_choice=named, stream_options={"include_usage": True, "continuous_usage_stats": True}
) as stream:
    events = list(stream)
    final = stream.get_final_completion()
pieces = [one for one in events if one.type == "tool_calls.function.arguments.delta"]
saw["streamed"] = final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
saw["pieces"] = [len(pieces), "".join(one.arguments_delta for one in pieces) == call.function.arguments]
saw["kinds"] = sorted({one.type for one in events})
saw["streamed_end"] = [final.choices[0].finish_reason, final.usage.completion_tokens == whole.usage.completion_tokens]
counts = [one.chunk.usage.completion_tokens for one in events if one.type == "chunk" and one.chunk.usage]
saw["counts"] = [len(counts), counts == sorted(counts), counts[-1] == final.usage.completion_tokens]

# The result goes back, and the model answers with it in view.
said = whole.choices[0].message.model_dump(exclude_none=True, include={"role", "tool_calls"})
for one in said["tool_calls"]:
    one["function"].pop("parsed_arguments")
result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
second = client.chat.completions.create(**(asked | {"messages": [*ask, said, result], "max_tokens": 12}))
saw["second"] = [second.choices[0].message.role, second.usage.prompt_tokens > whole.usage.prompt_tokens]

# What the model writes by itself is read: here it is held to writing a call, and nothing demands one.
text = r'<tool_call>\n\{"name": "Weather", "arguments": \{"city": "[A-Z][a-z]{2,7}", "unit": "C"\}\}\n</tool_call>'
auto = client.chat.completions.create(
    **asked, tool_choice="auto", extra_body={"structured_outputs": {"regex": text}}
).choices[0]
saw["auto"] = [auto.finish_reason, auto.message.tool_calls[0].function.name, auto.message.content]
saw["auto_city"] = json.loads(auto.message.tool_calls[0].function.arguments)["city"]
none = client.chat.completions.create(**(asked | {"max_tokens": 8}), tool_choice="none").choices[0]
saw["none"] = [none.finish_reason, none.message.tool_calls]

# The same over /v1/responses.
flat = {"type": "function", "name": "Weather", "parameters": weather["function"]["parameters"], "strict": True}
tools = {"tools": [flat], "tool_choice": {"type": "function", "name": "Weather"}}
responding = {"model": model, "input": ask, "max_output_tokens": 120, "temperature": 0}
response = client.responses.create(**responding, **tools)
(item,) = response.output
saw["item"] = [item.type, item.name, json.loads(item.arguments), response.status]
with client.responses.stream(**responding, **tools) as stream:
    kinds = [event.type for event in stream]
    ended = stream.get_final_response()
saw["item_streamed"] = ended.output[0].arguments == item.arguments
saw["item_kinds"] = [kinds[0], kinds[-1], kinds.count("response.function_call_arguments.done")]
output = {"type": "function_call_output", "call_id": item.call_id, "output": "21 degrees"}
again = client.responses.create(
    **(responding | {"input": [*ask, item.model_dump(exclude_none=True), output], "max_output_tokens": 12}),
    tools=[flat],
)
saw["answered"] = [again.status, again.usage.input_tokens > response.usage.input_tokens, bool(again.output_text)]
saw["typed"] = sorted(client.responses.parse(**responding, text_format=Sky).output_parsed.model_dump())
try:
    client.responses.create(model=model, input="x", store=True)
except openai.BadRequestError as error:
    saw["refused"] = [error.param, error.code]
try:
    client.responses.create(model=model, input="x", reasoning={"effort": "low"})
except openai.BadRequestError as error:
    saw["effort"] = error.param
print(json.dumps(saw))
