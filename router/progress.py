"""What a client has of a resumable stream, and whether it comes back after an error. Pure: time is an argument."""

import msgspec

from router.api import ApiError, Delta, Finished, GenerateEvent, Started

RECONNECT_S = 30.0
"""How long a client tries to come back, counted from when it lost the connection."""
PAUSE_S = (0.05, 1.0)
"""First and longest pause between two attempts."""


class Position(msgspec.Struct, frozen=True):
    """Where to go on: output tokens and bytes of text that were received."""

    token: str
    next_index: int
    text_bytes: int


class Progress:
    # Mutable state: the position, whether the end was seen, and the connection loss being mended.

    def __init__(self) -> None:
        self._token = ""
        self._next_index = 0
        self._text_bytes = 0
        self._lost: tuple[ApiError, float] | None = None
        self._pause_s = PAUSE_S[0]
        self.is_over = False
        """Whether the server has said how the request ended."""

    @property
    def position(self) -> Position | None:
        """None while there is nothing to come back to: before Started, or where the server knows no resumption."""
        if not self._token:
            return None
        return Position(self._token, self._next_index, self._text_bytes)

    def take(self, event: GenerateEvent) -> bool:
        """Note an event; False if the caller has seen it already (a resumed stream begins with Started again)."""
        self._lost, self._pause_s = None, PAUSE_S[0]
        if isinstance(event, Started):
            is_new = not self._token
            self._token = event.resume_token
            return is_new
        if isinstance(event, Delta):
            self._next_index += len(event.token_ids)
            self._text_bytes += len(event.text.encode())
        elif isinstance(event, Finished):
            self.is_over = True
        return True

    def pause_s(self, error: ApiError, from_server: bool, now: float) -> float:
        """How long to wait before coming back. Raises the error to tell the caller if there is no coming back.

        `from_server`: the server gave this status. All others come from a broken connection.
        """
        if from_server:
            self.is_over = True
            if self._lost is not None and error.code == "NOT_FOUND":
                raise self._lost[0]
            raise error
        if self.position is None or error.code == "DEADLINE_EXCEEDED":
            raise error
        self._lost = self._lost or (error, now)
        if now - self._lost[1] > RECONNECT_S:
            raise self._lost[0]
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S[1])
        return pause_s
