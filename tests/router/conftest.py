"""What the tests of the router share."""

import asyncio
from collections.abc import Iterator

import pytest
import uvicorn.server


class _BriskAsyncio:
    """asyncio, whose `sleep` is a tenth as long."""

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@pytest.fixture(scope="package", autouse=True)
def uvicorn_ends_at_once() -> Iterator[None]:
    """uvicorn looks every 0.1 s whether it shall end, and then whether its connections have: 0.3 s of each test."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(uvicorn.server, "asyncio", _BriskAsyncio())
        yield
