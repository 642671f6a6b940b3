"""The files in deploy/: their flags, paths, ports and metrics exist, and the programs they are for accept them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.go_template import CHART, TemplateError, manifests, merged, render_chart, top_of
from tokenyard.base.admin_paths import is_admin_path
from tokenyard.router import router_metrics
from tokenyard.router.admin_routes import OPEN_PATHS
from tokenyard.server.metrics import table

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# Debian's packages golang-go, golang-github-masterminds-sprig-dev and golang-gopkg-yaml.v3-dev.
GOCODE = Path("/usr/share/gocode")
SPRIG = GOCODE / "src/github.com/Masterminds/sprig"
OF_OTHERS = ("keda.sh", "monitoring.coreos.com", "leaderworkerset.x-k8s.io", "inference.networking.k8s.io")
# Values that switch each part of the chart on or off, by what they are for.
VARIANTS = {
    "defaults": {},
    "disk": {"kvStore": {"enabled": True, "storageClassName": "fast"}, "engine": {"args": ["--tp-size=2"], "gpus": 2}},
    "machines": {"engine": {"machines": 2, "args": ["--tp-size=2"], "nodeSelector": {"gpu": "h200"}}},
    "disaggregation": {
        "engine": {"gpus": 0, "args": ["--page-size=16"], "tolerations": [{"key": "cpu", "operator": "Exists"}]},
        "disaggregation": {"enabled": True, "prefillArgs": ["--schedule-policy=fcfs"]},
        "kvStore": {"enabled": True},
    },
    "bare": {
        "autoscaling": {"enabled": False},
        "monitoring": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "router": {"args": ["--policy=least_load"], "serviceType": "LoadBalancer"},
    },
    "clients": {"networkPolicy": {"clients": {"app": "chat"}}},
    "outside": {"router": {"serviceType": "LoadBalancer"}},
    "gateway": {"inferencePool": {"enabled": True}, "networkPolicy": {"clients": {"app": "gateway"}}},
}
METRIC = re.compile(r"\btokenyard_\w+")


def documents(text):
    return [one for one in yaml.safe_load_all(text) if one]


def rendered(variant):
    return [one for text in render_chart(CHART, VARIANTS[variant]).values() for one in documents(text)]


def pods(document):
    """The pod templates of a workload."""
    spec = document.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    return [one for one in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")) if one]


def containers():
    """(where, command line after the program) of every container of ours."""
    for variant in VARIANTS:
        for document in rendered(variant):
            for pod in pods(document):
                for container in pod["spec"]["containers"]:
                    words = [*container.get("command", ["tokenyard", "serve"])[1:], *container.get("args", [])]
                    # What the controller of a group of pods puts in.
                    yield variant, [re.sub(r"\$\((LWS_\w+)\)", "1", word) for word in words]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        if service["image"] == "tokenyard":
            yield name, [*service.get("entrypoint", ["tokenyard", "serve"])[1:], *service["command"]]
    unit = (DEPLOY / "systemd/tokenyard.service").read_text()
    yield "tokenyard.service", shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.M)[1])[1:]


def test_the_manifests_are_what_the_chart_renders():
    assert {path.name: path.read_text() for path in (DEPLOY / "kubernetes").iterdir()} == manifests()


def test_the_charts_rules_are_those_of_prometheus():
    assert (CHART / "files/rules.yml").read_text() == (DEPLOY / "prometheus/rules.yml").read_text()


def test_the_schema_knows_every_value_and_no_other():
    def names(schema):
        return {
            name: names(one) if one.get("additionalProperties") is False else None
            for name, one in schema["properties"].items()
        }

    def keys(values, schema):
        return {name: keys(value, schema[name]) if schema.get(name) else None for name, value in values.items()}

    schema = names(json.loads((CHART / "values.schema.json").read_text()))
    assert schema.pop("global", "missing") is None  # Helm adds it
    assert keys(yaml.safe_load((CHART / "values.yaml").read_text()), schema) == schema


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"disaggregation": {"enabled": True}}, "needs engine.gpus: 0"),
        ({"kvStore": {"enabled": True}, "engine": {"machines": 2}}, "needs engine.machines: 1"),
        (
            {"inferencePool": {"enabled": True}, "disaggregation": {"enabled": True}, "engine": {"gpus": 0}},
            "needs disaggregation.enabled: false",
        ),
        ({"autoscaling": {"minReplicas": 9, "maxReplicas": 3}}, "minReplicas"),
    ],
)
def test_values_that_contradict_each_other_are_refused(changes, words):
    with pytest.raises(TemplateError, match=words):
        render_chart(CHART, changes)


def test_values_are_merged_by_key():
    values = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merged(values, {"a": {"c": [3]}, "d": None}) == {"a": {"b": 1, "c": [3]}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parts_of_a_release_find_each_other(variant):
    """Selectors match the pods that they mean, and scale targets and volumes are there."""
    objects = rendered(variant)
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    all_pods = [pod for one in objects for pod in pods(one)]
    labels = [pod["metadata"]["labels"] for pod in all_pods]
    for one in objects:
        spec = one.get("spec", {})
        chosen = spec.get("podSelector", spec.get("selector"))
        if chosen is not None:
            wanted = chosen.get("matchLabels", {} if "matchExpressions" in chosen else chosen)
            among = {rule["key"]: rule["values"] for rule in chosen.get("matchExpressions", [])}
            matching = [have for have in labels if wanted.items() <= have.items()]
            assert any(all(have.get(key) in values for key, values in among.items()) for have in matching), one
        if one["kind"] == "InferencePool":
            picker = spec["endpointPickerRef"]
            (service,) = (
                two for two in objects if (two["kind"], two["metadata"]["name"]) == ("Service", picker["name"])
            )
            assert picker["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
        if one["kind"] == "ScaledObject":
            target = spec["scaleTargetRef"]
            assert (target.get("kind", "Deployment"), target["name"]) in names
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        for pod in pods(one):
            (container,) = pod["spec"]["containers"]
            volumes = claims | {volume["name"] for volume in pod["spec"].get("volumes", [])}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
    (router,) = (pod["spec"]["containers"][0] for pod in all_pods if "serviceAccountName" in pod["spec"])
    (selector,) = (word.split("=", 1)[1] for word in router["args"] if word.startswith("--worker-selector="))
    wanted = dict(pair.split("=") for pair in selector.split(","))
    found = [pod for pod in all_pods if wanted.items() <= pod["metadata"]["labels"].items()]
    assert found == [pod for pod in all_pods if "startupProbe" in pod["spec"]["containers"][0]] != []


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_paths_that_need_no_key_and_ports_that_are_there(variant):
    seen = 0
    for document in rendered(variant):
        for pod in pods(document):
            (container,) = pod["spec"]["containers"]
            if pod["metadata"]["labels"].get("tokenyard/part") == "node":
                continue  # it only computes
            ports = {port["name"] for port in container["ports"]}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if kind in container:
                    seen += 1
                    assert container[kind]["httpGet"]["path"] in OPEN_PATHS
                    assert container[kind]["httpGet"]["port"] in ports
            pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            drains_s = [int(word.split("=")[1]) for word in container["args"] if word.startswith("--shutdown")]
            assert pod["spec"]["terminationGracePeriodSeconds"] > pause_s + drains_s[0]
    assert seen >= 5


def of_kind(kind):
    return [one for one in rendered("defaults") if one["kind"] == kind]


def test_routers_and_engines_have_replicas_budgets_and_keys_from_secrets():
    budgets = {budget["metadata"]["name"] for budget in of_kind("PodDisruptionBudget")}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert min(values["router"]["replicas"], values["autoscaling"]["minReplicas"]) >= 2
    for deployment in of_kind("Deployment"):
        assert deployment["metadata"]["name"] in budgets
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert [one for one in container["envFrom"] if "secretRef" in one]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_upgrade_does_not_take_the_number_of_engines_back_from_the_autoscaler(variant):
    objects = {(one["kind"], one["metadata"]["name"]): one for one in rendered(variant)}
    scaled = [one["spec"]["scaleTargetRef"] for (kind, _), one in objects.items() if kind == "ScaledObject"]
    targets = [objects[target.get("kind", "Deployment"), target["name"]] for target in scaled]
    assert not any("replicas" in target["spec"] for target in targets)


def test_clients_outside_the_cluster_reach_a_router_that_a_service_shows_to_them():
    def sources(**values):
        policies = documents(render_chart(CHART, values)["networkpolicy.yaml"])
        (rules,) = (one["spec"]["ingress"] for one in policies if one["metadata"]["name"] == "yard-router")
        return [rule.get("from") for rule in rules if {"port": 30080} in rule["ports"]]

    shown = {"serviceType": "LoadBalancer"}
    assert None not in sources()
    assert None in sources(router=shown)
    assert None not in sources(router=shown, networkPolicy={"clients": {"app": "chat"}})


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
    (scaled,) = of_kind("ScaledObject")
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
def test_the_apis_of_kubernetes_accept_the_manifests(tmp_path):
    pytest.importorskip("kubernetes_validate")
    for variant in VARIANTS:
        path = tmp_path / f"{variant}.yaml"
        path.write_text(
            yaml.safe_dump_all([one for one in rendered(variant) if not one["apiVersion"].startswith(OF_OTHERS)])
        )
        done = subprocess.run([sys.executable, "-m", "kubernetes_validate", "--strict", str(path)], capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.world
@pytest.mark.skipif(
    not SPRIG.is_dir() or shutil.which("go") is None, reason="golang-go and Debian's sprig are not installed"
)
def test_gos_own_engine_renders_the_same(tmp_path):
    engine = tmp_path / "engine"
    source = Path(__file__).parent / "helm_engine/main.go"
    paths = {**os.environ, "GO111MODULE": "off", "GOPATH": str(GOCODE), "GOCACHE": str(tmp_path / "cache")}
    subprocess.run(["go", "build", "-o", engine, source], check=True, env=paths)
    for changes in VARIANTS.values():
        top = yaml.safe_dump(top_of(CHART, changes))
        done = subprocess.run([engine, CHART], input=top, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        theirs = {name: text for name, text in yaml.safe_load(done.stdout).items() if text.strip()}
        assert {name: documents(text) for name, text in theirs.items()} == {
            name: documents(text) for name, text in render_chart(CHART, changes).items()
        }


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
