import sys
import types

import pytest

from tokenyard.base import ConfigError
from tokenyard.policy.priority_function import (
    MAX_BOOST,
    RequestView,
    SystemView,
    by_service_class,
    close_target_gap,
    load_priority_function,
    shed_long_prompts,
    to_boost,
)


def request(**fields):
    known = {"priority": None, "tenant": "", "service_class": None, "prompt_tokens": 8, "max_new_tokens": 8}
    return RequestView(**{**known, "waited_s": 0.0, **fields})


@pytest.fixture
def module():
    made = types.ModuleType("my_hooks")
    sys.modules["my_hooks"] = made
    yield made
    del sys.modules["my_hooks"]


def test_a_function_is_found_by_its_path(module):
    module.urgent = lambda request, system: 1.0
    assert load_priority_function("my_hooks:urgent") is module.urgent


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_hooks", "module:name"),
        ("my_hooks:", "module:name"),
        (":f", "module:name"),
        ("my_hooks:a.b", "module:name"),
        ("no_such_module:f", "importing no_such_module failed"),
        ("my_hooks:f", "my_hooks has no f"),
        ("my_hooks:seven", "not callable"),
    ],
)
def test_a_wrong_path_says_what_is_wrong(module, path, message):
    module.seven = 7
    with pytest.raises(ConfigError, match=message):
        load_priority_function(path)


@pytest.mark.parametrize(("answer", "boost"), [(1, 1), (2.6, 3), (-0.4, 0), (1e30, MAX_BOOST), (-1e30, -MAX_BOOST)])
def test_answers_become_whole_levels_within_bounds(answer, boost):
    assert to_boost(answer) == boost


@pytest.mark.parametrize("answer", [None, "high", float("nan"), float("inf"), True, [1]])
def test_nonsense_answers_are_refused(answer):
    with pytest.raises(ValueError, match="finite number"):
        to_boost(answer)


def test_functions_that_come_along():
    calm, full = SystemView(1, 1, 0.5), SystemView(1, 1, 0.05, {"high": 0.25})
    assert [by_service_class(request(service_class=name), calm) for name in ("high", None, "low")] == [10, 0, -10]
    assert [shed_long_prompts(request(prompt_tokens=4096), view) for view in (calm, full)] == [0, -2]
    assert shed_long_prompts(request(prompt_tokens=100), full) == 0
    assert close_target_gap(request(service_class="high"), full) == pytest.approx(7.5)
    assert close_target_gap(request(), full) == 0
