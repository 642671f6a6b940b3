"""Converts structured output fields of requests to a grammar (Lark, as llguidance parses it).

It handles `response_format`, SGLang's json_schema, regex, ebnf and structural_tag, vLLM's structured_outputs and
guided_*, and forced tool calls in the model's own format. Unsupported schema keywords are detected by the compiler.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tokenyard.base import InvalidRequestError
from tokenyard.server.openai.schema_rewrite import rewritten
from tokenyard.server.openai.schema_size import check_size
from tokenyard.server.parse.argument_types import is_text
from tokenyard.server.parse.format import OutputFormat, ToolCallShape
from tokenyard.server.parse.output_style import OutputStyle
from tokenyard.server.protocol import OpenAIFields, SamplingFields

MAX_GRAMMAR_CHARS = 2_000_000
MAX_EBNF_CHARS = 100_000
MAX_STRUCTURES, MAX_TRIGGERS = 1024, 64
"""Each structure is compared with each trigger."""

SPACE_IN_JSON = r"[ \n]{0,8}"
"""White space between the parts of JSON is bounded: models may otherwise write nothing else up to their limit."""

SPACE_IN_CALLS = "[ ]?"
"""Chat templates write calls on one line, with a space behind commas and colons or without."""

_PLACE = re.compile(r" // [\w. ]+$", re.MULTILINE)
"""Where in the request a schema stands, at the end of its rule."""

SPACE_BEFORE = r"/[ \n]{0,4}/"
HARMONY_ANSWER = re.compile(r"<\|start\|>assistant$")
"""The end of a prompt after which an answer in harmony begins with a channel."""


@dataclass(slots=True)
class Grammar:
    """A grammar.

    start: body of the start rule.
    rules: bodies of the other rules by name.
    """

    start: str
    rules: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The grammar as Lark. Raises InvalidRequestError if it is too large."""
        lines = [f"start: {self.start}", *(f"{name}: {rule}" for name, rule in self.rules.items())]
        text = "\n".join(lines)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(f"the grammar has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
        return text


def literal(text: str, special: Mapping[str, int]) -> str:
    """Quote text for a rule. The tokens of `special` in it become token references, as text does not match them."""
    if not text:
        return ""
    if not special:
        return json.dumps(text, ensure_ascii=False)
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    parts = re.split(f"({pattern})", text)
    pieces = (
        f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False) for part in parts if part
    )
    return " ".join(pieces)


def schema_rule(schema: Any, *, lenient: bool, param: str, space: str = SPACE_IN_JSON) -> str:
    """A rule for JSON that matches a schema. With `lenient`, keywords that cannot be enforced are ignored."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except ValueError as error:
            raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from error
    if isinstance(schema, bool):
        schema = {} if schema else {"type": []}
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{param} must be a JSON schema, which is an object", param=param)
    check_size(schema, param)
    schema = rewritten(schema, lenient=lenient)
    options: dict[str, Any] = {"whitespace_pattern": space}
    if lenient:
        options["lenient"] = True
    given = schema.get("x-guidance")
    merged = {**schema, "x-guidance": options | (dict(given) if isinstance(given, Mapping) else {})}
    # The compiler quotes this comment in its error about the schema.
    return f"%json {_json(merged)} // {' '.join(param.split())}"


def _json(value: Any) -> str:
    """A value as JSON. Values that orjson refuses (lone surrogates, numbers beyond 64 bits) go through `json`."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value, ensure_ascii=False)


def grammar_text(body: SamplingFields, style: OutputStyle, prompt: str = "") -> str:
    """The text of the grammar that a body requests, "" for none. Raises InvalidRequestError for an invalid one."""
    grammar = grammar_of(body, style.special)
    if grammar is None:
        return ""
    check_free_end(body)
    return after_reasoning(grammar, style.form if prompt else None, prompt, style.special).text()


