"""Build the sdist and the wheel, install the wheel and have it answer a request with the demo model.

python tools/check_package.py [--empty]

The wheel is built from the tree, whose native library is compiled already, and goes into its own environment, which
borrows the packages that it depends on from this one. With --empty it is built from the sdist, and installs those as
well, as a user would. Needs the package `build`.
"""

import json
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from sysconfig import get_path

ROOT = Path(__file__).resolve().parents[1]
IN_WHEEL = (
    "tokenyard/cli/main.py",
    "tokenyard/demo_model/model.safetensors",
    "tokenyard/demo_model/tokenizer.json",
    "tokenyard/executor/native/build.py",
)
IN_SDIST = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "tokenyard/executor/native/src")


def build(target: Path, *, from_sdist: bool) -> Path:
    """Build both into `target` and return the wheel. Raises SystemExit for one that lacks something."""
    apart = [] if from_sdist else ["--sdist", "--wheel"]
    command = [sys.executable, "-m", "build", *apart, "--outdir", str(target), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,), (wheel,) = target.glob("*.tar.gz"), target.glob("*.whl")
    with tarfile.open(sdist) as archive:
        packed = [name.partition("/")[2] for name in archive.getnames()]
    with zipfile.ZipFile(wheel) as archive:
        unpacked = archive.namelist()
    missing = [name for name in IN_WHEEL if name not in unpacked]
    missing += [name for name in IN_SDIST if not any(one.startswith(name) for one in packed)]
    # What a wheel from the tree has and one from the sdist would not.
    made = ("tokenyard/executor/native/lib/", f"tokenyard-{wheel.name.split('-')[1]}.dist-info/")
    missing += [name for name in unpacked if not name.startswith(made) and name not in packed]
    if missing:
        raise SystemExit(f"missing from the packages: {', '.join(missing)}")
    print(f"built {sdist.name} ({sdist.stat().st_size:,} bytes) and {wheel.name} ({wheel.stat().st_size:,} bytes)")
    return wheel


def install(wheel: Path, folder: Path, *, empty: bool) -> Path:
    """Install the wheel into a new environment; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    flags = ["-c", str(ROOT / "constraints.txt"), f"{wheel}[torch]"] if empty else ["--no-deps", str(wheel)]
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *flags], check=True)
    if not empty:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(get_path("purelib") + "\n")
    return python


def answer(python: Path, folder: Path) -> str:
    """Serve the demo model from an empty folder and return an answer. Raises SystemExit if it does not come."""
    command = [str(python), "-I", "-m", "tokenyard", "serve", "--port", "0", "--log-format", "json"]
    server = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    log = ""
    try:
        for line in server.stderr:
            log += line
            if found := re.search(r"Tokenyard is ready at (http://[^\"]+)", line):
                body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}).encode()
                request = urllib.request.Request(f"{found[1]}/v1/completions", body)
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return str(json.load(reply)["choices"][0]["text"])
    finally:
        server.terminate()
        server.communicate(timeout=60)
    raise SystemExit(f"the installed package does not serve:\n{log}")


def main() -> None:
    """Build, install, serve."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty = "--empty" in sys.argv[1:]
        wheel = build(folder / "dist", from_sdist=empty)
        python = install(wheel, folder / "env", empty=empty)
        (folder / "elsewhere").mkdir()
        text = answer(python, folder / "elsewhere")
        if not text.strip():
            raise SystemExit("the installed package answers with nothing")
        print(f"the installed package answers: {text!r}")


if __name__ == "__main__":
    main()
