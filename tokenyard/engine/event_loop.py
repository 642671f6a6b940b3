"""The two loops of the scheduler process. What the steps do stands in `driver.py`."""

from tokenyard.engine.driver import Driver, Flight


def event_loop_normal(driver: Driver) -> None:
    """Run one step after the other until told to stop."""
    idle = False
    while driver.receive(wait=idle):
        plan = driver.plan()
        if plan is not None:
            flight = driver.launch(plan)
            driver.advise()
            driver.sample(flight)
            driver.process(flight)
        driver.send()
        idle = plan is None


def event_loop_overlap(driver: Driver) -> None:
    """Plan and launch step N+1 while the device works on step N, then process N (SGLang's overlap schedule).

    Needs a scheduler with two plans in flight. Sampling of N+1 may have to wait until N was processed.
    """
    idle = False
    pending: Flight | None = None
    while driver.receive(wait=idle):
        plan = driver.plan()
        flight = driver.launch(plan) if plan is not None else None
        driver.advise()
        if pending is not None:
            driver.process(pending)
        if flight is not None:
            driver.sample(flight)
        driver.send()
        idle = flight is None and pending is None
        pending = flight
