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


_FIRST: tuple[tuple[str, str, Callable[[object], str]], ...] = (
    ("prompt tokens", "prompt_tokens", _plain),
    ("  of them cached", "cached_tokens", _plain),
    ("KV blocks migrated", "migrated_blocks", _plain),
    ("  MiB", "migrated_bytes", _mib),
    ("time to first token, ms", "ttft_s", _ms),
    ("output tokens", "output_tokens", _plain),
    ("  time for each, ms", "itl_mean_s", _ms),
    ("whole request, ms", "e2e_s", _ms),
)
"""What a person wants to know first."""
_REST: tuple[tuple[str, str, Callable[[object], str]], ...] = (
    ("prefill worker", "prefill_worker", _plain),
    ("  cached there", "prefill_cached_tokens", _plain),
    ("decode worker", "decode_worker", _plain),
    ("  cached there", "decode_cached_tokens", _plain),
    ("migration, ms", "migration_s", _ms),
    ("  transport", "transport", _plain),
    ("inter-token, p99, ms", "itl_p99_s", _ms),
)


def table(answers: Mapping[str, ClientAnswer], is_verbose: bool = False) -> Table:
    """Requests side by side, so that it fits an 80-column terminal. `is_verbose` adds a part with the rest of the
    figures and all stages in milliseconds."""
    shown = Table(title="What happened", title_justify="left")
    shown.add_column("")
    for name in answers:
        shown.add_column(name, justify="right")
    columns = [figures(answer) for answer in answers.values()]
    for title, key, form in (*_FIRST, *(_REST if is_verbose else ())):
        shown.add_row(title, *(form(column[key]) for column in columns), end_section=key == _FIRST[-1][1])
    if not is_verbose:
        return shown
    shown.add_section()
    for stage in STAGES:
        shown.add_row(
            f"stage {stage}, ms",
            *(_ms(answer.finished.stats.stages.get(stage, 0.0)) for answer in answers.values()),
        )
    return shown


def summary(answers: Mapping[str, ClientAnswer]) -> str:
    """Say in a sentence what the first two requests have shown: the second shares its beginning with the first."""
    first, second = (answer.finished for answer in list(answers.values())[:2])
    reader, writer = first.stats.prefill_worker, first.stats.decode_worker
    moved = f"Both prompts were read, and answered, by {writer}"
    if first.stats.migrated_blocks:
        size = _mib(first.stats.migrated_bytes)
        moved = (
            f"{reader} read the first prompt and sent {first.stats.migrated_blocks} blocks of KV ({size} MiB) to "
            f"{writer}, which wrote the answer"
        )
    return (
        f"{moved}; of the second prompt {second.cached_tokens} of {second.prompt_tokens} tokens were cached, so that "
        f"its first token came after {_ms(second.ttft_s)} ms, not {_ms(first.ttft_s)}."
    )
