"""Chat templates: exact text, clear refusals, and no way to hang the server."""

import asyncio
import json
from pathlib import Path

import pytest

from tokenyard.base import ConfigError, InvalidRequestError
from tokenyard.engine.chat_template import ChatTemplate, load_chat_template, render_within

SHARED = Path(__file__).resolve().parents[2] / "../shared"
CASES = SHARED / "chat_templates" / "chat_template_cases.jsonl"
MESSAGES = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def cases():
    if not CASES.exists():
        return [pytest.param(None, marks=pytest.mark.skip("shared/chat_templates is not beside the checkout"))]
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
    ],
)
def test_a_template_that_fails_is_the_clients_error(source, words):
    with pytest.raises(InvalidRequestError, match=words):
        render(source)


def test_no_template_is_said():
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate({}, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("content", "expected"), [("Once upon", "[user]Hi[assistant]Once upon"), ("a ", "[user]Hi[assistant]a ")]
)
def test_the_last_message_can_be_continued(content, expected):
    source = PLAIN.replace("{% endfor %}", "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}")
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    assert render(source, messages, continue_final_message=True, add_generation_prompt=False) == expected


def test_an_endless_template_is_ended():
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": source}, {})

    async def twice():
        with pytest.raises(InvalidRequestError, match=r"longer than 0\.05 s"):
            await render_within(template, MESSAGES, timeout_s=0.05)
        return await render_within(ChatTemplate({"default": PLAIN}, {}), MESSAGES)

    assert asyncio.run(twice()) == "[user]Hi>"


def test_endless_output_is_ended(monkeypatch):
    monkeypatch.setattr("tokenyard.engine.chat_template.LONGEST_PROMPT_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        render("{% for a in range(9999) %}{{ a }}{% endfor %}")


def test_where_templates_are_found(tmp_path):
    assert not load_chat_template(tmp_path)
    config = {"bos_token": {"content": "<b>"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}1"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render(MESSAGES) == "<b>1"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}2")
    assert load_chat_template(tmp_path).render(MESSAGES) == "<b>2"
    (tmp_path / "own.jinja").write_text("3")
    assert load_chat_template(tmp_path, str(tmp_path / "own.jinja")).render(MESSAGES) == "3"


def test_broken_template_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        load_chat_template(tmp_path, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate({"default": "{% if %}"}, {})
    for content in ("[1]", "{", '{"chat_template": [1]}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match="tokenizer_config"):
            load_chat_template(tmp_path)
