"""What programs add to their state: texts, roles, generated parts and choices."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenyard.lang.values import ChoicesMethod, token_length_normalized

REGEX_OF_TYPE: dict[type, str] = {
    int: r"[-+]?[0-9]{1,18}",
    float: r"[-+]?[0-9]{1,15}(\.[0-9]{1,15})?",
    bool: r"(True|False)",
    str: r'"[^"\\\n]*"',
}


class Expression:
    """Anything that can be added to a state; expressions and texts join with +."""

    def __add__(self, other: "Expression | str") -> "Expression":
        return Several([self, as_expression(other)])

    def __radd__(self, other: "Expression | str") -> "Expression":
        return Several([as_expression(other), self])


@dataclass
class Text(Expression):
    """A text that stands as it is."""

    text: str


@dataclass
class Several(Expression):
    """Expressions one after the other."""

    parts: list[Expression]


@dataclass
class Role(Expression):
    """What a role says; without content, that it begins or ends."""

    role: str
    content: Expression | None = None
    begins: bool = True
    ends: bool = True


@dataclass
class Gen(Expression):
    """A part that the model writes. `sampling` has the names of /generate."""

    name: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False


@dataclass
class Select(Expression):
    """One of several texts, which the model chooses."""

    name: str | None
    choices: list[str]
    temperature: float
    method: ChoicesMethod


def as_expression(value: "Expression | str") -> Expression:
    """An expression as it is, a text as one. Raises TypeError for anything else."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, str):
        return Text(value)
    raise TypeError(f"a program adds texts and expressions to its state, not {type(value).__name__}")


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | list[str] | None = None,
    stop_token_ids: list[int] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    return_logprob: bool = False,
    dtype: type | None = None,
    choices: list[str] | None = None,
    choices_method: ChoicesMethod = token_length_normalized,
    regex: str | None = None,
    ebnf: str | None = None,
    json_schema: str | dict[str, Any] | None = None,
) -> Expression:
    """A part that the model writes, kept under `name`; what is None is as the program or the server has it.

    dtype: int, float, bool or str, as which the part, a text, must be written. choices: the same as `select`. With `n`
    the value is a list, and the program goes on behind the first. Raises ValueError for wishes that exclude each other.
    """
    if choices:
        return select(name, choices, temperature or 0.0, choices_method)
    if sum(value is not None for value in (dtype, regex, ebnf, json_schema)) > 1:
        raise ValueError("dtype, regex, ebnf and json_schema exclude each other")
    if dtype is not None:
        if dtype not in REGEX_OF_TYPE:
            raise ValueError(f"dtype must be int, float, bool or str, not {dtype!r}")
        regex = REGEX_OF_TYPE[dtype]
    wishes = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "regex": regex,
        "ebnf": ebnf,
        "json_schema": json_schema,
    }
    sampling = {name: value for name, value in wishes.items() if value is not None}
    return Gen(name, sampling, return_logprob)


def gen_int(name: str | None = None, **wishes: Any) -> Expression:
    """A whole number that the model writes."""
    return gen(name, dtype=int, **wishes)


def gen_string(name: str | None = None, **wishes: Any) -> Expression:
    """A text in quotes that the model writes."""
    return gen(name, dtype=str, **wishes)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
) -> Expression:
    """One of `choices`, which the model chooses. Raises ValueError where there is nothing to choose from."""
    if not choices or not all(choices):
        raise ValueError("select needs choices, which are texts that are not empty")
    return Select(name, list(choices), temperature, choices_method)


def system(content: Expression | str) -> Expression:
    """What the system says."""
    return Role("system", as_expression(content))


def user(content: Expression | str) -> Expression:
    """What the user says."""
    return Role("user", as_expression(content))


def assistant(content: Expression | str) -> Expression:
    """What the assistant says."""
    return Role("assistant", as_expression(content))


def system_begin() -> Expression:
    """What follows is said by the system."""
    return Role("system", ends=False)


def system_end() -> Expression:
    """The system ends."""
    return Role("system", begins=False)


def user_begin() -> Expression:
    """What follows is said by the user."""
    return Role("user", ends=False)


def user_end() -> Expression:
    """The user ends."""
    return Role("user", begins=False)


def assistant_begin() -> Expression:
    """What follows is said by the assistant."""
    return Role("assistant", ends=False)


def assistant_end() -> Expression:
    """The assistant ends."""
    return Role("assistant", begins=False)
