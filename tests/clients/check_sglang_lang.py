"""SGLang's own frontend language, whose RuntimeEndpoint drives the server. Its package is installed without the rest of
SGLang, which needs a GPU's libraries, so the package's own imports are passed over.
"""

import importlib.util
import sys
import types
from pathlib import Path

from common import Target, expect, try_client


def load_language() -> types.ModuleType:
    """`sglang.lang.api` without what `import sglang` loads."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    package = types.ModuleType("sglang")
    package.__path__ = [str(Path(found.origin).parent)]
    sys.modules["sglang"] = package
    import sglang.lang.api

    return sglang.lang.api


sgl = load_language()


def backend(target: Target) -> object:
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    return RuntimeEndpoint(target.url)


def generates(target: Target) -> None:
    @sgl.function
    def program(s, place):
        s += "Once upon a time in the " + place + sgl.gen("a", max_tokens=8, temperature=0)
        s += " and " + sgl.gen("b", max_tokens=4, stop=[" "], temperature=0)

    state = program.run(place="garden", backend=backend(target))
    expect(state["a"] and state.text().startswith("Once upon a time in the garden"), state.text())
    streamed = program.run(place="garden", backend=backend(target), stream=True)
    text = "".join(streamed.text_iter("a"))
    expect(text == state["a"], f"streamed {text!r}, whole {state['a']!r}")


def chooses(target: Target) -> None:
    from sglang.lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )

    for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized):

        @sgl.function
        def program(s, method=method):
            s += "The fox was very" + sgl.select("a", [" happy", " sad", " brown"], choices_method=method)

        state = program.run(backend=backend(target))
        expect(state["a"] in (" happy", " sad", " brown"), f"{method}: {state['a']}")


def typed_and_formed(target: Target) -> None:
    @sgl.function
    def program(s):
        s += "I have " + sgl.gen("count", dtype=int, max_tokens=20, temperature=0)
        s += " dogs and " + sgl.gen("other", regex="[0-9]{2} cats", max_tokens=20, temperature=0)

    state = program.run(backend=backend(target))
    expect(int(state["count"]) is not None and state["other"].endswith(" cats"), state.text())


def forks_and_batches(target: Target) -> None:
    @sgl.function
    def program(s, name):
        s += sgl.user(f"Tell a story about a {name}.")
        forks = s.fork(3)
        for place, fork in enumerate(forks):
            fork += sgl.assistant(sgl.gen("part", max_tokens=3 + place, temperature=0))
        s += sgl.assistant(" ".join(fork["part"] for fork in forks))

    states = program.run_batch([{"name": "fox"}, {"name": "dog"}], backend=backend(target), num_threads=2)
    expect(all(state.messages()[-1]["content"] for state in states), "a state is empty")


def facts(target: Target) -> None:
    endpoint = backend(target)
    expect(endpoint.get_model_name(), "there is no name")
    expect(endpoint.get_server_info(), "there are no facts of the server")
    endpoint.flush_cache()


if __name__ == "__main__":
    try_client("sglang", [generates, chooses, typed_and_formed, forks_and_batches, facts])
