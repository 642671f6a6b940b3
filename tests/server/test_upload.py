"""Forms of uploads, read in pieces of any size: what is kept, and what is refused."""

import random

import pytest

from tokenyard.base import InvalidRequestError
from tokenyard.batch import upload as uploads
from tokenyard.batch.file_store import FileStore
from tokenyard.batch.upload import Upload

TYPE = "multipart/form-data; boundary=xyz"


def form(*parts, end=b"--xyz--\r\n"):
    """A form of (name, filename, content)."""
    body = b""
    for name, filename, content in parts:
        shown = f'; filename="{filename}"' if filename else ""
        head = f'Content-Disposition: form-data; name="{name}"{shown}'
        body += b"--xyz\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + end


PURPOSE = ("purpose", "", b"batch")


def send(files, body, cuts=(), content_type=TYPE):
    upload = Upload(files, "acme", content_type)
    try:
        for begin, end in zip((0, *cuts), (*cuts, len(body)), strict=True):
            upload.feed(body[begin:end])
        return upload.finish()
    finally:
        upload.discard()


@pytest.fixture
def files(tmp_path):
    return FileStore(tmp_path, 10_000)


def test_any_cut_gives_the_same_file(files):
    draw = random.Random(5)
    for _ in range(60):
        # Content with much that looks like the mark.
        content = b"".join(draw.choice((b"\r\n", b"--", b"xyz", b"\r\n--xy", b"-", b"a")) for _ in range(40)) + b"."
        content = content.replace(b"\r\n--xyz", b"\r\n--xy")
        body = b"to be ignored" * draw.randrange(2) + b"\r\n" + form(("file", "a.jsonl", content), PURPOSE) + b"rest"
        cuts = sorted(draw.sample(range(1, len(body)), draw.randrange(len(body))))
        file = send(files, body, cuts)
        assert files.path(file).read_bytes() == content
        assert (file.filename, file.bytes, file.tenant) == ("a.jsonl", len(content), "acme")
        files.delete(file)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (form(PURPOSE), "file", "invalid_request"),
        (form(("file", "a", b"x")), "purpose", "invalid_request"),
        (form(("file", "a", b"x"), ("purpose", "", b"vision")), "purpose", "invalid_request"),
        (form(("file", "a", b""), PURPOSE), "file", "invalid_request"),
        (form(("file", "a", b"x"), ("file", "b", b"y"), PURPOSE), "file", "invalid_request"),
        (form(("file", "a", b"x"), PURPOSE, end=b""), None, "invalid_request"),
        (form(("file", "a", b"x"), ("purpose", "", b"p" * 70_000)), "purpose", "body_too_large"),
        (form(("file", "a", b"x" * 400), PURPOSE), "file", "body_too_large"),
        (form(("file", "a", b"x"), PURPOSE, ("expires_after[seconds]", "", b"9")), uploads.AGE, "invalid_request"),
        (b"--xyz\r\n" + b"h" * 20_000, None, "invalid_request"),
        (form(*[(f"f{n}", "", b"") for n in range(70)]), None, "invalid_request"),
        (b"", None, "invalid_request"),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(files, tmp_path, monkeypatch, body, param, code):
    monkeypatch.setattr(uploads, "MAX_FILE_BYTES", 300)
    with pytest.raises(InvalidRequestError) as refused:
        send(files, body, range(1000, len(body), 1000))
    assert (refused.value.param, refused.value.code) == (param, code)
    assert list(tmp_path.iterdir()) == []


def test_what_is_being_written_counts_against_the_tenant(files, tmp_path):
    begin = form(("file", "a", b"x" * 6_000), end=b"")
    first = Upload(files, "acme", TYPE)
    first.feed(begin)
    with pytest.raises(InvalidRequestError, match="delete some"):
        send(files, form(("file", "b", b"y" * 6_000), PURPOSE))
    first.discard()
    assert send(files, form(("file", "b", b"y" * 6_000), PURPOSE)).bytes == 6_000
    # What a killed process left behind goes when the next one starts.
    (tmp_path / "file-1.part").write_bytes(b"half")
    FileStore(tmp_path, 10_000)
    assert not (tmp_path / "file-1.part").exists()


def test_another_body_is_no_form(files):
    for content_type in ("application/json", "multipart/form-data", ""):
        with pytest.raises(InvalidRequestError, match="must be a form"):
            send(files, b"{}", content_type=content_type)
