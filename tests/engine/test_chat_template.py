"""Chat templates: exact text, clear refusals, and no way to hang the server."""

import asyncio
import json
from pathlib import Path

import pytest

from tokenyard.base import ConfigError, ContextLengthError, InvalidRequestError
from tokenyard.engine.text.chat_template import ChatTemplate, load_chat_template, render_with_timeout

SHARED = Path(__file__).resolve().parents[2] / "../shared"
CASES = SHARED / "chat_templates" / "chat_template_cases.jsonl"
MESSAGES = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def cases():
    if not CASES.exists():
        return [pytest.param(None, marks=pytest.mark.skip("shared/chat_templates is not next to the checkout"))]
    lines = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    return [pytest.param(case, id=case["name"]) for case in lines]


@pytest.mark.parametrize("case", cases())
def test_templates_of_known_models(case):
    text = ChatTemplate({"default": case["chat_template"]}, {}).render_variables(case["data"])
    assert text == case["target"]


def render(source, messages=MESSAGES, **options):
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, **options)


def test_special_tokens_and_client_variables():
    assert render("{{ bos_token }}{{ mood }}", chat_template_kwargs={"mood": "calm", "bos_token": "x"}) == "<s>calm"


def test_json_keeps_letters_and_markup():
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<ü>"}]).count("<ü>") == 1


def test_the_generation_tag_renders_its_inside():
    assert render("{% generation %}a{% endgeneration %}b") == "ab"


def test_tools_choose_their_template():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "tools"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "refused"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ 9 ** 999999999 }}", "number in it is too large"),
        ("{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}", "too large"),
        ("{{ 'a' * 1000000000 }}", "repetition in it is too long"),
        ("{{ 1000000000 * [1] }}", "repetition in it is too long"),
    ],
)
def test_a_template_that_fails_is_the_clients_error(source, words):
    with pytest.raises(InvalidRequestError, match=words):
        render(source)


ALTERNATING = (
    """{% if messages[0].role in ("system", "developer") %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("alternate") }}{% endif %}
{%- endfor %}"""
    + PLAIN
)


def test_a_template_that_refuses_gets_turns_that_alternate():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "system", "content": "top"},
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "yes"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "four"},
    ]
    turns = "[system]top\n\nrules[user]one\ntwo\n\nthree[assistant]yes[user]<system>\nlate\n</system>\n\nfour"
    assert render(ALTERNATING, messages) == turns + ">"
    assert render(ALTERNATING, messages[:5], continue_final_message=True, add_generation_prompt=False).endswith("yes")
    # Templates that accept the messages get them as they are.
    assert "[system]late[user]four" in render(PLAIN, messages)
    with pytest.raises(InvalidRequestError, match="alternate"):
        render(ALTERNATING, [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])


def test_a_missing_template_is_an_error():
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate({}, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("content", "expected"), [("Once upon", "[user]Hi[assistant]Once upon"), ("a ", "[user]Hi[assistant]a ")]
)
def test_the_last_message_can_be_continued(content, expected):
    source = PLAIN.replace("{% endfor %}", "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}")
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    assert render(source, messages, continue_final_message=True, add_generation_prompt=False) == expected


def test_a_message_that_occurs_in_the_markup_is_continued_at_its_end():
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    messages = [*MESSAGES, {"role": "assistant", "content": " end "}]
    assert render(source, messages, continue_final_message=True) == "<|user|>Hi<|end|><|assistant|>end"


def test_nothing_to_continue_is_an_error():
    for last in ({"role": "assistant", "content": None}, {"role": "user"}):
        with pytest.raises(InvalidRequestError, match="no last message"):
            render(PLAIN, [*MESSAGES, last], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="no last message"):
        render("{{ messages[0].role }}", continue_final_message=True)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LOOPS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m['content'] %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro show(m) %}{% set c = m.get('content') %}{% for part in c %}({{ part.text }}){% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "text"),
    [("{{ messages[0].content }}", "a\nb"), (LOOPS, "(a)(b)"), (MACRO, "(a)(b)"), (PLAIN, "[user]a\nb>")],
)
def test_parts_of_content_come_as_the_template_wants_them(source, text):
    assert render(source, [{"role": "user", "content": PARTS}]) == text


def test_a_last_message_in_parts_can_be_continued():
    assert render(LOOPS, [{"role": "assistant", "content": PARTS}], continue_final_message=True) == "(a)(b"


def test_arguments_of_tool_calls_become_objects_and_null_fields_go():
    source = (
        "{% for m in messages %}{{ m.refusal is not defined }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": text}} for text in ('{"a": "ü"}', "", "{broken")
    ]
    messages = [*MESSAGES, {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}]
    assert render(source, messages) == 'True;True{"a": "ü"}{}"{broken";'
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": "ü"}'


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


@pytest.mark.parametrize("absent", [{}, {"content": None}])
def test_content_that_is_absent_is_empty_unless_the_template_asks_for_none(absent):
    messages = [{"role": "assistant", **absent, "tool_calls": [CALL]}, {"role": "assistant", **absent}]
    adds = "{% for m in messages %}[{{ m.role + m.content }}]{% endfor %}"
    assert render(adds, messages) == "[assistant][assistant]"
    asks = "{% for m in messages %}{% set c = m.content %}{{ c is none }}{% endfor %}"
    assert render(asks, messages) == "TrueFalse"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_a_template_that_joins_arguments_gets_them_as_text(arguments):
    source = "{% for c in messages[0]['tool_calls'] %}{{ '<' + c['function']['arguments'] + '>' }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert render(source, [{"role": "assistant", "content": "", "tool_calls": [call]}]) == '<{"a": 1}>'


