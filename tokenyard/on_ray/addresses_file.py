"""The file of engines' addresses that `tokenyard route --worker-file` reads."""

import os
from pathlib import Path


def write_addresses(path: Path, urls: list[str]) -> None:
    """Put one address a line into the file, unless it says so already. Readers see the old or the new file."""
    text = "".join(f"{url}\n" for url in sorted(urls))
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
