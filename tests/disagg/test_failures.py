"""The failure matrix of prefill and decode apart: whatever breaks, the answer is the same, and nothing is left over."""

import random
from collections.abc import Callable

import pytest

from tests.disagg.simulated_pair import MS, STATES, TERMS, Engine, World, make_yard
from tokenyard.base import Cancel, SamplingParams
from tokenyard.disagg.protocol import Beat, DecodePeer, Done, Offer, Want


def prompt(tokens: int = 200, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(3, 90) for _ in range(tokens)]


def answer_of(tokens: list[int], max_new: int = 12) -> list[int]:
    alone = make_yard()
    number = alone.submit(tokens, max_new=max_new)
    alone.run()
    return alone.tokens[number]


def serve(world: World, tokens: list[int] | None = None, max_new: int = 12) -> None:
    """Ask, wait for the end, and hold the answer to that of an engine alone."""
    tokens = tokens or prompt()
    number = world.ask(tokens, max_new)
    world.run(lambda: number in world.d.yard.finished)
    assert world.d.yard.tokens[number] == answer_of(tokens, max_new)
    assert world.d.yard.finished[number].reason in ("length", "stop")


def computed(world: World) -> int:
    return world.d.yard.scheduler.snapshot(1).counters.prefill_tokens


def state_of(world: World) -> str:
    asks = list(world.d.decode_peer.prefills.values())
    return asks[0].state if asks else ""


MOMENTS = ("wanted", "offered", "reading", "validating")


def at(world: World, moment: str, then: Callable[[], None]) -> None:
    if moment == "offered":
        # Else pages are taken in the same turn.
        world.d.busy_until = world.now + 200 * MS
    # A machine that wants something said may not have had its turn yet.
    world.when(lambda: state_of(world) == moment and bool(world.said), then)


def kill_p(world: World) -> None:
    world.p.dead = True
    world.cut(world.now)


def stop_p(world: World) -> None:
    world.p.runs = False
    go_on = world.now + 4000 * MS
    world.when(lambda: world.now > go_on, lambda: setattr(world.p, "runs", True))


def restart_p(world: World) -> None:
    world.cut(world.now)
    world.p = Engine(world, "p2", states=world.states)
    world.connect()


def stop_d(world: World) -> None:
    """Longer than the lease, while other prompts take the pages at `p`."""
    world.d.runs = False
    go_on = world.now + 4000 * MS
    for seed in range(6):
        world.p.yard.submit(prompt(seed=50 + seed), max_new=4)
    world.when(lambda: world.now > go_on, lambda: setattr(world.d, "runs", True))


def cut(world: World) -> None:
    world.cut(world.now)


BREAKS = {"kill -9": kill_p, "stop": stop_p, "restart": restart_p, "cut": cut, "decode side stops": stop_d}


@pytest.mark.parametrize("states", [None, STATES])
def test_the_prompt_is_computed_there_and_the_answer_decoded_here(states):
    world = World(states=states)
    serve(world)
    assert world.d.decode_peer.counters == {"transferred": 1}
    assert world.p.prefill_peer.counters["handed_over"] == 1
    # A state is that of the whole prompt; KV alone is a hit up to the last whole page.
    assert computed(world) == (1 if states else 200 + 1 - 192)
    world.settle()


@pytest.mark.part(3)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", BREAKS)
def test_whatever_breaks_at_whatever_moment(what, moment):
    # With recurrent states every other time.
    states = STATES if (list(MOMENTS).index(moment) + list(BREAKS).index(what)) % 2 else None
    world = World(p={"pages": 24}, states=states)
    at(world, moment, lambda: BREAKS[what](world))
    serve(world)
    world.settle()


@pytest.mark.part(4)
@pytest.mark.parametrize("fate", ["lost", "doubled"])
@pytest.mark.parametrize(
    ("sender", "kind"), [("d", "Want"), ("p", "Offer"), ("d", "Done"), ("p", "Done"), ("d", "Beat"), ("p", "Beat")]
)
def test_lost_and_duplicated_messages(sender, kind, fate):
    seen = []

    def fault(by, message):
        hit = by == sender and type(message).__name__ == kind
        seen.append(hit)
        return fate if hit else ""

    world = World(fault)
    # A prompt that takes a while, so that there are beats.
    world.p.busy_until = world.now + 450 * MS
    serve(world)
    assert any(seen)
    world.settle()


def test_a_lost_drop_is_covered_by_the_lease():
    world = World(lambda sender, message: "lost" if type(message).__name__ == "Drop" else "")
    world.read_fault = "checksum"
    serve(world)
    assert world.d.decode_peer.counters["failed: checksum"] == 1
    world.settle()
    assert world.p.prefill_peer.counters["leases_over"] == 1


def test_a_flipped_bit_costs_a_prefill():
    world = World()
    world.read_fault = "checksum"
    serve(world)
    assert computed(world) == 201
    world.settle()


def test_a_late_read_of_pages_that_went_to_others_does_not_count():
    world = World(p={"pages": 16})
    at(world, "reading", lambda: stop_d(world))
    serve(world)
    assert world.d.decode_peer.counters["transferred"] == 0
    assert computed(world) == 201
    world.settle()


def test_a_client_that_disconnects_at_any_moment_leaves_nothing():
    for moment in MOMENTS:
        world = World()
        number = world.ask(prompt())
        at(world, moment, lambda world=world, number=number: world.d.yard.apply(Cancel([number])))
        world.run(lambda world=world, number=number: number in world.d.yard.finished)
        world.settle()


