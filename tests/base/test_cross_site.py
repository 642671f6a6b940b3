"""Requests that pages of other sites have a browser send."""

import pytest

from tokenyard.base.cross_site import is_loopback, why_cross_site, why_foreign_host

HERE = ("127.0.0.1:30000",)


@pytest.mark.parametrize(
    ("method", "origin", "fetch_site", "hosts", "allowed"),
    [
        ("POST", "", "", HERE, ()),
        ("POST", "http://127.0.0.1:30000", "same-origin", HERE, ()),
        ("POST", "", "same-origin", HERE, ()),
        ("POST", "", "none", HERE, ()),
        ("POST", "https://llm.example", "same-origin", ("llm.example",), ()),
        ("POST", "https://llm.example:443", "", ("llm.example",), ()),
        ("POST", "https://llm.example", "same-origin", ("10.0.0.1:30000", "llm.example"), ()),
        ("POST", "https://other.example", "cross-site", HERE, ("https://other.example",)),
        ("POST", "https://other.example", "cross-site", HERE, ("*",)),
        ("GET", "https://other.example", "cross-site", HERE, ()),
        ("OPTIONS", "https://other.example", "cross-site", HERE, ()),
    ],
)
def test_allowed(method, origin, fetch_site, hosts, allowed):
    assert why_cross_site(method, origin, fetch_site, hosts, allowed) == ""


@pytest.mark.parametrize(
    ("origin", "fetch_site", "hosts", "allowed"),
    [
        ("http://evil.example", "cross-site", HERE, ()),
        ("http://evil.example", "", HERE, ()),
        ("http://127.0.0.1:8080", "same-site", HERE, ()),
        ("https://127.0.0.1:30000", "", ("127.0.0.1",), ()),
        ("null", "cross-site", HERE, ()),
        ("http://[", "", HERE, ()),
        ("http://evil.example:99999", "", HERE, ()),
        ("", "cross-site", HERE, ()),
        ("", "same-site", HERE, ()),
        ("https://other.example.evil", "", HERE, ("https://other.example",)),
        ("http://evil.example", "", ("",), ()),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE"])
def test_refused(method, origin, fetch_site, hosts, allowed):
    assert why_cross_site(method, origin, fetch_site, hosts, allowed)


@pytest.mark.parametrize(
    "host", ["", "localhost", "localhost:30000", "127.0.0.1:30000", "[::1]:30000", "a.localhost", "192.168.1.4"]
)
def test_names_of_this_machine(host):
    assert why_foreign_host(host) == ""


def test_a_rebound_name_is_foreign_unless_its_site_may_call():
    assert "evil.example" in why_foreign_host("evil.example:30000")
    assert why_foreign_host("llm.example", ["https://llm.example"]) == ""
    assert why_foreign_host("evil.example", ["*"]) == ""


def test_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9")] == [True] * 4
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", ""))
