"""`python -m tokenyard.on_ray.addresses FILE`: keeps the addresses of the engines in a file for `tokenyard route`.

Serve tells of every change at once: an engine is in the file from when it is ready until Serve begins to drain it.
The file lives beside the router, not in the cluster: `tokenyard route --worker-file FILE`.
"""

import argparse
import threading
from pathlib import Path

import ray
from ray import serve

from tokenyard.on_ray.addresses_file import write_addresses
from tokenyard.on_ray.replica_listeners import replica_listeners


def main() -> None:
    """Run until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m tokenyard.on_ray.addresses", description=__doc__)
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--address", default="auto", help="of the cluster [the one that runs here]")
    parser.add_argument("--app", default="default", help="name of Serve's application [default]")
    args = parser.parse_args()
    ray.init(args.address, log_to_driver=False, logging_level="warning")
    replica_listeners.append(lambda urls: write_addresses(args.file, urls))
    # The first call has Serve tell of the replicas, and of changes from then on.
    serve.get_app_handle(args.app).check_health.remote().result()
    threading.Event().wait()


if __name__ == "__main__":
    main()
