"""The router's streams to its workers: how their tasks end. What travels on them is tried in `test_server.py` and, with
real processes, in `tests/chaos`."""

import asyncio

import pytest

from router.dispatch import _end


def test_who_is_cancelled_while_a_task_ends_hears_of_it() -> None:
    """Guards a link to a lost worker: its stream broke, it waited for its writer to end, and was told to end itself. It
    took that for the writer's end, dialled again, and whoever had told it waited for ever."""

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            await asyncio.sleep(0.01)

    async def body() -> None:
        writer = asyncio.create_task(slow_to_end())
        await asyncio.sleep(0)
        link = asyncio.create_task(_end(writer))
        await asyncio.sleep(0)
        link.cancel()
        with pytest.raises(asyncio.CancelledError):
            await link
        await asyncio.wait([writer])
        assert writer.cancelled()

    asyncio.run(body())


def test_what_a_task_failed_of_is_raised_when_it_ends() -> None:
    async def failing() -> None:
        try:
            await asyncio.sleep(10.0)
        except asyncio.CancelledError:
            raise ValueError("it failed") from None

    async def body() -> None:
        task = asyncio.create_task(failing())
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="it failed"):
            await _end(task)

    asyncio.run(body())
