"""The router's settings."""

from typing import Literal

import msgspec

from access.config import AccessConfig

LocalPrefill = Literal["never", "auto"]
ToolParser = Literal["auto", "none", "hermes", "llama3", "mistral", "harmony"]
ReasoningParser = Literal["auto", "none", "think", "harmony"]


class FrontLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on the clients of both fronts. Fewer connections are taken where the process may hold few descriptors:
    each front has an equal share of them, and what another does not want (`router/descriptors.py`)."""

    connections: int = 1024
    """Open at once on each front. Where there is no room, the HTTP front gives up the connection that has waited
    longest for its client; gRPC's refuses the new one."""
    grpc_connections: int = 0
    """So many on gRPC's instead; 0: as many as on the other."""
    connections_per_address: int = 512
    """As many of them may be from one address. Over HTTP only: gRPC's library knows a limit for all of them."""
    calls_per_address: int = 512
    """Over gRPC: calls of one address that are open at once, watches of health among them. One more is refused, and may
    come again. Since connections without a call are closed after `idle_s`, no address keeps more of them than this."""
    header_s: float = 10.0
    """The time for the head of a request, and for the handshake of either front."""
    body_s: float = 60.0
    """The time for a request's body, over HTTP."""
    idle_s: float = 75.0
    """The time that a connection without a request is kept; over HTTP also one whose client leaves an answer unread."""
    keepalive_s: float = 20.0
    """Over gRPC: how long a connection with a request may be silent before its client is asked whether it is there, and
    then how long it has to answer."""
    bodies_bytes: int = 64 * 1024 * 1024
    """Bodies over 64 KiB that are being received over HTTP, all together: beyond it, the largest of the address that
    has sent most is refused, and may come again. As much again may wait on each front to be read, one at a time."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    """The address that both fronts listen on. Beyond loopback only with credentials, unless their absence is asked for
    by name."""
    grpc_port: int = 50051
    """0 takes a free port."""
    http_port: int = 8000
    """0 takes a free port, -1 means no HTTP front."""
    chat_page: bool = True
    """Whether the HTTP front has a page at `/`."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins ("https://example.org") may ask the HTTP front from a browser; "*": those of all."""
    policy: str = "least-cost"
    """`least-cost`, or one of the simpler ones of `router.core.policies`, for comparison."""
    local_prefill: LocalPrefill = "never"
    """Whether decode workers read prompts although there are prefill workers: `auto`, where that is predicted to be the
    cheaper. Without any prefill worker they always do."""
    shadow_policies: tuple[str, ...] = ()
    """Policies that are asked about the same requests and do not act: the metrics say how often they would have chosen
    otherwise, and at what predicted cost."""
    decision_log: str = ""
    """The file of all decisions, on the router's host, for `headrace replay`; empty: none is kept."""
    decision_log_bytes: int = 256 * 1024 * 1024
    """At this size it is renamed NAME.1, in the place of the one before, and begins anew."""
    seed: int = 0
    """Seeds the generator that breaks ties between workers; it never touches sampling."""
    max_waiting: int = 256
    """Requests that may wait for room; the next one is refused with `retry_after_s`."""
    retry_after_s: float = 1.0
    """When a refused request is told to come again."""
    deadline_margin: float = 2.0
    """A request whose caller names a deadline is refused at once if it is predicted to take more than so many times
    what is left until then; 0: none is."""
    session_s: float = 1800.0
    """The time for which a conversation that its client has named goes on where it was, from its last request on."""
    chat_template: str = ""
    """The file of a chat template, on the router's host, in place of the model's own; empty: the model's."""
    tool_parser: ToolParser = "auto"
    """How the model writes its calls of tools: `auto` goes by its template and tokens; `none`: tools are refused."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model's reasoning is told from its answer: `auto` goes by its template and tokens; `none`: it is not."""
    served_model_names: tuple[str, ...] = ()
    """The names that callers may give as `model`; answers to those who give none are under the first. Empty: the name
    of the model's file or folder."""
    generation_config: Literal["model", "off"] = "model"
    """Where a request says nothing of a sampling value: `model`, what the model's publisher recommends
    (`generation_config.json`, a GGUF file's metadata, or a table of model cards); `off`, temperature 1 from the whole
    vocabulary."""
    default_max_tokens: int = 512
    """The longest answer to a request that does not say how long it may be."""
    default_timeout_s: float = 3600.0
    """The deadline of a request that names none: nothing waits for ever."""
    max_samples: int = 16
    """Most parallel samples (`n`) of one call; each counts as a request."""
    vllm_protocol: bool = False
    """Whether the gRPC port also speaks vLLM's engine protocol, to gateways made for that engine. It needs
    `headrace[vllm]`."""
    max_message_bytes: int = 4 * 1024 * 1024
    """The largest message over gRPC."""
    max_prompt_bytes: int = 1024 * 1024
    """The longest text of a prompt, all messages of a chat together."""
    tokenize_inline_bytes: int = 2 * 1024
    """Longer text is tokenized in threads of its own, so that it does not hold up other requests."""
    tokenize_threads: int = 2
    """Threads for text of more than `tokenize_inline_bytes`."""
    tokenize_budget_bytes: int = 16 * 1024 * 1024
    """Text that may be in those threads' hands or wait for them; beyond it the longest that waits is refused, and may
    come again."""
    worker_silent_s: float = 10.0
    """A worker that has not reported for this long gets no new requests. It is not given up: a step may be long."""
    worker_hung_s: float = 30.0
    """A connected worker that has not reported for this long is given up, and so is one that has not been reached for
    this long. Workers report after every step and four times a second without one, and a step is bounded (`max_batch`,
    `chunk_tokens`): the longest seen on two busy cores took little over a second. Whatever a device compiles must be
    compiled before its worker serves."""
    escalate_s: float = 5.0
    """A worker that another one calls silent is given up when the router has not heard of it for this long either."""
    unplaceable_s: float = 10.0
    """The time that requests wait while no worker is left that could take them."""
    max_placements: int = 3
    """Placements of one request that may be lost with their decode workers; then it is given up."""
    moves_at_once: int = 2
    """Requests that move off one leaving decode worker at the same time; the others run on meanwhile."""
    retry_reserve: int = 128
    """Placements after losses that all requests together may take at once; it refills within a minute. With workers on
    GPUs 1,024, by default: also four full batches, each of which goes with its worker."""
    retry_fraction: float = 0.2
    """The share of a placement that every new request adds to that budget, up to `retry_reserve`."""
    settle_s: float = 5.0
    """The time after its start that a router waits for decode workers to report what they kept for it. Until then it
    hands out nothing of earlier requests."""
    wakes_per_s: float = 12_000.0
    """Messages of new output over gRPC, all streams together, in a second: each costs 40 to 60 µs whatever is in it.
    Above it tokens of a stream share messages. Streams over HTTP are not counted: they are written to at less cost."""
    resume_window_s: float = 30.0
    """The time that a resumable stream waits for its client after the connection is lost."""
    conversation_tokens: int = 1_000_000
    """Token ids remembered of finished chats, so that follow-up turns begin with them."""
    limits: FrontLimits = FrontLimits()
    slo_ttft_s: float = 0.5
    """A request whose first token takes longer has missed the target, in the metrics; past it, look at prefill."""
    slo_itl_s: float = 0.05
    """The same of the mean gap between a request's tokens; past it, look at decode."""
    name: str = "router"
    """This router's name among those of its cluster: one that is started again continues its series of metrics, and
    goes on with what the life before it left."""
    own_port: int = -1
    """Where this router alone serves HTTP, beside the fronts whose ports it shares with the cluster's other routers; 0
    takes a free port, -1: it is the only one and shares nothing."""
    supervisor_metrics_port: int = 0
    """Where the process that started this router serves its own page, on the same host; 0: nowhere."""
    namespace_key: str = ""
    """Keys the cache namespaces of tenants, so that nobody can guess one; give every router of one cluster the same.
    Empty: `headrace up` makes one at its first start and keeps it beside the cluster's files; any other start draws one
    for as long as it lives."""
    access: AccessConfig = AccessConfig()
    """Who may come in: the cluster's own `access`, which its launcher puts here."""

    def names(self, own: str) -> tuple[str, ...]:
        """Return the names under which a model that calls itself `own` is served."""
        return self.served_model_names or (own,)
