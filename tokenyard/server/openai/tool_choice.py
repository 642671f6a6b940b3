"""Which tools an answer may call, and whether it must: `tools`, `tool_choice` and `parallel_tool_calls`."""

from dataclasses import dataclass
from typing import Any

from tokenyard.base import InvalidRequestError
from tokenyard.server.openai.structured_outputs import (
    Grammar,
    after_reasoning,
    check_free_end,
    forced_calls,
    grammar_of,
    in_final_channel,
    strict_calls,
)
from tokenyard.server.parse.output_style import OutputStyle, functions_of
from tokenyard.server.protocol import ChatRequest

Function = dict[str, Any]


@dataclass(slots=True)
class ToolUse:
    """The functions that an answer may call.

    functions: from `tools`.
    forced: the answer calls at least one.
    named: the client named the function to call.
    parallel: the answer may contain several calls.
    """

    functions: list[Function]
    forced: bool = False
    named: bool = False
    parallel: bool = True


def tool_use(body: ChatRequest) -> ToolUse:
    """The tool use that a chat body requests. Raises InvalidRequestError for an invalid choice or an unknown tool."""
    functions, choice = functions_of(body.tools or ()), body.tool_choice
    parallel = body.parallel_tool_calls is not False
    match choice:
        case None | "auto":
            return ToolUse(functions, parallel=parallel)
        case "none":
            return ToolUse([])
        case "required":
            return _forced(functions, [], parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return _forced(functions, [name], False, named=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            allowed = [function["name"] for function in functions_of(tools, "tool_choice")]
            use = _forced(functions, allowed, parallel)
            use.forced = mode == "required"
            return use
    raise InvalidRequestError(
        "tool_choice must be none, auto, required, a function by name or allowed_tools", param="tool_choice"
    )


def _forced(functions: list[Function], names: list[str], parallel: bool, *, named: bool = False) -> ToolUse:
    """Force a call of one of the functions, of one in `names` if there are any."""
    if not functions:
        raise InvalidRequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
    known = {function["name"]: function for function in functions}
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return ToolUse([known[name] for name in names] if names else functions, True, named, parallel)


def chat_grammar(body: ChatRequest, use: ToolUse, style: OutputStyle, prompt: str) -> str:
    """The text of the grammar for a chat answer, "" for none. Raises InvalidRequestError if two are requested."""
    grammar = grammar_of(body, style.special)
    if grammar is not None:
        grammar = in_final_channel(grammar, style.form, prompt, style.special)
    if use.forced:
        if grammar is not None:
            raise InvalidRequestError("a forced tool call leaves no place for another form", param="response_format")
        grammar = forced_calls(style.tool_call_format, use.functions, style.special, parallel=use.parallel)
    elif use.functions and grammar is not None:
        calls = forced_calls(style.tool_call_format, use.functions, style.special, parallel=use.parallel)
        grammar = _either(grammar, calls)
    elif use.functions:
        grammar = strict_calls(style.tool_call_format, use.functions, style.special, prompt)
    if grammar is None:
        return ""
    check_free_end(body)
    return after_reasoning(grammar, style.form, prompt, style.special).text()


def _either(answer: Grammar, calls: Grammar) -> Grammar:
    """An answer that matches the first grammar, or tool calls instead."""
    answer.rules |= {name: rule for name, rule in calls.rules.items() if name not in answer.rules}
    answer.start = f"(({answer.start}) | ({calls.start}))"
    return answer
