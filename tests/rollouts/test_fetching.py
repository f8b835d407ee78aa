# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Rows that are made when they are fetched: what is drawn for one depends on its place in the training alone."""

import itertools
import random

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset

from trl_multiagent.rollouts.fetching import FetchedRows, FetchedStream, makes_rows
from trl_multiagent.rollouts.sampling import JointSampler


def draw():
    return random.random(), float(np.random.rand()), torch.rand(()).item()


class Drawing:
    """Rows with random numbers."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, draw()


class Counting(Drawing):
    """Rows with the number of their fetch, which is this dataset's state."""

    def __init__(self):
        self.state = {"fetches": 0}

    def __getitem__(self, index):
        self.state["fetches"] += 1
        return index, self.state["fetches"]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class TestRows:
    def test_a_place_has_its_draw_whenever_it_is_fetched(self):
        rows = FetchedRows(Drawing(), seed=0)
        first = rows.__getitems__([(0, "0/0"), (0, "0/0"), (1, "0/1"), (0, "1/0")])
        assert first[0] == first[1]
        assert len({row[1] for row in first}) == 3
        assert rows[(0, "1/0")] == first[3]
        assert FetchedRows(Drawing(), seed=1)[(0, "0/0")] != first[0]

    def test_a_fetch_leaves_the_training_its_random_numbers(self):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        expected = draw()
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        _ = FetchedRows(Drawing(), seed=0)[(0, "0/0")]
        assert draw() == expected

    @pytest.mark.parametrize("ahead", [0, 1, 2])
    def test_the_state_is_the_one_before_a_batch_whatever_is_fetched_ahead(self, ahead):
        data = Counting()
        rows = FetchedRows(data, seed=0)
        rows.start(0)
        for batch in range(6):
            while rows._fetches < batch + 1 + ahead:
                rows.__getitems__([(0, "0/0"), (1, "0/1")])
            # The batch was trained: the next one to train is batch + 1
            assert rows.state_before(batch + 1) == {"fetches": 2 * (batch + 1)}
        assert data.state_dict() == {"fetches": 2 * (6 + ahead)}

    def test_a_resumed_epoch_counts_from_the_batches_before_it(self):
        rows = FetchedRows(Counting(), seed=0)
        rows.start(5)
        rows.__getitems__([(0, "0/0")])
        rows.__getitems__([(0, "0/0")])
        assert rows.state_before(5) == {"fetches": 0} and rows.state_before(6) == {"fetches": 1}
        assert rows.state_before(7) == {"fetches": 2}  # as it is

    def test_a_sampler_says_the_places(self):
        sampler = JointSampler(range(4), 2, 2, 1, shuffle=True, seed=0, placed=True)
        plain = JointSampler(range(4), 2, 2, 1, shuffle=True, seed=0)
        for epoch in range(3):
            draws = list(sampler)
            assert [index for index, _ in draws] == list(plain)
            assert [place for _, place in draws] == [f"{epoch}/{number}" for number in (0, 0, 1, 1, 2, 2, 3, 3)]


class TestStreams:
    @staticmethod
    def stream():
        return IterableDataset.from_generator(lambda: ({"number": n} for n in range(5))).map(
            lambda row: {**row, "draw": draw()}
        )

    def test_a_place_has_its_draw_in_every_pass_and_another_in_another_epoch(self):
        stream = FetchedStream(self.stream(), seed=0)
        first = list(stream)
        random.random()
        assert list(stream) == first
        stream.set_epoch(1)
        second = list(stream)
        assert [row["number"] for row in second] == [0, 1, 2, 3, 4]
        assert len({tuple(row["draw"]) for row in first + second}) == 10

    def test_it_leaves_the_training_its_random_numbers(self):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        expected = draw()
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        next(itertools.islice(FetchedStream(self.stream(), seed=0), 3, None))
        assert draw() == expected


def test_which_datasets_make_their_rows():
    plain = Dataset.from_dict({"prompt": ["a"]})
    assert not makes_rows(plain) and not makes_rows(plain.with_format("torch"))
    assert makes_rows(plain.with_transform(lambda batch: batch)) and makes_rows(Drawing())
    assert makes_rows(type("Own", (Dataset,), {})(plain.data))
