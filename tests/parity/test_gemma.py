"""Gemma 3 270M (base), a real model of another family than the demo's, against transformers on the same file: window
layers, two thetas, four norms a layer, a head of 256. As text, as logits, and as a cluster serves it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.cli import __main__ as cli
from cluster.config import ClusterConfig
from cluster.processes.launch import Addresses, Cluster, make_launcher
from engine.config import EngineConfig
from engine.device import open_device
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from engine.text.bundle import TextModel
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from router.config import RouterConfig
from tests.parity.prompts import TEXTS
from tests.parity.real_files import gemma_file
from tests.parity.reference import Difference, Reference

pytestmark = pytest.mark.parity

OUTPUT_TOKENS = 64
MAX_NEAR_TIES = 2
WINDOW = 512
GREEDY = SamplingParams(temperature=0.0)
LONG = " ".join(f"{n}. The mill has a wheel, and the wheel has {n} buckets." for n in range(1, 60))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma_file(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def model_dir(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(str(gemma), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def text(model_dir: Path) -> TextModel:
    return TextModel.load(model_dir)


@pytest.fixture(scope="module")
def reference(gemma: Path) -> Reference:
    torch.set_num_threads(1)
    return Reference(gemma)


def test_the_file_is_read_as_the_reference_reads_it(model_dir: Path, reference: Reference) -> None:
    """Guards what the file does not say: which layers are local, and their theta."""
    ours, theirs = ModelConfig.load(model_dir), reference.model.config
    kinds = ["sliding_attention" if ours.layer(n).window else "full_attention" for n in range(ours.layers)]
    assert kinds == theirs.layer_types and ours.layer(0).window == theirs.sliding_window == WINDOW
    thetas = {kind: ours.ropes[ours.layer(n).rope or 0].theta for n, kind in enumerate(kinds)}
    assert thetas == {kind: theirs.rope_parameters[kind]["rope_theta"] for kind in kinds}
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5


def test_text_comes_back_and_begins_once(text: TextModel) -> None:
    """Guards SentencePiece from scores, without merges: every character of every script, and exactly one BOS."""
    for words in TEXTS:
        ids = text.encode(words, add_special=True)
        assert ids.count(2) == 1 and ids[0] == 2
        assert text.decode(ids) == words


def _answers(model_dir: Path, prompts: list[list[int]], together: bool, groups: str = "off") -> list[list[int]]:
    config = EngineConfig(model_dir=str(model_dir), threads=1, layer_groups=groups)  # type: ignore[arg-type]
    engine = Colocated(open_device(config), open_device(config))
    records = [
        RequestRecord(
            request=RequestId(str(number)),
            tokens=prompt,
            prompt_tokens=len(prompt),
            max_tokens=OUTPUT_TOKENS,
            seed=0,
            sampling=GREEDY,
            ignore_eos=True,
        )
        for number, prompt in enumerate(prompts)
    ]
    runs = [records] if together else [[record] for record in records]
    answers = [answer.tokens for run in runs for answer in engine.run(run)]
    engine.close()
    return answers


def test_answers_are_the_references(model_dir: Path, text: TextModel, reference: Reference) -> None:
    """Guards the forward pass on real weights, also past the window, and that answers depend neither on company nor on
    whether the windows' layers are kept apart."""
    prompts = [text.encode(words, add_special=True) for words in (*TEXTS[:6], LONG)]
    assert len(prompts[-1]) > 2 * WINDOW
    answers = _answers(model_dir, prompts, together=False)
    found: list[Difference] = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer) == OUTPUT_TOKENS
        found += reference.differences(number, prompt, answer)
    print(f"\nGemma 3 270M: {len(prompts) * OUTPUT_TOKENS - len(found)} of {len(prompts) * OUTPUT_TOKENS} tokens as in "
          f"transformers; {found}")
    assert all(difference.is_near_tie for difference in found) and len(found) <= MAX_NEAR_TIES
    for groups in ("off", "on"):
        assert _answers(model_dir, prompts, together=True, groups=groups) == answers, groups


@pytest.fixture(scope="module")
def served(gemma: Path, model_dir: Path) -> Iterator[Addresses]:
    config = ClusterConfig(
        launcher="process", router=RouterConfig(grpc_port=0, http_port=-1), cache_dir="unused"
    )
    with Cluster(config, make_launcher("process"), model_dir=str(model_dir)) as running:
        yield running.start()


def test_headrace_generate_goes_on_with_a_text(served: Addresses, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["generate", "--server", served.grpc, "--raw", "--temperature", "0", "--max-tokens", "12"]
    assert cli.main([*flags, "The capital of France is"]) == 0
    # What it says greedily: it is small, and no answer to a question.
    assert "the capital of the country of France" in capfd.readouterr().out


def test_a_chat_is_told_that_there_is_no_template(served: Addresses, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards a base model that is asked to chat: no template of another model may stand in."""
    assert cli.main(["generate", "--server", served.grpc, "--max-tokens", "12", "Hello"]) != 0
    assert "no chat template" in capfd.readouterr().err
