"""Notes every use of pickle in a process that starts with this folder on its path and PICKLE_NOTES set: one
line for each call, with where it came from. The first line says that the process is watched."""

import os
import sys
import traceback

_FOLDER = os.environ.get("PICKLE_NOTES", "")


def _watch() -> None:
    import _pickle
    import pickle

    note = open(os.path.join(_FOLDER, f"{os.getpid()}.txt"), "a", buffering=1)  # noqa: SIM115 - for the process's life
    note.write(f"watched {' '.join(sys.orig_argv)}\n")

    def noted(name, call):  # type: ignore[no-untyped-def]
        def use(*args, **options):  # type: ignore[no-untyped-def]
            frames = [f"{one.filename}:{one.lineno}" for one in traceback.extract_stack(limit=12)[:-1]]
            note.write(f"used {name} {' < '.join(reversed(frames))}\n")
            return call(*args, **options)

        return use

    for name in ("load", "loads", "dump", "dumps"):
        for module in (pickle, _pickle):
            setattr(module, name, noted(name, getattr(module, name)))

    # What unpickles by a class of its own, in C or in Python, is seen when it looks for the first global.
    def audit(event: str, args: object) -> None:
        if event == "pickle.find_class":
            frames = [f"{one.filename}:{one.lineno}" for one in traceback.extract_stack(limit=12)[:-1]]
            note.write(f"used find_class{args} {' < '.join(reversed(frames))}\n")

    sys.addaudithook(audit)


if _FOLDER:
    _watch()
