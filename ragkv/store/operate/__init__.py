"""What an operator asks of a store: inspect, verify, collect garbage, export, import."""
