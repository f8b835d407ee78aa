# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Experience replay: which pairs of the preference datasets of all iterations so far are trained on."""

import random
from collections import Counter
from collections.abc import Iterable
from itertools import compress
from typing import Any


REPLAY_MODES = ("current", "nearest_k", "all_history", "lambda_decay")


class PreferenceReplay:
    """
    Draws an iteration's pairs from the preference datasets of this and earlier iterations. A dataset's age is the
    number of datasets added after it.

    - `"current"`: the pairs of the newest dataset, all of them and in order.
    - `"nearest_k"`: each draw takes one of the newest `k` datasets, with equal probability.
    - `"all_history"`: each draw takes one of all datasets, with equal probability.
    - `"lambda_decay"`: each draw takes a dataset of age a with a probability in proportion to
      `(1 - decay) * decay ** a`. With `decay=1` all are equal (the limit), with `decay=0` only the newest counts.

    Datasets without pairs are not drawn from; their weight goes to the others in proportion. Where nothing else has
    weight, all of it goes to the newest dataset that has pairs.

    What can never be drawn again is dropped from memory: with `"current"` all datasets but the newest, with
    `"nearest_k"` all but the newest `k`, and, while none of these has pairs, the newest that has some.

    Args:
        mode (`str`):
            One of `REPLAY_MODES`.
        k (`int`, *optional*):
            Number of datasets that `"nearest_k"` draws from, at least 1. Only with that mode.
        decay (`float`, *optional*):
            Weight of a dataset relative to the one after it, 0 to 1. Only with `"lambda_decay"`.
        sample_size (`int`, *optional*):
            Number of pairs to draw. Default: as many as the newest dataset that has pairs holds. Not with `"current"`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Attributes:
        datasets (list of lists): the pairs of each dataset that is kept, oldest first.

    Raises:
        ValueError: an option is missing, out of range, or without meaning in this mode.
    """

    def __init__(
        self,
        mode: str,
        k: int | None = None,
        decay: float | None = None,
        sample_size: int | None = None,
        seed: int = 0,
    ):
        if mode not in REPLAY_MODES:
            raise ValueError(f"Unknown preference_replay_mode={mode!r}, expected one of {REPLAY_MODES}.")
        _check_belongs("preference_replay_k", k, mode, "nearest_k")
        _check_belongs("preference_replay_lambda", decay, mode, "lambda_decay")
        if k is not None and k < 1:
            raise ValueError(f"preference_replay_k={k} must be at least 1, the newest dataset alone.")
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"preference_replay_lambda={decay} must be from 0 (newest alone) to 1 (all equal).")
        if sample_size is not None and mode == "current":
            raise ValueError(
                f"preference_replay_sample_size={sample_size} has no meaning with preference_replay_mode='current', "
                f"which takes each pair of the newest dataset once. Leave it out, or set another mode."
            )
        if sample_size is not None and sample_size < 1:
            raise ValueError(f"preference_replay_sample_size={sample_size} must be at least 1.")
        self.mode = mode
        self.k = k
        self.decay = decay
        self.sample_size = sample_size
        self.seed = seed
        self.datasets: list[list[Any]] = []

    def add(self, pairs: Iterable[Any]) -> None:
        """Add an iteration's dataset, which may be empty, and drop the datasets that are of no more use."""
        self.datasets.append(list(pairs))
        self._drop_useless()

    def weights(self) -> list[float]:
        """
        Probability of each dataset in a draw, oldest first: 0 for one without pairs. They sum to 1, or are all 0 if
        there is no pair at all.
        """
        newest = self._newest_with_pairs()
        oldest_age = len(self.datasets) - 1
        weights = [
            self._weight(oldest_age - index, oldest_age - newest) if pairs else 0.0
            for index, pairs in enumerate(self.datasets)
        ]
        total = sum(weights)
        return [weight / total for weight in weights] if total else weights

    def sample(self, iteration: int) -> list[Any]:
        """
        The pairs to train on in an iteration; empty if there is none.

        First the number of draws from each dataset is drawn, then which of its pairs. They are taken without
        replacement; where a dataset is drawn from more often than it has pairs, whole random permutations of it follow
        one another. Last, all are shuffled.

        The random numbers come from the seed and `iteration` alone. So the sample is the same on every process, after
        a resume, and when it is asked for again.

        Args:
            iteration (`int`):
                Number of the iteration.
        """
        if self.mode == "current":
            return list(self.datasets[-1]) if self.datasets else []
        weights = self.weights()
        used = list(compress(self.datasets, weights))
        if not used:
            return []
        rng = random.Random(f"{self.seed}/{iteration}")
        count = self.sample_size or len(used[-1])
        draws = Counter(rng.choices(range(len(used)), weights=[weight for weight in weights if weight], k=count))
        sample = [pair for index, pairs in enumerate(used) for pair in _take(pairs, draws[index], rng)]
        rng.shuffle(sample)
        return sample

    def state(self) -> dict[str, Any]:
        """What a resumed run needs for the same samples: `{"datasets": ...}`, with the pairs as they were added."""
        return {"datasets": [list(pairs) for pairs in self.datasets]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.datasets = [list(pairs) for pairs in state["datasets"]]
        self._drop_useless()

    def _newest_with_pairs(self) -> int:
        """Index of the newest dataset that has pairs, -1 if none has."""
        return max((index for index, pairs in enumerate(self.datasets) if pairs), default=-1)

    def _weight(self, age: int, newest_age: int) -> float:
        """Weight of a dataset that has pairs, where the newest of these has age `newest_age`."""
        if self.mode == "nearest_k":
            return float(age < self.k or age == newest_age)
        if self.mode == "lambda_decay":
            # Relative to the newest that has pairs, which so has weight 1 even where decay ** age would vanish
            return float(self.decay) ** (age - newest_age)
        return 1.0

    def _drop_useless(self) -> None:
        if self.mode == "current":
            self.datasets = self.datasets[-1:]
        if self.mode == "nearest_k":
            start, newest = max(len(self.datasets) - self.k, 0), self._newest_with_pairs()
            fallback = [self.datasets[newest]] if 0 <= newest < start else []
            self.datasets = fallback + self.datasets[start:]


def _check_belongs(name: str, value: Any, mode: str, owner: str) -> None:
    """Raise a `ValueError` unless an option is given in the mode that it belongs to, and in no other."""
    if mode == owner and value is None:
        raise ValueError(f"preference_replay_mode={mode!r} needs {name}, got None.")
    if mode != owner and value is not None:
        raise ValueError(
            f"{name}={value} has no meaning with preference_replay_mode={mode!r}. Leave it out, or set "
            f"preference_replay_mode={owner!r}."
        )


def _take(pairs: list[Any], count: int, rng: random.Random) -> list[Any]:
    taken: list[Any] = []
    while len(taken) < count:
        taken += rng.sample(pairs, min(len(pairs), count - len(taken)))
    return taken
