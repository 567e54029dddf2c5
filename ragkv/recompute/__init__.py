"""8 recompute: what a method does besides recomputing the chosen rows."""