def check_free_end(body: SamplingFields) -> None:
    """Raise InvalidRequestError if other fields keep the answer from ending as its grammar requires."""
    if body.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos cannot go with a grammar, which says where the end is", param="ignore_eos"
        )


def grammar_of(body: SamplingFields, special: Mapping[str, int] | None = None) -> Grammar | None:
    """The grammar that a body requests, None for none. Raises InvalidRequestError for wrong or different ones.

    Some clients send the same constraint in an old and a new field, for whichever the server knows.

    special: ids of the tokens that text does not match, by their text.
    """
    found: list[tuple[str, Grammar]] = []
    for name, value in _constraints(body):
        if value is not None:
            found.append((name, _grammar(name, value, special or {})))
    if len({_PLACE.sub("", grammar.text()) for _, grammar in found}) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequestError(f"{names} exclude each other", param=found[1][0])
    return found[0][1] if found else None


def _constraints(body: SamplingFields) -> list[tuple[str, Any]]:
    """(field name, value) of each structured output field in a body."""
    wishes: list[tuple[str, Any]] = [
        ("regex", body.regex or None),
        ("ebnf", body.ebnf or None),
        ("json_schema", body.json_schema or None),
        ("structural_tag", body.structural_tag or None),
    ]
    if not isinstance(body, OpenAIFields):
        return wishes
    form = body.response_format or {}
    if form.get("type", "text") != "text":
        wishes.append(("response_format", form))
    names = {"json": "json_schema", "grammar": "ebnf", "regex": "regex", "choice": "choice"}
    outputs = body.structured_outputs or {}
    for name, kind in names.items():
        for value in (outputs.get(name), getattr(body, f"guided_{name}")):
            wishes.append((kind, value))
    if outputs.get("json_object"):
        wishes.append(("json_schema", {"type": "object"}))
    if outputs.get("structural_tag"):
        wishes.append(("structural_tag", outputs["structural_tag"]))
    return wishes


def _grammar(name: str, value: Any, special: Mapping[str, int]) -> Grammar:
    """Convert one field to a grammar. Raises InvalidRequestError if its value has the wrong type."""
    match name:
        case "json_schema":
            return Grammar("answer", {"answer": schema_rule(value, lenient=False, param=name)})
        case "regex":
            return Grammar("ANSWER", {"ANSWER": f"/{_escaped(value, name)}/"})
        case "choice":
            return Grammar("answer", {"answer": _choice(value, special)})
        case "ebnf":
            return _ebnf(value)
        case "structural_tag":
            return _tagged(value, special)
    return _response_format(value, special)


def _response_format(form: Mapping[str, Any], special: Mapping[str, int]) -> Grammar:
    """Convert OpenAI's response_format, including the types that vLLM and SGLang add."""
    match form.get("type"):
        case "json_object":
            return Grammar(
                "answer", {"answer": schema_rule({"type": "object"}, lenient=False, param="response_format")}
            )
        case "json_schema":
            inner = form.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if schema is None:
                message = "response_format.json_schema.schema is required"
                raise InvalidRequestError(message, param="response_format")
            lenient = isinstance(inner, Mapping) and inner.get("strict") is False
            where = "response_format.json_schema.schema"
            return Grammar("answer", {"answer": schema_rule(schema, lenient=lenient, param=where)})
        case "structural_tag":
            return _tagged(form, special)
        case "regex" if isinstance(form.get("pattern"), str):
            return _grammar("regex", form["pattern"], special)
        case "grammar" if isinstance(form.get("grammar"), str):
            return _ebnf(form["grammar"])
    kinds = "text, json_object, json_schema, structural_tag, regex or grammar"
    raise InvalidRequestError(f"response_format.type must be {kinds}, with what belongs to it", param="response_format")


