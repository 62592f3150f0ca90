"""A worker or router in a process of its own: `python -m cluster.processes.child NAME`, started by `process_launcher`.

A line protocol on standard input and output, one JSON value a line:

    parent -> child   ChildSpec, then calls: SetWorkers, SetRouters, SetSecrets, IsReady, WhoIsCondemned, Ask,
                      ChildLeave, ChildStop
    child  -> parent  LoadProgress, at most a hundred; ChildStarted or Failed; then a ChildAnswer for each IsReady,
                      SecretsSet for each SetSecrets, Condemned for each WhoIsCondemned, and Told for each Ask, which
                      are answered in any order

The end of standard input means that the parent is gone, however it died: the child then stops by
itself, so a killed parent leaves no orphan. Whatever prints to standard output is sent to standard
error, and cannot break the protocol.
"""

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import BinaryIO

import msgspec

from cluster.processes.hosting import Hosted, one_line
from cluster.processes.spec import ChildReady, ChildSpec, Sealed
from engine.handshake import Keyring
from engine.messages import PeerAddress, guarded
from router.core.escalation import Verdict

ORPHAN_GRACE_S = 2.0


class SetWorkers(msgspec.Struct, frozen=True, tag=True):
    prefill: list[PeerAddress]
    decode: list[PeerAddress]


class SetRouters(msgspec.Struct, frozen=True, tag=True):
    routers: list[PeerAddress]


class SetSecrets(msgspec.Struct, frozen=True, tag=True):
    secrets: Sealed


class IsReady(msgspec.Struct, frozen=True, tag=True):
    pass


class WhoIsCondemned(msgspec.Struct, frozen=True, tag=True):
    pass


class Ask(msgspec.Struct, frozen=True, tag=True):
    number: int
    what: str
    argument: str


class ChildLeave(msgspec.Struct, frozen=True, tag=True):
    """Asks a worker to leave: its process then ends by itself, with status 0."""

    grace_s: float


class ChildStop(msgspec.Struct, frozen=True, tag=True):
    grace_s: float


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of weights that are loaded, and bytes of all."""

    done: int
    total: int


class ChildStarted(msgspec.Struct, frozen=True, tag=True):
    ready: ChildReady


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


class ChildAnswer(msgspec.Struct, frozen=True, tag=True):
    ready: bool


class SecretsSet(msgspec.Struct, frozen=True, tag=True):
    """The answer to `SetSecrets`: what begins from now on is proven with these."""


class Condemned(msgspec.Struct, frozen=True, tag=True):
    verdicts: list[Verdict]


class Told(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ask` of this number, as JSON; or why there is none."""

    number: int
    answer: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


ToChild = SetWorkers | SetRouters | SetSecrets | IsReady | WhoIsCondemned | Ask | ChildLeave | ChildStop
ToParent = LoadProgress | ChildStarted | Failed | ChildAnswer | SecretsSet | Condemned | Told

decode_call = guarded(msgspec.json.Decoder(ToChild).decode)
decode_report = guarded(msgspec.json.Decoder(ToParent).decode)


def encode_line(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record) + b"\n"


class ChildProcess:
    """The child's side: one thread obeys the parent, the main thread waits for the hosted object."""

    def __init__(self, calls: BinaryIO, reports: BinaryIO) -> None:
        self._calls = calls
        self._reports = reports
        self._hosted: Hosted | None = None
        self._stopping = threading.Event()
        self._reporting = threading.Lock()
        self._loaded_percent = 0

    def run(self) -> int:
        """Host what the first line names until it ends. Returns the exit status."""
        spec = msgspec.json.decode(self._calls.readline(), type=ChildSpec)
        try:
            self._keyring = Keyring(spec.secrets.open())
        except ValueError as error:
            self._report(Failed(f"it was not entrusted with the cluster's secret: {error}"))
            return 1
        threading.Thread(target=self._obey, name="parent", daemon=True).start()
        try:
            hosted = Hosted(spec, self._keyring, self._report_load)
            self._hosted = hosted
            ready = hosted.start()
            self._report(ChildStarted(ready))
            hosted.wait()
        except Exception as error:
            if self._stopping.is_set():
                return 0
            logging.getLogger(__name__).debug("%s failed", spec.name, exc_info=True)
            self._report(Failed(one_line(error)))
            if self._hosted is not None:
                self._hosted.stop(0.0)
            return 1
        return 0

    def _obey(self) -> None:
        for line in self._calls:
            try:
                if self._obey_one(decode_call(line)):
                    return
            except Exception as error:
                logging.getLogger(__name__).exception("a call from the parent failed")
                self._report(Failed(f"a call from its parent failed: {one_line(error)}"))
                os._exit(1)
        self._stop(ORPHAN_GRACE_S)

    def _obey_one(self, call: ToChild) -> bool:
        if isinstance(call, ChildStop):
            self._stop(call.grace_s)
            return True
        if isinstance(call, SetSecrets):
            # Also while a worker is still being opened: it will use them.
            self._keyring.replace(call.secrets.open())
            self._report(SecretsSet())
            return False
        hosted = self._hosted
        if hosted is None:
            raise RuntimeError("called before it was started")
        if isinstance(call, SetWorkers):
            hosted.set_workers(call.prefill, call.decode)
        elif isinstance(call, SetRouters):
            hosted.set_routers(call.routers)
        elif isinstance(call, ChildLeave):
            hosted.leave(call.grace_s)
        elif isinstance(call, WhoIsCondemned):
            self._report(Condemned(hosted.condemned()))
        elif isinstance(call, Ask):
            # In a thread of its own: who is slow to answer a person still hears its supervisor.
            threading.Thread(target=self._tell, args=(hosted, call), daemon=True).start()
        else:
            self._report(ChildAnswer(hosted.ready()))
        return False

    def _tell(self, hosted: Hosted, call: Ask) -> None:
        try:
            told = Told(call.number, msgspec.Raw(hosted.ask(call.what, call.argument)))
        except Exception as error:
            told = Told(call.number, error=one_line(error))
        self._report(told)

    def _stop(self, grace_s: float) -> None:
        self._stopping.set()
        # Whatever hangs while stopping must not keep the process: the parent may be dead already.
        last_resort = threading.Timer(grace_s + 1.0, os._exit, args=(1,))
        last_resort.daemon = True
        last_resort.start()
        if self._hosted is None:
            os._exit(0)
        self._hosted.stop(grace_s)

    def _report_load(self, done: int, total: int) -> None:
        """Report the bytes loaded at every hundredth."""
        percent = 100 * done // max(1, total)
        if percent > self._loaded_percent:
            self._loaded_percent = percent
            self._report(LoadProgress(done, total))

    def _report(self, record: ToParent) -> None:
        try:
            with self._reporting:
                self._reports.write(encode_line(record))
                self._reports.flush()
        except BrokenPipeError:
            self._stopping.set()


def main() -> int:
    # The terminal's Ctrl-C reaches the whole group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls = os.fdopen(os.dup(0), "rb")
    reports = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return ChildProcess(calls, reports).run()


if __name__ == "__main__":
    status = main()
    with suppress(OSError):  # its log's disk may be full
        sys.stderr.flush()
    # Libraries' exit hooks may wait for threads that have nothing left to say.
    os._exit(status)
