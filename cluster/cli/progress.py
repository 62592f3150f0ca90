"""Progress bars while a model is converted and a cluster starts: on a terminal, and nowhere else."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.sizes import format_size

BYTES = frozenset({"download", "weights", "loading"})


class Bars:
    """A bar for each thing that is reported, in the order in which they come. `report` may be called from any thread.
    """

    # Mutable state: the bars by what they are of.

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Bars":
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:22}"),
                BarColumn(),
                TextColumn("{task.fields[done]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self, what: str, done: int, total: int) -> None:
        """What BYTES names is in bytes, everything else is counted."""
        bars = self._bars
        if bars is None:
            return
        shown = f"{done}/{total}"
        if what in BYTES:
            shown = f"{format_size(done)} of {format_size(total)}"
        if what not in self._tasks:
            self._tasks[what] = bars.add_task(what, total=total, done=shown)
        bars.update(self._tasks[what], completed=done, total=total, done=shown)

    def close(self) -> None:
        """Take the bars away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
