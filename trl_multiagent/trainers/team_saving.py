# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What a team trainer exports: models that load by themselves, and the card."""

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers import Trainer

from ..checkpoints.export import save_team, team_card


class TeamSaving(Trainer):
    """
    The part of [`MultiAgentTrainer`] that exports the team.
    """

    @property
    def _loaded_caches(self) -> list[bool | None]:
        return [agent.loaded_use_cache for agent in self.agent_trainers]

    def _set_caches(self, values: Sequence[bool | None]) -> None:
        """Set `use_cache` in the actors' configs; None for an architecture that has no such entry."""
        for actor, value in zip(self.agents, values, strict=True):
            if value is not None:
                actor.config.use_cache = value

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, **kwargs) -> None:
        """Write `README.md` of the team into `args.output_dir`: what it holds and how to load it."""
        if not self.is_world_process_zero():
            return
        os.makedirs(self.args.output_dir, exist_ok=True)
        card = team_card(self.model, type(self).__name__, model_name, dataset_name)
        with open(os.path.join(self.args.output_dir, "README.md"), "w", encoding="utf-8") as file:
            file.write(card)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Export the team: `agent_i/` for each actor, `critic/` for a central critic, `agent_i/critic/` for one of each
        actor, and `value_head.pt` beside the model it belongs to. Each loads by `from_pretrained` and is a source for
        a new trainer. No training state is written. Call it on every process.

        Args:
            output_dir (`str`, *optional*):
                Parent directory. Default: `args.output_dir`.
        """
        self._write_models(self.args.output_dir if output_dir is None else output_dir, self._merged_in_exports)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Team save", revision=self.args.hub_revision)

    def _write_models(
        self,
        directory: str | os.PathLike,
        merged: Collection[str] | None,
        attempt: Callable[..., Any] = lambda part, *args: part(*args),
    ) -> None:
        """Write every entity, as `save_team` does, with the actors' caches as they were loaded."""
        current = [getattr(actor.config, "use_cache", None) for actor in self.agents]
        self._set_caches(self._loaded_caches)  # also in the middle of training
        try:
            tokenizers = [*self.tokenizers, *self.critic_tokenizers]
            save_team(self.model, tokenizers, directory, self.args.should_save, merged, attempt)
        finally:
            self._set_caches(current)
