"""The formats of the model families, most specific first: detection takes the first one that matches a template."""

from tokenyard.server.parse.format import OutputFormat, Region, ToolCallShape

THINK = ("<think>", "</think>")
THINK_OPEN = (r"<think>\s*$", "reasoning")


def _thinking(regions: dict[str, Region]) -> dict[str, Region]:
    """Add reasoning between <think> and </think>, before everything else, to regions of calls."""
    start = regions["start"]
    reasoning = {"</think>": "start"}
    # Some models call a tool without closing their reasoning.
    calls = {marker: region for marker, region in start.edges.items() if marker.startswith("<")}
    return {
        **regions,
        "start": Region("start", {"<think>": "reasoning", "</think>": "start", **start.edges}, bare=start.bare),
        "reasoning": Region("reasoning", {**reasoning, **calls}),
    }


def _with_content(edges: dict[str, str], bare: dict[str, str] | None = None) -> dict[str, Region]:
    """The regions outside of calls."""
    return {"start": Region("start", edges, bare=bare or {}), "content": Region("content", edges)}


HERMES = OutputFormat(
    "hermes",
    _thinking(_with_content({"<tool_call>": "call"}) | {"call": Region("objects", {"</tool_call>": "content"})}),
    detect=("<tool_call>", '"name"'),
    opened=(THINK_OPEN,),
    shape=ToolCallShape('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),
    thinks=THINK,
)

QWEN_CODER = OutputFormat(
    "qwen3_coder",
    _thinking(
        _with_content({"<tool_call>": "calls", "<function=": "name"})
        | {
            "calls": Region("skip", {"<function=": "name", "</tool_call>": "content"}),
            "name": Region("name", {">": "parameters"}),
            "parameters": Region("skip", {"<parameter=": "key", "</function>": "calls"}, in_call=True),
            "key": Region("key", {">": "value"}),
            "value": Region("value", {"</parameter>": "parameters"}),
        }
    ),
    detect=("<function=", "<parameter="),
    opened=(THINK_OPEN,),
    shape=ToolCallShape(
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        between="\n",
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    thinks=THINK,
)

GLM = OutputFormat(
    "glm",
    _thinking(
        _with_content({"<tool_call>": "name"})
        | {
            "name": Region("name", {"<arg_key>": "key", "</tool_call>": "content"}),
            "parameters": Region("skip", {"<arg_key>": "key", "</tool_call>": "content"}, in_call=True),
            "key": Region("key", {"</arg_key>": "between"}),
            "between": Region("skip", {"<arg_value>": "value"}, in_call=True),
            "value": Region("value", {"</arg_value>": "parameters"}),
        }
    ),
    detect=("<tool_call>", "<arg_key>"),
    opened=(THINK_OPEN,),
    shape=ToolCallShape(
        "<tool_call>",
        "\n",
        "</tool_call>",
        between="\n",
        parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    thinks=THINK,
)

MINIMAX = OutputFormat(
    "minimax",
    _thinking(
        _with_content({"<minimax:tool_call>": "calls"})
        | {
            "calls": Region("skip", {'<invoke name="': "name", "</minimax:tool_call>": "content"}),
            "name": Region("name", {'">': "parameters"}),
            "parameters": Region("skip", {'<parameter name="': "key", "</invoke>": "calls"}, in_call=True),
            "key": Region("key", {'">': "value"}),
            "value": Region("value", {"</parameter>": "parameters"}),
        }
    ),
    detect=("<minimax:tool_call>",),
    opened=(THINK_OPEN,),
    shape=ToolCallShape(
        '<invoke name="',
        '">\n',
        "</invoke>\n",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        parameter=('<parameter name="', '">', "</parameter>\n"),
    ),
    thinks=THINK,
)

_DEEPSEEK = {"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"}

DEEPSEEK_V3 = OutputFormat(
    "deepseek_v3",
    _thinking(
        _with_content({"<｜tool▁calls▁begin｜>": "calls"})
        | {
            "calls": Region("skip", {**_DEEPSEEK, "<｜tool▁call▁begin｜>": "type"}),
            "type": Region("skip", {"<｜tool▁sep｜>": "name"}),
            "name": Region("name", {"```json": "arguments"}),
            "arguments": Region("arguments", {"<｜tool▁call▁end｜>": "calls", "<｜tool▁calls▁end｜>": "content"}),
        }
    ),
    detect=("<｜tool▁calls▁begin｜>", "```json"),
    opened=(THINK_OPEN,),
    shape=ToolCallShape(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        between="\n",
    ),
    thinks=THINK,
)

DEEPSEEK_V31 = OutputFormat(
    "deepseek_v31",
    _thinking(
        _with_content({"<｜tool▁calls▁begin｜>": "calls"})
        | {
            "calls": Region("skip", _DEEPSEEK),
            "name": Region("name", {"<｜tool▁sep｜>": "arguments"}),
            "arguments": Region("arguments", {"<｜tool▁call▁end｜>": "calls", "<｜tool▁calls▁end｜>": "content"}),
        }
    ),
    detect=("<｜tool▁calls▁begin｜>",),
    opened=(THINK_OPEN,),
    shape=ToolCallShape(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    thinks=THINK,
)

_KIMI_END = {"<|tool_call_end|>": "calls", "<|tool_calls_section_end|>": "content"}

KIMI = OutputFormat(
    "kimi_k2",
    _thinking(
        _with_content({"<|tool_calls_section_begin|>": "calls"})
        | {
            "calls": Region("skip", {"<|tool_call_begin|>": "name", "<|tool_calls_section_end|>": "content"}),
            "name": Region(
                "name",
                {"<|tool_call_argument_begin|>": "arguments"},
                pattern=r"(?P<id>(?:functions\.)?(?P<name>.+?)(?::\d+)?)$",
            ),
            "arguments": Region("arguments", _KIMI_END),
        }
    ),
    detect=("<|tool_calls_section_begin|>",),
    opened=(THINK_OPEN,),
    shape=ToolCallShape(
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    thinks=THINK,
)

MISTRAL = OutputFormat(
    "mistral",
    _thinking(_with_content({"[TOOL_CALLS]": "calls"}) | {"calls": Region("objects", {})}),
    detect=("[TOOL_CALLS]",),
    shape=ToolCallShape('{"name": "', '", "arguments": ', "}", begin="[TOOL_CALLS] [", end="]", between=", "),
    id_style="mistral",
)

MISTRAL_NAMED = OutputFormat(
    "mistral_named",
    {
        "start": Region("start", {"[THINK]": "reasoning", "[TOOL_CALLS]": "name"}),
        "reasoning": Region("reasoning", {"[/THINK]": "start"}),
        "content": Region("content", {"[TOOL_CALLS]": "name"}),
        "name": Region("name", {"[ARGS]": "arguments", "[CALL_ID]": "id"}),
        "id": Region("id", {"[ARGS]": "arguments"}),
        "arguments": Region("arguments", {"[TOOL_CALLS]": "name"}),
    },
    detect=("[TOOL_CALLS]", "[ARGS]"),
    opened=((r"\[THINK\]\s*$", "reasoning"),),
    shape=ToolCallShape("[TOOL_CALLS]", "[ARGS]", ""),
    thinks=("[THINK]", "[/THINK]"),
    id_style="mistral",
)

LLAMA3 = OutputFormat(
    "llama3",
    _with_content({"<|python_tag|>": "calls"}, bare={"{": "bare"})
    | {"calls": Region("objects", {}), "bare": Region("objects", {}, known=True)},
    detect=("<|python_tag|>",),
    shape=ToolCallShape('{"name": "', '", "parameters": ', "}", between="; "),
)

LLAMA4 = OutputFormat(
    "llama4",
    _with_content({"<|python_start|>": "calls"}, bare={"[": "bare"})
    | {"calls": Region("pythonic", {"<|python_end|>": "content"}), "bare": Region("pythonic", {}, known=True)},
    detect=("<|python_start|>",),
)

LFM2 = OutputFormat(
    "lfm2",
    _thinking(
        _with_content({"<|tool_call_start|>": "calls"})
        | {"calls": Region("pythonic", {"<|tool_call_end|>": "content"})}
    ),
    detect=("<|tool_call_start|>",),
    opened=(THINK_OPEN,),
    thinks=THINK,
)

PHI4 = OutputFormat(
    "phi4",
    _with_content({"<|tool_call|>": "calls"}) | {"calls": Region("objects", {"<|/tool_call|>": "content"})},
    detect=("<|tool_call|>",),
    shape=ToolCallShape(
        '{"name": "', '", "arguments": ', "}", begin="<|tool_call|>[", end="]<|/tool_call|>", between=", "
    ),
)

_GEMMA4 = {"<|tool_call>": "name", "<|tool_response>": "end"}

GEMMA4 = OutputFormat(
    "gemma4",
    {
        "start": Region("start", {"<|channel>": "header", **_GEMMA4}),
        "header": Region("header", {"\n": "content", "<channel|>": "content"}, routes=((r"", "reasoning"),)),
        "reasoning": Region("reasoning", {"<channel|>": "start", **_GEMMA4}),
        "content": Region("content", {"<|channel>": "header", **_GEMMA4}),
        "name": Region(
            "name", {"{": "arguments", "<tool_call|>": "start"}, pattern=r"(?P<id>)call:\s*(?P<name>[\w.-]+)"
        ),
        "arguments": Region("braces", {"<tool_call|>": "start", **_GEMMA4}, quote='<|"|>'),
        "end": Region("skip", {}),
    },
    detect=("<|tool_call>", '<|"|>'),
    opened=((r"<\|channel>thought\n$", "reasoning"),),
    thinks=("<|channel>thought\n", "<channel|>"),
)

_HARMONY = {"<|channel|>": "header", "<|start|>": "header"}

HARMONY = OutputFormat(
    "harmony",
    {
        "start": Region("start", {**_HARMONY, "<|message|>": "content"}),
        "header": Region(
            "header",
            {"<|message|>": "content"},
            routes=((r"to=functions\.([^\s<]+)", "arguments"), (r"analysis", "reasoning"), (r"", "content")),
        ),
        "reasoning": Region("reasoning", {"<|end|>": "start", "<|return|>": "start", **_HARMONY}),
        "content": Region("content", {"<|end|>": "start", "<|return|>": "start", **_HARMONY}),
        "arguments": Region("arguments", {"<|call|>": "start", "<|end|>": "start", **_HARMONY}),
    },
    detect=("<|channel|>", "<|message|>"),
    opened=((r"<\|start\|>assistant(<\|channel\|>)?$", "header"),),
    shape=ToolCallShape("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
)

REASONING_ONLY = OutputFormat(
    "think",
    _thinking(_with_content({})),
    detect=("<think>",),
    opened=(THINK_OPEN,),
    thinks=THINK,
)

FAMILIES: dict[str, OutputFormat] = {
    family.name: family
    for family in (
        HARMONY,
        GEMMA4,
        KIMI,
        MINIMAX,
        GLM,
        QWEN_CODER,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        MISTRAL_NAMED,
        MISTRAL,
        LLAMA4,
        LFM2,
        LLAMA3,
        PHI4,
        HERMES,
        REASONING_ONLY,
    )
}

FALLBACK = HERMES
"""The format of calls for models whose template knows none: the most common one."""
