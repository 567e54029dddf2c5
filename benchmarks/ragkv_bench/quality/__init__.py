"""Quality of every method against full prefill, with intervals; the ratio that keeps it."""
