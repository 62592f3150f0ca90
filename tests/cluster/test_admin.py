"""The admin surface of a cluster of fakes, in this process: what it tells, does and refuses."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from cluster.admin import ORDERS, AdminServer, Drain, Scale, Status
from cluster.admin_client import AdminClient, NotRunning
from cluster.admin_proof import CODE_HEADER, NONCE_HEADER, answer_code, new_nonce, request_code
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.leftovers import descendants
from cluster.processes.process_launcher import ProcessChild
from cluster.processes.slots import SlotState
from cluster.processes.spec import LaunchError, OrderLateError, Sealed
from cluster.processes.supervisor import RestartConfig
from cluster.resolve import Setting
from cluster.rundir import RunDir
from engine.handshake import Keyring
from engine.messages import RankUse
from router.status.traffic import Traffic
from tests.cluster.cli.test_top import OVERVIEW
from tests.cluster.processes.test_launchers import CONFIG, FAKES, eventually

SETTINGS = (Setting("model", "", "default"), Setting("router.namespace_key", "hush", "file x"))


class Served:
    """A cluster of fakes with its admin surface, watched by a thread."""

    def __init__(self, folder: Path, factories: dict[str, str] = FAKES) -> None:
        self.config = msgspec.structs.replace(
            CONFIG,
            run_dir=str(folder / "run"),
            decode_workers=2,
            restart=RestartConfig(limit=3, first_pause_s=0.05),
        )
        self.rundir = RunDir(self.config, {})
        self.ended = threading.Event()
        self.cluster = Cluster(self.config, make_launcher("process"), factories, model_dir="x")
        self.admin = AdminServer(self.cluster, self.rundir, SETTINGS, "process", self.ended.set)
        self.client = AdminClient(self.rundir)


def signed(
    served: Served, method: str, path: str, content: bytes = b"", changed: dict[str, str] | None = None
) -> httpx.Response:
    """Ask as the client does, but for what is `changed`: method, path, nonce, or the secret as hexadecimal digits."""
    changed = changed or {}
    nonce = changed.get("nonce", new_nonce())
    secret = bytes.fromhex(changed.get("secret", served.cluster.keys.valid()[0].hex()))
    code = request_code(secret, changed.get("method", method), changed.get("path", path), nonce, content)
    transport = httpx.HTTPTransport(uds=str(served.rundir.socket))
    with httpx.Client(transport=transport, base_url="http://x", timeout=60) as http:
        headers = {NONCE_HEADER: nonce, CODE_HEADER: code}
        body = changed["content"].encode() if "content" in changed else content
        return http.request(method, path, content=body, headers=headers)


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    before = descendants()
    one = Served(tmp_path, getattr(request, "param", FAKES))
    with one.rundir.hold():
        one.admin.start()
        try:
            with one.cluster:
                one.admin.ready(one.cluster.start())
                watching = threading.Thread(target=one.cluster.watch, args=(one.ended,))
                watching.start()
                try:
                    with one.client:
                        yield one
                finally:
                    one.ended.set()
                    watching.join()
        finally:
            one.admin.stop()
    assert not one.rundir.socket.exists()
    assert eventually(lambda: set(descendants()) <= set(before), 5.0)


def test_status_tells_who_runs_and_who_died(served: Served) -> None:
    """Guards against an operator who cannot see that a worker dies again and again, or what of."""
    status = served.client.status()
    assert (status.state, status.pid, status.launcher) == ("running", os.getpid(), "process")
    assert status.grpc == served.cluster.router.address
    assert [one.name for one in status.processes] == ["prefill-0", "decode-0", "decode-1", "router"]
    assert all(one.state == "up" and one.pid for one in status.processes)
    before = {one.name: one for one in status.processes}["decode-1"]
    os.kill(before.pid, signal.SIGKILL)

    def again() -> bool:
        now = {one.name: one for one in served.client.status().processes}["decode-1"]
        return now.state == "up" and now.pid != before.pid and now.deaths == 1

    assert eventually(again, 20.0)
    now = {one.name: one for one in served.client.status().processes}["decode-1"]
    assert now.why == "killed by SIGKILL" and now.incarnation != before.incarnation


def test_ranks_of_a_worker_that_has_died_are_told_no_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards pids that mean nobody, or somebody else by now: a slot's latest process is told on, its ranks are not."""
    ranks = [RankUse(11, 1), RankUse(12, 1)]
    known = {name: msgspec.structs.replace(up, ranks=ranks) for name, up in served.cluster.processes().items()}
    monkeypatch.setattr(served.cluster, "processes", lambda: known)
    slots = served.cluster.slots()
    for state in SlotState:
        changed = [msgspec.structs.replace(one, state=state) for one in slots]
        monkeypatch.setattr(served.cluster, "slots", lambda changed=changed: changed)
        told = {one.name: one for one in served.admin.status().processes}["decode-1"]
        assert told.pid == known["decode-1"].pid
        assert told.ranks == (ranks if state in (SlotState.UP, SlotState.LEAVING) else []), state


