"""Evaluation, benchmarks, calibration and tuning of ragkv."""
