"""Which cases `make test` runs, and what each test costs."""

import gc
import os
import zlib
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, settings

# Tests share the cores with each other and with servers: how long an example takes says nothing.
settings.register_profile("shared-cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-cores")

STARTED = pytest.StashKey[float]()
CPU_S = "cpu_s"

# What collecting makes stays to the end. Looking for garbage in it, again and again, takes a third of the time.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--cpu-durations",
        type=int,
        metavar="N",
        help="show CPU seconds of each folder and of the N costliest tests, with those of their processes",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `part(n)`, mark all cases but a fixed sample of one in `n` as slow."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("part") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        kept = -(-len(group) // group[0].get_closest_marker("part").args[0])
        for item in sorted(group, key=lambda item: zlib.crc32(item.nodeid.encode()))[kept:]:
            item.add_marker(pytest.mark.slow)


def cpu_s():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[STARTED] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append((CPU_S, cpu_s() - item.stash[STARTED]))
    return report


def pytest_terminal_summary(terminalreporter, config):
    shown = config.getoption("--cpu-durations")
    if not shown:
        return
    cases, tests, folders = Counter(), Counter(), Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                spent = dict(report.user_properties)[CPU_S]
                test = report.nodeid.partition("[")[0]
                cases[test] += 1
                tests[test] += spent
                folders[test.partition("::")[0].rpartition("/")[0]] += spent
    terminalreporter.section("CPU seconds")
    terminalreporter.write_line(f"{tests.total():8.1f} in {cases.total()} tests")
    for name, spent in [*folders.most_common(), *tests.most_common(shown)]:
        terminalreporter.write_line(f"{spent:8.1f} {name}" + (f" ({cases[name]} cases)" if cases[name] > 1 else ""))
