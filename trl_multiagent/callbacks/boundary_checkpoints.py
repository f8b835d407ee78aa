# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints at the ends of epochs, numbered by epoch."""

import math
from collections.abc import Callable

from transformers import TrainerCallback


class BoundaryCheckpoints(TrainerCallback):
    """
    Saves a checkpoint at every k-th completed epoch and at the end of training.

    Args:
        save (`Callable`):
            Called with the number of the epoch that ended, from 1, on every process.
        interval (`int`):
            Every how many epochs.
    """

    def __init__(self, save: Callable[[int], None], interval: int):
        if interval < 1:
            raise ValueError(f"checkpoint_interval={interval}, expected 1 or more.")
        self.save = save
        self.interval = interval
        self._saved_step = -1

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        number = _epochs(state.epoch)
        if number % self.interval == 0:
            self._save(number, state.global_step)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self._saved_step != state.global_step:
            self._save(_epochs(state.epoch), state.global_step)

    def _save(self, number: int, step: int) -> None:
        self._saved_step = step
        self.save(number)


def _epochs(epoch: float) -> int:
    """Number of the epoch that is being or was just trained; `epoch` is a quotient, so whole numbers are rounded."""
    return max(math.ceil(round(epoch, 6)), 1)
