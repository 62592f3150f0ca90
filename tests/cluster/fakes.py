"""Workers and routers with the shape of the real ones and nothing inside, for the launchers' tests."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from engine.handshake import Keyring, Secrets
from engine.messages import PeerAddress, WorkerInfo
from engine.model.config import Progress
from engine.types import Incarnation
from router.config import RouterConfig
from router.core.escalation import Verdict

NO_SECRETS = Keyring((bytes(32),))


class RouterAddresses(msgspec.Struct, frozen=True):
    grpc: str
    http: str
    own: str = ""


class FakeWorker:
    def __init__(
        self,
        name: str,
        config: object,
        host: str = "127.0.0.1",
        port: int = 0,
        secrets: Secrets = NO_SECRETS,
        progress: Progress | None = None,
    ) -> None:
        self.name = name
        self.secrets = secrets
        self.host = host
        self.progress = progress
        self.stopped = threading.Event()

    def start(self) -> WorkerInfo:
        print("a stray line on standard output")
        return WorkerInfo(
            name=self.name,
            role="prefill",
            incarnation=Incarnation(os.getpid()),
            # The threads that the process was given, where a test can read them.
            address=f"{self.host}:{os.environ['OMP_NUM_THREADS']}",
            model="fake",
            fingerprint="",
            block_size=16,
            blocks=1,
            context_tokens=1,
            pid=os.getpid(),
            host="here",
        )

    def wait(self) -> None:
        self.stopped.wait()

    def leave(self, grace_s: float) -> None:
        self.stopped.set()

    def stop(self, grace_s: float = 5.0) -> None:
        self.stopped.set()


class KeyedWorker(FakeWorker):
    """A worker that tells which secrets it has, where one asks for its timelines."""

    def flights(self, request: str) -> list[str]:
        return [sha256(secret).hexdigest() for secret in self.secrets.valid()]


class LoadingWorker(FakeWorker):
    """A worker that says that it loads 40 bytes, and takes half a second for each half."""

    def start(self) -> WorkerInfo:
        assert self.progress is not None
        for done in (20, 40):
            self.progress(done, 40)
            time.sleep(0.5)
        return super().start()


class FailingWorker(FakeWorker):
    def start(self) -> WorkerInfo:
        raise OSError("no such\nmodel file: /nowhere")


class SlowWorker(FakeWorker):
    def start(self) -> WorkerInfo:
        time.sleep(60)
        return super().start()


class DyingWorker(FakeWorker):
    """A worker whose engine thread dies a moment after the start."""

    def wait(self) -> None:
        time.sleep(0.7)
        raise RuntimeError("block 7 is owned twice")


class KilledWorker(FakeWorker):
    """A worker whose process is killed a moment after the start."""

    def wait(self) -> None:
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGKILL)


class SilentWorker(FakeWorker):
    """A worker whose pipes are closed some time before its process is gone, as with a large core dump."""

    def start(self) -> WorkerInfo:
        os.closerange(3, 256)
        time.sleep(0.4)
        os._exit(7)


class NamelessWorker(FakeWorker):
    """A worker that writes half a report, and is killed by a signal without a name."""

    def start(self) -> WorkerInfo:
        for number in range(3, 256):
            with suppress(OSError):
                os.write(number, b'{"type":"ChildSta')
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
        return super().start()


class StubbornWorker(FakeWorker):
    def stop(self, grace_s: float = 5.0) -> None:
        time.sleep(60)


class ClingingWorker(FakeWorker):
    """A worker that stays when it is asked to leave."""

    def leave(self, grace_s: float) -> None:
        pass


class FakeRouter:
    """A router that is ready once it has been told its workers; binds its gRPC port as a real one does."""

    def __init__(self, config: RouterConfig, model_dir: str, secrets: Secrets) -> None:
        self.config = config
        self.workers: list[PeerAddress] | None = None
        self.stopped = threading.Event()
        self.listener = socket.socket()

    def start(self) -> RouterAddresses:
        try:
            self.listener.bind((self.config.host, self.config.grpc_port))
        except OSError as error:
            raise OSError(f"port {self.config.grpc_port} is in use") from error
        self.listener.listen()
        host, port = self.listener.getsockname()
        return RouterAddresses(f"{host}:{port}", "")

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        if not all(isinstance(peer, PeerAddress) for peer in prefill + decode):
            raise TypeError("peers must be PeerAddress records")
        self.workers = prefill + decode

    def ready(self) -> bool:
        return bool(self.workers)

    def condemned(self) -> tuple[Verdict, ...]:
        return ()

    def wait(self) -> None:
        self.stopped.wait()

    def stop(self, grace_s: float = 5.0) -> None:
        self.stopped.set()
        self.listener.close()


class AccusingRouter(FakeRouter):
    """A router that gives up the life that the file `ACCUSED_FILE` names, as `NAME:INCARNATION`, from when it exists.
    """

    def condemned(self) -> tuple[Verdict, ...]:
        file = Path(os.environ["ACCUSED_FILE"])
        if not file.exists():
            return ()
        name, _, incarnation = file.read_text().partition(":")
        return (Verdict(name, Incarnation(int(incarnation)), "a test says so"),)
