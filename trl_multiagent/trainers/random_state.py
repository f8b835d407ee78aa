# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Random numbers apart from the training's."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from accelerate.utils import set_seed


@contextlib.contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """
    Inside, Python, NumPy and torch draw from `seed` (on each process another stream); afterwards they go on where they
    were.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        set_seed(seed, device_specific=True)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
