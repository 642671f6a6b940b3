"""Small random programs for the scheduler core: settings, a pool, and what comes when. `make_program` makes one."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokenyard.base import (
    Cancel,
    Event,
    ExecutorInfo,
    Flush,
    KvAvailable,
    OpenGate,
    Pause,
    Request,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SessionEnded,
    SetPolicy,
    Slo,
    StateGroup,
    StopFound,
    Submit,
    TenantSettings,
    TurnEnded,
    Update,
    WindowGroup,
)
from tokenyard.cache.windows import min_window_pages
from tokenyard.cost import LinearCost, LinearTerms
from tokenyard.policy import POLICIES
from tokenyard.scheduler.row_state import Gate

EOS, ANSWER = 2, 7
NS_PER_MS = 1_000_000
SHARED_TOKENS = (0, 0, 4, 16)
"""Prompts of one family have so many first tokens in common."""

CLASSES = (None, "priority", "high", "low")
TENANTS = ("", "x", "y")


@dataclass(slots=True)
class Job:
    """A request: its tokens, and the fields of `Request` and `SamplingParams` that are not the default.

    answer_tokens: the token with which its answer ends by itself, counted from 1; `max_new` may cut it earlier.
    begun: tokens of its answer that it brings with it.
    """

    number: int
    prompt_tokens: int
    max_new: int
    answer_tokens: int
    n: int = 1
    family: int = 0
    shared: int = 0
    begun: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def most_tokens(self) -> int:
        """Tokens of all its answers, each with the prompt."""
        return self.n * (self.prompt_tokens + self.max_new)

    def event(self) -> Submit:
        """The event with which it arrives."""
        ids = np.full(self.prompt_tokens, 100 + self.number, np.int32)
        ids[: self.shared] = 50 + self.family
        sampling = SamplingParams(max_new_tokens=self.max_new, n=self.n)
        output_ids = np.full(self.begun, ANSWER, np.int32)
        return Submit(Request(self.number, f"r{self.number}", ids, sampling, output_ids=output_ids, **self.fields))


@dataclass(slots=True)
class Program:
    """Settings, a device of so many pages and pool rows, and pairs of (turn of the event loop, what comes then).

    step_ns: how long a step takes. noise: spread of the measured seconds that the cost model learns from, 0 for none.
    drafts: most drafts that the executor has ready for a row, of which a step accepts any number; 0 for no drafter.
    chances: those that its drafts may have, in thousandths. cost: what the scheduler believes of step times.
    windows: layers with a window, which have their own KV pool. states: layers with a recurrent state.
    """

    settings: dict[str, Any]
    pages: int
    pool_rows: int
    script: list[tuple[int, Job | Event]]
    step_ns: int = NS_PER_MS
    noise: float = 0.0
    drafts: int = 0
    chances: tuple[int, ...] = (900,)
    cost: LinearCost | None = None
    windows: WindowGroup | None = None
    states: StateGroup | None = None

    @property
    def jobs(self) -> list[Job]:
        """The requests, as they arrive."""
        return [entry for _, entry in self.script if isinstance(entry, Job)]

    def info(self) -> ExecutorInfo:
        """The device."""
        settings = self.scheduler_settings()
        context = settings.context_length
        device = ExecutorInfo("m", "cpu", "x", 999, context, (EOS,), settings.page_size, self.pages, self.pool_rows)
        return replace(device, windows=self.windows, states=self.states)

    def scheduler_settings(self) -> SchedulerSettings:
        """The settings. Raises ConfigError for those that contradict each other."""
        settings = SchedulerSettings(**self.settings)
        settings.validate()
        return settings


def make_program(seed: int) -> Program:
    """The program with this seed. Its settings are valid."""
    draw = random.Random(seed)
    settings = _settings(draw)
    size = settings.get("page_size", 1)
    tokens = draw.choice((16, 24, 40, 64, 64, 100, 200))
    settings["context_length"] = draw.choice((48, 100, 100))
    depth = settings["max_in_flight"]
    program = Program(
        settings=settings,
        pages=max(tokens // size, 3),
        pool_rows=settings["max_running_requests"] + draw.choice((0, 0, depth)),
        script=_script(draw, settings),
        step_ns=draw.choice((1, 1, 1, 10, 100)) * NS_PER_MS,
        noise=draw.choice((0.0, 0.0, 0.5, 1.5)),
        drafts=draw.choice((0, 0, 0, 0, 1, 3)),
    )
    _add_chances(random.Random(f"chances {seed}"), program)
    _add_windows(random.Random(f"windows {seed}"), program)
    _add_adapters(random.Random(f"adapters {seed}"), program)
    _add_transfers(random.Random(f"transfers {seed}"), program)
    _add_pauses_of_loads(random.Random(f"pauses {seed}"), program)
    _add_shares(random.Random(f"shares {seed}"), program)
    _add_sessions(random.Random(f"sessions {seed}"), program)
    _add_states(random.Random(f"states {seed}"), program)
    return program


def _add_chances(draw: random.Random, program: Program) -> None:
    """The number of drafts and their chances, also 0; in two of three a cost model by which some drafts pay."""
    if not program.drafts:
        return
    program.drafts = draw.choice((1, 3, 8))
    program.chances = draw.choice(((0,), (0, 900), (0, 1, 300, 900, 1000)))
    if draw.random() < 0.5:
        # Many rows that decode together, of which some have drafts.
        program.settings["max_running_requests"] = program.pool_rows = 6
        program.pages = max(program.pages, 200 // program.scheduler_settings().page_size)
    if draw.random() < 2 / 3:
        program.cost = LinearCost(LinearTerms(0.1, draw.choice((0.1, 1.0, 10.0)), 0.0, 0.2, 0.0, 0.0))


def _add_windows(draw: random.Random, program: Program) -> None:
    """In one program of five some layers have a window, without a change to the rest of the program."""
    if draw.random() < 0.8:
        return
    window, size = draw.choice((1, 3, 8, 16)), program.scheduler_settings().page_size
    least = min_window_pages(window, size)
    program.windows = WindowGroup(window, draw.randint(least, max(program.pages, least)))


def _add_states(draw: random.Random, program: Program) -> None:
    """In one program of five without windows, some layers have a recurrent state."""
    moves = any({"awaits_kv", "handover"} & job.fields.keys() for job in program.jobs)
    stored = program.settings.get("enable_hierarchical_cache")
    if program.windows is not None or draw.random() < (0.5 if moves or stored else 0.8):
        return
    program.states = StateGroup(draw.choice((0, 1, 4, 40)), track_interval=draw.choice((1, 5, 16)))
    program.settings["mamba_retention_policy"] = draw.choice(("worth", "worth", "last", "per-path"))
    if draw.random() < 0.5 and not (moves or stored):
        slot_pages = draw.choice((1, 2, 5))
        program.states = replace(program.states, num_slots=program.pages // slot_pages, slot_pages=slot_pages)


def _add_adapters(draw: random.Random, program: Program) -> None:
    """In one program of five requests have LoRA adapters, more than there are slots."""
    if draw.random() < 0.8:
        return
    program.settings["enable_lora"] = True
    program.settings["max_loras_per_batch"] = draw.choice((1, 1, 2, 3))
    program.settings["lora_drain_wait_threshold"] = draw.choice((0.0, 0.002, 1.0))
    for job in program.jobs:
        adapter = draw.choice(("", "a#1", "b#1", "c#1", "d#1"))
        job.fields |= {"lora": adapter} if adapter else {}


def _add_transfers(draw: random.Random, program: Program) -> None:
    """In one program of five KV comes and goes: requests wait for it, leave it to others, or it is stored."""
    if program.windows is not None or draw.random() < 0.8:
        return
    if draw.random() < 0.7:
        policy = draw.choice(("write_through", "write_through_selective", "write_back"))
        program.settings |= {"enable_hierarchical_cache": True, "hicache_write_policy": policy}
    for turn, job in [(turn, entry) for turn, entry in program.script if isinstance(entry, Job)]:
        if draw.random() < 0.5:
            job.fields["awaits_kv"] = True
            for number in range(job.number, job.number + job.n):
                program.script.append((turn + draw.randint(0, 9), _reach(draw, number, job)))
        elif job.n == 1 and draw.random() < 0.3:
            job.fields["handover"] = True
    program.script.sort(key=lambda entry: entry[0])


def _add_pauses_of_loads(draw: random.Random, program: Program) -> None:
    """Half of the requests whose KV can be loaded are paused about then, and their KV is offered once more."""
    for turn, reach in [(turn, entry) for turn, entry in program.script if isinstance(entry, KvAvailable)]:
        if draw.random() < 0.5:
            paused = turn + draw.randint(0, 3)
            resumed = paused + draw.choice((0, 0, 1))
            again = KvAvailable(reach.number, draw.choice((reach.tokens, 40)))
            program.script += [(paused, Pause(numbers=[reach.number])), (resumed, Resume([reach.number]))]
            program.script.append((resumed + draw.choice((0, 0, 1)), again))
    program.script.sort(key=lambda entry: entry[0])


def _add_shares(draw: random.Random, program: Program) -> None:
    """In one program of five tenants have shares of the pool, and their prompts long prefixes in common, up to all of
    a prompt.
    """
    if draw.random() < 0.8:
        return
    first = draw.choice((0.2, 0.4, 0.6))
    program.settings["tenants"] = {"x": TenantSettings(kv_share=first), "y": TenantSettings(kv_share=0.9 - first)}
    for job in program.jobs:
        job.fields["tenant"] = draw.choice(("x", "x", "y", "z"))
        job.family, job.shared = draw.randint(0, 1), draw.randint(0, job.prompt_tokens)


def _add_sessions(draw: random.Random, program: Program) -> None:
    """In one program of two most requests are turns of two sessions, whose turns and ends are reported at any time."""
    if draw.random() < 0.5:
        return
    for turn, job in [(turn, entry) for turn, entry in program.script if isinstance(entry, Job)]:
        name = draw.choice(("", "s", "t"))
        if not name:
            continue
        job.fields["session"] = name
        job.family, job.shared = "st".index(name), draw.randint(0, job.prompt_tokens)
        later = turn + draw.randint(0, 30)
        ended = draw.choice((TurnEnded(name, "tool"), TurnEnded(name, "user", 10**6), SessionEnded(name)))
        program.script.append((later, ended))
    program.script.sort(key=lambda entry: entry[0])


def _reach(draw: random.Random, number: int, job: Job) -> KvAvailable:
    known = job.prompt_tokens + job.begun
    if job.n == 1 and draw.random() < 0.3:
        return KvAvailable(number, known, ANSWER)
    return KvAvailable(number, draw.randint(0, known))


def _some(draw: random.Random, share: float, **choices: tuple[Any, ...]) -> dict[str, Any]:
    """Each setting with probability `share`, at one of its values."""
    return {name: draw.choice(values) for name, values in choices.items() if draw.random() < share}


def _settings(draw: random.Random) -> dict[str, Any]:
    size = draw.choice((1, 1, 1, 2, 4, 16))
    settings: dict[str, Any] = {
        "max_running_requests": draw.choice((1, 2, 2, 3, 4, 6)),
        "max_in_flight": draw.choice((1, 2, 2, 3)),
        "schedule_policy": draw.choice((*POLICIES, "fcfs", "fcfs", "priority")),
    }
    if size > 1:
        settings["page_size"] = size
    settings |= _some(
        draw,
        0.35,
        headroom=("history", "past-future", "limit", "none"),
        retraction_policy=("newest", "priority", "slack", "fewest-lost"),
        enable_mixed_chunk=(True,),
        prefill_decode_interval=(0, 1, 2),
        chunked_prefill_size=(-1, size, 4 * size, 16 * size),
        disable_radix_cache=(True,),
        schedule_conservativeness=(0.01, 0.1),
    )
    settings |= _some(
        draw,
        0.15,
        max_overtaken_tokens=(0, 10, 60),
        step_budget=("time", "tokens"),
        max_partial_prefills=(2, 4),
        prefill_max_requests=(1, 2),
        max_prefill_tokens=(8, 32),
        max_queued_requests=(2, 5),
        in_batch_prefix_caching_check_threshold=(-1, 4),
        lpm_degrade_threshold=(2,),
        enable_dynamic_chunking=(True,),
        radix_eviction_policy=("lfu", "slru", "priority", "reuse", "reuse"),
        decode_share=(0.0, 0.3, 0.9),
        session_max_wait_s=(0.0, 0.02, 1.0),
        slo_ttft_ms=(0.0, 4.0, 50.0),
        slo_ttft_scale=(0.0, 1.0),
        slo_tpot_ms=(0.001, 2.0),
        slo_chunk_tokens=(1, 4),
        slo_idle_step_ms=(0.01, 5.0),
        queue_timeout_s=(0.02, 1.0),
        run_timeout_s=(0.1, 5.0),
    )
    for part in (_priorities, _levels, _tenants, _options, _last_resorts):
        settings |= part(draw, settings)
    return settings


def _priorities(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {}
    return (
        {"enable_priority_scheduling": True}
        | _some(
            draw,
            0.5,
            priority_scheduling_preemption_threshold=(0, 0, 1),
            priority_aging_s=(0.0, 0.001, 0.01),
            schedule_low_priority_values_first=(True,),
            default_priority_value=(0, 5),
        )
        | _some(draw, 0.1, disable_priority_preemption=(True,))
    )


def _levels(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    if draw.random() < 0.7:
        return {}
    return {"enable_service_levels": True} | _some(
        draw,
        0.5,
        service_level_quantum_tokens=(1, 8, 64),
        service_level_weights=((1, 1, 1), (3, 2, 1)),
        strict_level_share=(0.01, 0.9),
    )


def _tenants(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    if draw.random() < 0.6:
        return {}
    tenants, left = {}, 1.0
    for name in draw.sample((*TENANTS, "*"), draw.choice((1, 2, 3))):
        values = _some(
            draw,
            0.3,
            weight=(0.5, 2.0),
            tokens_per_s=(1.0, 100.0, 10_000.0),
            burst_tokens=(1, 16, 64),
            max_running=(1, 2),
            max_queued=(1, 3),
        ) | _some(draw, 0.6, kv_share=(0.2, 0.4, 0.6))
        share = values.get("kv_share", 0.0)
        if name == "*" or share > left:
            values.pop("kv_share", None)
        left -= values.get("kv_share", 0.0)
        tenants[name] = TenantSettings(**values)
    return {"tenants": tenants}


def _options(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Options of the policy, so small that they matter in a program of a few hundred tokens."""
    choices = {
        "mlfq": {"quantum_tokens": (1, 4, 16), "promote_s": (0.0, 0.02, 0.5)},
        "vtc": {"saved_tokens": (0, 30)},
        "dlpm": {"quantum_tokens": (1, 16), "saved_tokens": (0, 30)},
        "random": {"seed": (1, 2)},
        "hits-first": {"cheap_s": (0.0, 0.001, 0.01)},
        "session": {"cheap_s": (0.0, 0.001, 0.01)},
        "continuum": {"ttl_s": (0.0, 0.01, 1.0)},
        "pause-idle": {"idle_s": (0.0, 0.01, 1.0)},
    }.get(settings["schedule_policy"], {})
    options = _some(draw, 0.6, **choices)
    return {"policy_options": options} if options else {}


