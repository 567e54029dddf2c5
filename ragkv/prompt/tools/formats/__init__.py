"""How chat templates write tool calls, a file for each; a new one is found by itself."""
