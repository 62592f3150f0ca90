"""Tries constraints out in a process of its own, before any worker sees them: `python -m engine.constraints.trial DIR`.

What compiles a grammar is native code that callers feed. The limits of `engine/constraints/grammar.py` bound most of
what it does, not all, and a crash would take its process along. So a router asks this one: a frame of MessagePack in,
its answer out, over standard input and output, each behind its length in four bytes. It is limited in memory, and each
trial in seconds of the processor; when it ends, whatever was on trial is refused, and the router starts another.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import BinaryIO

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.constraints.grammar import compile_constraint, shown
from engine.constraints.text import FIELD, check_constraint
from engine.constraints.trial_messages import CPU_S, LENGTH, MEMORY_BYTES, ConstraintTrial, TrialVerdict
from engine.constraints.vocabulary import load_vocabulary
from engine.types import Constraint, ConstraintKind, FieldError

STACK_BYTES = 1024 * 1024
"""An eighth of what a worker's threads have, so that what is deep enough to end one of them ends this process."""
STEPS = 24
"""Tokens of the answer that a trial makes up, to see masks being made."""


def try_out(question: ConstraintTrial, vocabulary: LLTokenizer | FieldError) -> TrialVerdict:
    """Compile a constraint, and make up the beginning of an answer. Nothing is raised. With a model that no constraint
    can be kept with, the error that says so stands for its vocabulary."""
    try:
        if isinstance(vocabulary, FieldError):
            raise vocabulary
        check_constraint(question.constraint)
        constraint = _in_lark(question.constraint)
        _walk(compile_constraint(constraint, vocabulary), vocabulary)
    except FieldError as error:
        return TrialVerdict(None, error.message)
    return TrialVerdict(constraint)


def _in_lark(constraint: Constraint) -> Constraint:
    """Return a grammar in Lark's notation; it may have come in EBNF as llama.cpp writes it (GBNF)."""
    from llguidance.gbnf_to_lark import any_to_lark

    if constraint.kind is not ConstraintKind.LARK:
        return constraint
    try:
        return Constraint(ConstraintKind.LARK, any_to_lark(constraint.text))
    except Exception as error:  # the library has no narrower one
        raise FieldError(FIELD, f"is neither a Lark grammar nor EBNF: {shown(str(error))}") from error


def _walk(matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
    random = Random(0)
    for step in range(STEPS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise FieldError(FIELD, shown(matcher.get_error()))
        allowed = np.flatnonzero(np.unpackbits(mask, count=vocabulary.vocab_size, bitorder="little"))
        if step == 0 and not set(allowed.tolist()) - set(vocabulary.eos_tokens):
            raise FieldError(FIELD, "allows nothing but an empty answer")
        if matcher.is_stopped() or not len(allowed):
            return
        matcher.consume_token(int(allowed[random.randrange(len(allowed))]))


def serve(
    read: BinaryIO, write: BinaryIO, vocabulary: LLTokenizer | FieldError, begins: Callable[[], None]
) -> None:
    """Answer questions until there are no more. `begins` is called at each."""
    decoder = msgspec.msgpack.Decoder(ConstraintTrial)
    while len(header := read.read(LENGTH.size)) == LENGTH.size:
        frame = read.read(*LENGTH.unpack(header))
        begins()
        answer = msgspec.msgpack.encode(try_out(decoder.decode(frame), vocabulary))
        write.write(LENGTH.pack(len(answer)) + answer)
        write.flush()


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as told:
        held = int(told.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))


def _limit_time() -> None:
    """From now on this process has `CPU_S` seconds of the processor: then the system ends it. A limit of the kind that
    memory has would count whole seconds, and all since the process began."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)


def main(folder: str) -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    vocabulary: LLTokenizer | FieldError
    try:
        vocabulary = load_vocabulary(Path(folder))
    except FieldError as error:
        vocabulary = error
    threading.stack_size(STACK_BYTES)
    ready = LENGTH.pack(0)
    sys.stdout.buffer.write(ready)
    sys.stdout.buffer.flush()
    args = (sys.stdin.buffer, sys.stdout.buffer, vocabulary, _limit_time)
    thread = threading.Thread(target=serve, args=args)
    thread.start()
    _limit_memory()
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
