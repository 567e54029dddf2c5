"""Find: render the prompt, tokenise it once, and find the known chunks in it."""
