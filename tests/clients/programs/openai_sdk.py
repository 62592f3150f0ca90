"""OpenAI's own client against a front: `python openai_sdk.py URL`. Writes one JSON object of what it saw."""

import json
import sys
from typing import Literal

import openai
from openai import OpenAI
from pydantic import BaseModel

HI = [{"role": "user", "content": "Why is the sky blue?"}]


class Sky(BaseModel):
    color: Literal["blue", "red"]
    is_high: bool


def refused(kind: type[openai.APIStatusError], client: OpenAI, **fields: object) -> list[object]:
    """The status and the field at fault of a request that must be refused, as the client sees them."""
    try:
        client.chat.completions.create(**({"model": model, "messages": HI} | fields))
    except kind as error:
        return [error.status_code, error.param, error.code]
    raise AssertionError(f"{fields} was not refused as {kind.__name__}")


client = OpenAI(base_url=f"{sys.argv[1]}v1", api_key="none", max_retries=0, timeout=120)
model = client.models.list().data[0].id
saw: dict[str, object] = {"model": model, "retrieved": client.models.retrieve(model).id}

greedy = {"model": model, "messages": HI, "max_tokens": 12, "temperature": 0}
whole = client.chat.completions.create(**greedy)
saw["whole"] = whole.choices[0].message.content
saw["usage"] = whole.usage.model_dump(exclude_none=True)
saw["finish"] = whole.choices[0].finish_reason

chunks = list(client.chat.completions.create(**greedy, stream=True, stream_options={"include_usage": True}))
saw["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
saw["streamed_usage"] = chunks[-1].usage.model_dump(exclude_none=True)
saw["cached"] = chunks[-1].usage.prompt_tokens_details.cached_tokens

# The helper refuses an answer that the limit cut off.
ended = greedy | {"max_tokens": 200, "stop": ["."]}
with client.chat.completions.stream(**ended) as stream:
    kinds = [event.type for event in stream]
    typed = stream.get_final_completion().choices[0].message.content
saw["typed"] = typed == client.chat.completions.create(**ended).choices[0].message.content
saw["kinds"] = sorted(set(kinds))

text = client.completions.create(model=model, prompt="One, two, three,", max_tokens=4, temperature=0)
saw["text"] = text.choices[0].text
saw["samples"] = len(client.chat.completions.create(**greedy, n=2).choices)

likely = client.chat.completions.create(**greedy, logprobs=True, top_logprobs=2).choices[0].logprobs.content
saw["logprobs"] = [len(likely), max(one.logprob for one in likely), {len(one.top_logprobs) for one in likely} == {2}]
saw["likely_text"] = "".join(one.token for one in likely)

parsed = client.chat.completions.parse(**(greedy | {"max_tokens": 60}), response_format=Sky)
saw["parsed"] = parsed.choices[0].message.parsed.model_dump()

saw["errors"] = [
    refused(openai.BadRequestError, client, temperature=9),
    refused(openai.BadRequestError, client, extra_body={"max_tokenz": 5}),
    refused(openai.BadRequestError, client, extra_body={"store": True}),
    refused(openai.NotFoundError, client, model="gpt-x"),
]
print(json.dumps(saw))
