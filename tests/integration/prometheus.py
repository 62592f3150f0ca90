"""A Prometheus server of a test's own, and what it answers over its HTTP API."""

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

BINARY = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
START_S = 20.0

Points = list[tuple[float, float]]
"""(seconds since 1970, value); values that are no number are left out."""


class Prometheus:
    """Scrapes as `config` says, whose paths are relative to `folder`; its data lie there too."""

    def __init__(self, folder: Path, config: str) -> None:
        assert BINARY is not None
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        (folder / "prometheus.yml").write_text(config)
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                BINARY,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
                # Without this, a query over a range goes back to what a gone series said minutes ago.
                "--query.lookback-delta=15s",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline_s = time.monotonic() + START_S
        while not self._is_ready():
            assert self._process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline_s, "Prometheus does not get ready"
            time.sleep(0.05)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._log.close()

    def get(self, path: str, **parameters: object) -> Any:
        """The data of an answer. Fails with Prometheus' own words."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}?{query}", timeout=30) as got:
                return json.load(got)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def over(
        self, expr: str, start_s: float, end_s: float, step_s: float = 1.0
    ) -> list[tuple[dict[str, str], Points]]:
        """Every series of `expr` within the time, with its labels."""
        result = self.get("/api/v1/query_range", query=expr, start=start_s, end=end_s, step=step_s)[
            "result"
        ]
        return [
            (
                series["metric"],
                [(at, float(v)) for at, v in series["values"] if not math.isnan(float(v))],
            )
            for series in result
        ]

    def value(self, expr: str) -> float:
        """The sum of all series now."""
        result = self.get("/api/v1/query", query=expr)["result"]
        return sum(float(series["value"][1]) for series in result)

    def until(self, expr: str, limit_s: float) -> None:
        """Wait until `expr` has a series. Fails past `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while not self.get("/api/v1/query", query=expr)["result"]:
            assert time.monotonic() < deadline_s, f"not within {limit_s} s: {expr}"
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
