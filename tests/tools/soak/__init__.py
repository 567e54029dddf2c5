"""The soak: a server under everything that clients do to one, and whether it stays right.

``python -m soak`` from this folder's parent, or ``make soak``.
"""
