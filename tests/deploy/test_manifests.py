"""The files in deploy/: their flags, paths, ports and metrics exist, and the programs they are for accept them."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tokenyard.base.admin_paths import is_admin_path
from tokenyard.cli.main import build_parser
from tokenyard.router import router_metrics
from tokenyard.router.admin_routes import OPEN_PATHS
from tokenyard.server.metrics import table

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CUSTOM = ("podmonitor.yaml", "prometheusrule.yaml", "inferencepool.yaml", "autoscaler.yaml")
OF_KUBERNETES = [path for path in MANIFESTS if path.name not in CUSTOM]
METRIC = re.compile(r"\btokenyard_\w+")


def documents(path):
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def containers():
    """(where, command line after the program) of every container of ours."""
    for path in MANIFESTS:
        for document in documents(path):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            for container in pod.get("containers", []):
                yield path.name, [*container.get("command", ["tokenyard", "serve"])[1:], *container.get("args", [])]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        if service["image"] == "tokenyard":
            yield name, [*service.get("entrypoint", ["tokenyard", "serve"])[1:], *service["command"]]
    unit = (DEPLOY / "systemd/tokenyard.service").read_text()
    yield "tokenyard.service", shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.M)[1])[1:]


@pytest.mark.parametrize(("where", "words"), [pytest.param(*one, id=f"{one[0]}-{one[1][0]}") for one in containers()])
def test_the_command_lines_have_flags_that_exist(where, words):
    assert words[0] in ("serve", "route")
    build_parser(words[0]).parse_strictly(words)


def test_probes_ask_paths_that_need_no_key_and_ports_that_are_there():
    seen = 0
    for path in MANIFESTS:
        for document in documents(path):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            for container in pod.get("containers", []):
                ports = {port["name"] for port in container["ports"]}
                for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                    if kind in container:
                        seen += 1
                        assert container[kind]["httpGet"]["path"] in OPEN_PATHS
                        assert container[kind]["httpGet"]["port"] in ports
                pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
                drains_s = [int(word.split("=")[1]) for word in container["args"] if word.startswith("--shutdown")]
                assert pod["terminationGracePeriodSeconds"] > pause_s + drains_s[0]
    assert seen >= 5


def of_kind(kind):
    return [one for path in MANIFESTS for one in documents(path) if one["kind"] == kind]


def test_routers_and_engines_have_replicas_budgets_and_keys_from_secrets():
    budgets = {budget["metadata"]["name"] for budget in of_kind("PodDisruptionBudget")}
    for deployment in of_kind("Deployment"):
        assert deployment["spec"]["replicas"] >= 2
        assert deployment["metadata"]["name"] in budgets
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert [one for one in container["envFrom"] if "secretRef" in one]


def test_the_router_sends_engines_their_admin_key_or_it_could_not_read_their_limits():
    (router,) = (one for one in of_kind("Deployment") if one["metadata"]["name"] == "yard-router")
    (sent,) = router["spec"]["template"]["spec"]["containers"][0]["env"]
    assert sent["name"] == "TOKENYARD_ROUTE_WORKER_API_KEY"
    assert sent["valueFrom"]["secretKeyRef"]["key"] == "TOKENYARD_ADMIN_API_KEY"
    assert is_admin_path("/server_info")


def test_the_jobs_of_scraped_pods_are_those_that_the_rules_name():
    (monitor,) = of_kind("PodMonitor")
    label = monitor["spec"]["jobLabel"]
    jobs = {one["spec"]["template"]["metadata"]["labels"][label] for one in of_kind("Deployment")}
    static = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert jobs == {job["job_name"] for job in static} == {"tokenyard", "tokenyard-router"}
    rules = (DEPLOY / "prometheus/rules.yml").read_text()
    assert set(re.findall(r'up\{job="([^"]+)"\}', rules)) == jobs


def test_the_operators_rules_are_those_of_prometheus():
    (rule,) = of_kind("PrometheusRule")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())


def queries():
    """Every expression of the board and the rules."""
    board = json.loads((DEPLOY / "grafana/tokenyard.json").read_text())
    yield from (one["expr"] for panel in board["panels"] for one in panel.get("targets", []))
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])
    (scaled,) = documents(DEPLOY / "kubernetes/autoscaler.yaml")
    yield from (trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])


def test_the_metrics_that_board_and_rules_name_exist():
    tables = ((table.PREFIX, table.METRICS), (router_metrics.PREFIX, router_metrics.METRICS))
    series = {"histogram": ("_bucket", "_sum", "_count")}
    known = {
        prefix + metric.name + ending
        for prefix, metrics in tables
        for metric in metrics
        for ending in series.get(metric.kind, ("",))
    }
    named = {name for query in queries() for name in METRIC.findall(query)}
    assert len(named) > 25
    assert not named - known


@pytest.mark.world
def test_the_apis_of_kubernetes_accept_the_manifests():
    pytest.importorskip("kubernetes_validate")
    for path in OF_KUBERNETES:
        done = subprocess.run([sys.executable, "-m", "kubernetes_validate", "--strict", str(path)], capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.world
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_configuration_and_rules_and_the_alerts_fire():
    for words in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
    ):
        done = subprocess.run(["promtool", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