def _escaped(value: Any, param: str) -> str:
    """A regular expression, escaped for use between slashes in Lark."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{param} must be a string", param=param)
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", value, flags=re.DOTALL).replace("\n", r"\n")


def _choice(value: Any, special: Mapping[str, int]) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise InvalidRequestError("choice must be a list of strings that are not empty", param="choice")
    return " | ".join(literal(item, special) for item in value)


def _ebnf(value: Any) -> Grammar:
    """Convert a grammar in GBNF (`root ::= ...`) or Lark (`start: ...`)."""
    if not isinstance(value, str) or len(value) > MAX_EBNF_CHARS:
        message = f"ebnf must be a string of at most {MAX_EBNF_CHARS} characters"
        raise InvalidRequestError(message, param="ebnf")
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(value)
    except Exception as error:  # the converter raises whatever a wrong grammar makes of it
        raise InvalidRequestError(f"ebnf: {str(error)[:300] or type(error).__name__}", param="ebnf") from error
    found = re.search(r"^start\s*:", lark, re.MULTILINE)
    if found is None:
        raise InvalidRequestError("ebnf has neither a rule root ::= nor a rule start:", param="ebnf")
    renamed = lark[: found.start()] + "answer:" + lark[found.end() :]
    return _Raw("answer", {}, renamed)


@dataclass(slots=True)
class _Raw(Grammar):
    """A grammar that the client wrote in Lark."""

    lark: str = ""

    def text(self) -> str:
        """The whole grammar."""
        return f"{self.lark}\n{Grammar.text(self)}"


def _tagged(value: Any, special: Mapping[str, int]) -> Grammar:
    """Convert structural_tag: free text in which a trigger begins a tag that must match one of the structures."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise InvalidRequestError(f"structural_tag is not valid JSON: {error}", param="structural_tag") from error
    structures = value.get("structures") if isinstance(value, Mapping) else None
    triggers = value.get("triggers") if isinstance(value, Mapping) else None
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        message = "structural_tag needs structures (begin, schema, end) and triggers"
        raise InvalidRequestError(message, param="structural_tag")
    tags = []
    for name, entries, most in (("structures", structures, MAX_STRUCTURES), ("triggers", triggers, MAX_TRIGGERS)):
        if len(entries) > most:
            message = f"structural_tag has {len(entries)} {name}; at most {most} are taken"
            raise InvalidRequestError(message, param="structural_tag")
    for place, item in enumerate(structures):
        where = f"structural_tag.structures[{place}]"
        if not isinstance(item, Mapping) or not all(isinstance(item.get(name), str) for name in ("begin", "end")):
            raise InvalidRequestError(f"{where} needs begin and end", param="structural_tag")
        trigger = next((word for word in triggers if isinstance(word, str) and item["begin"].startswith(word)), "")
        if not trigger:
            raise InvalidRequestError(f"{where}.begin starts with none of the triggers", param="structural_tag")
        rule = schema_rule(item.get("schema", {}), lenient=False, param=where)
        tags.append((trigger, item["begin"].removeprefix(trigger), rule, item["end"]))
    rules = {"TEXT": r"/(.|\n)*/"}
    for place, (trigger, rest, content, end) in enumerate(tags):
        _add_trigger(rules, f"trigger_{place}", trigger, special)
        rules[f"content_{place}"] = content
        parts = [f"trigger_{place}", literal(rest, special), f"content_{place}", literal(end, special)]
        rules[f"tag_{place}"] = " ".join(part for part in parts if part)
    rules["tail"] = "TEXT"
    options = " | ".join(f"tag_{place}" for place in range(len(tags)))
    return Grammar(f"({options})* tail", rules)


def _add_trigger(rules: dict[str, str], name: str, trigger: str, special: Mapping[str, int]) -> None:
    """Add a rule for free text up to and with `trigger`. The rules must have TEXT."""
    if _holds_token(trigger, special):
        rules[name] = f"TEXT {literal(trigger, special)}"
    else:
        rules[f"{name}[lazy]"] = f"TEXT {json.dumps(trigger, ensure_ascii=False)}"


