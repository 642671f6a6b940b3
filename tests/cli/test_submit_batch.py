"""`tokenyard batch` against a server whose connection breaks."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tokenyard.cli.main import main

BATCH = {
    "id": "batch_1",
    "status": "completed",
    "output_file_id": "file-1",
    "error_file_id": None,
    "request_counts": {"total": 1, "completed": 1, "failed": 0},
}


class Breaking(BaseHTTPRequestHandler):
    def do_GET(self):
        is_file = self.path.endswith("/content")
        body = b'{"custom_id": "1"' if is_file else json.dumps(BATCH).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body) + 1000 * is_file))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_download_that_breaks_is_not_taken_for_whole(url, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    assert main(["batch", "--id", "batch_1", "--output", str(output), "--url", url]) == 2
    assert "the connection broke before the end of file-1" in capsys.readouterr().err
    assert not output.exists()
