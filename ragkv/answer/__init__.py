"""Answers, streams of their text, and the interface of an engine."""
