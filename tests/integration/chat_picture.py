"""Draws the README's picture of the page at `/`: `python -m tests.integration.chat_picture FILE`.

A real cluster with the demo model, a real browser, two turns of a conversation.
"""

import base64
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.model.prepared.cache import prepare
from router.config import RouterConfig
from tests.router.http.browser import Tab, browsing

TURNS = ("Why is the sky blue?", "Say it to a child.")
MOST_BYTES = 150_000


@contextmanager
def serving_page(model_dir: Path, chat_template: str = "") -> Iterator[str]:
    """The address of a small cluster's HTTP front."""
    router = RouterConfig(grpc_port=0, http_port=0, chat_template=chat_template)
    config = ClusterConfig(launcher="process", log_level="error", router=router)
    cluster = Cluster(config, make_launcher("process"), model_dir=str(model_dir))
    try:
        yield f"http://{cluster.start().http}/"
    finally:
        cluster.stop()


def converse(tab: Tab) -> None:
    """Ask each of `TURNS` once the answer before it is over."""
    tab.until("document.querySelector('#model').textContent")
    tab.run("document.querySelector('#temperature').value = 0; document.querySelector('#longest').value = 48")
    for number, words in enumerate(TURNS, 1):
        tab.run("document.querySelector('#words').focus()")
        tab.type(f"{words}\n")
        tab.until(f"document.querySelectorAll('.bar').length === {number} && !document.querySelector('#send').hidden")


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with serving_page(prepare(None, folder / "models")) as address, browsing(folder) as browser:
            tab = browser.open(address, width=820, height=560)
            converse(tab)
            tab.run("document.querySelector('#talk').scrollTop = 1e6")
            picture = base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"])
    if len(picture) > MOST_BYTES:
        raise SystemExit(f"the picture has {len(picture)} bytes, {MOST_BYTES} allowed")
    target.write_bytes(picture)
    print(f"{target}: {len(picture)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
