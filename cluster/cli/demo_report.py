"""The demo's figures: as data, and as a table with a column for every request."""

from collections.abc import Callable, Mapping

from rich.table import Table

from cluster.cli.ask import ClientAnswer
from telemetry.labels import STAGES

MIB = 1024 * 1024


def figures(answer: ClientAnswer) -> dict[str, object]:
    """Everything the table shows of one request, in tokens, bytes and seconds."""
    end = answer.finished
    stats = end.stats
    return {
        "prefill_worker": stats.prefill_worker,
        "decode_worker": stats.decode_worker,
        "transport": stats.transport,
        "finish_reason": end.reason.value,
        "prompt_tokens": end.prompt_tokens,
        "output_tokens": end.output_tokens,
        "cached_tokens": end.cached_tokens,
        "prefill_cached_tokens": stats.prefill_cached_tokens,
        "decode_cached_tokens": stats.decode_cached_tokens,
        "migrated_blocks": stats.migrated_blocks,
        "migrated_bytes": stats.migrated_bytes,
        "migration_s": stats.migration_s,
        "ttft_s": end.ttft_s,
        "itl_mean_s": end.itl_mean_s,
        "itl_p99_s": end.itl_p99_s,
        "e2e_s": end.e2e_s,
        "stages_s": {stage: stats.stages.get(stage, 0.0) for stage in STAGES},
    }


def _plain(value: object) -> str:
    return str(value)


def _ms(value: object) -> str:
    return f"{value * 1e3:.1f}" if isinstance(value, int | float) else ""


def _mib(value: object) -> str:
    return f"{value / MIB:.2f}" if isinstance(value, int | float) else ""


_ROWS: tuple[tuple[str, str, Callable[[object], str]], ...] = (
    ("prefill worker", "prefill_worker", _plain),
    ("decode worker", "decode_worker", _plain),
    ("prompt tokens", "prompt_tokens", _plain),
    ("  cached, prefill side", "prefill_cached_tokens", _plain),
    ("  cached, decode side", "decode_cached_tokens", _plain),
    ("output tokens", "output_tokens", _plain),
    ("blocks migrated", "migrated_blocks", _plain),
    ("  MiB", "migrated_bytes", _mib),
    ("  time, ms", "migration_s", _ms),
    ("  transport", "transport", _plain),
    ("time to first token, ms", "ttft_s", _ms),
    ("inter-token, mean, ms", "itl_mean_s", _ms),
    ("inter-token, p99, ms", "itl_p99_s", _ms),
    ("whole request, ms", "e2e_s", _ms),
)


def table(answers: Mapping[str, ClientAnswer]) -> Table:
    """Requests side by side, so that it fits an 80-column terminal; stages in milliseconds."""
    shown = Table(title="What happened", title_justify="left")
    shown.add_column("")
    for name in answers:
        shown.add_column(name, justify="right")
    columns = [figures(answer) for answer in answers.values()]
    for title, key, form in _ROWS:
        shown.add_row(title, *(form(column[key]) for column in columns))
    shown.add_section()
    for stage in STAGES:
        shown.add_row(
            f"stage {stage}, ms",
            *(_ms(answer.finished.stats.stages.get(stage, 0.0)) for answer in answers.values()),
        )
    return shown
