"""What is measured again and again, as one number. Pure."""

NEWEST = 0.2
"""Share of the newest measurement in the running mean."""


def mean(known: float, latest: float) -> float:
    """The running mean after the newest measurement; `known` 0.0: there was none."""
    return latest if known == 0.0 else known + NEWEST * (latest - known)
