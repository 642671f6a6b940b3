"""Step times from tables: look-ups, chunks, scaling, files and tapes."""

from dataclasses import replace

import numpy as np
import pytest

from tokenyard.base import ConfigError, StepWork
from tokenyard.cost import (
    Column,
    Grid,
    LinearTerms,
    OnlineCost,
    Profile,
    StepTable,
    TableCost,
    closest_terms,
    load_profile,
    lower_terms,
    save_profile,
)
from tokenyard.cost.step_table import usual_steps
from tokenyard.policy.prefill_time import PrefillTime

TERMS = LinearTerms(1.0, 5.0, 2.0, 0.02, 5e-5, 1e-6)


def table(**changes) -> StepTable:
    """10 ms and 0.1 a token without chunks, 20 and 0.1 with, attention of 1 us per token read and 1e-6 ms per area."""
    tokens, contexts = (1, 64, 4096), (0, 1024, 65536)
    chunks, prefixes = (1, 1024, 2048, 4096, 8192), (0, 4096, 65536)
    usual = StepTable(
        decode=Column(tokens, tuple(10 + 0.1 * n for n in tokens)),
        mixed=Column(tokens, tuple(20 + 0.1 * n for n in tokens)),
        rows=Grid((1, 256), contexts, tuple(tuple(1e-3 * b * s for s in contexts) for b in (1, 256))),
        chunk=Grid(chunks, prefixes, tuple(tuple(1e-6 * x * (p + x / 2) for p in prefixes) for x in chunks)),
        host_ms=0.5,
        origin="a test",
    )
    return replace(usual, **changes)


def cost(**changes) -> TableCost:
    return TableCost(terms=TERMS, table=table(**changes))


def work(rows: int = 0, context: int = 0, *chunks: tuple[int, int]) -> StepWork:
    made = StepWork(rows, rows, rows, rows * context)
    for prefix, tokens in chunks:
        made.add_chunk(prefix, tokens)
    return made


def test_a_decode_step_is_host_and_base_and_attention():
    assert cost().step(work(8, 1000)) * 1e3 == pytest.approx(0.5 + 10 + 0.8 + 8.0)


def test_a_mixed_step_takes_the_other_base_and_the_attention_of_both():
    expected = 0.5 + 20 + 0.1 * 1032 + 8.0 + 1e-6 * 1024 * (4096 + 512)
    assert cost().step(work(8, 1000, (4096, 1024))) * 1e3 == pytest.approx(expected)


def test_several_chunks_have_one_launch_floor():
    alone = cost(chunk_floor_ms=0.3).step(work(0, 0, (0, 1024)))
    base = cost().table.mixed
    attention = alone * 1e3 - 0.5 - base.at(1024)
    both = cost(chunk_floor_ms=0.3).step(work(0, 0, (0, 1024), (0, 1024))) * 1e3 - 0.5 - base.at(2048)
    assert both == pytest.approx(2 * attention - 0.3)


def test_a_chunk_beyond_the_table_costs_as_its_parts():
    whole = cost().step(work(0, 0, (0, 32768))) * 1e3 - 0.5 - (20 + 3276.8)
    assert whole == pytest.approx(1e-6 * 32768**2 / 2, rel=0.01)


def test_many_decode_steps_are_bit_for_bit_the_single_ones():
    contexts = np.arange(8 * 500, 8 * 500 + 4000, 7)
    one = [cost().step(StepWork(8, 8, 8, int(context))) for context in contexts]
    assert cost().decodes(8, contexts).tolist() == one


def test_a_scaled_cost_takes_that_much_longer():
    step = work(8, 1000, (100, 700))
    assert cost().scaled(1.5).step(step) == pytest.approx(1.5 * cost().step(step))


def test_prefill_time_of_a_table_is_its_slope():
    found = PrefillTime.of(cost())
    assert found.token_s == pytest.approx(1e-4)
    assert found.area_s == pytest.approx(1e-9)


def test_the_lower_terms_are_never_above_the_table():
    tables = table()
    found = lower_terms(closest_terms(tables), tables)
    assert all(found.step(one) <= cost().step(one) * 1e3 * (1 + 1e-9) for one in usual_steps())
    assert lower_terms(TERMS, None) is TERMS


def test_learning_starts_at_the_closest_terms():
    assert OnlineCost(cost()).step(work(8, 1000)) == pytest.approx(TERMS.step(work(8, 1000)) / 1e3)


@pytest.mark.parametrize(
    "changes",
    [
        {"decode": Column((1,), (1.0,))},
        {"decode": Column((4, 1), (1.0, 2.0))},
        {"mixed": Column((1, 2), (1.0,))},
        {"mixed": Column((1, 2), (1.0, float("nan")))},
        {"mixed": Column((1, 2), (0.0, 1.0))},
        {"rows": Grid((1, 2), (0, 1), ((1.0, 2.0),))},
    ],
)
def test_a_malformed_table_is_refused(changes):
    with pytest.raises(ConfigError, match="step table"):
        table(**changes)


def test_a_profile_keeps_its_table_in_its_file(tmp_path):
    profile = Profile("h100", "a model", TERMS, 1000, 10, 100, "a test", table=table(), measured="TTFT 10 %")
    save_profile(profile, tmp_path / "profile.json")
    read = load_profile(tmp_path / "profile.json")
    assert read == profile
    assert read.cost().step(work(8, 1000)) == profile.cost().step(work(8, 1000))
    assert profile.scaled(2.0).cost().step(work(3, 9)) == pytest.approx(2 * profile.cost().step(work(3, 9)))


def test_a_broken_table_in_a_file_is_named(tmp_path):
    profile = Profile("h100", "a model", TERMS, 1000, 10, 100, "a test", table=table())
    save_profile(profile, tmp_path / "profile.json")
    broken = (tmp_path / "profile.json").read_text().replace('"mixed"', '"mixt"')
    (tmp_path / "profile.json").write_text(broken)
    with pytest.raises(ConfigError, match=r"profile\.json: the step table"):
        load_profile(tmp_path / "profile.json")
