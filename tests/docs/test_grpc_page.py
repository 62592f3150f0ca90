"""docs/grpc.md: its commands, typed beside a router with stand-ins for its workers."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from router.app import RouterApp
from router.config import RouterConfig
from router.status.observer import NullObserver
from tests.docs.test_commands import everything
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS

BIN = Path(sys.executable).parent
HERE = "tests/docs/test_grpc_page.py"


@pytest.mark.skipif(not shutil.which("buf", path=str(BIN)), reason="needs buf (PyPI: buf-bin, in the extra `dev`)")
def test_what_is_typed_is_answered(tmp_path: Path) -> None:
    """Guards the page against options that buf no longer has, and the server against reflection that it cannot read."""
    (block,) = [b for b in everything() if b.page == "docs/grpc.md" and b.mark == f"run by: {HERE}"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def go() -> tuple[int | None, str, str]:
        app = RouterApp(RouterConfig(grpc_port=port, http_port=-1), ByteText(), NullObserver(), SECRETS)
        workers = FakeWorkers()
        try:
            await app.start()
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            await asyncio.sleep(0.1)  # health follows readiness by a tick
            typed = await asyncio.create_subprocess_exec(
                *("bash", "-ec", block.text.replace("50051", str(port))),
                env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            async with asyncio.timeout(60):
                out, err = await typed.communicate()
            return typed.returncode, out.decode(), err.decode()
        finally:
            await app.stop(0.0)
            await workers.stop()

    code, out, err = asyncio.run(go())
    assert code == 0, err
    for told in ("headrace.v1.Headrace/Detokenize", '"FINISH_REASON_LENGTH"', '"contextTokens": "512"', '"SERVING"'):
        assert told in out
