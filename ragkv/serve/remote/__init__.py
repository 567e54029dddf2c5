"""The parts of the server's client; they need httpx, and torch for an answer alone."""
