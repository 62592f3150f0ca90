"""Several prompts as one: each is a request of its own, and their events become those of one answer.

The choices go by prompt, then by sample. One request that fails, or is refused, fails all; leaving ends all.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from router.front.api import ApiError, Delta, Finished, GenerateCall, GenerateEvent, Started

Generate = Callable[[GenerateCall], AsyncGenerator[GenerateEvent, None]]


async def generate_all(generate: Generate, calls: Sequence[GenerateCall]) -> AsyncGenerator[GenerateEvent, None]:
    """Yield what `generate` yields for one call: Started of all, deltas, Finished of every sample. Raises ApiError."""
    # What is kept is bounded by what the calls may write.
    said: asyncio.Queue[tuple[int, GenerateEvent | Exception]] = asyncio.Queue()

    async def run(at: int, call: GenerateCall) -> None:
        try:
            async with aclosing(generate(call)) as events:
                async for event in events:
                    said.put_nowait((at, event))
        except Exception as error:
            said.put_nowait((at, error))

    tasks = [asyncio.create_task(run(at, call)) for at, call in enumerate(calls)]
    starts: dict[int, Started] = {}
    held: list[tuple[int, Delta | Finished]] = []
    left = sum(call.n for call in calls)
    try:
        while left:
            at, event = await said.get()
            if isinstance(event, Exception):
                raise _numbered(event, at) if isinstance(event, ApiError) and len(calls) > 1 else event
            if isinstance(event, Started):
                starts[at] = event
                if len(starts) < len(calls):
                    continue
                yield _merged([starts[number] for number in range(len(calls))])
            else:
                held.append((at, event))
            if len(starts) == len(calls):
                for one, item in held:
                    left -= isinstance(item, Finished)
                    yield msgspec.structs.replace(item, sample=one * calls[0].n + item.sample)
                held.clear()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _numbered(error: ApiError, at: int) -> ApiError:
    """Return the error of a prompt with its place among the others."""
    name = error.field.partition("[")[0]
    if name not in ("prompt", "token_ids"):
        return error
    field = f"prompt[{at}]{error.field[len(name) :]}"
    message = f"{field}: {error.message.removeprefix(f'{error.field}: ')}"
    return ApiError(error.code, message, field, retry_after_s=error.retry_after_s)


def _merged(starts: Sequence[Started]) -> Started:
    return msgspec.structs.replace(
        starts[0],
        prompt_tokens=sum(start.prompt_tokens for start in starts),
        samples=sum(start.samples for start in starts),
        prompt_ids=tuple([ids for start in starts for ids in start.prompt_ids]),
    )
