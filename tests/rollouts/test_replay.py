# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Experience replay: which datasets are drawn from, how often, and which of their pairs."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from trl_multiagent.rollouts.replay import REPLAY_MODES, PreferenceReplay


OPTIONS = {"current": {}, "nearest_k": {"k": 2}, "all_history": {}, "lambda_decay": {"decay": 0.5}}


def pairs_of(iteration, size):
    return [f"{iteration}-{number}" for number in range(size)]


def replay_of(sizes, mode="all_history", **options):
    """Datasets of the given sizes, oldest first; pair `i-n` is number n of dataset i."""
    replay = PreferenceReplay(mode, **options)
    for iteration, size in enumerate(sizes):
        replay.add(pairs_of(iteration, size))
    return replay


def by_dataset(pairs):
    return Counter(int(pair.split("-")[0]) for pair in pairs)


def slow_weights(sizes, mode, k=None, decay=None):
    """Probability of each dataset ever added, by the rules as they are stated."""
    weights = []
    for index, size in enumerate(sizes):
        age = len(sizes) - 1 - index
        if mode == "nearest_k":
            weight = 1 / k if age < k else 0.0
        elif mode == "all_history" or decay == 1:
            weight = 1 / len(sizes)
        else:
            weight = 1 - decay
            for _ in range(age):
                weight *= decay
        weights.append(weight if size else 0.0)
    if sum(weights) == 0 and any(sizes):
        for index in reversed(range(len(sizes))):
            if sizes[index]:
                weights[index] = 1.0
                break
    return [weight / sum(weights) if any(sizes) else 0.0 for weight in weights]


SIZES = [
    [3],
    [2, 3, 4],
    [5, 1, 2, 2],
    [2, 0, 3],
    [3, 4, 0],
    [3, 4, 0, 0],
    [0, 0, 2],
    [2, 0, 0, 0],
    [0, 0],
    [0, 1, 0, 1],
]
DRAWS = [
    ("nearest_k", {"k": 1}),
    ("nearest_k", {"k": 2}),
    ("nearest_k", {"k": 3}),
    ("nearest_k", {"k": 10}),
    ("all_history", {}),
    ("lambda_decay", {"decay": 0.0}),
    ("lambda_decay", {"decay": 0.3}),
    ("lambda_decay", {"decay": 0.9}),
    ("lambda_decay", {"decay": 1.0}),
]


class TestWeights:
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    @pytest.mark.parametrize(("mode", "options"), DRAWS, ids=str)
    def test_they_are_those_of_the_slow_loop(self, mode, options, sizes):
        replay = replay_of(sizes, mode, **options)
        weighted = zip(replay.datasets, replay.weights(), strict=True)
        kept = {pairs[0].split("-")[0]: weight for pairs, weight in weighted if pairs}
        expected = slow_weights(sizes, mode, **options)
        assert [kept.get(str(index), 0.0) for index in range(len(sizes))] == pytest.approx(expected)
        assert sum(replay.weights()) == pytest.approx(1.0 if any(sizes) else 0.0)

    def test_of_a_decay_by_hand(self):
        # 1 : 1/2 : 1/4, newest first
        assert replay_of([1, 1, 1], "lambda_decay", decay=0.5).weights() == pytest.approx([1 / 7, 2 / 7, 4 / 7])

    def test_the_weight_of_an_empty_dataset_goes_to_the_others_in_proportion(self):
        # 1 : 1/4 remain of 1 : 1/2 : 1/4
        assert replay_of([1, 0, 1], "lambda_decay", decay=0.5).weights() == pytest.approx([0.2, 0.0, 0.8])

    def test_of_lambda_1_are_equal(self):
        assert replay_of([1, 5, 2, 1], "lambda_decay", decay=1).weights() == [0.25] * 4

    def test_of_lambda_0_are_all_on_the_newest_that_has_pairs(self):
        assert replay_of([1, 1, 1], "lambda_decay", decay=0).weights() == [0.0, 0.0, 1.0]
        assert replay_of([1, 1, 0], "lambda_decay", decay=0).weights() == [0.0, 1.0, 0.0]

    def test_of_a_small_lambda_do_not_vanish_over_many_empty_datasets(self):
        weights = replay_of([1, 1] + [0] * 400, "lambda_decay", decay=0.1).weights()
        assert weights[:2] == pytest.approx([1 / 11, 10 / 11])

    def test_of_current_are_on_the_newest(self):
        assert replay_of([3, 2], "current").weights() == [1.0]
        assert replay_of([3, 0], "current").weights() == [0.0]

    @pytest.mark.parametrize("mode", REPLAY_MODES)
    def test_without_datasets_there_are_none(self, mode):
        assert PreferenceReplay(mode, **OPTIONS[mode]).weights() == []


