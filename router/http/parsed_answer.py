"""One sample's answer in the parts of a chat message: content, reasoning and calls, whole or as it comes. Pure."""

from typing import Any

from router.front.parsers.choose import Parsing, parser_of
from router.front.parsers.pieces import Piece, PieceKind, parts_of
from router.front.parsers.turn import call_id
from router.front.tokenizing import Steps


class PartsReader:
    """Takes an answer's text apart. `had` is what the client of a resumed stream has of it."""

    # Mutable state: the parser, how many calls there were, and whether there was anything at all.

    def __init__(self, parsing: Parsing, request_id: str, sample: int = 0, had: str = "") -> None:
        self._parsing = parsing
        self._request_id = request_id
        self._sample = sample
        self._parser = parser_of(parsing)
        self.calls = 0
        self.has_begun = False
        for part in parts_of(had):
            self.push(part)

    def push(self, text: str) -> list[Piece]:
        return self._given(self._parser.push(text))

    def flush(self) -> list[Piece]:
        return self._given(self._parser.flush())

    def id_of(self, call: int) -> str:
        return call_id(self._parsing, self._request_id, self._sample, call)

    def _given(self, pieces: list[Piece]) -> list[Piece]:
        given = [piece for piece in pieces if not (piece.call and self._parsing.single)]
        self.calls += sum(piece.kind is PieceKind.CALL for piece in given)
        self.has_begun = self.has_begun or bool(given)
        return given

    def delta(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return what is new as OpenAI's `delta`, without a role."""
        made: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            match piece.kind:
                case PieceKind.CONTENT:
                    made["content"] = made.get("content", "") + piece.text
                case PieceKind.REASONING:
                    made["reasoning_content"] = made.get("reasoning_content", "") + piece.text
                case PieceKind.CALL:
                    function = {"name": piece.text, "arguments": ""}
                    name = self.id_of(piece.call)
                    calls.append({"index": piece.call, "id": name, "type": "function", "function": function})
                case PieceKind.ARGUMENTS:
                    if not calls or calls[-1]["index"] != piece.call:
                        calls.append({"index": piece.call, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += piece.text
        return made | ({"tool_calls": calls} if calls else {})

    def message(self, text: str) -> Steps[dict[str, Any]]:
        """Return the whole of a whole text as OpenAI's `message`. Yields where others may have the event loop."""
        pieces: list[Piece] = []
        for at, part in enumerate(parts_of(text)):
            if at:
                yield
            pieces += self.push(part)
        made = self.delta(pieces + self.flush())
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in made.get("tool_calls", ())]
        content = made.get("content", None if calls else "")
        whole = {"role": "assistant", "content": content, "refusal": None}
        if self._parsing.reasoning:
            whole["reasoning_content"] = made.get("reasoning_content")
        return whole | ({"tool_calls": calls} if calls else {})
