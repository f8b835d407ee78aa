# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The order in which prompts are trained."""

import pytest
from trl.trainer.utils import RepeatSampler

from trl_multiagent.rollouts.sampling import JointSampler


def epochs(sampler, count=3):
    return [list(sampler) for _ in range(count)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", [0, 42])
@pytest.mark.parametrize(
    ("rows", "generations", "prompts", "repeats"),
    [(8, 2, 4, 1), (8, 3, 2, 2), (6, 4, 1, 3), (6, 1, 6, 1), (4, 2, 4, 4)],
)
def test_where_batches_are_full_it_is_trls_order_in_every_epoch(rows, generations, prompts, repeats, seed, shuffle):
    ours = JointSampler(range(rows), generations, prompts, repeats, shuffle, seed)
    trls = RepeatSampler(range(rows), generations, prompts, repeats, shuffle, seed)
    assert epochs(ours) == epochs(trls)
    assert len(ours) == len(trls) == len(list(ours))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(("generations", "prompts", "repeats"), [(2, 2, 1), (3, 4, 2), (2, 8, 1)])
class TestIncompleteBatches:
    """B36: where the last batch of an epoch is not full, TRL drops its prompts; here none is dropped."""

    def test_every_prompt_is_seen_in_each_epoch(self, rows, generations, prompts, repeats):
        for order in epochs(JointSampler(range(rows), generations, prompts, repeats)):
            assert set(order) == set(range(rows))

    def test_the_length_is_that_of_an_epoch(self, rows, generations, prompts, repeats):
        sampler = JointSampler(range(rows), generations, prompts, repeats)
        full_batches = -(-rows // prompts)
        assert len(sampler) == len(list(sampler)) == full_batches * prompts * generations * repeats

    def test_every_batch_holds_whole_groups_and_is_repeated(self, rows, generations, prompts, repeats):
        size = prompts * generations
        order = list(JointSampler(range(rows), generations, prompts, repeats))
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        for start in range(0, len(batches), repeats):
            assert batches[start : start + repeats] == [batches[start]] * repeats
        for batch in batches:
            for start in range(0, size, generations):
                assert len(set(batch[start : start + generations])) == 1


def test_the_last_batch_is_filled_from_the_start_of_the_same_epoch():
    sampler = JointSampler(range(5), num_generations=2, num_prompts=2, shuffle=False)
    assert list(sampler) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0]


def test_the_filling_follows_the_shuffled_order():
    order = list(JointSampler(range(5), num_generations=1, num_prompts=2, seed=3))
    assert order[5] == order[0] and sorted(order[:5]) == [0, 1, 2, 3, 4]


def test_a_dataset_smaller_than_a_batch_is_repeated_in_it():
    assert list(JointSampler(range(2), 1, 5, shuffle=False)) == [0, 1, 0, 1, 0]


def test_epochs_differ_and_the_seed_fixes_them():
    first, second = (epochs(JointSampler(range(20), 1, 20, seed=7)) for _ in range(2))
    assert first == second
    assert first[0] != first[1] != first[2]
    assert first != epochs(JointSampler(range(20), 1, 20, seed=8))


def test_without_shuffling_the_datasets_order_is_kept():
    assert epochs(JointSampler(range(4), 1, 2, shuffle=False), 2) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_a_run_that_goes_on_at_an_epoch_takes_that_epochs_order(epoch, shuffle):
    def sampler():
        return JointSampler(range(7), 2, 3, shuffle=shuffle, seed=5)

    whole, later = epochs(sampler(), 5), sampler()
    later.set_epoch(epoch)
    assert epochs(later, 5 - epoch) == whole[epoch:]
    later.set_epoch(1)  # also after it was gone through
    assert list(later) == whole[1]
