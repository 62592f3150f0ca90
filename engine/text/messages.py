"""A chat as a template gets it: messages, with calls of tools and their results, the tools, the template's options.

What is JSON (a call's arguments, a tool's parameters, the template's own variables) stays the text that its writer
sent, so that a chat can be kept, compared and digested, and is read when the template is rendered.
"""

from collections.abc import Iterator

import msgspec


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that the model has made. `arguments` is the JSON text as the model wrote it, perhaps broken."""

    name: str
    arguments: str
    id: str = ""


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is the JSON text of a schema, empty for none."""

    name: str
    description: str = ""
    parameters: str = ""


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn. `content` is None in an assistant's turn that has only called tools. `tool_call_id` and `name` say
    whose result a tool's turn is; `reasoning` is what the assistant thought before it answered."""

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that decides how a chat is rendered. `template_kwargs` is the JSON text of an object, whose members the
    template sees as variables. `is_literal`: names of control tokens in what users wrote are text."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    template_kwargs: str = ""
    add_generation_prompt: bool = True
    continue_final: bool = False
    """The last message is the beginning of the answer, and is not closed."""
    is_literal: bool = True

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield every text that reaches the template, with the name of its field."""
        for at, message in enumerate(self.messages):
            field = f"messages[{at}]"
            yield f"{field}.content", message.content or ""
            if message.reasoning:
                yield f"{field}.reasoning_content", message.reasoning
            if message.name:
                yield f"{field}.name", message.name
            if message.tool_call_id:
                yield f"{field}.tool_call_id", message.tool_call_id
            for number, call in enumerate(message.tool_calls):
                yield f"{field}.tool_calls[{number}].id", call.id
                yield f"{field}.tool_calls[{number}].function.name", call.name
                yield f"{field}.tool_calls[{number}].function.arguments", call.arguments
        for at, tool in enumerate(self.tools):
            yield f"tools[{at}].function.name", tool.name
            yield f"tools[{at}].function.description", tool.description
            yield f"tools[{at}].function.parameters", tool.parameters
        if self.template_kwargs:
            yield "chat_template_kwargs", self.template_kwargs

    @property
    def size(self) -> int:
        """How much text there is, in characters, with what a template writes around each message and tool."""
        around = 64 * (len(self.messages) + len(self.tools))
        return around + sum(len(text) for _, text in self.texts())
