"""Attend: run some rows of the prompt through the model over the spliced cache."""
