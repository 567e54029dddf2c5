"""Measure data, quality, speed, capacity and tuning; only the commands import it."""
