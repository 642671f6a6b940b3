"""What the pages point to is there: links between them, and files of the package that they name."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tokenyard"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
NAMED = re.compile(r"`((?:tokenyard/)?[a-z_]+/[a-z_/]+\.py)`")


def test_links_and_files_exist():
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        here = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
        here += [name for name in NAMED.findall(text) if not any((root / name).exists() for root in (ROOT, PACKAGE))]
        missing += [f"{page.relative_to(ROOT)}: {name}" for name in here]
    assert not missing


def test_every_page_of_results_is_linked():
    links = LINK.findall((ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8"))
    pages = {str(page.relative_to(ROOT / "benchmarks")) for page in (ROOT / "benchmarks/results").glob("*.md")}
    assert pages == {link for link in links if link.startswith("results/")}


def test_the_glossary_names_what_is_there():
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").split("\n## Words of our own")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = [row for row in cells if "`" in row[2]]
    assert len(rows) > 60
    for _, ours, files in rows:
        texts = [(PACKAGE / name).read_text(encoding="utf-8") for name in re.findall(r"`([^`]+)`", files)]
        for name in re.findall(r"`([\w.]+)`", ours):
            assert any(name.split(".")[-1] in text for text in texts), f"{name} is not in {files}"


def test_the_path_through_the_core_can_be_read_in_an_afternoon():
    section = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## A path through the core")[1]
    files = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", section.split("\n## ")[0])
    lines = [len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in files]
    assert len(files) == 12
    assert sum(lines) < 4500, "say in README.md and architecture.md what is true"
