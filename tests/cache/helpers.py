"""Short words for the tests of the prefix cache."""

from itertools import count

import numpy as np

from tokenyard.cache import make_key


def key_of(*tokens):
    return make_key(np.array(tokens, np.int32))


def ints(*values):
    return np.array(values, np.int32)


class Recorder:
    """A listener that records every change."""

    def __init__(self):
        self.heard = []

    def inserted(self, parent, node):
        self.heard.append(("inserted", parent, node))

    def split(self, upper, lower):
        self.heard.append(("split", upper, lower))

    def evicted(self, node):
        self.heard.append(("evicted", node))


class Pages:
    """Hands out page ids that were never used before."""

    def __init__(self):
        self._numbers = count(1)

    def take(self, n):
        return np.array([next(self._numbers) for _ in range(n)], np.int32)
