"""One schema, four sources, and messages that a person can act on."""

import argparse
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.cli import __main__ as cli
from cluster.config import ConfigError, default_threads, fields, problem
from cluster.memory import available_bytes
from cluster.resolve import Resolved, add_flags, resolve


def resolved(*flags: str, **environ: str) -> Resolved:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return resolve(parser.parse_args(list(flags)), environ)


def origin(result: Resolved, key: str) -> str:
    return next(setting.origin for setting in result.settings if setting.key == key)


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    """Guards against a source that silently overrules a nearer one."""
    file = tmp_path / "c.toml"
    file.write_text("prefill_workers = 2\ndecode_workers = 2\n[prefill]\nchunk_tokens = 32\n")
    result = resolved(
        "--config",
        str(file),
        "--prefill",
        "4",
        HEADRACE_PREFILL_WORKERS="3",
        HEADRACE_DECODE_WORKERS="3",
        OTHER_PREFILL_WORKERS="9",
    )
    config = result.config
    assert (config.prefill_workers, config.decode_workers) == (4, 3)
    assert (config.prefill.chunk_tokens, config.decode.max_batch) == (32, 32)
    assert origin(result, "prefill_workers") == "flag --prefill"
    assert origin(result, "decode_workers") == "variable HEADRACE_DECODE_WORKERS"
    assert origin(result, "prefill.chunk_tokens") == f"file {file}"
    assert origin(result, "decode.max_batch") == "default"


def test_every_setting_can_be_set_by_flag_and_variable() -> None:
    """Guards against a setting that only the file can reach."""
    changed: dict[object, str] = {bool: "true", int: "7", float: "7.5", str: "float16"}
    changed[tuple[str, ...]] = "random, round-robin"
    for key, kind, _ in fields():
        value = changed.get(kind)
        if value is None:
            continue
        extra = []
        if key.endswith("engine.dtype"):
            # Both pools must agree on it.
            extra = ["--set", f"prefill.engine.dtype={value}"]
            extra += ["--set", f"decode.engine.dtype={value}"]
        if key.endswith((".digest_sample", "tracing.sample", ".device_share")):
            value = "0.5"
        if key.endswith("engine.device"):
            value = "cuda:1"
        if key == "decode.engine.draft_model":
            extra = ["--set", "decode.engine.speculation=model"]
        if key == "router.policy":
            value = "random"
        if key == "router.cors_origins":
            value = "https://example.org, http://localhost:3000"
        by_flag = resolved("--set", f"{key}={value}", *extra)
        variable = "HEADRACE_" + key.upper().replace(".", "__")
        by_variable = resolved(*extra, **{variable: value})
        assert origin(by_flag, key) == "flag --set"
        assert extra or origin(by_variable, key) == f"variable {variable}"
        assert by_flag.config == by_variable.config


def test_a_list_of_names_is_the_same_from_everywhere(tmp_path: Path) -> None:
    """Guards the one setting that is a list: commas where there is only text, TOML's own list in the file."""
    file = tmp_path / "c.toml"
    file.write_text('[router]\nshadow_policies = ["random", "round-robin"]\n')
    for result in (
        resolved("--config", str(file)),
        resolved("--set", "router.shadow_policies=random, round-robin"),
        resolved(HEADRACE_ROUTER__SHADOW_POLICIES="random,round-robin"),
    ):
        assert result.config.router.shadow_policies == ("random", "round-robin")
    empty = resolved("--config", str(file), "--set", "router.shadow_policies=")
    assert empty.config.router.shadow_policies == ()


