"""The reader of the command line: argparse, without abbreviations, and with a hint where a word is almost right."""

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

_OPTION = re.compile(r"--[a-z][a-z-]*")


class CommandParser(argparse.ArgumentParser):
    """Takes options in full alone: what `--mod` stands for would change with the next option. Parsers of verbs, which
    argparse makes by the class of the whole one's, do the same."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """End with one line: the forms of all options, which argparse would print above it, are what `help` is for."""
        program, _, verb = self.prog.partition(" ")
        said = f"{program}: {verb}{': ' if verb else ''}{message.removeprefix('argument ')}"
        self.exit(2, f"{said} (`{program} help{' ' if verb else ''}{verb}` says what it takes)\n")

    def options(self) -> list[str]:
        """Return every option that the verb of this parser has."""
        return sorted(set(_OPTION.findall(self.format_help())))


def almost(word: str, known: Iterable[str]) -> str:
    """Return a question that asks whether another word was meant; empty where none is near."""
    words = list(known)
    # What somebody has begun to type is meant before what merely looks like it.
    begun = [one for one in words if len(word) > 3 and one.startswith(word)]
    close = begun[:1] or difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
