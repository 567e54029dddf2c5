"""Repair: one pass over the chosen tokens only, with exact masks."""
