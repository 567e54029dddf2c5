"""Tune: train the auxiliary model to look where the primary model's query looks."""
