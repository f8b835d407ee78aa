# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A scalar head on the hidden states of a language model."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn


VALUE_HEAD_FILE = "value_head.pt"
VALUE_HEAD_CONFIG_FILE = "value_head_config.json"


@dataclass
class RunningMoments:
    """
    Mean and variance of all returns so far.

    They are numbers, not buffers, since DeepSpeed would round buffers to the training's precision.

    Attributes:
        count (`float`): returns seen.
        mean (`float`): their mean.
        total_deviation (`float`): the sum of their squared differences from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    total_deviation: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation; 1 as long as the returns do not vary."""
        std = math.sqrt(self.total_deviation / self.count) if self.count else 0.0
        return std if std > 1e-6 * max(abs(self.mean), 1.0) else 1.0

    def as_tensor(self) -> torch.Tensor:
        """The three numbers, `(3,)` in float64."""
        return torch.tensor(list(asdict(self).values()), dtype=torch.float64)

    def update(self, count: float, mean: float, total_deviation: float) -> None:
        """Take in a batch by its own three numbers (the pairwise update of Chan, Golub and LeVeque 1979)."""
        if not count:
            return
        total, difference = self.count + count, mean - self.mean
        self.total_deviation += total_deviation + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total


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
        critic_type (`str`, *optional*, defaults to `"v"`):
            What it values, for those who load it: `"v"` a history, `"q"` a history with its completion.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Precision of the weights. Values are float32 in any case.

    The last layer starts small (standard deviation `0.1 / sqrt(width)`, no bias), so that first values are near 0.

    With value normalisation (PopArt's idea without its rescaling of weights, as in MAPPO), `moments` follow the
    returns, and the network predicts in units of their standard deviation, from their mean; values are in the
    returns' units always. The moments are part of the state dict.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_dim: int | None = None,
        critic_type: str = "v",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.critic_type = critic_type
        if hidden_dim is None:
            self.net = nn.Sequential(nn.Linear(hidden_size, 1, dtype=dtype))
        else:
            self.net = nn.Sequential(
                nn.Linear(hidden_size, hidden_dim, dtype=dtype), nn.Tanh(), nn.Linear(hidden_dim, 1, dtype=dtype)
            )
        nn.init.normal_(self.net[-1].weight, std=0.1 * self.net[-1].in_features ** -0.5)
        nn.init.zeros_(self.net[-1].bias)
        self.moments = RunningMoments()
        self.register_load_state_dict_pre_hook(_add_moments)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., hidden_size)` -> `(...)`, float32."""
        # Autocast would bring the product back to half precision
        with torch.autocast(device_type=hidden_states.device.type, enabled=False):
            predicted = self.net(hidden_states.to(self.net[0].weight.dtype)).squeeze(-1).float()
        return predicted * self.moments.std + self.moments.mean

    def get_extra_state(self) -> torch.Tensor:
        return self.moments.as_tensor()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.moments = RunningMoments(*state.tolist())


def _add_moments(head: ValueHead, state_dict: dict, prefix: str, *args) -> None:
    """A saved head without moments, as other libraries write them, is one that saw no returns."""
    state_dict.setdefault(f"{prefix}_extra_state", RunningMoments().as_tensor())


def save_value_head(head: ValueHead, directory: str | Path) -> None:
    """
    Write `value_head.pt` into `directory`, a state dict that `torch.load(weights_only=True)` reads, and beside it
    `value_head_config.json`, which says that there is one and what it values.
    """
    state = {name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()}
    torch.save(state, Path(directory) / VALUE_HEAD_FILE)
    with open(Path(directory) / VALUE_HEAD_CONFIG_FILE, "w", encoding="utf-8") as file:
        json.dump({"critic_type": head.critic_type, "hidden_dim": head.hidden_dim}, file)


def read_value_head_config(directory: str | Path) -> dict[str, str | int | None]:
    """
    What the head in `directory` is: its `critic_type` and `hidden_dim`.

    Raises:
        FileNotFoundError: no model was saved there with a head.
    """
    path = Path(directory) / VALUE_HEAD_CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no {VALUE_HEAD_CONFIG_FILE}: no model was saved there with a head.")
    return json.loads(path.read_text(encoding="utf-8"))


def load_value_head(head: ValueHead, directory: str | Path) -> None:
    """
    Load `value_head.pt` of `directory` into `head`.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: the saved head has another shape, or values something else; both are named.
    """
    path, config = Path(directory) / VALUE_HEAD_FILE, Path(directory) / VALUE_HEAD_CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, although the model beside it was saved with a value head. Restore the file, or "
            f"remove {VALUE_HEAD_CONFIG_FILE} to start with a new head."
        )
    critic_type = read_value_head_config(directory)["critic_type"] if config.is_file() else None
    if critic_type not in (None, head.critic_type):
        raise ValueError(
            f"The value head in {path} was trained with critic_type={critic_type!r}, this run has "
            f"critic_type={head.critic_type!r}. Use the same, or a backbone without a head."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    shapes = [
        {n: tuple(t.shape) for n, t in tensors.items() if n != "_extra_state"}
        for tensors in (state, head.state_dict())
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The value head in {path} has the shapes {shapes[0]}, but this run asks for {shapes[1]}. Set the head's "
            f"hidden width (`critic_value_head_hidden_dim`, for a head on an actor `value_head_hidden_dim`) as it was "
            "when the head was saved, or use a backbone without one."
        )
    head.load_state_dict(state)
