"""Which parsers an answer needs: by the dialect that the model's template and tokens show, or by the configuration."""

from collections.abc import Callable

import msgspec

from engine.text.messages import ChatPrompt
from router.front.parsers.harmony import MARKS, HarmonyParser
from router.front.parsers.hermes import HermesParser
from router.front.parsers.llama import TAG, LlamaParser
from router.front.parsers.mistral import ARGS, CALL_ID, MARK, MistralParser
from router.front.parsers.pieces import AnswerParser
from router.front.parsers.thinking import CLOSE, OPEN, ContentParser, ThinkingParser


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an answer's text is taken apart. `is_open`: the prompt has already opened the think block. `single`: only
    the first call is given, as the caller asked for one."""

    tools: str = ""
    reasoning: str = ""
    is_open: bool = False
    single: bool = False

    @property
    def marks(self) -> frozenset[str]:
        """Control tokens that these parsers must see, where the tokenizer calls them special."""
        return frozenset((*_MARKS.get(self.tools, ()), *_MARKS.get(self.reasoning, ())))


_TOOLS: dict[str, Callable[[], AnswerParser]] = {
    "hermes": HermesParser,
    "llama3": LlamaParser,
    "mistral": MistralParser,
}
_MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": (TAG,),
    "mistral": (MARK, CALL_ID, ARGS),
    "harmony": MARKS,
    "think": (OPEN, CLOSE),
}


def opens_thinking(chat: ChatPrompt, prompt: str) -> bool:
    """Return whether the answer begins inside of a think block: the template opens it, or the message does that the
    answer goes on with."""
    if not chat.continue_final:
        return chat.add_generation_prompt and prompt.rstrip().endswith(OPEN)
    begun = chat.messages[-1].content or ""
    return begun.rfind(OPEN) > begun.rfind(CLOSE)


def parser_of(parsing: Parsing) -> AnswerParser:
    """Return the parser of one answer."""
    if "harmony" in (parsing.tools, parsing.reasoning):
        return HarmonyParser()
    kind = _TOOLS.get(parsing.tools)
    parser: AnswerParser = kind() if kind is not None else ContentParser()
    if parsing.reasoning == "think":
        parser = ThinkingParser(parser, is_open=parsing.is_open)
    return parser