def test_a_killed_decode_engine_costs_the_prefill_engine_nothing():
    for moment in MOMENTS[:-1]:
        world = World()
        world.ask(prompt())
        at(world, moment, lambda world=world: setattr(world.d, "dead", True))
        world.run(lambda world=world: world.d.dead)
        world.reading = 0
        world.settle()
        assert world.p.prefill_peer.counters["leases_over"] == 1


@pytest.mark.parametrize("patient", [True, False])
def test_out_of_pages_the_offer_waits_and_is_given_up_in_the_end(patient):
    world = World(d={"pages": 18})
    first = world.d.yard.submit(prompt(150, seed=3), max_new=60 if patient else 100)
    world.d.yard.executor.answer_tokens = (90, 100)
    world.run(lambda: world.d.yard.scheduler.snapshot(1).running == 1)
    if not patient:
        world.d.busy_until = world.now + 1800 * MS
    serve(world)
    assert first in world.d.yard.finished
    assert (world.d.decode_peer.counters["transferred"] == 1) == patient
    world.settle()


def test_a_prefill_engine_with_a_full_queue_refuses():
    world = World(p={"max_queued_requests": 1})
    world.p.busy_until = world.now + 1000 * MS
    world.p.yard.submit(prompt(seed=9))
    serve(world)
    assert world.d.decode_peer.counters["failed: queue_full"] == 1
    assert not world.d.decode_peer.healthy_peers(world.now), "it is left alone for a while"
    world.settle()


def test_the_wait_for_a_slow_prefill_engine_is_bounded():
    world = World()
    world.p.busy_until = world.now + 6000 * MS
    serve(world)
    assert world.d.decode_peer.counters["failed: wanted for too long"] == 1
    world.settle()


@pytest.mark.parametrize("max_new", [1, 12])
def test_an_answer_of_one_token_moves_no_pages(max_new):
    tokens = prompt(100)
    world = World()
    if max_new > 1:
        for yard in (world.p.yard, world.d.yard):
            yard.executor.answer_tokens = (1, 1)
    number = world.ask(tokens, max_new)
    world.run(lambda: number in world.d.yard.finished)
    assert len(world.d.yard.tokens[number]) == 1
    assert computed(world) == 0
    assert ("d", "Done") not in world.said
    world.settle()


def test_a_restarted_engine_does_not_know_the_keys_of_its_predecessor():
    world = World()
    world.p.prefill_peer.received(1, Want("k", b"", None, boot_id="p0"), world.now)
    (sent,) = world.p.prefill_peer.take()
    assert sent.message.why == "restarted"
    world.p.prefill_peer.received(1, Done("k"), world.now)
    assert type(world.p.prefill_peer.take()[0].message).__name__ == "Gone"


def test_the_load_of_an_engine_counts_while_it_says_what_it_is():
    decode_peer = DecodePeer(TERMS, 16)
    for connection, name in enumerate(("a", "b")):
        decode_peer.joined(connection, name, 0)
    decode_peer.want(Want("k", b"", SamplingParams()), [1], "a", 0, 10**9)
    decode_peer.received(0, Beat(["k"], load_s=0.5, slowdown=2.0), 1)
    assert [(peer.name, peer.load_s, peer.slowdown) for peer in decode_peer.healthy_peers(1)] == [
        ("b", 0.0, 1.0),
        ("a", 0.5, 2.0),
    ]
    # It says no more once nothing is open.
    decode_peer.ended(1, 2)
    assert [(peer.name, peer.load_s, peer.slowdown) for peer in decode_peer.healthy_peers(2)] == [
        ("a", 0.0, 1.0),
        ("b", 0.0, 1.0),
    ]


def test_an_older_connection_to_an_engine_ends_for_itself():
    decode_peer = DecodePeer(TERMS, 16)
    for connection in (0, 1):
        decode_peer.joined(connection, "a", 0)
    decode_peer.lost(0, 1)
    assert [(peer.name, peer.number) for peer in decode_peer.healthy_peers(1)] == [("a", 1)]
    decode_peer.lost(1, 2)
    assert not decode_peer.peers()


def test_an_offer_that_makes_no_sense_is_refused():
    def fault(sender, message):
        if isinstance(message, Offer):
            message.tokens = 10_000
        return ""

    world = World(fault)
    serve(world)
    assert world.d.decode_peer.counters["failed: wrong offer"] == 1
    world.settle()


def test_a_room_that_is_named_twice_gets_its_prompt_once():
    world = World()
    prompts = [prompt(seed=seed) for seed in (1, 2)]
    numbers = [world.ask(one, key="room 7") for one in prompts]
    world.run(lambda: all(number in world.d.yard.finished for number in numbers))
    assert [world.d.yard.tokens[number] for number in numbers] == [answer_of(one) for one in prompts]
    assert world.d.decode_peer.counters == {"transferred": 1, "failed: open already": 1}
    world.settle()


@pytest.mark.parametrize("states", [None, STATES])
def test_many_requests_some_of_which_break_lose_nothing(states):
    rng = random.Random(7)

    def fault(sender, message):
        return rng.choice(["lost", "doubled", *[""] * 18])

    world = World(fault, d={"pages": 60}, p={"pages": 40}, states=states)
    prompts = {world.ask(prompt(rng.choice((70, 130, 200)), seed=i % 7), 6): i for i in range(40)}
    for number in list(prompts)[::9]:
        world.d.yard.apply(Cancel([number]))
    world.run(lambda: all(number in world.d.yard.finished for number in prompts), 60)
    for number in prompts:
        finish = world.d.yard.finished[number]
        assert finish.reason == ("abort" if number in list(prompts)[::9] else finish.reason)
    assert world.d.decode_peer.counters["transferred"] > 5
    world.settle()
