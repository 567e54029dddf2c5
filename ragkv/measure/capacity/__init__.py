"""What a store takes: plans and simulated traces."""
