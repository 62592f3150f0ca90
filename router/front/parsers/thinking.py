"""Think blocks: `<think>…</think>` before the answer proper, opened by the model or already by the template."""

from router.front.parsers.pieces import AnswerParser, Aside, Piece, PieceKind, undecided

OPEN, CLOSE = "<think>", "</think>"


class ThinkingParser:
    """Takes the block off the beginning and gives the rest to the parser behind it. White space around the block, and
    around what is in it, belongs to neither. A block that never ends is reasoning to its end."""

    # Mutable state: what is not decided yet, what came behind that and decides nothing, and where in the answer it is:
    # before the block, in it, or behind it.

    def __init__(self, behind: AnswerParser, *, is_open: bool = False) -> None:
        self._behind = behind
        self._held = ""
        self._aside = Aside()
        self._before = not is_open
        self._is_inside = is_open
        self._has_begun = False
        self._skips = False

    @property
    def is_reasoning(self) -> bool:
        return self._is_inside

    def push(self, text: str) -> list[Piece]:
        if self._aside.takes(text):
            return []
        self._held += self._aside.release() + text
        pieces: list[Piece] = []
        if self._before:
            self._enter()
        if self._is_inside:
            pieces += self._think()
        if not (self._before or self._is_inside):
            pieces += self._pass_on()
        else:
            self._aside.wait(self._held)
        return pieces

    def flush(self) -> list[Piece]:
        rest, self._held = self._held + self._aside.release(), ""
        if self._is_inside:
            return [Piece(PieceKind.REASONING, rest)] if rest.strip() else []
        pieces = self._behind.push(rest) if rest and not self._skips else []
        return pieces + self._behind.flush()

    def _enter(self) -> None:
        shown = self._held.lstrip()
        if shown.startswith(OPEN):
            self._before, self._is_inside = False, True
            self._held = shown[len(OPEN) :]
        elif not OPEN.startswith(shown):
            self._before = False

    def _think(self) -> list[Piece]:
        if not self._has_begun:
            self._held = self._held.lstrip()
        at = self._held.find(CLOSE)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(CLOSE) :]
            self._is_inside, self._skips = False, True
        else:
            cut = len(self._held) - undecided(self._held, CLOSE)
            thought, self._held = self._held[:cut], self._held[cut:]
        self._has_begun = self._has_begun or bool(thought) or bool(self._held)
        return [Piece(PieceKind.REASONING, thought)] if thought else []

    def _pass_on(self) -> list[Piece]:
        if self._skips:
            self._held = self._held.lstrip()
            self._skips = not self._held
        text, self._held = self._held, ""
        return self._behind.push(text) if text else []


class ContentParser:
    """The end of a row of parsers: all text is content."""

    is_reasoning = False

    def push(self, text: str) -> list[Piece]:
        return [Piece(PieceKind.CONTENT, text)] if text else []

    def flush(self) -> list[Piece]:
        return []
