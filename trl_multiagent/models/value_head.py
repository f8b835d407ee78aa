# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A scalar head on the hidden states of a language model."""

from pathlib import Path

import torch
from torch import nn


VALUE_HEAD_FILE = "value_head.pt"


class ValueHead(nn.Module):
    """
    Maps hidden states to one value each. It is made in float32 whatever the backbone's precision, and hidden states
    are cast to its dtype, so that small value errors are not lost to rounding. (DeepSpeed in bf16 casts all modules of
    the team, the head too; its master weights are float32.)

    Args:
        hidden_size (`int`):
            Width of the hidden states.
        hidden_dim (`int`, *optional*):
            Width of a hidden layer with a tanh. `None` is a linear head.

    The last layer starts small (standard deviation `0.1 / sqrt(width)`, no bias), so that first values are near 0.
    """

    def __init__(self, hidden_size: int, hidden_dim: int | None = None):
        super().__init__()
        if hidden_dim is None:
            self.net = nn.Sequential(nn.Linear(hidden_size, 1, dtype=torch.float32))
        else:
            self.net = nn.Sequential(
                nn.Linear(hidden_size, hidden_dim, dtype=torch.float32),
                nn.Tanh(),
                nn.Linear(hidden_dim, 1, dtype=torch.float32),
            )
        nn.init.normal_(self.net[-1].weight, std=0.1 * self.net[-1].in_features ** -0.5)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., hidden_size)` -> `(...)`, float32."""
        # Autocast would bring the product back to half precision
        with torch.autocast(device_type=hidden_states.device.type, enabled=False):
            return self.net(hidden_states.to(self.net[0].weight.dtype)).squeeze(-1).float()


def save_value_head(head: ValueHead, directory: str | Path) -> None:
    """Write `value_head.pt` into `directory`: a state dict that `torch.load(weights_only=True)` reads."""
    torch.save(
        {name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()},
        Path(directory) / VALUE_HEAD_FILE,
    )


def load_value_head(head: ValueHead, directory: str | Path) -> None:
    """
    Load `value_head.pt` of `directory` into `head`.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: the saved head has another shape; both shapes are named.
    """
    path = Path(directory) / VALUE_HEAD_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, although the model beside it was saved with a value head. Restore the file, or "
            f"remove the entry 'value_head' from {path.with_name('config.json')} to start with a new head."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    saved = {name: tuple(tensor.shape) for name, tensor in state.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if saved != expected:
        raise ValueError(
            f"The value head in {path} has the shapes {saved}, but this run asks for {expected}. Set the head's "
            f"hidden width (`critic_value_head_hidden_dim`) as it was when the head was saved, or use a backbone "
            "without one."
        )
    head.load_state_dict(state)