def test_pools_are_scaled_and_workers_drained(served: Served) -> None:
    """Guards against an order that is answered before it is done, and against a pool that grows back."""

    def names(kind: str) -> list[str]:
        return [p.name for p in served.client.status().processes if p.kind == kind]

    told = served.client.scale(Scale(prefill=2, decode=3))
    assert {p.name for p in told.processes} >= {"prefill-1", "decode-2"}
    assert all(p.state == "up" for p in told.processes) and len(told.processes) == 6
    served.client.scale(Scale(decode=1))
    assert names("decode") == ["decode-0"] and names("prefill") == ["prefill-0", "prefill-1"]
    served.client.drain(Drain("prefill-0"))
    assert names("prefill") == ["prefill-1"]
    served.client.scale(Scale(prefill=2))
    assert sorted(names("prefill")) == ["prefill-0", "prefill-1"]
    pid = served.cluster.workers["decode-0"].pid
    served.client.drain(Drain("decode-0", replace=True))
    assert served.cluster.workers["decode-0"].pid != pid and names("decode") == ["decode-0"]


def test_what_would_empty_a_pool_is_refused(served: Served) -> None:
    served.client.scale(Scale(decode=1))
    with pytest.raises(LaunchError, match="decode-0 is the last decode worker"):
        served.client.drain(Drain("decode-0"))
    with pytest.raises(LaunchError, match="the decode pool has at least one worker"):
        served.client.scale(Scale(decode=0))
    with pytest.raises(LaunchError, match="there is no worker decode-7"):
        served.client.drain(Drain("decode-7"))
    with pytest.raises(LaunchError, match="there is no worker router"):
        served.client.drain(Drain("router"))
    assert all(one.state == "up" for one in served.client.status().processes)


def test_what_no_command_line_has_checked_is_bounded(served: Served) -> None:
    """Guards against a script that posts a slip of the keyboard, and starts a million processes, or half an order."""
    before = served.client.status().processes
    with pytest.raises(LaunchError, match="1025"):
        served.client.scale(Scale(prefill=2, decode=1025))
    with pytest.raises(LaunchError, match="at least one worker"):
        served.client.scale(Scale(prefill=2, decode=-1))
    for timeout_s in (0.0, -1.0, 1e308):
        with pytest.raises(LaunchError, match="timeout_s"):
            served.client.scale(Scale(prefill=2, timeout_s=timeout_s))
        with pytest.raises(LaunchError, match="timeout_s"):
            served.client.drain(Drain("decode-1", timeout_s=timeout_s))
    assert served.client.status().processes == before


