"""Keeps what a client has of a resumable stream, and decides whether it comes back after an error, or asks again.
Pure: time is an argument."""

from random import Random

from protos import headrace_pb2 as pb
from router.client.errors import ApiError

RECONNECT_S = 30.0
"""The time for which a client tries to come back, counted from when it lost the connection."""
PAUSE_S = (0.05, 1.0)
"""First and longest pause between two attempts."""
RETRY_S = (0.1, 5.0)
"""The same between two askings of a request that was refused."""


class Progress:
    # Mutable state: the token and the positions by sample, who has finished, and the connection loss being mended.

    def __init__(self, token: str = "") -> None:
        self.token = token
        """Empty while there is nothing to come back to: before Started, or where the server knows no resumption."""
        self.positions = [pb.Position()]
        self.has_begun = False
        self._finished: set[int] = set()
        self._lost: tuple[ApiError, float] | None = None
        self._pause_s = PAUSE_S[0]
        self.is_over = False
        """True once the server has said how the request ended."""

    def take(self, response: pb.GenerateResponse) -> bool:
        """Note an event; False if the caller has seen it already (a resumed stream begins with Started again, and ends
        with Finished of every sample), or this client does not know its kind. Raises ApiError for an event of a sample
        that there is not."""
        self._lost, self._pause_s = None, PAUSE_S[0]
        kind = response.WhichOneof("event")
        if kind == "started":
            is_new = not self.has_begun
            if is_new:
                self.positions = [pb.Position() for _ in range(max(1, response.started.samples))]
            self.token, self.has_begun = response.started.resume_token, True
            return is_new
        if kind is None:
            return False  # of a newer server
        event = response.delta if kind == "delta" else response.finished
        if not 0 <= event.sample < len(self.positions):
            raise ApiError("INTERNAL", f"the server sent an event of sample {event.sample}")
        if kind == "delta":
            at = self.positions[event.sample]
            at.next_index += len(event.token_ids)
            at.text_bytes += len(event.text.encode())
            return True
        is_new = event.sample not in self._finished
        self._finished.add(event.sample)
        self.is_over = len(self._finished) == len(self.positions)
        return is_new

    def resume_request(self) -> pb.ResumeRequest:
        """Return what asks for the rest."""
        first, *others = self.positions
        return pb.ResumeRequest(
            resume_token=self.token, next_index=first.next_index, text_bytes=first.text_bytes, others=others
        )

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


class Retries:
    """Says when a request that no worker has taken yet is asked again, so that the answer may still come in time."""

    # Mutable state: the next pause.

    def __init__(self, random: Random) -> None:
        self._random = random
        self._pause_s = RETRY_S[0]

    def pause_s(self, error: ApiError, left_s: float | None) -> float | None:
        """Return how long to wait; None where asking again would not help, or there is no time for it. Longer than the
        server says, by a little that differs between clients: they shall not all come at once."""
        is_busy = error.code == "RESOURCE_EXHAUSTED" and error.retry_after_s is not None
        if not is_busy and error.code != "UNAVAILABLE":
            return None
        pause_s = max(error.retry_after_s or 0.0, self._pause_s) * self._random.uniform(1.0, 1.25)
        self._pause_s = min(2 * self._pause_s, RETRY_S[1])
        return None if left_s is not None and pause_s >= left_s else pause_s
