"""Engines and a router in front of them, in one go: `python tools/fleet.py [ENGINES] [ROUTER FLAGS]`.

Each engine serves the demo model on its own port; the router listens on 30000 unless --port says otherwise. Ctrl-C
ends everything. An engine that is killed is started again, so that one can watch the router do without it meanwhile.
"""

import os
import signal
import socket
import subprocess
import sys
import time

RESTART_S = 5.0
POLL_S = 0.2
TOKENYARD = (sys.executable, "-m", "tokenyard")


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start_engine(port: int) -> subprocess.Popen[bytes]:
    """An engine with the demo model; it does not receive Ctrl-C, so that the router can end first."""
    command = [*TOKENYARD, "serve", "--port", str(port), "--log-level", "warning"]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def main(argv: list[str]) -> int:
    """Run until the router ends; returns its exit status."""
    count = int(argv.pop(0)) if argv and argv[0].isdigit() else 2
    ports = free_ports(count)
    engines = {port: start_engine(port) for port in ports}
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    router = subprocess.Popen([*TOKENYARD, "route", "--worker-urls", *urls, *argv])
    for number, port in enumerate(ports):
        print(f"engine w{number}: port {port}, process {engines[port].pid}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: router.terminate())
    died: dict[int, float] = {}
    try:
        while router.poll() is None:
            time.sleep(POLL_S)
            for port, engine in engines.items():
                if engine.poll() is None:
                    continue
                if port not in died:
                    print(f"the engine on port {port} has died; a new one in {RESTART_S:g} s", file=sys.stderr)
                    died[port] = time.monotonic()
                elif time.monotonic() - died[port] > RESTART_S:
                    engines[port] = start_engine(port)
                    del died[port]
    finally:
        for engine in engines.values():
            if engine.poll() is None:
                os.killpg(engine.pid, signal.SIGTERM)
        for engine in engines.values():
            engine.wait()
    return router.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
