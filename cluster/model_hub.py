"""A model that is named as on the Hugging Face hub (`Qwen/Qwen3-0.6B`): found in the hub's cache, or downloaded.

What is in the cache is used as it is, without asking anybody, so that a host without a network starts as quickly as any
other; `hf download` brings a newer revision. Where the hub cannot be reached, the error says so within seconds, and how
to bring the model by hand. The package `huggingface_hub` is an extra (`pip install 'headrace[hub]'`); it reads the
variables that its users know (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from engine.model.config import ModelError
from engine.model.files.hf_model import INDEX, shards
from engine.model.prepared.cache import BESIDE

ANSWER_S = 5.0
"""The longest that the hub may take to answer the first question."""
WANTED = (*BESIDE, INDEX, "model*.safetensors")
"""The files that a model is made of, and no others: a repository may hold it in several formats."""
LOOK_S = 0.3
"""How often the size of what has arrived is looked at."""
_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?"
)

Report = Callable[[int, int], None]


class HubModel(msgspec.Struct, frozen=True):
    """`OWNER/NAME`, with `@REVISION` where not the latest is meant; of a repository of GGUF files,
    `OWNER/NAME/FILE.gguf`."""

    repository: str
    file: str = ""
    revision: str = "main"

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it is served where no others are asked for."""
        return self.repository, self.repository.partition("/")[2]


def hub_model(model: str) -> HubModel | None:
    """Read a model's name as one of the hub; None for what is a path here, or cannot be such a name."""
    found = _NAME.fullmatch(model)
    if found is None or Path(model).expanduser().exists() or found["repository"].endswith(".gguf"):
        return None
    return HubModel(found["repository"], found["file"] or "", found["revision"] or "main")


def located(model: str, report: Report | None = None) -> str:
    """Return the path of a model: that of a name on the hub, downloaded if it is not in the cache, and any other as it
    is. `report` hears how many bytes have arrived, and of how many. Raises ModelError."""
    asked = hub_model(model)
    if asked is None:
        return model
    try:
        import huggingface_hub as hub
    except ImportError as error:
        why = "no such file or directory; with `pip install huggingface_hub` it is looked for on the hub"
        raise ModelError(model, f"{why}, or {_by_hand(asked)}") from error
    return _cached(hub, asked) or _downloaded(hub, asked, report)


def _cached(hub: Any, asked: HubModel) -> str:
    """Return the path of a model that is whole in the cache, else nothing."""
    first = asked.file or "config.json"
    found = hub.try_to_load_from_cache(asked.repository, first, revision=asked.revision)
    if not isinstance(found, str):
        return ""
    if asked.file:
        return found
    folder = Path(found).parent
    try:
        is_whole = (folder / "tokenizer.json").exists() and all(shard.exists() for shard in shards(folder))
    except ModelError:
        return ""
    return str(folder) if is_whole else ""


def _downloaded(hub: Any, asked: HubModel, report: Report | None) -> str:
    """Download what is missing, and return the path. Raises ModelError."""
    api = hub.HfApi()
    try:
        said = api.model_info(asked.repository, revision=asked.revision, files_metadata=True, timeout=ANSWER_S)
    except Exception as error:  # the library passes on those of two HTTP libraries, whichever it uses
        raise _told(hub, api.endpoint, asked, error) from error
    sizes = {one.rfilename: one.size or 0 for one in said.siblings or ()}
    wanted = _wanted(asked, sizes)
    hub.utils.disable_progress_bars()
    try:
        with _watched(hub, asked, sum(sizes[name] for name in wanted), report):
            for name in wanted:  # of one commit, so that they fit together
                hub.hf_hub_download(asked.repository, name, revision=said.sha)
            # Now the cache is told what the revision's own name stands for; by that it is asked.
            hub.hf_hub_download(asked.repository, wanted[0], revision=asked.revision)
    except Exception as error:
        raise _told(hub, api.endpoint, asked, error) from error
    if path := _cached(hub, asked):
        return path
    raise ModelError(asked.repository, "what was downloaded is not a whole model: it has changed meanwhile; try again")


def _wanted(asked: HubModel, sizes: dict[str, int]) -> list[str]:
    """Return the files of a repository that a model is made of, in the order of their names. Raises ModelError."""
    if asked.file:
        if asked.file not in sizes:
            raise ModelError(asked.repository, f"has no file {asked.file}{_ggufs(sizes)}")
        return [asked.file]
    if "config.json" not in sizes:
        raise ModelError(asked.repository, f"has no config.json{_ggufs(sizes)}")
    found = sorted(name for name in sizes if any(fnmatchcase(name, pattern) for pattern in WANTED))
    return [name for name in found if "/" not in name or name in BESIDE]


def _ggufs(sizes: dict[str, int]) -> str:
    files = sorted(name for name in sizes if name.endswith(".gguf"))
    return f"; name one of its GGUF files behind it, as OWNER/NAME/FILE.gguf: {', '.join(files)}" if files else ""


def _repository(hub: Any, asked: HubModel) -> Path:
    return Path(hub.constants.HF_HUB_CACHE) / f"models--{asked.repository.replace('/', '--')}"


@contextmanager
def _watched(hub: Any, asked: HubModel, total: int, report: Report | None) -> Iterator[None]:
    """Tell how much has arrived, by the size of the folder, until the block ends."""
    if report is None:
        yield
        return
    blobs, ended = _repository(hub, asked) / "blobs", threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            arrived = 0
            for blob in blobs.glob("*"):
                try:
                    arrived += blob.stat().st_size
                except FileNotFoundError:
                    continue  # it is whole now, and has another name
            report(min(arrived, total), total)

    looking = threading.Thread(target=look, name="download", daemon=True)
    report(0, total)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
    report(total, total)


def _told(hub: Any, endpoint: str, asked: HubModel, error: Exception) -> ModelError:
    """Say in one line why a model could not be had, and what to do."""
    errors = hub.errors
    if isinstance(error, ModelError):
        return error
    if isinstance(error, errors.GatedRepoError):
        why = f"is gated: ask for access at {endpoint}/{asked.repository}, then `hf auth login`, or set HF_TOKEN"
        return ModelError(asked.repository, why)
    if isinstance(error, errors.RepositoryNotFoundError):
        why = f"no such file or directory here, and {endpoint} knows no such model, or not for you (HF_TOKEN)"
        return ModelError(asked.repository, why)
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(asked.repository, f"has no revision {asked.revision}")
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return ModelError(
        asked.repository,
        f"no such file or directory here, and {endpoint} cannot be reached ({first}); {_by_hand(asked)}",
    )


def _by_hand(asked: HubModel) -> str:
    """Say how a model is brought to a host without a network."""
    name = asked.repository.partition("/")[2]
    what = f"{asked.repository} {asked.file}".strip()
    path = f"{name}/{asked.file}" if asked.file else name
    return f"where there is a network, `hf download {what} --local-dir {name}`; copy it here and say --model ./{path}"
