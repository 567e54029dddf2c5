"""Other engines on the same prompts: measuring sticks, never dependencies."""
