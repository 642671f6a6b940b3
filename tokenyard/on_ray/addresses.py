"""`python -m tokenyard.on_ray.addresses FILE`: keep the addresses of the engines in a file for `tokenyard route`.

Serve reports each change immediately: an engine is in the file from when it is ready until Serve begins to drain it.
Run it on the router's machine, because `tokenyard route --worker-file FILE` reads the file.
"""

import argparse
import os
import threading
from pathlib import Path


def write_addresses(path: Path, urls: list[str]) -> None:
    """Write one address per line, sorted, if that changes the file. The file is replaced atomically."""
    text = "".join(f"{url}\n" for url in sorted(urls))
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def main() -> None:
    """Run until the process is stopped."""
    # Ray is imported here so that `write_addresses` can be tested without it.
    import ray
    from ray import serve

    from tokenyard.on_ray.replica_listeners import replica_listeners

    parser = argparse.ArgumentParser(prog="python -m tokenyard.on_ray.addresses", description=__doc__)
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--address", default="auto", help="address of the cluster [the one on this machine]")
    parser.add_argument("--app", default="default", help="name of the Serve application [default]")
    args = parser.parse_args()
    ray.init(args.address, log_to_driver=False, logging_level="warning")
    replica_listeners.append(lambda urls: write_addresses(args.file, urls))
    # The first call makes Serve send the replicas to this process, and every change after that.
    serve.get_app_handle(args.app).check_health.remote().result()
    threading.Event().wait()


if __name__ == "__main__":
    main()
