"""Tools that the model may call: definitions into the prompt, calls out of the answer."""