class TestSamples:
    def test_current_takes_the_newest_dataset_as_it_is(self):
        replay = replay_of([4, 3], "current")
        assert replay.sample(0) == replay.sample(7) == ["1-0", "1-1", "1-2"]
        replay.add([])
        assert replay.sample(8) == []

    @pytest.mark.parametrize("mode", REPLAY_MODES)
    def test_without_pairs_the_sample_is_empty(self, mode):
        replay = PreferenceReplay(mode, **OPTIONS[mode])
        assert replay.sample(0) == []
        replay.add([])
        assert replay.sample(1) == []

    @pytest.mark.parametrize("sizes", [[4, 4, 4], [2, 5, 3, 1], [3, 0, 4, 0]], ids=str)
    @pytest.mark.parametrize(("mode", "options"), DRAWS, ids=str)
    def test_datasets_are_drawn_as_often_as_their_weights_say(self, mode, options, sizes):
        replay = replay_of(sizes, mode, sample_size=100, **options)
        total = Counter()
        for iteration in range(100):
            total += by_dataset(replay.sample(iteration))
        for index, weight in enumerate(slow_weights(sizes, mode, **options)):
            # Five standard deviations of 10000 draws are at most 0.025
            assert total[index] / 10_000 == pytest.approx(weight, abs=0.025)
            assert weight > 0 or total[index] == 0

    def test_pairs_of_a_dataset_are_drawn_equally_often(self):
        replay = replay_of([5], sample_size=2)
        total = Counter(pair for iteration in range(2000) for pair in replay.sample(iteration))
        assert all(count == pytest.approx(800, abs=5 * 22) for count in total.values()) and len(total) == 5

    def test_no_pair_is_there_twice_before_its_dataset_is_used_up(self):
        replay = replay_of([4, 7], sample_size=20)
        for iteration in range(50):
            sample = replay.sample(iteration)
            counts = Counter(sample)
            for dataset, size in enumerate([4, 7]):
                rounds, rest = divmod(by_dataset(sample)[dataset], size)
                # Each pair as often as there are whole rounds, and `rest` of them once more
                expected = [rounds + 1] * rest + [rounds] * (size - rest)
                assert sorted((counts[pair] for pair in pairs_of(dataset, size)), reverse=True) == expected

    def test_a_sample_as_large_as_the_only_dataset_is_a_permutation(self):
        replay = replay_of([6])
        samples = [replay.sample(iteration) for iteration in range(20)]
        assert all(sorted(sample) == pairs_of(0, 6) for sample in samples)
        assert len({tuple(sample) for sample in samples}) > 10

    def test_datasets_are_mixed_in_the_order(self):
        sample = replay_of([50, 50], sample_size=60).sample(0)
        changes = sum(a[0] != b[0] for a, b in zip(sample, sample[1:], strict=False))
        assert changes > 10  # two blocks would have one change

    @pytest.mark.parametrize(
        ("sizes", "sample_size", "expected"), [([3, 5], None, 5), ([3, 5, 0], None, 5), ([3, 5], 9, 9), ([3, 0], 1, 1)]
    )
    def test_the_size_is_as_asked_or_that_of_the_newest_dataset_with_pairs(self, sizes, sample_size, expected):
        assert len(replay_of(sizes, sample_size=sample_size).sample(0)) == expected

    def test_pairs_may_be_any_objects_and_are_not_copied(self):
        pairs = [{"winner": ["a"]}, {"winner": ["b"]}]
        replay = PreferenceReplay("all_history")
        replay.add(pairs)
        assert all(any(pair is own for own in pairs) for pair in replay.sample(0))

    def test_what_is_done_to_the_given_list_or_the_sample_does_not_matter(self):
        replay = PreferenceReplay("current")
        pairs = ["a", "b"]
        replay.add(pairs)
        pairs.clear()
        replay.sample(0).clear()
        assert replay.sample(0) == ["a", "b"]


