# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What a checkpoint says of itself, read without building anything."""

import json
import os
from typing import Any


# What a checkpoint holds of the team besides models and optimizer
TEAM_STATE_FILE = "team_state.json"


def read_checkpoint_metadata(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """
    Read what a training checkpoint says of its run.

    Args:
        checkpoint (`str` or `os.PathLike`):
            Directory of the checkpoint.

    Returns:
        `dict`: `"wandb"` is the identity of the W&B run, a `dict` with `id`, `project` and `entity`, or `None`;
        `"env_step"` is the number of joint responses that had been scored for training.

    Raises:
        FileNotFoundError: the directory is no checkpoint of a team.
    """
    path = os.path.join(checkpoint, TEAM_STATE_FILE)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{os.fspath(checkpoint)!r} is no checkpoint of a team: it has no {TEAM_STATE_FILE}.")
    with open(path, encoding="utf-8") as file:
        state = json.load(file)
    return {"wandb": state["wandb"], "env_step": state["env_step"]}
