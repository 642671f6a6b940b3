"""A router in front of prefill and decode engines: it names one of each for a request, as the server's router does."""

from collections.abc import Callable

from typing_extensions import override

from tokenyard.routing.dispatch import Send
from tokenyard.routing.workers import PREFILL
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.fleet.sim_router import FleetLayout, Reject, RoutedRequest, SimRouting, Submit
from tokenyard.sim.kv.disagg_settings import DisaggSettings
from tokenyard.sim.outcome import Setup, executor_info


class DisaggRouting(SimRouting):
    """Routers that choose a decode engine by `DisaggSettings.decode_policy` and a prefill engine by `prefill_policy`.

    The load of both is counted when a request is sent. If no prefill engine has room, the decode engine computes the
    prompt.

    partner: the prefill engine of each request, -1 for none.
    drop: called as (request, ns) when the prefill half of a request is no longer needed.
    """

    def __init__(
        self,
        disagg: DisaggSettings,
        places: FleetLayout,
        prefill_engines: FleetLayout,
        fleet: Fleet,
        seed: int,
        submit: Submit,
        reject: Reject,
    ) -> None:
        """Create the routers of the decode engines and of the `prefill_engines`, whose numbers follow."""
        super().__init__((disagg.prefill_policy, disagg.decode_policy), places, fleet, seed, submit, reject)
        self.partner: dict[int, int] = {}
        self.drop: Callable[[int, int], None] = lambda index, now: None
        for router in self._routers:
            router.add(prefill_engines, PREFILL)

    @override
    def _send(self, call: RoutedRequest, action: Send[RoutedRequest], now: int) -> None:
        self.partner[call.request.number] = -1 if action.prefill is None else action.prefill.target.worker.replica
        super()._send(call, action, now)

    def leg_ended(self, index: int, now: int, computed: bool) -> None:
        """The prefill half of a request has ended: its prompt is `computed`, or its prefill engine is gone."""
        call = self.open_calls.get(index)
        if call is not None:
            call.router.machine.prefill_ended(call, now, computed=computed)
            self.capacity_freed = True

    @override
    def died(self, replica: int, now: int) -> None:
        if replica >= self._places.replicas:
            for router in self._routers:
                router.down(replica, range(0))
            return
        for number, call in self.open_calls.items():
            if call.scheduler == replica and call.prefill is not None:
                self.drop(number, now)
        super().died(replica, now)


def make_routing(setup: Setup, alike: bool, submit: Submit, reject: Reject) -> SimRouting:
    """The routers of a fleet. `alike`: whether prompts may share prefixes."""
    devices = [executor_info(setup, replica) for replica in range(setup.replicas)]
    pools = [info.num_pages * info.page_size for info in devices]
    room, disagg = setup.settings.max_running_requests, setup.disagg
    on_disk = 0 if setup.kv_store is None else setup.kv_store.disk_tokens(setup.profile.kv_bytes_per_token)
    places = FleetLayout(setup.replicas, setup.dp_size, setup.fleet.dp_aware, room, pools, setup.settings, on_disk)
    if disagg is not None and disagg.mode == "decode":
        count, last = disagg.prefill_replicas, executor_info(setup, setup.replicas)
        prefill_engines = FleetLayout(count, 1, True, room, [last.num_pages * last.page_size] * count, setup.settings)
        routing: SimRouting = DisaggRouting(disagg, places, prefill_engines, setup.fleet, setup.seed, submit, reject)
    else:
        routing = SimRouting((setup.router,), places, setup.fleet, setup.seed, submit, reject)
    routing.alike = alike
    return routing
