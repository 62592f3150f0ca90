"""A headless Chromium, driven by its DevTools protocol over two pipes: no driver, no socket, no package of ours."""

import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MISSING = f"no Chromium here (one of {', '.join(NAMES)})"
LIMIT_S = 60.0
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    # Its sandbox wants rights that a container or root's account does not have; it only ever sees our own page.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "about:blank",
)


def chromium() -> str | None:
    """Return the path of one, if there is any."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process, with as many tabs as are opened. Mutable state: the numbers of calls, the bytes of a message that is
    not complete, and what each tab has been told without having asked."""

    def __init__(self, program: str, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        # Above the two numbers at which it looks for them.
        read_end, write_end = (_above(end) for end in (ours[0], theirs[1]))
        actions = [(os.POSIX_SPAWN_DUP2, read_end, 3), (os.POSIX_SPAWN_DUP2, write_end, 4)]
        log = os.open(folder / "browser.log", os.O_WRONLY | os.O_CREAT)
        actions += [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        command = [program, *_FLAGS[:-1], f"--user-data-dir={folder / 'profile'}", _FLAGS[-1]]
        environment = {**os.environ, "HOME": str(folder)}
        self._pid = os.posix_spawn(program, command, environment, file_actions=actions, setpgroup=0)
        for end in (read_end, write_end, log):
            os.close(end)
        self._out, self._in = ours[1], theirs[0]
        self._number = 0
        self._rest = b""
        self.told: dict[str, list[dict[str, Any]]] = {}

    def call(self, method: str, session: str = "", **params: object) -> dict[str, Any]:
        """Return the result of a command. Raises AssertionError if it fails."""
        self._number += 1
        number = self._number
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(LIMIT_S)
            assert answer is not None, f"{method} was not answered"
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def listen(self, seconds: float) -> None:
        """Take in what tabs are told for so long."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._receive(left_s)

    def open(self, url: str, *, scheme: str = "light", width: int = 900, height: int = 700) -> "Tab":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.told[session] = []
        tab = Tab(self, session)
        for domain in ("Runtime", "Log", "Network", "Page"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        tab.call("Page.navigate", url=url)
        tab.until("document.readyState === 'complete'")
        return tab

    def close(self) -> None:
        for end in (self._out, self._in):
            os.close(end)
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                break
            time.sleep(0.05)
        else:
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def _receive(self, limit_s: float) -> dict[str, Any] | None:
        """Return the next message, if one comes in time; what a tab was told is also kept."""
        end_s = time.monotonic() + limit_s
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end_s - time.monotonic()))[0]:
                return None
            got = os.read(self._in, 1 << 20)
            assert got, "the browser has ended"
            self._rest += got
        whole, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        if "method" in message and message.get("sessionId") in self.told:
            self.told[message["sessionId"]].append(message)
        return message


class Tab:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: object) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """Return the value of an expression. Raises AssertionError if it throws."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, script: str, limit_s: float = LIMIT_S) -> None:
        """Wait until an expression is true."""
        end_s = time.monotonic() + limit_s
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end_s, f"never true: {script}; the page: {self.run('document.body.innerText')}"
            self._browser.listen(0.03)

    def text(self, selector: str) -> str:
        found: str = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def type(self, text: str) -> None:
        """Type into what has the focus, as a keyboard would; a line's end is the Enter key."""
        for part in text.splitlines(keepends=True):
            if words := part.rstrip("\n"):
                self.call("Input.insertText", text=words)
            if part.endswith("\n"):
                key: dict[str, Any] = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
                self.call("Input.dispatchKeyEvent", type="keyDown", **key)
                self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def told(self, method: str) -> list[dict[str, Any]]:
        """Return what came unasked, of one kind."""
        return [one["params"] for one in self._browser.told[self._session] if one["method"] == method]

    def complaints(self) -> list[object]:
        """Return exceptions, and errors on the console: breaches of the page's policy are among them."""
        thrown = [one["exceptionDetails"] for one in self.told("Runtime.exceptionThrown")]
        return [*thrown, *(one["entry"] for one in self.told("Log.entryAdded") if one["entry"]["level"] == "error")]


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    program = chromium()
    assert program is not None, MISSING
    browser = Browser(program, folder)
    try:
        yield browser
    finally:
        browser.close()


def _above(end: int) -> int:
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return moved
