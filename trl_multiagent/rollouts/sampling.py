# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The order in which prompts are trained."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class JointSampler(Sampler):
    """
    Repeats dataset indices so that each prompt gets a group of joint samples, and each generation batch is visited by
    every micro-step that uses it.

    The order is that of TRL's `RepeatSampler` with the same seed. Unlike it, the last prompts of an epoch are never
    dropped: an incomplete last batch is filled with prompts from the start of the same epoch, so every prompt is
    trained in each epoch, and a dataset smaller than one batch works.

    Args:
        data_source (`Sized`):
            The dataset.
        num_generations (`int`):
            Joint samples for each prompt, G.
        num_prompts (`int`):
            Prompts in a generation batch, over all processes.
        repeat_count (`int`):
            Micro-steps that use one generation batch.
        shuffle (`bool`):
            Whether each epoch has a new random order.
        seed (`int`):
            Seed of that order.
        placed (`bool`, *optional*, defaults to `False`):
            Whether each index comes with its prompt's place in the training, `"<epoch>/<number>"`, for `FetchedRows`.
    """

    def __init__(
        self,
        data_source: Sized,
        num_generations: int,
        num_prompts: int,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        placed: bool = False,
    ):
        self.num_rows = len(data_source)
        self.num_generations = num_generations
        self.num_prompts = num_prompts
        self.repeat_count = repeat_count
        self.shuffle = shuffle
        self.seed = seed
        self.placed = placed
        self.epoch = 0  # of the next order
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.num_prompts)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch, counted from 0, as if those before it had been gone through."""
        self.epoch = epoch
        self.generator.manual_seed(self.seed)
        if self.shuffle:
            for _ in range(epoch):
                torch.randperm(self.num_rows, generator=self.generator)

    def __iter__(self) -> Iterator[int | tuple[int, str]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = list(range(self.num_rows))
        if self.shuffle:
            order = torch.randperm(self.num_rows, generator=self.generator).tolist()
        for batch in range(self.num_batches):
            start = batch * self.num_prompts
            chunk = [
                (order[place % self.num_rows], f"{epoch}/{place}") if self.placed else order[place % self.num_rows]
                for place in range(start, start + self.num_prompts)
            ]
            group = [index for index in chunk for _ in range(self.num_generations)]
            for _ in range(self.repeat_count):
                yield from group

    def __len__(self) -> int:
        return self.num_batches * self.num_prompts * self.num_generations * self.repeat_count
