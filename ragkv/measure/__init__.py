"""Measure data, quality, speed and tuning; only the commands import it."""
