# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What a checkpoint says of itself, read without building anything."""

import json
import os
from typing import Any


# What a checkpoint says of its run
RUN_FILE = "run.json"


def read_run_file(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """
    All that a checkpoint says of its run.

    Raises:
        FileNotFoundError: the directory is no checkpoint of a team.
    """
    path = os.path.join(checkpoint, RUN_FILE)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{os.fspath(checkpoint)!r} is no checkpoint of a team: it has no {RUN_FILE}.")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def read_checkpoint_metadata(checkpoint: str | os.PathLike) -> dict[str, Any]:
    """
    Read what a training checkpoint says of its run.

    Args:
        checkpoint (`str` or `os.PathLike`):
            Directory of the checkpoint.

    Returns:
        `dict`: `"wandb"` is the identity of the W&B run, a `dict` with `id`, `project` and `entity`, or `None`;
        `"env_step"` is the number of joint responses that had been scored for training, `"step"` the number of
        optimizer steps, and `"versions"` maps packages to the versions that wrote the checkpoint.

    Raises:
        FileNotFoundError: the directory is no checkpoint of a team.
    """
    run = read_run_file(checkpoint)
    return {"wandb": run["trackers"].get("wandb"), **{name: run[name] for name in ("env_step", "step", "versions")}}
