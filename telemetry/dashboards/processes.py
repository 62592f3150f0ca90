"""The processes themselves: who is up, who came back, and what they use."""

from telemetry.dashboards import measures
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.measures import TARGET
from telemetry.dashboards.panel import Dashboard, PanelRow, Proof, one

PROCESSES = Dashboard(
    "processes",
    "Headrace: processes",
    "Up, restarts, processor, memory, files",
    (
        PanelRow(
            "Who is up?",
            (
                one(
                    "Answers a scrape",
                    "1: it does. Lost workers stay listed until they are back; drained ones go.",
                    "none",
                    measures.UP,
                    "{{worker}}",
                    high=1,
                ),
                one(
                    "Down",
                    "Listed and not answering.",
                    "none",
                    f"1 - {measures.UP}",
                    "{{worker}}",
                    high=1,
                    proof=Proof.FAULT,
                ),
                one(
                    "State",
                    "As the router sees its workers.",
                    "none",
                    f"{S.seen('worker_state', 'peer, role, state')} > 0",
                    "{{peer}}: {{state}}",
                    low=1,
                    high=1,
                    kind="table",
                ),
                one(
                    "Lost",
                    "Workers gone in the last hour: as they were asked to (left), by themselves (lost), or ended "
                    "because the router gave them up.",
                    "none",
                    S.seen("worker_losses_total", "peer, how", "1h"),
                    "{{peer}}: {{how}}",
                    proof=Proof.FAULT,
                ),
                one(
                    "Ejected",
                    "Workers in the last hour that had failed and got no requests for a while.",
                    "none",
                    S.seen("worker_ejections_total", "peer", "1h"),
                    "{{peer}}",
                    proof=Proof.SHOWN,
                ),
                one(
                    "Processes started",
                    "In the last hour, by name, as their supervisor counts them.",
                    "none",
                    S.grown("process_starts_total", "1h", "peer"),
                    "{{peer}}",
                    proof=Proof.FAULT,
                ),
                one(
                    "Died of",
                    "In the last hour, by kind of process and cause, as their supervisor was told.",
                    "none",
                    S.grown("process_deaths_total", "1h", "role, cause"),
                    "{{role}}: {{cause}}",
                    proof=Proof.FAULT,
                ),
                one(
                    "Running since",
                    "Age of the process.",
                    "s",
                    f"time() - {S.series('process_start_time_seconds')}",
                    "{{worker}}",
                ),
                one(
                    "Requests left to nobody",
                    "Resumable requests of a lost router that no other took in time, in the last hour.",
                    "none",
                    S.grown("orphans_expired_total", "1h", TARGET),
                    "{{worker}}",
                    proof=Proof.SHOWN,
                ),
            ),
        ),
        PanelRow(
            "What do they use?",
            (
                one(
                    "Processor",
                    "Cores, by process.",
                    "none",
                    S.rate("process_cpu_seconds_total", TARGET),
                    "{{worker}}",
                ),
                one(
                    "Memory",
                    "Resident. Mapped weights count for every process that touched them.",
                    "bytes",
                    S.series("process_resident_memory_bytes"),
                    "{{worker}}",
                    low=1,
                ),
                one(
                    "GPU memory",
                    "Of a worker's tensors, reserved by it (these included), used by all processes of its GPU, and all "
                    "there is. Zero without a GPU.",
                    "bytes",
                    S.sum("device_memory_bytes", f"{TARGET}, state"),
                    "{{worker}} {{state}}",
                    proof=Proof.SHOWN,
                ),
                one(
                    "Kernels compiled while serving",
                    "By Triton, or loaded from its cache, in the last hour: requests waited for it. Anything but zero "
                    "is a launch that the warm-up lacks; the worker's log names the kernel.",
                    "none",
                    S.grown("kernel_compilations_total", "1h", TARGET, phase="serving"),
                    "{{worker}}",
                    proof=Proof.SHOWN,
                ),
                one(
                    "Open files",
                    "Of those allowed.",
                    "percentunit",
                    measures.files_used(S),
                    "{{worker}}",
                    high=1,
                ),
                one(
                    "Certificates end in",
                    "By what they are for; ten years where there are none.",
                    "s",
                    measures.certificate_left_s(S),
                    "{{worker}} {{certificate}}",
                    proof=Proof.SHOWN,
                ),
            ),
        ),
        PanelRow(
            "How do ranks share the work?",
            (
                one(
                    "Weights by rank",
                    "Of each process of a tensor-parallel worker; a worker of one process is rank 0.",
                    "bytes",
                    S.sum("rank_weights_bytes", f"{TARGET}, rank"),
                    "{{worker}} rank {{rank}}",
                ),
                one(
                    "Processor by rank",
                    "Cores. The panel above knows rank 0 alone.",
                    "none",
                    S.rate("rank_cpu_seconds_total", f"{TARGET}, rank"),
                    "{{worker}} rank {{rank}}",
                ),
                one(
                    "Rank 0 waits",
                    "The share of its time in which it waits for the other ranks: for their parts of sums, and for "
                    "their word that they have read an order. Zero where there is one rank.",
                    "percentunit",
                    # A wait counts when it is over: a long one, that began before the window, would be above 1.
                    f"clamp_max({S.rate('rank_wait_seconds_total', f'{TARGET}, what')}, 1)",
                    "{{worker}} {{what}}",
                    high=1,
                    proof=Proof.SHOWN,
                ),
            ),
        ),
        PanelRow(
            "What are they?",
            (
                one(
                    "Versions",
                    "Of every process, with the git revision that it was built from.",
                    "none",
                    S.series("build_info"),
                    "{{worker}} {{version}} {{revision}}",
                    low=1,
                    high=1,
                    kind="table",
                    width=8,
                ),
                one(
                    "Workers' settings",
                    "Block size, dtype and transport. Workers that share requests agree on the first two.",
                    "none",
                    S.series("worker_config_info"),
                    "{{worker}}",
                    low=1,
                    high=1,
                    kind="table",
                    width=8,
                ),
                one(
                    "Router's settings",
                    "Its policy.",
                    "none",
                    S.series("router_config_info"),
                    "{{policy}}",
                    low=1,
                    high=1,
                    kind="table",
                    width=8,
                ),
            ),
        ),
    ),
)
