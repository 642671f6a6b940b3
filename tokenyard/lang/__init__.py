"""The frontend language: programs of prompts, generations and choices, with the API of SGLang's frontend language.

from tokenyard import lang

@lang.function
def answer(s, question):
    s += lang.user(question)
    s += lang.assistant(lang.gen("answer", max_tokens=64))

lang.set_default_backend(lang.Endpoint("http://127.0.0.1:30000"))
print(answer.run(question="Why is the sky blue?")["answer"])
"""

from tokenyard.lang.interpreter import ProgramState, ProgramStateGroup
from tokenyard.lang.ir import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from tokenyard.lang.program import Program, function, set_default_backend
from tokenyard.lang.runtime_endpoint import Endpoint, EndpointError
from tokenyard.lang.transport import HttpAnswer, Transport
from tokenyard.lang.values import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

RuntimeEndpoint = Endpoint
"""The name in SGLang."""

Answer = HttpAnswer
Forks = ProgramStateGroup
"""`Answer` and `Forks` are deprecated names, kept for one more release."""

__all__ = [
    "Answer",
    "Endpoint",
    "EndpointError",
    "Forks",
    "HttpAnswer",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "RuntimeEndpoint",
    "Transport",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "greedy_token_selection",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]
