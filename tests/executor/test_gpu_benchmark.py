"""The benchmark for GPUs runs through on a CPU, so that no line of it is broken when a GPU is at hand."""

import json

import pytest

from benchmarks import gpu


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_all_parts_run(capsys):
    assert gpu.measure(gpu.rehearsal())
    told = lines(capsys)
    assert not [line for line in told if "error" in line]
    assert sum(line.get("tokens_as_on_cpu", False) for line in told) == 2 * len(gpu.EXACT_CASES)
    decoded = [line for line in told if line["part"] == "decode, tiny"]
    assert [line["batch"] for line in decoded if "floor_share" in line] == [1, 4]
    assert [line["batch"] for line in decoded if "idle_share" in line] == [1, 4]


def test_a_part_that_fails_says_so_after_what_it_has(capsys):
    def part():
        yield {"case": "first", "tokens_as_on_cpu": True}
        raise MemoryError("no room")

    assert not gpu.tell("some part", part())
    assert lines(capsys) == [
        {"part": "some part", "case": "first", "tokens_as_on_cpu": True},
        {"part": "some part", "error": "MemoryError: no room"},
    ]
    assert not gpu.tell("other tokens", iter([{"tokens_as_on_cpu": False}]))
    assert gpu.tell("figures", iter([{"batch": 1}]))
