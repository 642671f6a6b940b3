"""Calls to a scheduler process, and what it replied."""

from tokenyard.engine.processes.messages import RpcReply, RpcRequest


def snapshot(call_id):
    return RpcRequest(call_id, "snapshot")


def flush(call_id):
    return RpcRequest(call_id, "flush")


def choose(call_id, name, options=None):
    return RpcRequest(call_id, "set_policy", {"name": name, "options": options or {}})


def replies(port):
    return {message.call_id: message for message in port.sent if isinstance(message, RpcReply)}