def test_both_pools_have_the_time_of_one_order(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `scale --timeout`, which would wait twice as long where it names two pools."""
    given: list[float | None] = []

    def scale(kind: str, count: int, timeout_s: float | None) -> None:
        given.append(timeout_s)
        time.sleep(0.05)

    monkeypatch.setattr(served.cluster, "scale", scale)
    served.client.scale(Scale(prefill=1, decode=2, timeout_s=9.0))
    served.client.scale(Scale(prefill=1, decode=2))
    first, second, *others = given
    assert first is not None and second is not None and others == [None, None]
    assert 8.9 < first <= 9.0 and second <= first - 0.05


def test_the_second_pool_is_ordered_when_the_first_takes_too_long(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `scale prefill=2 decode=3 --timeout 1`: what was asked for goes on, of both pools."""
    given: list[str] = []

    def scale(kind: str, count: int, timeout_s: float | None) -> None:
        given.append(f"{kind}={count}")
        raise OrderLateError(f"{kind}={count}: not done in {timeout_s:g} s")

    monkeypatch.setattr(served.cluster, "scale", scale)
    with pytest.raises(LaunchError, match=r"prefill=2, decode=3: not done in 1 s"):
        served.client.scale(Scale(prefill=2, decode=3, timeout_s=1.0))
    assert given == ["prefill=2", "decode=3"]


class Frozen:
    """A supervisor that answers `answers` questions about its status, and then nothing."""

    def __init__(self, folder: Path, answers: int) -> None:
        self.rundir = RunDir(msgspec.structs.replace(CONFIG, run_dir=str(folder / "run")), {})
        self.asked: list[str] = []
        self.answers = answers
        self.listener = socket.socket(socket.AF_UNIX)

    def listen(self) -> None:
        self.rundir.entrust((bytes(32),))
        self.listener.bind(str(self.rundir.socket))
        self.listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        told = msgspec.json.encode(Status(name="x", state="running", pid=1, launcher="process", model="x", up_s=1.0))
        with suppress(OSError), ExitStack() as kept:
            connection, _ = self.listener.accept()
            kept.enter_context(connection)
            while heard := connection.recv(1 << 16).decode():
                if " HTTP/1.1" in heard:  # what comes behind it is a body
                    self.asked.append(heard.split()[1])
                if len(self.asked) > self.answers:
                    continue
                headers = dict(line.lower().split(": ", 1) for line in heard.split("\r\n") if ": " in line)
                code = answer_code(bytes(32), headers[NONCE_HEADER.lower()], 200, told)
                head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(told)}\r\n{CODE_HEADER}: {code}\r\n\r\n"
                connection.sendall(head.encode() + told)


@pytest.fixture
def frozen(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Frozen]:
    one = Frozen(tmp_path, request.param)
    with one.rundir.hold(), one.listener:
        one.listen()
        yield one


@pytest.mark.parametrize("frozen", [0], indirect=True)
@pytest.mark.parametrize(
    "order",
    [
        lambda client: client.drain(Drain("decode-1")),
        lambda client: client.scale(Scale(decode=2)),
        lambda client: client.scale(Scale(decode=2, timeout_s=0.3)),
        lambda client: client.rotate(),
    ],
    ids=["drain", "scale", "timeout", "rotate"],
)
def test_a_frozen_supervisor_is_named_and_given_no_order(
    frozen: Frozen, order: Callable[[AdminClient], object]
) -> None:
    """Guards against a verb that waits for ever, and an order that is carried out when nobody wants it any more."""
    with AdminClient(frozen.rundir, quick_s=0.2) as client, pytest.raises(LaunchError, match="did not answer in"):
        order(client)
    assert eventually(lambda: frozen.asked == ["/status"], 5.0)


@pytest.mark.parametrize("frozen", [1], indirect=True)
def test_an_order_with_a_time_is_not_waited_for_longer(frozen: Frozen) -> None:
    """Guards `--timeout` where the supervisor freezes once it has the order."""
    began_s = time.monotonic()
    with AdminClient(frozen.rundir, quick_s=0.3) as client, pytest.raises(LaunchError, match="did not answer in"):
        client.scale(Scale(decode=2, timeout_s=0.3))
    assert eventually(lambda: frozen.asked == ["/status", "/scale"], 5.0)
    assert 0.6 <= time.monotonic() - began_s < 10.0


def test_secrets_stay_here_and_nonsense_is_told(served: Served) -> None:
    """Guards the namespace key, which would let whoever reads it probe other tenants' prefixes."""
    assert served.client.config()["router.namespace_key"] == {"value": "(set)", "origin": "file x"}
    answer = signed(served, "POST", "/scale", b'{"decode": 2, "replicas": 3}')
    assert answer.status_code == 400 and "replicas" in answer.json()["error"]
    assert signed(served, "POST", "/drain", b"not json").status_code == 400
    assert signed(served, "GET", "/drain").status_code == 405
    assert signed(served, "POST", "/drain", bytes(1 << 20)).status_code == 413
    with pytest.raises(LaunchError, match="cannot be asked for 'overview'"):
        served.client.overview()
    with pytest.raises(LaunchError, match="cannot be asked for 'traffic'"):
        served.client.traffic()
    told = served.client.flights("r")
    assert told.flights == [] and "cannot be asked" in told.silent["decode-0"]


