# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Datasets whose rows are made when they are asked for, by a transform that may draw random numbers or by a dataset that
changes: read so that a resumed run gets the rows of one that never stopped.

A data loader fetches ahead of the training, so what a fetch draws must not depend on where the training stands. Here
it depends on the prompt's place in the epoch, which also gives all joint samples of a group the same prompt.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
from torch.utils.data import Dataset, IterableDataset

from ..checkpoints.random_states import own_random_state
from ..checkpoints.stateful import Stateful


def makes_rows(dataset: Any) -> bool:
    """Whether an indexed dataset may give another row each time: by a transform, or as a class of its own."""
    return type(dataset) is not datasets.Dataset or dataset.format["type"] == "custom"


class FetchedRows(Dataset):
    """
    Gives each row with random numbers of its own, and remembers the dataset's state before each fetch.

    Args:
        dataset ([`~torch.utils.data.Dataset`]):
            The dataset.
        seed (`int`):
            Seed of the random numbers.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset = dataset
        self.seed = seed
        self._states: dict[int, Any] = {}
        self._fetches = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: tuple[int, str]) -> Any:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: Sequence[tuple[int, str]]) -> list[Any]:
        """The rows of index and place in the training."""
        if isinstance(self.dataset, Stateful):
            self._states = {n: state for n, state in self._states.items() if n >= self._fetches - 2}
            self._states[self._fetches] = copy.deepcopy(self.dataset.state_dict())
        self._fetches += 1
        rows = []
        for index, place in draws:
            with own_random_state(_seed(self.seed, place), device_specific=False):
                rows.append(self.dataset[index])
        return rows

    def start(self, num_trained: int) -> None:
        """Say that an epoch begins, in which this process trained some batches before."""
        self._states, self._fetches = {}, num_trained

    def state_before(self, batch: int) -> Any:
        """A copy of the dataset's state before this process fetched a batch of the epoch, or as it is."""
        state = self._states.get(batch)
        return copy.deepcopy(self.dataset.state_dict()) if state is None else state


class FetchedStream(IterableDataset):
    """
    Gives each row of a stream with random numbers of its own.

    Args:
        dataset ([`~datasets.IterableDataset`]):
            The stream.
        seed (`int`):
            Seed of the random numbers.
    """

    def __init__(self, dataset: datasets.IterableDataset, seed: int):
        self.dataset = dataset
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.dataset)
        number = 0
        while True:
            with own_random_state(_seed(self.seed, f"{self.epoch}/{number}"), device_specific=False):
                try:
                    row = next(rows)
                except StopIteration:
                    return
            yield row
            number += 1


def _seed(seed: int, place: str) -> int:
    return random.Random(f"{seed}/{place}").getrandbits(32)
