"""Engines and simulations on a Ray cluster (`on_a_cluster.py`), and how many engines a load asks for."""

import json
import os
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_manifests import DEPLOY, documents
from tests.e2e.servers import ROOT
from tokenyard.cli.main import build_parser
from tokenyard.on_ray.addresses import write_addresses
from tokenyard.on_ray.autoscaling import engines_wanted

ENVIRONMENT = ROOT / ".venv-clients" / "ray"
SCRIPT = Path(__file__).parent / "on_a_cluster.py"


def serve_configs():
    yield yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())
    (service,) = documents((DEPLOY / "ray/rayservice.yaml").read_text())
    yield yaml.safe_load(service["spec"]["serveConfigV2"])


@pytest.mark.parametrize("config", list(serve_configs()), ids=["serve", "rayservice"])
def test_the_engines_of_serves_files_have_flags_that_exist(config):
    (application,) = config["applications"]
    assert application["import_path"] == "tokenyard.on_ray.deployment:build"
    build_parser("serve").parse_strictly(["serve", *application["args"]["flags"].split()])


def test_the_router_next_to_the_head_reads_what_the_feed_writes():
    (service,) = documents((DEPLOY / "ray/rayservice.yaml").read_text())
    pod = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    feed, router = ({c["name"]: c for c in pod["containers"]}[name] for name in ("addresses", "router"))
    given = build_parser("route").parse_strictly(["route", *router["args"]])
    assert given.worker_file in feed["command"]


@pytest.mark.parametrize(
    ("queued_s", "fullness", "engines"),
    [
        ([0.0], [0.0], 1),  # one is kept
        ([3.0, 5.0], [0.1, 0.1], 4),  # 8 s of prefill, 2 s each
        ([0.0, 0.0], [1.0, 1.0], 3),  # two full engines leave no room for a burst
        ([0.0] * 3, [0.3, 0.2, 0.1], 1),
        ([0.5], [3.0], 4),  # two requests wait for each that runs
    ],
)
def test_engines_for_a_load(queued_s, fullness, engines):
    assert engines_wanted(queued_s, fullness, target_s=2.0) == engines


def test_the_file_of_addresses_is_replaced_whole_and_only_on_a_change(tmp_path):
    file = tmp_path / "engines"
    write_addresses(file, ["http://b:1", "http://a:1"])
    assert file.read_text() == "http://a:1\nhttp://b:1\n"
    before = file.stat().st_ino
    write_addresses(file, ["http://a:1", "http://b:1"])
    assert file.stat().st_ino == before
    write_addresses(file, [])
    assert (file.read_text(), list(tmp_path.iterdir())) == ("", [file])


@pytest.fixture(scope="module")
def ray_python() -> str:
    """A Python with Ray and what this package needs, in a separate environment."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        needed = [*project["dependencies"], *project["optional-dependencies"]["ray"]]
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *needed], check=True)
    return str(python)


@pytest.mark.world
@pytest.mark.timeout(600)
def test_a_cluster_of_two_nodes(ray_python):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([ray_python, str(SCRIPT)], capture_output=True, text=True, env=environment)
    assert "PASS" in ran.stdout.splitlines(), ran.stdout + ran.stderr


@pytest.mark.world
def test_serve_accepts_its_file(ray_python):
    code = "import json, sys; from ray.serve.schema import ServeDeploySchema as S; S(**json.load(sys.stdin))"
    for config in serve_configs():
        subprocess.run([ray_python, "-c", code], input=json.dumps(config), text=True, check=True)
