"""A router of others in the place of the policy: it sees each prompt, and says which prefill worker gets it.

It is asked when the real router core places a request, which is then offered to that prefill worker and to the decode
worker with the fewest blocks in use. As far as it is told, a request has ended when its prompt has been computed.
"""

from collections.abc import Sequence
from typing import Protocol

from benchmarks.routing.workloads import BLOCK
from engine.types import RequestId
from router.core.decisions import RecordedPolicy
from router.core.policy import Choice, DecodeView, Demand, PrefillView, cost, reason


class PeerError(Exception):
    """A router of others did not start, or did not answer."""


class PeerRouter(Protocol):
    """A router of others before workers of these names, which it was started with."""

    def choose(self, request: RequestId, tokens: Sequence[int], tenant: bytes) -> str:
        """Return the worker that gets the prompt. Raises PeerError."""

    def computed(self, request: RequestId) -> None:
        """Let the router know that the prompt has been computed."""

    def close(self) -> None:
        """End it, and what was started for it."""


def knows_repeats(peer: PeerRouter) -> bool:
    """Return True if a prompt that has been served goes where it was, though that worker has more to do."""
    prompt = range(40 * BLOCK)
    first = RequestId("probe-0")
    names = {peer.choose(first, prompt, b"probe")}
    peer.computed(first)
    later = [RequestId(f"probe-{number}") for number in range(1, 6)]
    names.update([peer.choose(request, prompt, b"probe") for request in later])
    for request in later:
        peer.computed(request)
    return len(names) == 1


class PeerPolicy(RecordedPolicy):
    """Owner: the simulated cluster, which tells it of prompts that come and that are computed."""

    # Mutable state: the prompts that wait to be placed, and what was chosen for those that are not computed yet.

    def __init__(self, peer: PeerRouter, seed: int) -> None:
        super().__init__("prefill-tokens", seed, [])
        self._peer = peer
        self._prompts: dict[RequestId, tuple[Sequence[int], bytes]] = {}
        self._chosen: dict[RequestId, str] = {}
        self.asked = 0

    def comes(self, request: RequestId, tokens: Sequence[int], tenant: bytes) -> None:
        """Take a prompt that may be asked for."""
        self._prompts[request] = tokens, tenant

    def computed(self, request: RequestId) -> None:
        """Hear that a prompt has been computed."""
        self._prompts.pop(request, None)
        if self._chosen.pop(request, None) is not None:
            self._peer.computed(request)

    def choose(self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]) -> Choice | None:
        if not prefills or not decodes:
            return None
        request = self._request
        if request not in self._chosen:
            self._chosen[request] = self._peer.choose(request, *self._prompts[request])
            self.asked += 1
        prefill = next(view for view in prefills if view.name == self._chosen[request])
        decode = min(decodes, key=lambda view: (view.used_blocks, view.name))
        return Choice(prefill, decode, cost(demand, prefill, decode), reason(prefill, decode))
