"""The pages' files by themselves: nothing from another host, nothing that the page's own policy forbids."""

import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from tokenyard.server.native.live_feed import BIN, ROW
from tokenyard.ui.files import HEADERS, ROUTER_PAGE, SERVER_PAGE, read_file

ROW_ALIASES = {"age": "age_ms"}
OURS = sorted(one.name for one in files("tokenyard.ui").iterdir() if one.name.endswith((".html", ".css", ".js")))


class Page(HTMLParser):
    """What a page refers to, its ids, and what a strict policy would refuse in it."""

    def __init__(self):
        super().__init__()
        self.refers, self.ids, self.refused = [], [], []
        self._script = False

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.refers += [given[name] for name in ("src", "href") if given.get(name)]
        self.ids += [given["id"]] if "id" in given else []
        self.refused += [name for name in given if name.startswith("on") or name == "style"]
        self._script = tag == "style" or (tag == "script" and "src" not in given)

    def handle_data(self, data):
        if self._script and data.strip():
            self.refused.append(data)

    def handle_endtag(self, tag):
        self._script = False


def page(name):
    parsed = Page()
    parsed.feed(read_file(name).decode())
    return parsed


@pytest.mark.parametrize("paths", [SERVER_PAGE, ROUTER_PAGE], ids=["server", "router"])
def test_a_page_refers_to_what_is_served_with_it_and_has_no_inline_code(paths):
    parsed = page(paths["/"][0])
    assert parsed.refused == []
    linked = {path for path in parsed.refers if path.startswith("ui/")}
    assert {f"/{path}" for path in linked} == set(paths) - {"/"}
    assert not [path for path in parsed.refers if "//" in path or path.startswith("/")]
    for name, _ in paths.values():
        assert read_file(name)


@pytest.mark.parametrize("name", OURS)
def test_no_file_of_ours_names_another_host_or_writes_markup(name):
    text = read_file(name).decode()
    assert not re.findall(r"https?://|//[a-z]+\.[a-z]", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


@pytest.mark.parametrize(
    ("paths", "main"), [(SERVER_PAGE, "server"), (ROUTER_PAGE, "router")], ids=["server", "router"]
)
def test_scripts_use_ids_that_their_page_has(paths, main):
    parsed = page(paths["/"][0])
    assert len(set(parsed.ids)) == len(parsed.ids)
    scripts = [name for name, kind in paths.values() if kind.startswith("text/javascript") and "vendor" not in name]
    used = {one for name in scripts for one in re.findall(r'\$\("([\w-]+)"\)', read_file(name).decode())}
    assert used <= set(parsed.ids)


def test_the_page_reads_bins_and_rows_in_the_server_s_order():
    script = read_file("server.js").decode()
    bins = re.search(r"const BIN = \{(.*?)\}", script)[1]
    assert [one.strip() for one in bins.split(",")] == [f"{name}: {at}" for at, name in enumerate(BIN) if at]
    assert set(re.findall(r"\bBIN\.(\w+)", script)) <= set(BIN)
    row = re.search(r"const \[id, (.*?)\] = row;", script)[1].split(", ")
    assert [ROW_ALIASES.get(name, name) for name in row] == list(ROW)


def test_the_policy_allows_own_scripts_only():
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_licence_of_the_curves_is_shipped():
    assert b"Leon Sorokin" in read_file("vendor/LICENSE")
