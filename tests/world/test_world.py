"""Worlds of fixed seeds hold what docs/promises.md says, the same each time, and notice what breaks it."""

from dataclasses import replace

import pytest

from tests.world import client, network
from tests.world.engine import WEIGHTS, weights_folder
from tests.world.shrink import shrink
from tests.world.world import Fault, Story, make_story, run
from tokenyard.cache.state_checkpoints import StateCheckpoints
from tokenyard.engine.frontend.scheduler_client import SchedulerClient
from tokenyard.engine.scheduler_process.attachments.kv_store import KvStoreConnector
from tokenyard.executor.distributed.rank0 import ModelRanks
from tokenyard.executor.forward_batch import PageTable
from tokenyard.router import kv_event_subscriber
from tokenyard.router.stream_continuation import Continuation


def short_story(*faults, requests=40):
    """Two engines behind a router, and some six seconds of requests."""
    asks = [
        client.Ask(
            *(i, 0.15 * i, [5 + i % 7] * (8 + i), (1, 20, 60)[i % 3]),
            stream=i % 4 > 0,
            leaves_after=9 if i == 5 else None,
        )
        for i in range(requests)
    ]
    settings = {"page_size": 4, "max_total_tokens": 2048, "mock_step_ms": 20.0}
    return Story(3, 2, 1, 1, asks, list(faults), settings)


KILLED = Fault(2.0, "kill", "engine0", 1.0)


def test_without_faults_every_answer_is_whole():
    outcome = run(short_story())
    assert outcome.violations == []
    assert outcome.lost == 0
    assert {seen.end for seen in outcome.seen} == {"done", "left"}


def test_a_killed_engine_costs_no_answer_and_the_same_story_ends_the_same():
    story = short_story(KILLED, Fault(4.0, "kill scheduler", "engine1"))
    outcome = run(story)
    assert outcome.violations == []
    assert outcome.lost == 0
    assert run(story).digest == outcome.digest


def test_a_store_on_disk_survives_what_happens_to_the_disk(monkeypatch):
    story = short_story(
        Fault(1.0, "disk broken", "engine0", 0.5),
        Fault(2.0, "bit flips", "engine0"),
        Fault(2.5, "power", "engine0", 0.5),
        Fault(4.0, "disk full", "engine0", 1.0),
    )
    settings = story.settings | {"enable_hierarchical_cache": True, "max_total_tokens": 512}
    shared = [replace(ask, prompt=[7 + ask.number % 6] * 200 + [ask.number]) for ask in story.asks]
    started = []
    begin = KvStoreConnector.__init__
    monkeypatch.setattr(KvStoreConnector, "__init__", lambda self, *given: started.append(self) or begin(self, *given))
    outcome = run(replace(story, settings=settings, asks=shared))
    assert outcome.violations == []
    assert outcome.lost == 0
    assert sum(store.counters.loaded_tokens for store in started) > 0


@pytest.mark.slow
def test_a_scheduler_that_restarts_with_other_weights_than_its_engines_is_noticed(monkeypatch):
    story = short_story(Fault(1.0, "weights", "engine0", 1.0), Fault(2.5, "kill scheduler", "engine0"))
    weights = ("", *map(weights_folder, WEIGHTS))
    story = replace(story, asks=[replace(ask, weights=weights) for ask in story.asks])
    assert run(story).violations == []
    order = SchedulerClient.order
    monkeypatch.setattr(
        SchedulerClient, "order", lambda self, verb, **given: verb == "restore_weights" or order(self, verb, **given)
    )
    (violation,) = run(story).violations
    assert violation.endswith("has weights '' in place of '1'")