def test_processes_that_hang_take_the_time_of_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `trace` and `top` while two processes hang: one after the other they took longer than the verb waits."""
    names = [slot.name for slot in served.cluster.slots()]
    together = threading.Barrier(len(names))

    def ask(name: str, what: str, argument: str = "") -> bytes:
        together.wait(5.0)
        raise LaunchError(f"{name} did not answer {what} of {argument!r}")

    monkeypatch.setattr(served.cluster, "ask", ask)
    assert served.client.flights("r").silent == {name: f"{name} did not answer flights of 'r'" for name in names}


def test_a_router_that_does_not_answer_is_named_beside_what_the_others_say(tmp_path: Path) -> None:
    """Guards `top` and `report disagg`, which took the figures of those routers that answer for those of all."""
    said = {"overview": msgspec.json.encode(OVERVIEW), "traffic": msgspec.json.encode(Traffic(decode_workers=2))}
    silent = {"router-1": "router-1: did not answer in 10 s"}

    def ask(name: str, question: str, about: str) -> bytes:
        if name in silent:
            raise LaunchError(silent[name])
        return said[question]

    names = ["router-0", "router-1"]
    cluster: Any = SimpleNamespace(routers=names, ask=ask, keys=Keyring((bytes(32),)))
    config = msgspec.structs.replace(CONFIG, run_dir=str(tmp_path / "run"))
    admin = AdminServer(cluster, RunDir(config, {}), SETTINGS, "process", lambda: None)
    found = admin.overview()
    assert (found.open, found.silent) == (OVERVIEW.open, silent)
    assert admin.traffic() == Traffic(decode_workers=2, silent=silent)
    silent.clear()
    assert admin.overview().silent == admin.traffic().silent == {}
    silent |= dict.fromkeys(names, "did not answer in 10 s")
    with pytest.raises(LaunchError, match="did not answer in 10 s"):
        admin.overview()


def test_only_this_user_may_ask(served: Served) -> None:
    assert served.rundir.folder.stat().st_mode & 0o077 == 0
    assert served.rundir.secret.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"secret": "00" * 32},
        {"method": "POST"},
        {"path": "/config"},
        {"content": "x"},
        {"nonce": "1.0-aa"},
        {"nonce": "never"},
        {"nonce": "nan-1"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_only_who_has_the_secret_is_answered(served: Served, changed: dict[str, str]) -> None:
    """Guards the admin surface wherever its socket can be reached: a code is of one request, and of now."""
    assert signed(served, "GET", "/status").status_code == 200
    answer = signed(served, "GET", "/status", changed=changed)
    assert answer.status_code == 401 and set(answer.json()) == {"error"}


def test_a_request_that_was_overheard_is_worth_nothing(served: Served) -> None:
    nonce = new_nonce()
    assert signed(served, "GET", "/status", changed={"nonce": nonce}).status_code == 200
    assert signed(served, "GET", "/status", changed={"nonce": nonce}).status_code == 401


def test_who_answers_without_the_secret_is_not_believed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.admin.answer_code", lambda *said: "00")
    with pytest.raises(LaunchError, match="does not have its secret"):
        served.client.status()


KEYED = {kind: "tests.cluster.fakes:KeyedWorker" for kind in ("prefill", "decode")} | {"router": FAKES["router"]}


@pytest.mark.parametrize("served", [KEYED], indirect=True)
def test_a_secret_is_replaced_while_the_cluster_serves(served: Served) -> None:
    """Guards a rotation that leaves somebody behind: workers, those that come later, and the verbs."""

    def known(name: str) -> list[str]:
        return list(msgspec.json.decode(served.cluster.ask(name, "flights"), type=list[str]))

    (old,) = served.cluster.keys.valid()
    told: list[int] = []
    served.cluster.rotate(lambda valid: (told.append(len(valid)), served.rundir.entrust(valid))[1])
    (new,) = served.cluster.keys.valid()
    assert new != old and told == [2, 1], "there must be a time at which both are valid"
    expected = [sha256(new).hexdigest()]
    assert all(known(name) == expected for name in ("prefill-0", "decode-0", "decode-1"))
    assert signed(served, "GET", "/status", changed={"secret": old.hex()}).status_code == 401
    served.client.drain(Drain("decode-1", replace=True))
    assert known("decode-1") == expected
    served.client.rotate()
    assert known("decode-1") != expected and served.client.status().state == "running"


@pytest.mark.parametrize("served", [KEYED], indirect=True)
def test_a_rotation_that_could_not_tell_everybody_is_finished(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a third secret, which leaves who was not told the second one with none that anybody else has."""
    (old,) = served.cluster.keys.valid()
    told: list[tuple[bytes, ...]] = []
    tell = ProcessChild.set_secrets
    with monkeypatch.context() as broken:

        def deaf(self: ProcessChild, secrets: Sealed) -> None:
            if self.spec.name == "decode-0":
                raise LaunchError("decode-0 does not answer")
            tell(self, secrets)

        broken.setattr(ProcessChild, "set_secrets", deaf)
        with pytest.raises(LaunchError, match="decode-0 does not answer"):
            served.cluster.rotate(told.append)
    served.cluster.rotate(told.append)
    (new,) = served.cluster.keys.valid()
    assert told == [(new, old), (new, old), (new,)] and new != old
    for name in ("prefill-0", "decode-0", "decode-1"):
        known = msgspec.json.decode(served.cluster.ask(name, "flights"), type=list[str])
        assert known == [sha256(new).hexdigest()], name