def test_a_loop_over_what_may_be_calls_does_not_want_content_in_parts():
    source = (
        "{% for m in messages %}{% if m.tool_calls is defined %}{% set calls = m.tool_calls %}{% else %}"
        "{% set calls = m.content %}{% endif %}{% for c in calls %}{% endfor %}{{ m.content + '.' }}{% endfor %}"
    )
    assert render(source, [{"role": "user", "content": PARTS}]) == "a\nb."


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_known_by_all_its_names(name):
    source = "{{ messages[0].reasoning_content }},{{ messages[0].thinking }}"
    assert render(source, [{"role": "assistant", "content": "x", name: "so"}]) == "so,so"


def test_what_a_generation_block_sets_stays_inside():
    source = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    assert render(source) == "21"


@pytest.mark.part(3)
@pytest.mark.parametrize("case", cases())
def test_conversations_come_out_as_with_transformers(case):
    """Also those that the cases do not hold: tools and their calls, reasoning, parts, continuing."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    variables = dict(case["data"])
    special = {name: variables.pop(name) for name in list(variables) if name.endswith("_token")}
    given, tools = variables.pop("messages"), variables.pop("tools", None)
    variables.pop("add_generation_prompt", None)
    template = ChatTemplate({"default": case["chat_template"]}, special)
    compared = 0
    for messages in (given, CONTINUED, CALLED):
        as_they_are = messages_of_reference(messages, case["name"])
        for tools_given in (tools, [TOOL]):
            for continues in (False, True):
                options = {"add_generation_prompt": not continues, "continue_final_message": continues}
                try:
                    (wanted,), _ = reference(
                        [as_they_are],
                        chat_template=case["chat_template"],
                        tools=tools_given,
                        **options,
                        **special,
                        **variables,
                    )
                except Exception:  # a template that refuses this conversation raises whatever it likes
                    with pytest.raises(InvalidRequestError):
                        template.render(messages, tools=tools_given, chat_template_kwargs=variables, **options)
                    continue
                found = template.render(messages, tools=tools_given, chat_template_kwargs=variables, **options)
                assert found == wanted
                compared += 1
    assert compared


ASK_FOR_NONE = ("deepseek-ai/DeepSeek-R1", "meetkai/functionary-medium-v2.2")
"""Cases that ask whether content is none, and join the arguments of calls to strings."""


def messages_of_reference(messages, name):
    """What a user of transformers has to hand over: the library takes messages as they are."""
    if name in ASK_FOR_NONE:
        return [
            {**message, "tool_calls": [with_json_arguments(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in messages
        ]
    return [{**message, "content": message.get("content") or ""} for message in messages]


def with_json_arguments(call):
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


CONTINUED = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": " the end "}]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d<é",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}},
    },
}
CALLED = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "é<"}}}],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "22"},
    {"role": "assistant", "content": "warm", "reasoning": "because"},
]


def test_an_endless_template_is_ended():
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": source}, {})

    async def twice():
        with pytest.raises(InvalidRequestError, match=r"longer than 0\.05 s"):
            await render_with_timeout(template, MESSAGES, timeout_s=0.05)
        return await render_with_timeout(ChatTemplate({"default": PLAIN}, {}), MESSAGES)

    assert asyncio.run(twice()) == "[user]Hi>"


def test_where_templates_are_found(tmp_path, caplog):
    assert not load_chat_template(tmp_path)
    assert "has no chat template" in caplog.text
    caplog.clear()
    config = {"bos_token": {"content": "<b>"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}1"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render(MESSAGES) == "<b>1"
    assert not caplog.text
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}2")
    assert load_chat_template(tmp_path).render(MESSAGES) == "<b>2"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_chat_template(tmp_path).render(MESSAGES, tools=[TOOL]) == "tools"
    (tmp_path / "own.jinja").write_text("3")
    assert load_chat_template(tmp_path, str(tmp_path / "own.jinja")).render(MESSAGES) == "3"


def test_other_places_of_templates_and_special_tokens(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<m>", "eos_token": {"content": "<e>"}}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ bos_token }}{{ eos_token }}"}))
    assert load_chat_template(tmp_path).render(MESSAGES) == "<m><e>"
    config = {"bos_token": "<c>", "chat_template": {"default": "{{ bos_token }}", "tool_use": "t"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render(MESSAGES) == "<c>"
    assert load_chat_template(tmp_path).render(MESSAGES, tools=[TOOL]) == "t"


def test_broken_template_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        load_chat_template(tmp_path, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate({"default": "{% if %}"}, {})
    for content in ("[1]", "{", '{"chat_template": [1]}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match="tokenizer_config"):
            load_chat_template(tmp_path)


def test_a_prompt_that_cannot_fit_is_ended_while_it_is_written():
    with pytest.raises(ContextLengthError, match="1000 characters"):
        render("{% for i in range(90000) %}{{ i }} {% endfor %}", max_chars=1000)


@pytest.mark.parametrize("where", ["arguments", "template variables"])
def test_values_nested_too_deeply_are_the_clients_error_or_stay_text(where):
    if where == "arguments":
        call = {"function": {"name": "f", "arguments": "[" * 100_000}}
        assert render("{{ messages[0].tool_calls[0].function.name }}", [{"role": "x", "tool_calls": [call]}]) == "f"
        return
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="refused"):
        render("{{ x | tojson }}", chat_template_kwargs={"x": deep})