@pytest.mark.slow
def test_tokens_repeated_in_a_continuation_are_noticed_and_the_story_is_cut_down(monkeypatch):
    resume = Continuation.resume_stream

    def forgetful(self):
        resume(self)
        self.outputs[0] = self.outputs[0][:-1]

    monkeypatch.setattr(Continuation, "resume_stream", forgetful)
    story = short_story(Fault(0.5, "slow", "engine1", 0.2), KILLED)
    found = run(story).violations
    assert any("not a prefix" in text for text in found)
    shorter = shrink(story, [text for text in found if "not a prefix" in text])
    assert shorter.faults == [KILLED]
    assert len(shorter.asks) <= 2


def divided(story):
    """The same with models of two ranks."""
    return replace(story, tp_size=2, asks=[replace(ask, divided=True) for ask in story.asks])


@pytest.mark.slow
def test_a_model_that_loses_a_rank_costs_no_answer(monkeypatch):
    lost = []
    give_up = ModelRanks.give_up
    monkeypatch.setattr(ModelRanks, "give_up", lambda self, reason: lost.append(reason) or give_up(self, reason))
    killed, stopped = Fault(0.5, "rank killed", "engine0"), Fault(1.0, "rank stopped", "engine1", 3.0)
    outcome = run(divided(short_story(killed, stopped, Fault(0.2, "rank slow", "engine1", 0.5), requests=12)))
    assert outcome.violations == []
    assert outcome.lost == 0
    assert "tensor-parallel rank 1 was killed by signal 9" in lost
    assert "tensor-parallel rank 1 is stalled" in lost


@pytest.mark.slow
def test_wrong_kv_at_a_rank_is_noticed(monkeypatch):
    write = PageTable.write

    def forget(self, plan):
        write(self, plan)
        if not plan.row_starts and self.host is not None and len(plan.page_ids) > 1:
            self.host[plan.page_rows[0], plan.page_columns[0]] = plan.page_ids[1]

    monkeypatch.setattr(PageTable, "write", forget)
    found = run(divided(short_story(requests=4))).violations
    assert any("not a prefix" in text for text in found)


@pytest.mark.slow
@pytest.mark.parametrize("slot_pages", [0, 2])
def test_a_hit_without_its_recurrent_state_is_noticed(slot_pages, monkeypatch):
    story = short_story(KILLED, requests=16)
    asks = [replace(ask, prompt=[7 + ask.number % 3] * 50 + [ask.number] * 12) for ask in story.asks]
    device = {"checkpoints": 20, "track_interval": 16, "slot_pages": slot_pages}
    story = replace(story, asks=asks, device=device)
    outcome = run(story)
    assert outcome.violations == []
    assert outcome.done["tokens of prompts from prefix caches"] > 0
    monkeypatch.setattr(StateCheckpoints, "usable_pages", lambda self, runs, count: count)
    noticed = "the pages of checkpoint" if slot_pages else "from another state"
    assert any(noticed in text for text in run(story).violations)


@pytest.mark.slow
def test_a_machine_without_power_is_noticed_by_probes_of_silent_connections(monkeypatch):
    asks = [client.Ask(0, 0.0, [5] * 20, 200, stream=False), client.Ask(1, 0.0, [6] * 20, 200, stream=False)]
    story = replace(short_story(Fault(1.0, "power", "engine0", 1.0)), asks=asks)
    assert run(story).violations == []
    monkeypatch.setattr(network.ConnectionSocket, "setsockopt", lambda *arguments: None)
    assert any("has not ended" in text for text in run(story).violations)


@pytest.mark.slow
def test_a_router_that_no_longer_hears_of_a_cache_is_noticed(monkeypatch):
    story = replace(short_story(Fault(1.0, "power", "engine0", 1.0), requests=10), kv_events="replay")
    assert run(story).violations == []
    monkeypatch.setattr(kv_event_subscriber, "PROBES", {})
    assert run(story).violations == ["router0 has not heard of what engine0 has cached"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(7), 22])
def test_worlds_of_fixed_seeds(seed):
    story = make_story(seed)
    outcome = run(story)
    assert outcome.violations == [], str(story)
