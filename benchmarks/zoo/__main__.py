"""Print each paper's claim next to our figure.

    python -m benchmarks.zoo [NAME ...] [--markdown FILE]

A NAME is the beginning of a module: lmetric, preble, vtc, dlpm, sjf, las, continuum.
"""

import argparse
from pathlib import Path

from benchmarks.zoo import continuum, dlpm, las, lmetric, preble, sjf, vtc

MODULES = (lmetric, continuum, las, vtc, dlpm, sjf, preble)


def main() -> None:
    """Run the chosen experiments, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--markdown", type=Path, help="also write a table")
    args = parser.parse_args()
    rows = ["| policy | paper | its claim | our figure | what differs |", "| --- | --- | --- | --- | --- |"]
    for module in MODULES:
        short = module.__name__.rpartition(".")[2]
        if args.names and not any(short.startswith(name) for name in args.names):
            continue
        entry = module.ENTRY
        ours = entry.measure()
        print(f"{entry.name}: {entry.paper}\n  claim:   {entry.claim}\n  ours:    {ours}\n  differs: {entry.differs}")
        rows.append(f"| {entry.name} | {entry.paper} | {entry.claim} | {ours} | {entry.differs} |")
    if args.markdown is not None:
        args.markdown.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
