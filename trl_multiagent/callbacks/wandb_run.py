# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Which W&B run a training logs to."""

import logging
from typing import Any

from transformers import TrainerCallback


logger = logging.getLogger(__name__)

# Ids of the runs that were started here; such a run ends when the next training starts one of its own
_started: set[str] = set()


class WandbRunCallback(TrainerCallback):
    """
    Starts or continues the W&B run of a training, before transformers' own callback logs to it.

    Args:
        config (`dict`):
            What `wandb.init` is called with: `project`, `name`, `entity`, `tags`, `dir`, `id`, `resume`, ... To
            continue a run, give its `id` and `resume="allow"`, as [`read_checkpoint_metadata`] helps to.
    """

    def __init__(self, config: dict[str, Any]):
        self.config = dict(config)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if not state.is_world_process_zero:
            return
        import wandb

        if wandb.run is not None and wandb.run.id in _started - {self.config.get("id")}:
            wandb.finish()
        if wandb.run is None:
            _started.add(wandb.init(**self.config).id)
        elif wandb.run.id != self.config.get("id"):
            logger.warning("A W&B run is active already (%s); it is used, and not `wandb_config`.", wandb.run.id)


def wandb_identity() -> dict[str, Any] | None:
    """`id`, `project` and `entity` of the active W&B run; `None` without one."""
    import wandb

    if wandb.run is None:
        return None
    return {"id": wandb.run.id, "project": wandb.run.project, "entity": wandb.run.entity or None}
