"""An answer as a row of blocks, each of one kind: what the formats have in common that give an answer in such. Pure."""

from enum import Enum, auto

import msgspec

from router.front.parsers.pieces import Piece, PieceKind
from router.http.parsed_answer import PartsReader


class BlockStep(Enum):
    BEGIN = auto()
    MORE = auto()
    END = auto()


class AnswerBlock(msgspec.Struct):
    """Reasoning, content, or a call (`PieceKind.CALL`) with its name and id; `text` is what it holds so far, of a call
    its arguments."""

    kind: PieceKind
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""


class AnswerBlocks:
    # Mutable state: the blocks so far, and whether the last is still open.

    def __init__(self, reader: PartsReader) -> None:
        self._reader = reader
        self.blocks: list[AnswerBlock] = []
        self._is_open = False

    def push(self, text: str) -> list[tuple[BlockStep, AnswerBlock, str]]:
        """Return what happens to blocks with this text; of MORE, with what is new of it."""
        return self._follow(self._reader.push(text))

    def end(self) -> list[tuple[BlockStep, AnswerBlock, str]]:
        """The same at the end of the answer, which closes the last block."""
        return self._follow(self._reader.flush()) + self._close()

    def _follow(self, pieces: list[Piece]) -> list[tuple[BlockStep, AnswerBlock, str]]:
        steps: list[tuple[BlockStep, AnswerBlock, str]] = []
        for piece in pieces:
            kind = PieceKind.CALL if piece.kind is PieceKind.ARGUMENTS else piece.kind
            if not self._is_open or piece.kind is PieceKind.CALL or self.blocks[-1].kind is not kind:
                steps += self._close()
                block = AnswerBlock(kind, len(self.blocks))
                if piece.kind is PieceKind.CALL:
                    block.name, block.call_id = piece.text, self._reader.id_of(piece.call)
                self.blocks.append(block)
                self._is_open = True
                steps.append((BlockStep.BEGIN, block, ""))
            if piece.kind is not PieceKind.CALL:
                self.blocks[-1].text += piece.text
                steps.append((BlockStep.MORE, self.blocks[-1], piece.text))
        return steps

    def _close(self) -> list[tuple[BlockStep, AnswerBlock, str]]:
        if not self._is_open:
            return []
        self._is_open = False
        return [(BlockStep.END, self.blocks[-1], "")]
