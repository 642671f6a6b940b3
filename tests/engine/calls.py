"""Calls to a scheduler process, and what it replied."""

from tokenyard.engine.processes.messages import Call, Reply


def snapshot(call_id):
    return Call(call_id, "snapshot")


def flush(call_id):
    return Call(call_id, "flush")


def choose(call_id, name, options=None):
    return Call(call_id, "set_policy", {"name": name, "options": options or {}})


def replies(port):
    return {message.call_id: message for message in port.sent if isinstance(message, Reply)}
