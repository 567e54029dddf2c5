"""Place: align cached chunks with the prompt, re-rotate, and lay them into one buffer."""
