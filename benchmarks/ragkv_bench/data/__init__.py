"""Evaluation examples, and the prompts made of them."""