def _add_text_until(rules: dict[str, str], name: str, end: str, special: Mapping[str, int]) -> None:
    """Add a rule for text up to and with `end`."""
    if _holds_token(end, special):
        # Text cannot contain the token, so that it needs no other end. What precedes the token belongs to the text's
        # expression, which would otherwise take it.
        first = min(place for token in special if (place := end.find(token)) >= 0)
        before = re.escape(end[:first]).replace("\\\n", r"\n").replace("/", r"\/")
        rules[name] = f"/(?s:.*){before}/ {literal(end[first:], special)}"
    else:
        rules[f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]"] = r"/(?s:.*)/"


def _holds_token(text: str, special: Mapping[str, int]) -> bool:
    """Whether a text contains a token that text in a grammar does not match."""
    return any(token in text for token in special)


def after_reasoning(grammar: Grammar, form: OutputFormat | None, prompt: str, special: Mapping[str, int]) -> Grammar:
    """Allow reasoning before the grammar, if the prompt has begun it or the model may begin it."""
    if form is not None and form.name == "harmony":
        return _after_messages(grammar, prompt, special)
    if form is None or form.thinks is None:
        return grammar
    begin, end = form.thinks
    opened = form.begins_in(prompt) == "reasoning"
    if not opened and re.search(re.escape(end) + r"\s*$", prompt[-400:]):
        # The prompt has already closed the reasoning.
        return grammar
    _add_text_until(grammar.rules, "thought", end, special)
    start = f"thought {SPACE_BEFORE}"
    if not opened:
        start = f"({literal(begin, special)} {start})?"
    grammar.start = f"{start} {grammar.start}" if "|" not in grammar.start else f"{start} ({grammar.start})"
    return grammar


def in_final_channel(grammar: Grammar, form: OutputFormat | None, prompt: str, special: Mapping[str, int]) -> Grammar:
    """Put an answer where the format expects it: harmony's channel `final`, if the prompt has not opened a channel."""
    if form is not None and form.name == "harmony" and HARMONY_ANSWER.search(prompt):
        grammar.start = f"{literal('<|channel|>final<|message|>', special)} ({grammar.start})"
    return grammar


def _after_messages(grammar: Grammar, prompt: str, special: Mapping[str, int]) -> Grammar:
    """Allow messages of harmony's channels `analysis` and `commentary` before the grammar."""
    if HARMONY_ANSWER.search(prompt):
        _add_text_until(grammar.rules, "prose", "<|end|>", special)
        channel, message = literal("<|channel|>", special), literal("<|message|>", special)
        following = literal("<|start|>assistant", special)
        grammar.rules["message"] = f'{channel} ("analysis" | "commentary") {message} prose {following}'
        grammar.start = f"message* ({grammar.start})"
    return grammar


def forced_calls(
    form: OutputFormat, functions: Sequence[Mapping[str, Any]], special: Mapping[str, int], *, parallel: bool
) -> Grammar:
    """One or more calls of `functions`, in the format of the model family. Without `parallel` exactly one."""
    shape = form.shape
    if shape is None:
        raise InvalidRequestError(f"tool calls in the format {form.name} cannot be forced", param="tool_choice")
    rules: dict[str, str] = {}
    for place, function in enumerate(functions):
        opening = literal(shape.before + str(function["name"]) + shape.middle, special)
        after = literal(shape.after, special)
        rules[f"call_{place}"] = " ".join(part for part in (opening, f"arguments_{place}", after) if part)
        _add_arguments(rules, place, shape, function, special)
    rules["call"] = " | ".join(f"call_{place}" for place in range(len(functions)))
    more = f"({literal(shape.between, special)} call)*" if shape.between else "call*"
    parts = [literal(shape.begin, special), "call", more if parallel else "", literal(shape.end, special)]
    return Grammar(" ".join(part for part in parts if part), rules)


