"""`headrace trace`: the timelines of a request, process by process. Each counts from its own first event."""

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.admin import Flights
from cluster.cli.status_view import silent_lines
from telemetry.flight import Flight, FlightEvent

PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""The prefixes that the HTTP front writes before a request's id, in the answers of its four APIs."""
ROUTER = "router"
"""What the names of all routers begin with."""


def request_of(text: str) -> str:
    for prefix in PREFIXES:
        text = text.removeprefix(prefix)
    return text


def print_trace(told: Flights, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    for flight in told.flights:
        console.print(Text(f"{flight.request} on {flight.worker}, from {_clock(flight)}", "bold"))
        for event in flight.events:
            console.print(Text(f"  {event.at_s * 1e3:10.1f} ms  {_line(event)}"), soft_wrap=True)
        if flight.left_out:
            console.print(f"  ({flight.left_out} events in the middle were not kept)")
    _print_silent(told, console)


def print_latest(told: Flights, console: Console | None = None) -> None:
    """Print the requests that the routers heard of last, the newest first, and who could not be asked."""
    console = console or Console(highlight=False)
    table = Table("request", "began", "last event")
    latest = [flight for flight in told.flights if flight.worker.startswith(ROUTER)]
    for flight in sorted(latest, key=lambda flight: -flight.began_unix_s):
        table.add_row(Text(flight.request), _clock(flight), Text(_line(flight.events[-1])[:100]))
    console.print(table)
    _print_silent(told, console)


def is_router_silent(told: Flights) -> bool:
    return any(name.startswith(ROUTER) for name in told.silent)


def _print_silent(told: Flights, console: Console) -> None:
    for line in silent_lines(told.silent):
        console.print(line, soft_wrap=True)


def _clock(flight: Flight) -> str:
    return time.strftime("%H:%M:%S", time.localtime(flight.began_unix_s))


def _line(event: FlightEvent) -> str:
    facts = "  ".join(f"{name}={value}" for name, value in event.facts.items())
    return f"{event.what:24} {facts}".rstrip()
