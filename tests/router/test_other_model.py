"""A worker that serves another model than the one whose tokenizer the router has."""

import asyncio
import logging
from pathlib import Path

import pytest

from engine.model.config import ModelConfig
from engine.text.bundle import fingerprint
from router.app import RouterApp
from router.config import RouterConfig
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS

OURS = "0123abcd"


def test_it_is_refused_at_its_first_word_and_taken_when_it_is_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against answers that are made of other words: nothing is placed on such a worker, who knows both models is
    told so once, and the life that comes after it under its name is taken."""

    async def body() -> None:
        workers = FakeWorkers()
        workers.fingerprint = "4567cdef/float32"
        app = RouterApp(
            RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS, fingerprint=OURS
        )
        try:
            await app.start()
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(lambda: len(_refusals(caplog)) == 2)
            await asyncio.sleep(2.5)  # it is dialled again meanwhile
            assert len(list(app.hub.core.registry)) == 0 and not app.hub.ready()
            assert {record.args[0] for record in _refusals(caplog)} == {"d0", "p0"}  # type: ignore[index]
            assert len(_refusals(caplog)) == 2, "said once, not with every attempt"
            for record in _refusals(caplog):
                assert "prepared as 4567cdef" in record.getMessage() and OURS in record.getMessage()
            workers.fingerprint = f"{OURS}/float32"
            await until(app.hub.ready)
        finally:
            await app.stop(0.0)
            await workers.stop()

    with caplog.at_level(logging.ERROR, "router.dispatch"):
        asyncio.run(body())


def test_the_first_that_fits_says_which_weights_are_meant(caplog: pytest.LogCaptureFixture) -> None:
    """Guards a router on a host that has not loaded the weights: it knows all of the model but them, takes the first
    worker that fits, and then none with other weights."""

    async def body() -> None:
        first, second = FakeWorkers(), FakeWorkers()
        first.fingerprint, second.fingerprint = f"{OURS}-aa/float32", f"{OURS}-bb/float32"
        app = RouterApp(
            RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS, fingerprint=OURS
        )
        try:
            await app.start()
            await first.start()
            await app.set_workers(*first.peers)
            await until(app.hub.ready)
            await first.stop()
            await second.start()
            await app.set_workers(*second.peers)
            await until(lambda: len(_refusals(caplog)) == 2)
            assert not app.hub.ready()
            assert all(f"prepared as {OURS}-bb" in r.getMessage() for r in _refusals(caplog))
        finally:
            await app.stop(0.0)
            await first.stop()
            await second.stop()

    with caplog.at_level(logging.ERROR, "router.dispatch"):
        asyncio.run(body())


def _refusals(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "is refused" in record.getMessage()]


def test_the_fingerprint_is_the_prepared_models(demo_model: Path) -> None:
    """Guards the other side: what a router compares is what the engine of the same folder says of itself."""
    assert fingerprint(demo_model) == ModelConfig.load(demo_model).fingerprint == demo_model.name
