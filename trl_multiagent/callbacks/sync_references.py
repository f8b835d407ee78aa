# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Moving reference models along with the actors."""

from collections.abc import Sequence

from transformers import TrainerCallback

from .._compat import SyncRefModelCallback
from ..models.critic import without_value_head


class SyncReferencesCallback(TrainerCallback):
    """
    Mixes every actor into its reference model each `ref_model_sync_steps` steps (TR-DPO, `sync_ref_model`): TRL's own
    callback for each actor, on the actor's model instead of the team's.

    Args:
        agents (sequence of [`GRPOAgent`]):
            The actors' trainers.
    """

    def __init__(self, agents: Sequence):
        self.pairs = [(agent, SyncRefModelCallback(agent.ref_model, agent.accelerator)) for agent in agents]

    def on_step_end(self, args, state, control, **kwargs):
        for agent, callback in self.pairs:
            with without_value_head(agent.model):  # the reference has none
                callback.on_step_end(args, state, control, **{**kwargs, "model": agent.model})
