"""What child processes share: log lines, the task line, and giving up without a parent."""

import json
import logging
import os
import sys
import threading
from datetime import datetime

import pytest
import zmq

from tokenyard.engine.processes import child
from tokenyard.engine.processes.engine_config import ChildTask, EngineConfig
from tokenyard.engine.processes.logs import set_up_logging


def test_log_lines_as_json(capsys):
    hooks = sys.excepthook, threading.excepthook
    try:
        set_up_logging("info", "json")
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("room").exception("it broke: %s", "x")
        logging.getLogger("room").debug("not said")
        (line,) = capsys.readouterr().err.splitlines()
        said = json.loads(line)
        assert (said["level"], said["logger"], said["message"]) == ("error", "room", "it broke: x")
        assert "ValueError: no" in said["error"]
        assert datetime.fromisoformat(said["time"]).tzinfo is not None
        sys.excepthook(ValueError, ValueError("uncaught"), None)
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        for line, words in zip(lines, ("ValueError: uncaught", "ZeroDivisionError"), strict=True):
            assert words in line["message"]
    finally:
        sys.excepthook, threading.excepthook = hooks
        logging.captureWarnings(False)
        logging.getLogger().handlers.clear()


def test_the_task_line_leaves_the_stop_word_unread():
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"task\nstop\n")
    os.close(write_fd)
    assert child.read_line(read_fd) == b"task\n"
    assert os.read(read_fd, 100) == b"stop\n"
    assert child.read_line(read_fd) == b""
    os.close(read_fd)


def test_a_process_whose_parent_is_gone_ends_and_cleans_up(monkeypatch, tmp_path):
    class EndedError(Exception):
        pass

    def end(code):
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    task = ChildTask(EngineConfig("m"), os.getppid(), str(sockets))
    child.end_with_parent(task)
    assert sockets.exists()
    task.parent_pid += 1
    with pytest.raises(EndedError):
        child.end_with_parent(task)
    assert not sockets.exists()


def test_a_flood_is_taken_in_turns():
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://flood")
    push.connect("inproc://flood")
    for i in range(child.MAX_FRAMES_PER_POLL + 3):
        push.send(str(i).encode())
    first, rest = child.receive_all(pull), child.receive_all(pull)
    assert (len(first), rest) == (256, [b"256", b"257", b"258"])
    assert child.receive_all(pull) == []
    context.destroy(linger=0)
