"""What an operator asks of a store: inspect, verify, copy."""
