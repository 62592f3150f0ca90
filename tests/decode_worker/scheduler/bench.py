"""A decode scheduler alone with a prefill worker that does what a test says: for the tests of each part."""

from collections.abc import Sequence

from decode_worker.scheduler.events import FromPeer, PeerUp
from decode_worker.scheduler.request import Request
from engine.messages import (
    Accepted,
    BlockOffer,
    FirstToken,
    Handoff,
    Offer,
    PeerAddress,
    Place,
    Record,
    Refused,
    StartPrefill,
)
from engine.types import BlockId, Incarnation, RequestId, RequestRecord, SamplingParams
from tests.decode_worker.scheduler.leaving.test_departures import Bench
from transfer.handoff.commands import Received

HERE = PeerAddress("", "")
POOL, P = PeerAddress("prefill-0", "p:1"), Incarnation(5)


def record_of(name: str, prompt: list[int], max_tokens: int = 8, **more: object) -> RequestRecord:
    return RequestRecord(
        request=RequestId(name),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        seed=0,
        sampling=SamplingParams(temperature=0.0),
        **more,  # type: ignore[arg-type]
    )


class Fetching(Bench):
    """A bench with blocks of four tokens; `POOL` can be read from, and its every message is a test's."""

    def __init__(self, blocks: int = 32, **config: object) -> None:
        super().__init__(blocks, **config)  # type: ignore[arg-type]
        self.tell(PeerUp(P, POOL, "shm", 4))

    def place(
        self,
        name: str,
        prompt: list[int],
        prefill: PeerAddress = HERE,
        fork_of: str | None = None,
        placement: int = 1,
        **more: object,
    ) -> bool:
        """Offer a request; returns whether it was taken."""
        message = Place(
            record=record_of(name, prompt, **more),  # type: ignore[arg-type]
            placement=placement,
            prefill=prefill,
            fork_of=None if fork_of is None else RequestId(fork_of),
        )
        before = len(self.told)
        self.router(message)
        answers = [r for r in self.told[before:] if isinstance(r, (Accepted, Refused))]
        return [type(answer) for answer in answers] == [Accepted]

    def request(self, name: str) -> Request:
        return self.scheduler._requests[RequestId(name)]

    def asked(self) -> StartPrefill:
        """The latest handoff that was asked for."""
        latest = self.of(StartPrefill)[-1]
        assert isinstance(latest, StartPrefill)
        return latest

    def land(self, handoff: Handoff, error: str = "") -> None:
        """Offer all that the latest handoff lacks, and let it land, or fail."""
        asked = self.asked()
        tokens = len(asked.record.tokens)
        wanted = range(asked.have_tokens // 4, -(-tokens // 4))
        offers = [BlockOffer(BlockId(at), 1, at, min(4, tokens - 4 * at), 0) for at in wanted]
        self.tell(FromPeer(P, Offer(handoff, 0, offers)))
        self.tell(Received(handoff, 0, error, 0.1, 0 if error else len(offers)))

    def name_token(self, handoff: Handoff, token: int = 9, chunks: int = 1, more: Sequence[int] = ()) -> None:
        said = FirstToken(
            handoff=handoff, token=token, more=list(more), chunks=chunks, queue_s=0.0, run_s=0.0, cached_tokens=0
        )
        self.tell(FromPeer(P, said))

    def last(self, kind: type[Record]) -> Record:
        return self.of(kind)[-1]
