"""Keeps what a client has of a resumable stream, and decides whether it comes back after an error. Pure: time is an
argument."""

from router.front.api import ApiError, Delta, GenerateEvent, Position, Started

RECONNECT_S = 30.0
"""The time for which a client tries to come back, counted from when it lost the connection."""
PAUSE_S = (0.05, 1.0)
"""First and longest pause between two attempts."""


class Progress:
    # Mutable state: the token and the positions by sample, who has finished, and the connection loss being mended.

    def __init__(self) -> None:
        self.token = ""
        """Empty while there is nothing to come back to: before Started, or where the server knows no resumption."""
        self.positions = [Position()]
        self._finished: set[int] = set()
        self._lost: tuple[ApiError, float] | None = None
        self._pause_s = PAUSE_S[0]
        self.is_over = False
        """True once the server has said how the request ended."""

    def take(self, event: GenerateEvent) -> bool:
        """Note an event; False if the caller has seen it already (a resumed stream begins with Started again, and ends
        with Finished of every sample). Raises ApiError for an event of a sample that there is not."""
        self._lost, self._pause_s = None, PAUSE_S[0]
        if isinstance(event, Started):
            is_new = not self.token
            if is_new:
                self.positions = [Position()] * event.samples
            self.token = event.resume_token
            return is_new
        if not 0 <= event.sample < len(self.positions):
            raise ApiError("INTERNAL", f"the server sent an event of sample {event.sample}")
        if isinstance(event, Delta):
            at, tokens, text_bytes = self.positions[event.sample], len(event.token_ids), len(event.text.encode())
            self.positions[event.sample] = Position(at.next_index + tokens, at.text_bytes + text_bytes)
            return True
        is_new = event.sample not in self._finished
        self._finished.add(event.sample)
        self.is_over = len(self._finished) == len(self.positions)
        return is_new

    def pause_s(self, error: ApiError, from_server: bool, now: float) -> float:
        """Return how long to wait before coming back. Raises the error to tell the caller if there is no coming back.

        `from_server`: the server gave this status. All others come from a broken connection.
        """
        # 1. The server has ended the request, or has forgotten it while the client was away.
        if from_server:
            self.is_over = True
            if self._lost is not None and error.code == "NOT_FOUND":
                raise self._lost[0]
            raise error
        # 2. The connection broke, and there is nothing to come back to, or no time.
        if not self.token or error.code == "DEADLINE_EXCEEDED":
            raise error
        # 3. It broke, and the client tries again until it has been away for too long.
        self._lost = self._lost or (error, now)
        if now - self._lost[1] > RECONNECT_S:
            raise self._lost[0]
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S[1])
        return pause_s
