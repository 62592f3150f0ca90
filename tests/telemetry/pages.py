"""A metrics page as values that a test can look up."""

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: bytes) -> Samples:
    """Values by (sample name, sorted labels without model, pool and worker)."""
    own = {"model", "pool", "worker"}
    return {
        (
            sample.name,
            tuple(sorted((key, value) for key, value in sample.labels.items() if key not in own)),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