def test_orders_that_wait_keep_no_operator_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `status` and `down` from drains that wait for a worker that does not come back, one behind the other:
    each keeps a thread, though whoever asked for it has long given up."""
    go, answers = threading.Event(), list[httpx.Response]()
    monkeypatch.setattr(served.cluster, "drain", lambda *order, **how: go.wait(60))

    def order() -> None:
        answers.append(signed(served, "POST", "/drain", b'{"worker": "decode-1", "replace": true}'))

    threads = [threading.Thread(target=order) for _ in range(50)]
    for thread in threads:
        thread.start()
    try:
        assert eventually(lambda: len(answers) == 50 - ORDERS, 20.0)
        assert {answer.status_code for answer in answers} == {409}
        assert f"{ORDERS} orders are under way" in answers[0].json()["error"]
        with pytest.raises(LaunchError, match="orders are under way"):
            served.client.rotate()
        assert served.client.status().state == "running"
        assert served.client.down().state == "stopping"
    finally:
        go.set()
        for thread in threads:
            thread.join()
    assert sum(answer.status_code == 200 for answer in answers) == ORDERS
    assert served.client.rotate().state == "stopping"


def test_down_is_asked_for_once_the_caller_has_its_answer(served: Served) -> None:
    assert served.client.down().state == "stopping"
    assert served.ended.is_set()


def test_the_processes_are_written_down(served: Served) -> None:
    """Guards `down` after the supervisor was killed: nobody else knows the pids. Other children of this process, such
    as a resource tracker, are written down as well."""
    wanted = {up.pid: name for name, up in served.cluster.processes().items()}
    wanted[os.getpid()] = "supervisor"

    def noted() -> bool:
        found = {p.pid: p.name for p in served.rundir.processes()}
        return wanted.items() <= found.items() and set(found) <= {*wanted, *descendants()}

    assert len(wanted) == 5 and eventually(noted, 5.0)


def test_nobody_there_is_one_clear_word(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, run_dir=str(tmp_path / "run"))
    with (
        AdminClient(RunDir(config, {})) as client,
        pytest.raises(NotRunning, match="no cluster named 'headrace' runs here"),
    ):
        client.status()


# httpcore 1.0 forgets to close a socket whose connect failed.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_idle_connections_keep_no_operator_out(served: Served) -> None:
    """Guards `down` and `status` from whoever connects to the socket and says nothing."""
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(200)]
        for one in idle:
            assert eventually(lambda one=one: one.connect_ex(str(served.rundir.socket)) == 0, 5.0)
            one.settimeout(10)

        def answered() -> bool:
            with suppress(LaunchError):  # the kernel's own queue is full for a moment
                return served.client.status().state == "running"
            return False

        assert eventually(answered, 10.0)
        assert idle[0].recv(1) == b""
        asked = idle[-1]
        asked.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        asked.shutdown(socket.SHUT_WR)
        assert asked.recv(100).startswith(b"HTTP/1.1 401 "), "it has not proven that it may ask"
