"""Where a verb that asks a cluster finds it."""

import argparse
from pathlib import Path

import pytest

from cluster.admin_client import AdminClient, NotRunning
from cluster.cli.find import served_at
from cluster.processes.spec import LaunchError
from cluster.resolve import add_flags


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_cluster_that_does_not_answer_is_not_looked_for_elsewhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards prompts from whoever serves at the usual port, while a cluster's supervisor hangs."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    arguments = parser.parse_args(["--set", f"run_dir={tmp_path}"])

    def asked(error: LaunchError) -> str:
        def fail(client: AdminClient) -> None:
            raise error

        monkeypatch.setattr(AdminClient, "status", fail)
        return served_at(arguments, kind)  # type: ignore[arg-type]

    assert asked(NotRunning("none")) == {"grpc": "127.0.0.1:50051", "http": "127.0.0.1:8000"}[kind]
    with pytest.raises(LaunchError, match="did not answer"):
        asked(LaunchError("the supervisor did not answer in 15 s"))
