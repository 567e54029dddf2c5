"""Intervals: known coverage, pairing, and what has no value."""

from __future__ import annotations

import numpy as np
import pytest

from ragkv_bench.quality.intervals import interval, ratio_of_sums


def test_the_mean_interval_is_the_normal_one_for_many_examples():
    values = np.random.default_rng(0).normal(2.0, 1.0, size=400)
    low, high = interval(np.mean, values)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.015)
    assert high == pytest.approx(values.mean() + half, abs=0.015)


def test_it_covers_the_truth_about_as_often_as_it_says():
    draw = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        low, high = interval(np.mean, draw.normal(size=40), seed=seed)
        hits += low <= 0 <= high
    assert 0.89 <= hits / 200 <= 0.98


def test_seeds_repeat():
    values = np.arange(10.0) ** 2
    assert interval(np.mean, values, seed=1) == interval(np.mean, values, seed=1)
    assert interval(np.mean, values, seed=1) != interval(np.mean, values, seed=2)


def test_columns_are_resampled_together():
    values = np.arange(1.0, 9.0)
    low, high = interval(ratio_of_sums, 3 * values, values)
    assert (low, high) == (pytest.approx(3), pytest.approx(3))


def test_one_example_has_a_point_and_none_has_nothing():
    assert interval(np.median, np.array([4.0])) == (4, 4)
    assert interval(np.mean, np.array([])) is None
    assert interval(ratio_of_sums, np.zeros(3), np.zeros(3)) is None
