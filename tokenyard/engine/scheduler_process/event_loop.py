"""The two loops of the scheduler process. `driver.py` implements the steps."""

from collections import deque

from tokenyard.engine.scheduler_process.driver import Driver, LaunchedStep


def event_loop_normal(driver: Driver) -> None:
    """Run one step after the other until the port says stop."""
    idle = False
    while driver.receive(wait=idle):
        plan = driver.plan()
        if plan is not None:
            step = driver.launch(plan)
            driver.while_device_runs()
            driver.sample(step)
            driver.process(step)
        driver.send()
        idle = plan is None


def event_loop_overlap(driver: Driver, depth: int = 2) -> None:
    """Plan and launch steps while the device works on earlier ones, then process the oldest (SGLang's overlap schedule,
    and its pipeline loop where the device is several stages).

    depth: how many steps may be in flight; needs a scheduler with as many plans. A step whose sampling was delayed is
    sampled once the step before it was processed.
    """
    idle = False
    in_flight: deque[LaunchedStep] = deque()
    while driver.receive(wait=idle):
        plan = driver.plan()
        if plan is not None:
            in_flight.append(driver.launch(plan))
        driver.while_device_runs()
        full = len(in_flight) == depth
        idle = not in_flight
        came_to_front = len(in_flight) == 1 and plan is not None
        if in_flight and (full or plan is None):
            driver.process(in_flight.popleft())
            came_to_front = bool(in_flight)
        if came_to_front:
            driver.sample(in_flight[0])
        driver.send()