def strict_calls(
    form: OutputFormat, functions: Sequence[Mapping[str, Any]], special: Mapping[str, int], prompt: str = ""
) -> Grammar | None:
    """Free text in which calls must match their schemas; None without a strict function."""
    shape = form.shape
    if shape is None or not any(function.get("strict") is True for function in functions):
        return None
    if form.name == "harmony" and HARMONY_ANSWER.search(prompt):
        return _calls_or_final(form, functions, special)
    first = shape.begin + shape.before
    trigger = next((marker for marker in form.regions["start"].edges if first.startswith(marker)), "")
    if not trigger:
        return _calls_or_text(form, functions, special)
    rules = forced_calls(form, functions, special, parallel=False).rules
    head = shape.begin.removeprefix(trigger) if shape.begin else ""
    for place, function in enumerate(functions):
        before = shape.before if shape.begin else shape.before.removeprefix(trigger)
        opening = literal(before + str(function["name"]) + shape.middle, special)
        after = literal(shape.after, special)
        rules[f"call_{place}"] = " ".join(part for part in (opening, f"arguments_{place}", after) if part)
    rules["TEXT"] = r"/(.|\n)*/"
    _add_trigger(rules, "trigger", trigger, special)
    more = f"({literal(shape.between, special)} call)*" if shape.begin and shape.between else ""
    more = "call*" if shape.begin and not shape.between else more
    parts = ["trigger", literal(head, special), "call", more, literal(shape.end, special)]
    rules["tag"] = " ".join(part for part in parts if part)
    rules["tail"] = "TEXT"
    return Grammar("tag* tail", rules)


def _calls_or_final(form: OutputFormat, functions: Sequence[Mapping[str, Any]], special: Mapping[str, int]) -> Grammar:
    """Calls, or text in harmony's channel `final`."""
    calls = forced_calls(form, functions, special, parallel=True)
    calls.rules["TEXT"] = r"/(.|\n)*/"
    return Grammar(f"({calls.start}) | ({literal('<|channel|>final<|message|>', special)} TEXT)", calls.rules)


def _calls_or_text(form: OutputFormat, functions: Sequence[Mapping[str, Any]], special: Mapping[str, int]) -> Grammar:
    """Calls, or text that does not begin as a call does: for formats whose calls need no marker."""
    calls = forced_calls(form, functions, special, parallel=True)
    begin = "".join(form.regions["start"].bare)
    calls.rules["TEXT"] = rf"/([ \n\t]*[^ \n\t{re.escape(begin)}](.|\n)*)?/"
    markers = " | ".join(literal(marker, special) for marker in form.regions["start"].edges)
    return Grammar(f"(({markers})? {calls.start}) | TEXT", calls.rules)


def _add_arguments(
    rules: dict[str, str], place: int, shape: ToolCallShape, function: Mapping[str, Any], special: Mapping[str, int]
) -> None:
    """Add the rules of one function's arguments: JSON, or text for each parameter."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    param = f"tools: {function['name']}.parameters"
    lenient = function.get("strict") is not True
    if shape.parameter is None:
        # Models should not invent arguments that a tool does not have, unless its schema allows any.
        closed = {"additionalProperties": False} if parameters.get("properties") else {}
        schema = {"type": "object", **closed, **parameters}
        rules[f"arguments_{place}"] = schema_rule(schema, lenient=lenient, param=param, space=SPACE_IN_CALLS)
        return
    before, middle, after = shape.parameter
    required = parameters.get("required") or []
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    pieces = []
    for number, (key, schema) in enumerate((parameters.get("properties") or {}).items()):
        name = f"value_{place}_{number}"
        if is_text(schema):
            _add_text_until(rules, name, after, special)
            closing = ""
        else:
            whole = {**shared, **schema} if isinstance(schema, Mapping) else schema
            rules[name] = schema_rule(whole, lenient=lenient, param=f"{param} at /properties/{key}")
            closing = literal(after, special)
        piece = " ".join(part for part in (literal(before + key + middle, special), name, closing) if part)
        pieces.append(piece if key in required else f"({piece})?")
    rules[f"arguments_{place}"] = " ".join(pieces) or '""'
