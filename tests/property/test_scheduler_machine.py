"""Random events at random moments, one to three plans in flight: nothing is lost, nothing comes twice."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.examples import examples
from tests.scheduler.harness import Yard, make_info
from tokenyard.base import (
    Cancel,
    Flush,
    Pause,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SetPolicy,
    StateGroup,
    StopFound,
    TenantSettings,
    Update,
    WindowGroup,
)
from tokenyard.cache import windows
from tokenyard.executor.mock import FixedStepCost, MockExecutor
from tokenyard.policy import POLICIES
from tokenyard.policy.state_retention import STATE_RETENTIONS

PREFIXES = ([], [5] * 4, [5] * 16, [5, 6, 7, 8] * 5)
CONTEXT = 48
MARGIN_TOKENS = windows.MARGIN_TOKENS
PRIORITIES = {"enable_priority_scheduling": True}
AROUND = (
    {},
    {},
    PRIORITIES,
    PRIORITIES | {"priority_aging_s": 0.0, "priority_scheduling_preemption_threshold": 0},
    {"enable_service_levels": True, "service_level_quantum_tokens": 8},
    {"max_overtaken_tokens": 30},
    PRIORITIES | {"enable_service_levels": True, "max_overtaken_tokens": 60},
)
OTHER_SETTINGS = (
    {},
    {"headroom": "history", "retraction_policy": "newest"},
    {"headroom": "past-future", "retraction_policy": "slack", "step_budget": "time", "slo_chunk_tokens": 8},
    {"headroom": "none", "retraction_policy": "fewest-lost", "enable_dynamic_chunking": True},
    {"slo_ttft_ms": 4.0, "slo_ttft_scale": 0.0, "slo_max_wait_s": 0.02, "slo_chunk_tokens": 4},
    {"slo_ttft_ms": 3.0, "slo_ttft_scale": 0.0, "slo_reject": True, "retraction_policy": "priority"},
    {"tenants": {"x": TenantSettings(weight=2.0, max_running=1, max_queued=3), "": TenantSettings(kv_share=0.4)}},
    {"tenants": {"x": TenantSettings(kv_share=0.6), "": TenantSettings(kv_share=0.2)}, "headroom": "none"},
)


class SchedulerMachine(RuleBasedStateMachine):
    """The real scheduler and cache, the mock device, and a model that only knows what each token must be."""

    check_kv = False

    def group_settings(self, data):
        """Settings that concern these groups."""
        return {}

    def device(self, data):
        """What the mock device does besides."""
        return {}

    def groups(self, data, tokens, page_size):
        """The layers with a window, which have their own pool, and those with a recurrent state."""
        return {}

    @initialize(
        depth=st.integers(1, 3),
        page_size=st.sampled_from([1, 4]),
        chunk=st.sampled_from([-1, 4, 8]),
        mixed=st.booleans(),
        no_cache=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        around=st.sampled_from(AROUND),
        others=st.sampled_from(OTHER_SETTINGS),
        tokens=st.sampled_from([48, 64, 160]),
        eviction=st.sampled_from(["lru", "lfu", "slru", "priority", "reuse"]),
        data=st.data(),
    )
    def start(self, depth, page_size, chunk, mixed, no_cache, policy, around, others, tokens, eviction, data):
        rows = 4
        self.depth = depth
        if others.get("enable_dynamic_chunking"):
            chunk = 8
        self.settings = SchedulerSettings(
            page_size=page_size,
            max_running_requests=rows,
            max_queued_requests=12,
            context_length=CONTEXT,
            chunked_prefill_size=chunk,
            enable_mixed_chunk=mixed,
            disable_radix_cache=no_cache,
            radix_eviction_policy=eviction,
            schedule_policy=policy,
            prefill_decode_interval=2,
            max_in_flight=depth,
            schedule_conservativeness=0.1,
            in_batch_prefix_caching_check_threshold=4,
            in_batch_prefix_caching_deprioritize_threshold=4,
            **around,
            **others,
            **self.group_settings(data),
        )
        info = make_info(tokens // page_size, page_size, rows + depth, CONTEXT, **self.groups(data, tokens, page_size))
        device = {"answer_tokens": (3, 20), "check_kv": self.check_kv, **self.device(data)}
        executor = MockExecutor(info, FixedStepCost(0.001), sleep=False, **device)
        self.yard = Yard(self.settings, info, executor=executor)
        self.requests: dict[int, tuple[tuple[int, ...], int]] = {}
        self.known: dict[tuple[tuple[int, ...], int], int] = {}
        self.cut: dict[int, int] = {}

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(3, 9), min_size=1, max_size=20),
        max_new=st.integers(0, 24),
        n=st.sampled_from([1, 1, 1, 3]),
        salt=st.sampled_from(["", "", "x"]),
        urgent=st.sampled_from([None, 0, 5, 30]),
        due_ns=st.sampled_from([None, None, 1_000_000, 8_000_000]),
        service_class=st.sampled_from([None, "priority", "high", "low"]),
    )
    def submit(self, prefix, tail, max_new, n, salt, urgent, due_ns, service_class):
        prompt = prefix + tail
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, n=n)
        number = self.yard.submit(
            prompt,
            sampling=sampling,
            cache_salt=salt,
            priority=urgent,
            deadline_ns=due_ns,
            service_class=service_class,
            routing_key=salt or None,
            tenant=salt,
        )
        for answer in range(n):
            self.requests[number + answer] = (tuple(prompt), max_new)

    @rule()
    def launch(self):
        if len(self.yard.tickets) < self.depth:
            self.yard.launch()

    @rule()
    def commit(self):
        self.yard.commit()

    @rule(steps=st.integers(1, 12))
    def turn(self, steps):
        for _ in range(steps):
            while len(self.yard.tickets) < self.depth and self.yard.launch():
                pass
            self.yard.commit()
            self.yard.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.yard.apply(Cancel([self._pick(data)]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def pause_one(self, data):
        self.yard.apply(Pause(numbers=[self._pick(data)]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def resume_one(self, data):
        self.yard.apply(Resume([self._pick(data)]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), priority=st.integers(-5, 5))
    def update(self, data, priority):
        self.yard.apply(Update(self._pick(data), priority=priority))

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def set_policy(self, policy):
        self.yard.apply(SetPolicy(policy))

    @precondition(lambda self: any(n not in self.yard.finished for n in self.yard.tokens))
    @rule(data=st.data())
    def stop_found(self, data):
        open_numbers = [n for n in self.yard.tokens if n not in self.yard.finished]
        number = data.draw(st.sampled_from(open_numbers))
        keep = data.draw(st.integers(1, len(self.yard.tokens[number])))
        self.yard.apply(StopFound(number, keep, "x"))
        assert self.yard.finished[number].completion_tokens == keep

    @rule(mode=st.sampled_from(["in_place", "retract", "abort"]), resume=st.booleans())
    def pause_all(self, mode, resume):
        self.yard.apply(Pause(mode))
        self.yard.launch()
        self.yard.commit()
        if resume:
            self.yard.apply(Resume())

    @rule()
    def flush(self):
        self.yard.apply(Flush())

    @rule()
    def resume_all(self):
        self.yard.apply(Resume())

    @invariant()
    def pages_have_one_owner(self):
        if hasattr(self, "yard"):
            self.yard.check()

    @invariant()
    def hits_are_known_without_matching(self):
        if hasattr(self, "yard"):
            self.yard.check_hits()

    @invariant()
    def tokens_do_not_depend_on_the_schedule(self):
        if not hasattr(self, "yard"):
            return
        for number, tokens in self.yard.tokens.items():
            prompt, max_new = self.requests[number]
            assert len(tokens) <= max_new
            for position, token in enumerate(tokens):
                assert self.known.setdefault((prompt, position), token) == token

    def teardown(self):
        if not hasattr(self, "yard"):
            return
        self.yard.apply(Resume())
        self.yard.apply(Resume(sorted(self.requests)))
        self.yard.run(self.depth)
        assert sorted(self.yard.finished) == sorted(self.requests)
        assert self.yard.scheduler.idle() is None
        for number, finish in self.yard.finished.items():
            if finish.reason == "length":
                expected = min(self.requests[number][1], CONTEXT - len(self.requests[number][0]))
                assert len(self.yard.tokens.get(number, [])) == finish.completion_tokens <= expected

    def _pick(self, data):
        return data.draw(st.sampled_from(sorted(self.requests)))


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


class WindowedMachine(SchedulerMachine):
    """The same with a group of layers with a window. The device checks that all within a window is there."""

    check_kv = True

    def groups(self, data, tokens, page_size):
        windows.MARGIN_TOKENS = data.draw(st.sampled_from([0, 2, 9]))
        window, share = data.draw(st.sampled_from([1, 2, 5, 12])), data.draw(st.sampled_from([0.2, 0.5, 0.8]))
        pages = max(windows.min_window_pages(window, page_size), int(share * tokens) // page_size)
        return {"windows": WindowGroup(window, pages)}

    def teardown(self):
        try:
            super().teardown()
        finally:
            windows.MARGIN_TOKENS = MARGIN_TOKENS


WindowedMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=examples(60))
TestWindowedMachine = WindowedMachine.TestCase


class StatesMachine(SchedulerMachine):
    """The same with layers that keep a recurrent state. The device checks the state that each row continues from."""

    check_kv = True

    def groups(self, data, tokens, page_size):
        slots, interval = data.draw(st.sampled_from([0, 1, 3, 50])), data.draw(st.sampled_from([1, 3, 8]))
        shared = data.draw(st.sampled_from([0, 0, 1, 3]))
        if shared:
            slots = tokens // page_size // shared
        return {"states": StateGroup(slots, track_interval=interval, slot_pages=shared)}

    def group_settings(self, data):
        most = data.draw(st.sampled_from([1, 3, -1]))
        policy = data.draw(st.sampled_from(STATE_RETENTIONS))
        return {"mamba_retention_policy": policy, "mamba_max_states_per_path": most}

    def device(self, data):
        return {"drafts": data.draw(st.sampled_from([0, 0, 3])), "draft_right": 0.6}


StatesMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=examples(60))
TestStatesMachine = StatesMachine.TestCase
