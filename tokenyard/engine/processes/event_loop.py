"""The two loops of the scheduler process. What the steps do stands in `driver.py`."""

from tokenyard.engine.processes.driver import Driver, LaunchedStep


def event_loop_normal(driver: Driver) -> None:
    """Run one step after the other until told to stop."""
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


def event_loop_overlap(driver: Driver) -> None:
    """Plan and launch step N+1 while the device works on step N, then process N (SGLang's overlap schedule).

    Needs a scheduler with two plans in flight. Sampling of N+1 may have to wait until N was processed.
    """
    idle = False
    pending: LaunchedStep | None = None
    while driver.receive(wait=idle):
        plan = driver.plan()
        step = driver.launch(plan) if plan is not None else None
        driver.while_device_runs()
        if pending is not None:
            driver.process(pending)
        if step is not None:
            driver.sample(step)
        driver.send()
        idle = step is None and pending is None
        pending = step