def _last_resorts(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """What a program may contain only with certain other settings."""
    fixed: dict[str, Any] = {}
    if settings.get("slo_ttft_ms") == 0.0 and settings.get("slo_ttft_scale") == 0.0:
        fixed["slo_ttft_ms"] = 4.0
    if settings.get("enable_dynamic_chunking"):
        fixed["chunked_prefill_size"] = 16
        fixed["step_budget"] = "tokens"
    if settings["schedule_policy"] == "slo" and draw.random() < 0.5:
        fixed |= draw.choice(({"slo_max_wait_s": 0.02}, {"slo_max_wait_s": 2.0}, {"slo_reject": True}))
    return fixed


def _script(draw: random.Random, settings: dict[str, Any]) -> list[tuple[int, Job | Event]]:
    jobs, turn, number = draw.choice((2, 3, 4, 5, 7, 12)), 0, 0
    spread = draw.choice((0, 1, 4, 12))
    longest = draw.choice((8, 20, 40))
    script: list[tuple[int, Job | Event]] = []
    for _ in range(jobs):
        turn += draw.randint(0, spread)
        job = _job(draw, number, longest)
        script.append((turn, job))
        if "grammar" in job.fields:
            opened = turn + draw.randint(0, 9)
            script += [(opened, OpenGate(job.number + answer, Gate.GRAMMAR)) for answer in range(job.n)]
        number += job.n
    if draw.random() < 0.35:
        for _ in range(draw.choice((1, 2, 5))):
            script.append((draw.randint(0, turn + 30), _event(draw, number)))
    script.sort(key=lambda entry: entry[0])
    return script


def _job(draw: random.Random, number: int, longest: int) -> Job:
    prompt, max_new = draw.randint(1, longest), draw.randint(0 if draw.random() < 0.1 else 1, longest)
    fields: dict[str, Any] = {
        "priority": draw.choice((None, 0, 0, 1, 5, 30)),
        "service_class": draw.choice(CLASSES),
        "tenant": draw.choice(TENANTS),
        "routing_key": draw.choice((None, "a", "b")),
    }
    if draw.random() < 0.2:
        fields["deadline_ns"] = draw.choice((1, 8, 60)) * NS_PER_MS
    if draw.random() < 0.1:
        fields["slo"] = Slo(draw.choice((None, NS_PER_MS)), draw.choice((None, NS_PER_MS // 10)))
    if draw.random() < 0.07:
        fields["grammar"] = "start: /a/"
    answer = draw.choice((max_new, max_new, draw.randint(1, max(max_new, 1))))
    count = draw.choice((1, 1, 1, 1, 1, 1, 3))
    return Job(
        number,
        prompt,
        max_new,
        answer,
        n=count,
        begun=draw.randrange(answer) if count == 1 and answer > 1 and draw.random() < 0.1 else 0,
        family=draw.randint(0, 1),
        shared=min(draw.choice(SHARED_TOKENS), prompt),
        fields={name: value for name, value in fields.items() if value not in (None, "")},
    )


def _event(draw: random.Random, numbers: int) -> Event:
    number = draw.randrange(numbers)
    return draw.choice(
        (
            lambda: Cancel([number]),
            lambda: StopFound(number, draw.choice((1, 3)), "x"),
            lambda: Pause(numbers=[number]),
            lambda: Resume([number]),
            lambda: Update(number, priority=draw.choice((0, 3, 40))),
            lambda: Update(number, boost=draw.choice((-20, 20))),
            lambda: Update(number, deadline_ns=draw.choice((1, 50)) * NS_PER_MS),
            lambda: SetPolicy(draw.choice(sorted(POLICIES)), changes=_some(draw, 0.3, step_budget=("time", "tokens"))),
            lambda: Pause(draw.choice(("in_place", "retract"))),
            Resume,
            Flush,
        )
    )()
