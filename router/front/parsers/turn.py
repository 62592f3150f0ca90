"""An answer as the message that its client sends back with the next turn."""

from hashlib import blake2b

from engine.text.messages import ChatMessage, ToolCall
from router.front.parsers.choose import Parsing, parser_of
from router.front.parsers.pieces import PieceKind, parts_of

_LETTERS = 24


def call_id(parsing: Parsing, request_id: str, sample: int, call: int) -> str:
    """Return the name of a call: the same whenever, and by whichever router, the answer is written again."""
    digest = blake2b(f"{request_id}/{sample}/{call}".encode(), digest_size=_LETTERS // 2, person=b"headrace call")
    # Templates of Mistral's refuse other names than these.
    return digest.hexdigest()[:9] if parsing.tools == "mistral" else f"call_{digest.hexdigest()}"


def turn_of(parsing: Parsing | None, request_id: str, answer: str) -> ChatMessage:
    """Return the assistant's turn that a whole answer is."""
    if parsing is None:
        return ChatMessage("assistant", answer)
    parser = parser_of(parsing)
    pieces = [piece for part in parts_of(answer) for piece in parser.push(part)] + parser.flush()
    content = reasoning = ""
    calls: list[ToolCall] = []
    for piece in pieces:
        match piece.kind:
            case PieceKind.CONTENT:
                content += piece.text
            case PieceKind.REASONING:
                reasoning += piece.text
            case PieceKind.CALL:
                calls.append(ToolCall(piece.text, "", call_id(parsing, request_id, 0, piece.call)))
            case PieceKind.ARGUMENTS:
                last = calls[piece.call]
                calls[piece.call] = ToolCall(last.name, last.arguments + piece.text, last.id)
    if parsing.single:
        del calls[1:]
    return ChatMessage(
        "assistant", content if content or not calls else None, tool_calls=tuple(calls), reasoning=reasoning
    )