class TestRepeating:
    @pytest.mark.parametrize("mode", REPLAY_MODES)
    def test_the_same_iteration_gives_the_same_sample(self, mode):
        replay = replay_of([4, 5, 6], mode, **OPTIONS[mode])
        first = replay.sample(3)
        replay.sample(4)
        assert replay.sample(3) == first

    def test_iterations_and_seeds_differ(self):
        samples = [replay_of([20, 20], seed=seed).sample(iteration) for seed in (0, 1) for iteration in (0, 1)]
        assert len({tuple(sample) for sample in samples}) == 4

    def test_another_process_draws_the_same(self):
        # Hashes of texts differ between processes, unless they are told otherwise
        code = (
            "from trl_multiagent.rollouts.replay import PreferenceReplay\n"
            "replay = PreferenceReplay('lambda_decay', decay=0.5, seed=3)\n"
            "for i in range(3): replay.add([f'{i}-{n}' for n in range(8)])\n"
            "print(' '.join(replay.sample(5)))"
        )
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert output.split() == replay_of([8, 8, 8], "lambda_decay", decay=0.5, seed=3).sample(5)

    @pytest.mark.parametrize("sizes", [[], [4], [4, 0, 3], [5, 0, 0, 0], [2, 3, 4, 5]], ids=str)
    @pytest.mark.parametrize("mode", REPLAY_MODES)
    def test_a_resumed_replay_goes_on_with_the_same_samples(self, mode, sizes):
        replay = replay_of(sizes, mode, **OPTIONS[mode])
        resumed = PreferenceReplay(mode, **OPTIONS[mode])
        resumed.load(json.loads(json.dumps(replay.state())))
        for iteration in range(3):
            assert resumed.sample(iteration) == replay.sample(iteration)
            assert resumed.weights() == replay.weights() and resumed.datasets == replay.datasets
            for either in (replay, resumed):
                either.add(pairs_of(100 + iteration, iteration))

    def test_a_state_stays_as_it_was_when_more_is_added(self):
        replay = replay_of([1])
        state = replay.state()
        replay.add(["later"])
        replay.datasets[0].append("more")
        assert state == {"datasets": [["0-0"]]}


class TestMemory:
    @pytest.mark.parametrize(
        ("mode", "options", "sizes", "kept"),
        [
            ("current", {}, [1, 1, 1], [[2]]),
            ("current", {}, [1, 0], [[]]),
            ("nearest_k", {"k": 2}, [1, 1, 1], [[1], [2]]),
            ("nearest_k", {"k": 2}, [1, 1, 1, 0], [[2], []]),
            ("nearest_k", {"k": 2}, [1, 1, 0, 0], [[1], [], []]),  # else there would be no pair
            ("nearest_k", {"k": 2}, [1, 1, 0, 0, 0], [[1], [], []]),
            ("nearest_k", {"k": 2}, [1, 1, 0, 0, 0, 1], [[], [5]]),
            ("nearest_k", {"k": 2}, [0, 0, 0], [[], []]),
            ("all_history", {}, [1, 0, 1], [[0], [], [2]]),
            ("lambda_decay", {"decay": 0.5}, [1, 0, 1], [[0], [], [2]]),
        ],
        ids=str,
    )
    def test_only_datasets_that_can_be_drawn_again_are_kept(self, mode, options, sizes, kept):
        datasets = replay_of(sizes, mode, **options).datasets
        assert [[int(pair.split("-")[0]) for pair in pairs] for pairs in datasets] == kept

    def test_where_the_nearest_k_are_empty_the_newest_with_pairs_is_drawn(self):
        assert set(by_dataset(replay_of([3, 2, 0, 0, 0], "nearest_k", k=2).sample(0))) == {1}


class TestOptions:
    @pytest.mark.parametrize(
        ("mode", "options", "match"),
        [
            ("newest", {}, "preference_replay_mode='newest'.*current.*nearest_k.*all_history.*lambda_decay"),
            ("nearest_k", {}, "needs preference_replay_k"),
            ("nearest_k", {"k": 0}, "preference_replay_k=0"),
            ("all_history", {"k": 2}, "preference_replay_k=2.*'all_history'"),
            ("current", {"k": 1}, "preference_replay_k=1.*'current'"),
            ("lambda_decay", {}, "needs preference_replay_lambda"),
            ("lambda_decay", {"decay": -0.1}, "preference_replay_lambda=-0.1"),
            ("lambda_decay", {"decay": 1.1}, "preference_replay_lambda=1.1"),
            ("lambda_decay", {"decay": float("nan")}, "preference_replay_lambda=nan"),
            ("nearest_k", {"k": 2, "decay": 0.0}, "preference_replay_lambda=0.0.*'nearest_k'"),
            ("lambda_decay", {"k": 2, "decay": 0.5}, "preference_replay_k=2.*'lambda_decay'"),
            ("all_history", {"sample_size": 0}, "preference_replay_sample_size=0"),
            ("current", {"sample_size": 4}, "preference_replay_sample_size=4.*'current'"),
        ],
    )
    def test_one_that_is_missing_out_of_range_or_without_meaning_is_an_error(self, mode, options, match):
        with pytest.raises(ValueError, match=match):
            PreferenceReplay(mode, **options)
