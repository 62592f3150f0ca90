"""The page at `/`: a chat that shows where each answer ran and where its time went.

One static file, which asks nobody but the server it came from. Its policy lets the browser use the script and the style
that the file holds, known by their digests, and nothing that found its way in with a model's answer. It holds no
secret, so it needs no credential; what it asks for does, and it asks its reader for a key.
"""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response

PAGE_PATH = "/"
_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class ChatPage:
    def __init__(self) -> None:
        text = files("router.http").joinpath("chat.html").read_text(encoding="utf-8")
        self._body = text.encode()
        self._headers = {
            "content-security-policy": _policy(text),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            # A newer server brings a newer page.
            "cache-control": "no-cache",
        }

    def response(self) -> Response:
        return Response(self._body, headers=self._headers, media_type="text/html")


def _policy(text: str) -> str:
    """Return the content security policy of a page with inline styles and scripts."""
    allowed: dict[str, list[str]] = {"style": [], "script": []}
    for kind, inline in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
    sources = [f"{kind}-src {' '.join(digests)}" for kind, digests in allowed.items()]
    closed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return "; ".join([*closed, *sources, "connect-src 'self'", "img-src data:"])
