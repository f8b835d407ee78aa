# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The random number generators of a process: where they stand, and random numbers apart from them."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed


def random_states() -> dict[str, Any]:
    """
    Where Python, NumPy and torch, on the CPU and on every accelerator, stand in this process: tensors and numbers
    only, so that `torch.load(weights_only=True)` reads it.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "devices": [get() for get, _ in _device_generators()],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """
    Go on from where `random_states` was called.

    Where this process has more or fewer accelerators than the one that saved, those that both have are set.
    """
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    for (_, set_state), state in zip(_device_generators(), states["devices"], strict=False):
        set_state(state)


def _device_generators() -> list[tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]]:
    """How to read and set the generator of each accelerator."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator().type
    module = torch.get_device_module(kind)
    if kind == "mps":  # has one device, and no index
        return [(module.get_rng_state, module.set_rng_state)]
    return [
        (functools.partial(module.get_rng_state, device), functools.partial(module.set_rng_state, device=device))
        for device in range(torch.accelerator.device_count())
    ]


@contextlib.contextmanager
def own_random_state(seed: int, device_specific: bool = True) -> Iterator[None]:
    """
    Inside, Python, NumPy and torch draw from `seed`, each process another stream if `device_specific`; afterwards they
    go on where they were.
    """
    states = random_states()
    set_seed(seed, device_specific=device_specific)
    try:
        yield
    finally:
        set_random_states(states)
