"""Explain: one page that shows where every token of a prompt came from."""
