"""Texts as models of each family write them, with the message that they hold."""

from dataclasses import dataclass, field


@dataclass
class Case:
    family: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    prompt: str = ""


TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
WEATHER = ("get_weather", '{"city": "Paris"}')

CASES = [
    Case(
        "hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', calls=[WEATHER]
    ),
    Case(
        "hermes",
        '<think>\nHm, weather.\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", '
        '"arguments": {"city": "Paris"}}'
        '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        content="I look.",
        reasoning="Hm, weather.",
        calls=[WEATHER, ("now", "{}")],
    ),
    Case(
        "hermes",
        '<tool_call>{"arguments": {"city": "</tool_call> \\" } "}, "name": "get_weather"}</tool_call>',
        calls=[("get_weather", '{"city": "</tool_call> \\" } "}')],
    ),
    Case("hermes", '<tool_call>{"name": "now"}</tool_call> done', content="done", calls=[("now", "{}")]),
    Case("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[("now", "{}")]),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=[WEATHER],
    ),
    Case("hermes", "  a < b and <tool> is \n text\n\n", content="  a < b and <tool> is \n text\n\n"),
    Case("hermes", "see \n<tool_call>not json</tool_call> !", content="see \n<tool_call>not json</tool_call> !"),
    Case("hermes", '<tool_call>{"arguments": {}}</tool_call>', content='<tool_call>{"arguments": {}}</tool_call>'),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        calls=[("get_weather", '{"city": "Par')],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": 1</tool_call> x',
        content="x",
        calls=[("get_weather", '{"city": 1')],
    ),
    Case("hermes", "Hm.\n</think>\nYes.", content="Yes.", reasoning="Hm.", prompt="<|im_start|>assistant\n<think>\n"),
    Case("hermes", "What is <think>?", content="What is <think>?", prompt="about <think>\nassistant\n"),
    Case("hermes", "<think>never ends \n", reasoning="never ends"),
    Case(
        "hermes",
        '<think>so <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        reasoning="so",
        calls=[("now", "{}")],
    ),
    Case(
        "qwen3_coder",
        '<think>a</think>Go:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis "x"\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=where>\n"
        '{"lat": 1}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>',
        content="Go:",
        reasoning="a",
        calls=[
            ("get_weather", '{"city": "Paris \\"x\\"", "days": 3, "exact": true, "where": {"lat": 1}}'),
            ("now", "{}"),
        ],
    ),
    Case(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n12\n</parameter>\n</function>",
        calls=[("get_weather", '{"city": "12"}')],
    ),
    Case(
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        calls=[("get_weather", '{"city": "Paris", "days": 2}'), ("now", "{}")],
    ),
    Case(
        "minimax",
        '<think>x</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        reasoning="x",
        calls=[WEATHER, ("now", "{}")],
    ),
    Case(
        "deepseek_v3",
        "Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="Ok",
        calls=[WEATHER, ("now", "{}")],
    ),
    Case(
        "deepseek_v31",
        "So</think>Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="Ok",
        reasoning="So",
        calls=[WEATHER, ("now", "{}")],
        prompt="<｜Assistant｜><think>",
    ),
    Case(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        calls=[WEATHER, ("now", "{}")],
    ),
    Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        calls=[WEATHER, ("now", "{}")],
    ),
    Case("mistral", "[1, 2] is a list", content="[1, 2] is a list"),
    Case(
        "mistral_named",
        '[THINK]a[/THINK]b[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
        content="b",
        reasoning="a",
        calls=[WEATHER, ("now", "{}")],
    ),
    Case("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=[WEATHER]),
    Case(
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        calls=[WEATHER, ("now", "{}")],
    ),
    Case("llama3", '{"name": "Bob", "parameters": {"age": 3}}', content='{"name": "Bob", "parameters": {"age": 3}}'),
    Case("llama3", ' {"a": 1, "b": [2]} is JSON', content=' {"a": 1, "b": [2]} is JSON'),
    Case("llama4", "[get_weather(city='Paris'), now()]", calls=[WEATHER, ("now", "{}")]),
    Case("llama4", "[a link](http://x) now", content="[a link](http://x) now"),
    Case("llama4", "[other(a=1)]", content="[other(a=1)]"),
    Case(
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Pa)]ris", days=-1, exact=true)]<|tool_call_end|>Checking.',
        content="Checking.",
        calls=[("get_weather", '{"city": "Pa)]ris", "days": -1, "exact": true}')],
    ),
    Case("phi4", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', calls=[("now", "{}")]),
    Case(
        "gemma4",
        "<|channel>thought\nHm, weather.\n<channel|>I look."
        '<|tool_call>call:get_weather{city:<|"|>Pa"}\\ris<|"|>,days:-1,exact:true,where:{at:[1,<|"|>x<|"|>],to:{}}}'
        "<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>",
        content="I look.",
        reasoning="Hm, weather.",
        calls=[
            (
                "get_weather",
                '{"city": "Pa\\"}\\\\ris", "days": -1, "exact": true, "where": {"at": [1, "x"], "to": {}}}',
            ),
            ("now", "{}"),
        ],
    ),
    Case(
        "gemma4",
        'So.\n<channel|><|tool_call>call:get_weather{"city": "Pa\\"ris" , '
        'where:{ <|"|>a b<|"|>: NaN, c:null}}<tool_call|>',
        reasoning="So.",
        calls=[("get_weather", '{"city": "Pa\\"ris", "where": {"a b": "NaN", "c": null}}')],
        prompt="<|turn>model\n<|channel>thought\n",
    ),
    Case(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Par',
        calls=[("get_weather", '{"city": "Par')],
    ),
    Case("gemma4", "a <| b {c:1} <|tool_call>get", content="a <| b {c:1} <|tool_call>get"),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        reasoning="Need weather.",
        calls=[WEATHER],
        prompt="<|start|>assistant",
    ),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
        content="Four.",
        reasoning="Easy.",
    ),
    Case("think", "<think>\na\n\nb\n</think>\n\nc d", content="c d", reasoning="a\n\nb"),
]
