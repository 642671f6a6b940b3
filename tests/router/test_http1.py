import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.router import http1
from tokenyard.router.http1 import ChunkedBody, LengthBody, WireError, parse_head

CONTENTS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def chunked(contents, tail=b"0\r\n\r\n", ext=b""):
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), ext, part) for part in contents) + tail


def pieces(data, cuts):
    cuts = sorted({min(cut, len(data)) for cut in cuts})
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if begin < end]


@given(CONTENTS, st.lists(st.integers(0, 300), max_size=8), st.booleans(), st.sampled_from([2, 1 << 20]))
def test_chunks_are_passed_on_whole_however_they_are_cut(contents, cuts, unpack, longest):
    before, http1.MAX_HELD_BYTES = http1.MAX_HELD_BYTES, longest
    try:
        data, body = chunked(contents), ChunkedBody(unpack=unpack)
        passed = [body.feed(part) for part in pieces(data, cuts)]
    finally:
        http1.MAX_HELD_BYTES = before
    assert body.done
    assert b"".join(passed) == (b"".join(contents) if unpack else data)


@given(CONTENTS, st.integers(0, 300))
def test_a_stream_that_breaks_off_breaks_off_between_chunks(contents, place):
    data, body = chunked(contents), ChunkedBody()
    passed = body.feed(data[:place])
    assert passed + chunked([]) == chunked(contents[: sum(1 for _ in _whole(contents, place))]) or body.done


def _whole(contents, place):
    used = 0
    for part in contents:
        used += len(chunked([part], b""))
        if used <= place:
            yield part


def test_trailers_and_extensions():
    body = ChunkedBody()
    assert (
        body.feed(chunked([b"ab"], b"0\r\nx-checksum: 1\r\n\r\n", b";name=value")) == b"2;name=value\r\nab\r\n0\r\n\r\n"
    )
    assert body.done


@pytest.mark.parametrize(
    "data",
    [
        b"zz\r\n",
        b"-1\r\nab\r\n",
        b"+2\r\nab\r\n",
        b"0x2\r\nab\r\n",
        b"2_0\r\nab\r\n",
        b" 2\r\nab\r\n",
        b"2\nab\n",
        b"2\r\nabcd\r\n",
        b"\r\n",
        b"fffffffffffffffffff\r\n",
        b"2" * 5000,
        b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"1\r\na\r\n0\r\n\r\nx",
    ],
)
def test_what_is_no_chunk_is_refused(data):
    with pytest.raises(WireError):
        ChunkedBody().feed(data)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_any_bytes_are_chunks_or_an_error(data, cuts):
    body = ChunkedBody()
    try:
        for part in pieces(data, cuts):
            body.feed(part)
    except WireError:
        pass


def test_a_body_of_known_length_takes_no_more():
    body = LengthBody(5)
    assert body.feed(b"abc") == b"abc"
    assert not body.done
    assert not body.end()
    body.feed(b"de")
    assert body.done
    with pytest.raises(WireError, match="bytes after the end"):
        LengthBody(2).feed(b"abc")


def test_a_head():
    head = parse_head(b"HTTP/1.1 200 OK\r\nContent-Type:  text/plain \r\nContent-Length: 3\r\nConnection: keep-alive")
    assert (head.status, head.reason, head.length, head.chunked, head.keep_alive) == (200, b"OK", 3, False, True)
    assert head.headers == [(b"content-type", b"text/plain"), (b"content-length", b"3")]
    assert not parse_head(b"HTTP/1.1 200 OK\r\nConnection: close").keep_alive
    assert not parse_head(b"HTTP/1.0 200 OK").keep_alive
    assert parse_head(b"HTTP/1.1 200").reason == b""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 99 OK",
        b"ICY 200 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\nspace : x",
        b"HTTP/1.1 200 OK\r\n folded: x",
        b"HTTP/1.1 200 OK\r\na: b\nc: d",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4",
        b"HTTP/1.1 200 OK\r\nContent-Length: +3",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    ],
)
def test_what_is_no_head_is_refused(data):
    with pytest.raises(WireError):
        parse_head(data)


@given(st.binary(max_size=120))
def test_any_bytes_are_a_head_or_an_error(data):
    with contextlib.suppress(WireError):
        parse_head(b"HTTP/1.1 200 OK\r\n" + data)
