"""The machine against texts of every family: whole, in pieces, and with parts that were not requested."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.server.parse.texts import CASES, TOOLS, Case
from tokenyard.server.parse.events import ParsedMessage, ToolCallArguments, ToolCallEnd, ToolCallStart
from tokenyard.server.parse.format import OutputFormat
from tokenyard.server.parse.model_formats import FAMILIES
from tokenyard.server.parse.output_parser import OutputParser


def parse(form: OutputFormat, pieces: list[str], prompt: str = "", **options: bool) -> ParsedMessage:
    parser = OutputParser(form, prompt, tools=TOOLS, **options)
    message = ParsedMessage()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    return message


def facts(message: ParsedMessage) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.text[:24]!r}")
def test_a_whole_text_gives_its_message(case: Case):
    found = facts(parse(FAMILIES[case.family], [case.text], case.prompt))
    assert found == (case.content, case.reasoning, case.calls)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.text[:24]!r}")
def test_every_cut_in_two_and_single_characters_give_the_same_message(case: Case):
    form = FAMILIES[case.family]
    whole = parse(form, [case.text], case.prompt)
    assert parse(form, list(case.text), case.prompt) == whole
    for cut in range(len(case.text)):
        assert parse(form, [case.text[:cut], case.text[cut:]], case.prompt) == whole


def fragments() -> st.SearchStrategy[tuple[str, list[str]]]:
    """Hostile texts: markers, halves of markers and pieces of JSON in any order, cut anywhere."""

    def of(form: OutputFormat) -> st.SearchStrategy[tuple[str, list[str]]]:
        markers = sorted(form.markers)
        parts = [*markers, *(marker[: len(marker) // 2] for marker in markers), '{"name": "now", "arguments": {}}']
        parts += [
            '{"name": "get_weather", ',
            '"arguments": {"city": "a',
            "\\",
            '"',
            "}",
            "{",
            "]",
            "[",
            " ",
            "\n",
            "x y",
        ]
        parts += ["get_weather", "now", "city", "12", "<", "[now()]", "[now(", ", ", "null", ":", "é你"]
        texts = st.lists(st.sampled_from(parts), max_size=14).map("".join)
        cuts = st.lists(st.integers(0, 200), max_size=20)

        def cut(pair: tuple[str, list[int]]) -> tuple[str, list[str]]:
            text, places = pair
            ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
            return form.name, [text[a:b] for a, b in itertools.pairwise(ends)]

        return st.tuples(texts, cuts).map(cut)

    return st.sampled_from(list(FAMILIES.values())).flatmap(of)


@settings(max_examples=examples(400), deadline=None)
@given(fragments(), st.booleans(), st.booleans())
def test_any_cut_of_any_text_gives_the_same_message(given_text, calls: bool, reasoning: bool):
    name, pieces = given_text
    form = FAMILIES[name]
    whole = parse(form, ["".join(pieces)], calls=calls, reasoning=reasoning)
    assert parse(form, pieces, calls=calls, reasoning=reasoning) == whole
    assert parse(form, list("".join(pieces)), calls=calls, reasoning=reasoning) == whole
    assert calls or not whole.calls
    assert reasoning or not whole.reasoning


@settings(max_examples=examples(200), deadline=None)
@given(fragments())
def test_calls_begin_once_and_end_once_in_order(given_text):
    name, pieces = given_text
    parser = OutputParser(FAMILIES[name], tools=TOOLS)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    opened: list[int] = []
    current = None
    for event in events:
        if isinstance(event, ToolCallStart):
            assert current is None
            assert event.index == len(opened)
            assert event.name
            opened.append(event.index)
            current = event.index
        elif isinstance(event, ToolCallArguments):
            assert event.index == current
            assert event.text
        elif isinstance(event, ToolCallEnd):
            assert event.index == current
            current = None
    assert current is None


@pytest.mark.parametrize("rest", ["<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "no'])
def test_a_second_call_that_is_cut_before_its_name_leaves_no_text(rest):
    first = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert facts(parse(FAMILIES["hermes"], [first, "\n", rest])) == ("", "", [("now", "{}")])
    assert facts(parse(FAMILIES["hermes"], [rest])) == (rest, "", [])


@settings(max_examples=examples(100), deadline=None)
@given(st.text(max_size=60), st.sampled_from(sorted(FAMILIES)))
def test_plain_text_is_content_as_it_stands(text: str, name: str):
    if any(mark in text for mark in "<[{"):
        return
    assert facts(parse(FAMILIES[name], list(text))) == (text, "", [])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from([form.name for form in FAMILIES.values() if form.shape is not None and not form.shape.parameter]),
    st.lists(st.dictionaries(st.text(min_size=1, max_size=5), JSON_VALUES, max_size=3), min_size=1, max_size=3),
)
def test_calls_written_in_a_familys_shape_are_read_back(name: str, given_arguments):
    form = FAMILIES[name]
    shape = form.shape
    arguments = [json.dumps(one, ensure_ascii=False) for one in given_arguments]
    if name == "harmony":
        arguments = arguments[:1]
    calls = [f"{shape.before}now{shape.middle}{one}{shape.after}" for one in arguments]
    text = shape.begin + shape.between.join(calls) + shape.end
    content, _, found = facts(parse(form, list(text)))
    assert found == [("now", one) for one in arguments]
    assert not content


def test_no_marker_is_the_beginning_of_another_of_its_region():
    for form in FAMILIES.values():
        for region in form.regions.values():
            for marker in region.edges:
                assert not any(other != marker and other.startswith(marker) for other in region.edges), form.name


def test_every_transition_has_a_target():
    for form in FAMILIES.values():
        for region in form.regions.values():
            targets = [*region.edges.values(), *region.bare.values(), *(target for _, target in region.routes)]
            assert set(targets) <= set(form.regions), form.name


def emitted(form: OutputFormat, pieces: list[str], prompt: str = "") -> list[ParsedMessage | int]:
    """What a client has after pieces of an answer, and how many of its calls have ended."""
    parser, message, ends = OutputParser(form, prompt, tools=TOOLS), ParsedMessage(), 0
    for piece in pieces:
        events = parser.feed(piece)
        message.add(events)
        ends += sum(isinstance(event, ToolCallEnd) for event in events)
    return [message, ends]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.text[:24]!r}")
def test_what_a_client_has_depends_on_the_text_alone(case: Case):
    """An answer continues at another engine with a parser that was fed its text so far in one piece."""
    form = FAMILIES[case.family]
    for cut in range(len(case.text) + 1):
        said = case.text[:cut]
        assert emitted(form, [said], case.prompt) == emitted(form, list(said), case.prompt)


@settings(max_examples=examples(400), deadline=None)
@given(fragments())
def test_what_a_client_has_of_a_hostile_text_depends_on_the_text_alone(cut: tuple[str, list[str]]):
    name, pieces = cut
    for count in range(1, len(pieces) + 1):
        assert emitted(FAMILIES[name], ["".join(pieces[:count])]) == emitted(FAMILIES[name], pieces[:count])