def test_one_pool_is_two_settings_and_what_follows() -> None:
    """Guards `--workers`: nobody is of the prefill pool, so that nothing of it must be set to agree."""
    found = resolved("--workers", "3")
    assert (found.config.prefill_workers, found.config.decode_workers) == (0, 3)
    assert origin(found, "prefill_workers") == origin(found, "decode_workers") == "flag --workers"
    assert found.config.decode.local_chunk_tokens == found.config.prefill.chunk_tokens == 128
    assert resolved("--prefill", "2").config.decode.local_chunk_tokens == 64
    given = resolved("--workers", "3", "--set", "decode.local_chunk_tokens=32")
    assert given.config.decode.local_chunk_tokens == 32
    on_gpu = resolved("--workers", "2", "--set", "decode.engine.device=cuda", "--set", "decode.engine.kv_dtype=int8")
    assert on_gpu.config.prefill.engine.device == "cuda" and on_gpu.config.prefill.engine.kv_dtype == "int8"
    assert on_gpu.config.decode.local_chunk_tokens == 4096
    assert on_gpu.config.decode.engine.device_share == 0.5, "of the two that there are"


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        ([], "auto"),
        (["--set", "decode.itl_target_ms=off"], "off"),
        (["--set", "decode.itl_target_ms=40"], 40.0),
        (["--workers", "2"], "off"),
        (["--set", "decode.engine.lend_cores=false"], "off"),
        (["--set", "prefill.engine.lend_cores=false"], "off"),
        (["--set", "decode.engine.attention=torch"], "off"),
        (["--set", "engine.dtype=bfloat16"], "off"),
        (["--launcher", "ray", "--set", "ray.address=auto"], "off"),
        (["--launcher", "ray"], "auto"),
    ],
)
def test_steps_wait_by_default_where_the_pools_lend_each_other_cores(flags: list[str], target: object) -> None:
    """Guards streams of clusters whose prefill workers gain nothing by a decode worker that waits."""
    found = resolved(*flags)
    assert found.config.decode.itl_target_ms == target
    assert origin(found, "decode.itl_target_ms").startswith("computed") is (target == "auto")


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--prefill", "-1"], {}, r"prefill_workers \(flag --prefill\): -1 is negative"),
        (["--decode", "0"], {}, r"decode_workers \(flag --decode\): 0 is too small"),
        (["--workers", "0"], {}, r"decode_workers \(flag --workers\): 0 is too small"),
        (["--workers", "2", "--prefill", "1"], {}, "flag --workers: one pool has no --prefill"),
        (["--workers", "2", "--decode", "2"], {}, "flag --workers: one pool has no --decode"),
        (["--prefill", "two"], {}, "'two' is not a whole number"),
        (["--grpc-port", "70000"], {}, r"router.grpc_port .*70000 is not in 0..65535"),
        (["--launcher", "k8s"], {}, "launcher .*'k8s' is not one of ray, process"),
        (["--set", "prefill.chunk_tokens"], {}, "not KEY=VALUE"),
        (["--set", "stop_grace_s=nan"], {}, "stop_grace_s .*not a finite number"),
        (["--set", "prefill.engine.model_dir=/x"], {}, "unknown setting 'prefill.engine.model_dir"),
        (
            ["--set", "decode.engine.dtype=float16"],
            {},
            r"prefill.engine.dtype \(default for cpu\) is 'float32' but decode.engine.dtype",
        ),
        (
            ["--set", "decode.engine.kv_dtype=int8"],
            {},
            r"prefill.engine.kv_dtype \(default\) is 'auto' but decode.engine.kv_dtype \(flag --set\) is 'int8'",
        ),
        (
            ["--set", "prefill.transfer.digests=some"],
            {},
            r"prefill.transfer.digests .*'some' is not one of all, sampled, off",
        ),
        (
            ["--set", "decode.transfer.digest_sample=1.5"],
            {},
            r"decode.transfer.digest_sample .*1.5 is more than all: a share is at most 1",
        ),
        (
            ["--set", "decode.transfer.digest_sample=0"],
            {},
            r"decode.transfer.digest_sample .*0 is too small",
        ),
        (
            ["--set", "prefill.engine.dtype=int3"],
            {},
            "prefill.engine.dtype .*'int3' is not one of float32",
        ),
        (
            [],
            {"HEADRACE_PREFIL__CHUNK_TOKENS": "1"},
            "variable HEADRACE_PREFIL__CHUNK_TOKENS: unknown setting .*did you mean",
        ),
        ([], {"HEADRACE_DECODE__MAX_BATCH": "-1"}, r"decode.max_batch .*-1 is negative"),
        (["--set", "router.policy=best"], {}, r"router.policy \(flag --set\): 'best' is not one of least-cost, "),
        (["--set", "router.shadow_policies=random,best"], {}, r"router.shadow_policies .*'best' is not one of"),
        (["--set", "router.cors_origins=https://a.example/"], {}, r"router.cors_origins .*neither \* nor an origin"),
        (["--set", "router.cors_origins=a.example"], {}, r"router.cors_origins .*neither \* nor an origin"),
        (["--set", "router.cors_origins=null"], {}, r"router.cors_origins .*neither \* nor an origin"),
        (["--set", "prefill.transfer.wire=int4"], {}, r"prefill.transfer.wire .*'int4' is not one of"),
        (
            ["--set", "decode.transfer.wire=fp8", "--set", "decode.engine.deterministic=on"],
            {},
            r"decode.engine.deterministic \(flag --set\) is 'on' but decode.transfer.wire .* is 'fp8'",
        ),
    ],
)
def test_bad_settings_name_key_and_origin(
    flags: list[str], environ: dict[str, str], message: str
) -> None:
    """Guards against a typo that is ignored, and against messages that do not say where to look."""
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(*flags, **environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[prefill]\nchunk = 1\n", "unknown setting 'prefill.chunk'"),
        ("[cache]\nsize = 1\n", "unknown setting 'cache'"),
        ('[prefill]\nchunk_tokens = "64"\n', "prefill.chunk_tokens .*'64' is not a whole number"),
        ("prefill_workers = true\n", "prefill_workers .*True is not a whole number"),
        ("prefill = 3\n", "unknown setting 'prefill'"),
        ("prefill_workers = \n", "line 1"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    """Guards against a file whose text values are guessed at, or whose sections are ignored."""
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolved("--config", str(file))


@pytest.mark.parametrize(
    ("flags", "prefill", "decode"),
    [
        ((), (1.0, 5.0), (1.0, 5.0)),
        (("--set", "decode.engine.device=cuda"), (1.0, 5.0), (1.0, 5.0)),
        (("--set", "decode.engine.device=cuda", "--decode", "4"), (1.0, 5.0), (0.25, 20.0)),
        (("--set", "decode.engine.device=cuda", "--set", "prefill.engine.device=cuda:0"), (0.5, 10.0), (0.5, 10.0)),
        (("--set", "decode.engine.device=cuda:1", "--set", "prefill.engine.device=cuda"), (1.0, 5.0), (1.0, 5.0)),
        (
            ("--set", "decode.engine.device=cuda", "--set", "ray.address=auto", "--set", "ray.gpus_per_worker=0.5",
             "--decode", "8"),
            (1.0, 5.0), (0.5, 10.0),
        ),
        (("--set", "decode.engine.device=cuda", "--set", "ray.address=auto", "--decode", "8"), (1.0, 5.0), (1.0, 5.0)),
        (
            ("--set", "decode.engine.device=cuda", "--decode", "2", "--set", "decode.engine.device_share=0.3",
             "--set", "decode.transfer.nccl.drain_s=3"),
            (1.0, 5.0), (0.3, 3.0),
        ),
    ],
)  # fmt: skip
def test_workers_of_one_gpu_know_of_each_other(
    flags: tuple[str, ...], prefill: tuple[float, float], decode: tuple[float, float]
) -> None:
    """Guards against two pools that each take the whole of a card, and limits for a card of one's own."""
    result = resolved(*flags)
    for pool, told in ((result.config.prefill, prefill), (result.config.decode, decode)):
        assert (pool.engine.device_share, pool.transfer.nccl.drain_s) == told
    computed = "computed" in origin(result, "decode.engine.device_share")
    assert computed is (decode[0] in (0.25, 0.5))


def test_threads_are_shared_out_unless_given() -> None:
    """Guards against two workers that each take every core: their steps were measured six times
    slower at the tail."""
    result = resolved("--set", "decode.engine.threads=3")
    assert result.config.decode.engine.threads == 3
    assert result.config.prefill.engine.threads == default_threads(2)
    assert "computed" in origin(result, "prefill.engine.threads")
    assert default_threads(10_000) == 1


def test_memory_is_shared_out_for_pools_that_are_sized_by_it() -> None:
    """Guards against two workers that each plan with all of the memory, and against a configuration that differs from
    call to call where nothing asks for that."""
    result = resolved("--set", "decode.engine.pool_bytes=auto", "--decode", "3")
    share = result.config.decode.engine.memory_bytes
    assert 0 < share < 0.3 * available_bytes()
    assert origin(result, "decode.engine.memory_bytes") == "computed: available memory / 4 workers"
    assert result.config.prefill.engine.memory_bytes == 0
    given = resolved(
        "--set", "decode.engine.pool_bytes=auto", "--set", "decode.engine.memory_bytes=9"
    )
    assert given.config.decode.engine.memory_bytes == 9


def test_the_example_file_is_valid() -> None:
    example = Path(__file__).parents[2] / "examples" / "headrace.toml"
    assert resolved("--config", str(example)).config.prefill.chunk_tokens == 128


def test_dump_config_lists_everything_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dump-config", "--set", "router.namespace_key=hush"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()] == [key for key, _, _ in fields()]
    assert "hush" not in text
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["router.namespace_key"] == {"value": "(set)", "origin": "flag --set"}


def test_wrong_settings_exit_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--set", "prefill.chunk_tokens=-4"]) == 2
    error = capsys.readouterr().err
    assert error == "headrace: prefill.chunk_tokens (flag --set): -4 is negative\n"


GPU_RANKS = ("--set", "decode.engine.device=cuda", "--set", "decode.engine.tensor_parallel=2")


def test_workers_of_several_ranks_have_the_tiers_of_others() -> None:
    """Guards defaults that depend on where the blocks of ranks lie."""
    on_cpu = ("--set", "engine.tensor_parallel=3", "--set", "engine.rank_pools=own")
    assert resolved(*on_cpu).config.prefill.tiers == resolved().config.prefill.tiers
    on_gpu = resolved("--prefill", "0", "--decode", "1", *GPU_RANKS, "--set", "decode.tiers.disk_bytes=1000")
    one = resolved("--prefill", "0", "--decode", "1", *GPU_RANKS[:2])
    assert on_gpu.config.decode.tiers == replace(one.config.decode.tiers, disk_bytes=1000)


def test_zero_is_taken_where_the_page_says_what_it_means() -> None:
    """Guards settings that say what 0 does, and refused it."""
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
    said = set(re.findall(r"^\| `(\w+)` \|.*[;.|] 0: ", page, re.MULTILINE))
    keys = [key for key, _, _ in fields() if key.rpartition(".")[2] in said]
    assert {"router.deadline_margin", "decode.engine.one_shot_bytes", "context_tokens"} <= set(keys)
    assert {key: told for key in keys if (told := problem(key, 0)) is not None} == {}


def test_what_kubernetes_says_of_a_service_is_no_setting() -> None:
    """Guards pods beside a service named headrace: every start after the first one was refused."""
    told = {
        "HEADRACE_SERVICE_HOST": "10.0.0.5",
        "HEADRACE_SERVICE_PORT": "8000",
        "HEADRACE_SERVICE_PORT_GRPC": "50051",
        "HEADRACE_PORT": "tcp://10.0.0.5:8000",
        "HEADRACE_PORT_8000_TCP": "tcp://10.0.0.5:8000",
        "HEADRACE_PORT_8000_TCP_PROTO": "tcp",
        "HEADRACE_METRICS_SERVICE_HOST": "10.0.0.6",
        "HEADRACE_METRICS_PORT": "tcp://10.0.0.6:9090",
        "HEADRACE_ROUTER__GRPC_PORT": "0",
    }
    found = resolved(**told)
    assert origin(found, "router.grpc_port") == "variable HEADRACE_ROUTER__GRPC_PORT"
    with pytest.raises(ConfigError, match="variable HEADRACE_PORT: unknown setting"):
        resolved(HEADRACE_PORT="8000")


@pytest.mark.parametrize("name", ["", "a/b", ".a"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    assert "cannot name a cluster's files" in (problem("name", name) or "")
