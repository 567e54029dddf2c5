"""Ordinary prefill of the whole prompt: the reference for quality."""

from ragkv.select.method import Method

METHOD = Method("full", reuse="none")
