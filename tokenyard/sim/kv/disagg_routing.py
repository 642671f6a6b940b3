"""A router in front of prefill and decode engines: it names one of each for a request, as the server's router does."""

from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from tokenyard.base import NS_PER_S
from tokenyard.routing.prefix_index import Prompt, token_prompt
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.fleet.sim_router import FleetLayout, Refuse, RoutedRequest, Send, SimRouter, SimRouting
from tokenyard.sim.kv.disagg_settings import DisaggSettings
from tokenyard.sim.outcome import Setup, executor_info


class DisaggRouting(SimRouting):
    """Routers that choose a decode engine by `DisaggSettings.decode_policy` and a prefill engine by `prefill_policy`.

    The load of both is counted when a request is sent. If no prefill engine has room, the decode engine computes the
    prompt.

    drop: called as (request, ns) when the prefill half of a request is no longer needed.
    """

    def __init__(
        self,
        disagg: DisaggSettings,
        places: FleetLayout,
        prefill_engines: FleetLayout,
        fleet: Fleet,
        seed: int,
        send: Send,
        refuse: Refuse,
    ) -> None:
        """Create the routers of the decode engines and those of the `prefill_engines`."""
        super().__init__(disagg.decode_policy, places, fleet, seed, send, refuse)
        self.partner: dict[int, int] = {}
        self.drop: Callable[[int, int], None] = lambda index, now: None
        self._prefill_engines = [
            SimRouter(disagg.prefill_policy, prefill_engines, replace(fleet, max_worker_requests=0), seed + number)
            for number in range(fleet.routers)
        ]
        self._legs: dict[int, RoutedRequest] = {}

    @override
    def _dispatch(self, call: RoutedRequest, now: int) -> None:
        call.prefills = not self._choose_partner(call, now)
        super()._dispatch(call, now)

    def _choose_partner(self, call: RoutedRequest, now: int) -> bool:
        """Count a request at a prefill engine that computes its prompt; False if none has room."""
        router, request = self._prefill_engines[self._routers.index(call.router)], call.request
        prompt = token_prompt(request.prompt_ids) if router.needs_prefix else Prompt(size=len(request.prompt_ids))
        leg = RoutedRequest(request, router, prompt, call.key)
        if not router.has_capacity(leg):
            self.partner[request.number] = -1
            return False
        router.dispatch(leg, now / NS_PER_S)
        self._legs[request.number] = leg
        self.partner[request.number] = self._places.replicas + leg.target
        return True

    def leg_ended(self, index: int, now: int, computed: bool) -> None:
        """The prefill half of a request has ended: its prompt is `computed`, or its prefill engine is gone."""
        leg = self._legs.pop(index, None)
        if leg is not None:
            assert leg.sent is not None
            if computed:
                leg.sent.first_token(now / NS_PER_S)
            leg.router.ended(leg)
            self.room = True

    @override
    def close(self, replica: int) -> None:
        if replica < self._places.replicas:
            super().close(replica)
            return
        for router in self._prefill_engines:
            router.closed.add(replica - self._places.replicas)

    @override
    def open(self, replica: int) -> None:
        if replica < self._places.replicas:
            super().open(replica)
            return
        for router in self._prefill_engines:
            router.closed.discard(replica - self._places.replicas)
        self.room = True

    @override
    def died(self, replica: int, now: int) -> None:
        prefill_engines = replica - self._places.replicas
        if prefill_engines >= 0:
            self.close(replica)
            for router in self._prefill_engines:
                router.died(prefill_engines, [prefill_engines])
            return
        for number, call in self._open.items():
            if call.scheduler == replica and number in self._legs:
                self.drop(number, now)
                leg = self._legs.pop(number)
                leg.router.ended(leg)
        super().died(replica, now)


def make_routing(setup: Setup, alike: bool, send: Send, refuse: Refuse) -> SimRouting:
    """The routers of a fleet. `alike`: whether prompts may share prefixes."""
    devices = [executor_info(setup, replica) for replica in range(setup.replicas)]
    pools = [info.num_pages * info.page_size for info in devices]
    room, disagg = setup.settings.max_running_requests, setup.disagg
    on_disk = 0 if setup.kv_store is None else setup.kv_store.disk_tokens(setup.profile.kv_bytes_per_token)
    places = FleetLayout(setup.replicas, setup.dp_size, setup.fleet.dp_aware, room, pools, setup.settings, on_disk)
    if disagg is not None and disagg.mode == "decode":
        count, last = disagg.prefill_replicas, executor_info(setup, setup.replicas)
        prefill_engines = FleetLayout(count, 1, True, room, [last.num_pages * last.page_size] * count, setup.settings)
        routing: SimRouting = DisaggRouting(disagg, places, prefill_engines, setup.fleet, setup.seed, send, refuse)
    else:
        routing = SimRouting(setup.router, places, setup.fleet, setup.seed, send, refuse)
    routing.alike = alike
    return routing
