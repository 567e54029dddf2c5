"""Another engine, of known speed."""

from __future__ import annotations


class Peer:
    """Takes a second to its first token, and a tenth for each later one."""

    name = "peer"
    build = "AVX2 = 1"

    def __init__(self):
        self.asked = []

    def answer(self, ids, tokens):
        self.asked.append((tuple(ids), tokens))
        return 1.0, 1.0 + 0.1 * (tokens - 1)
