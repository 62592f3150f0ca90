"""All dashboards, in the order of their links, and what none of them shows."""

from telemetry.dashboards.memory import MEMORY
from telemetry.dashboards.migration import MIGRATION
from telemetry.dashboards.overview import OVERVIEW
from telemetry.dashboards.pools import POOLS
from telemetry.dashboards.processes import PROCESSES
from telemetry.dashboards.requests import REQUESTS
from telemetry.dashboards.router import ROUTER

DASHBOARDS = (OVERVIEW, REQUESTS, POOLS, MEMORY, MIGRATION, ROUTER, PROCESSES)

UNPLOTTED = {
    "headrace_kv_pool_blocks": "A constant; the dashboards' list of workers is read off it.",
    "headrace_worker_lives_total": "Each router's own count; headrace_process_starts_total has every start once.",
    "process_virtual_memory_bytes": "Reserved address space, which says nothing of memory in use.",
}
"""Families that no panel and no rule asks for, each with why."""
