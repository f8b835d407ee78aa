# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What a team trainer writes and reads: exports, training checkpoints, the card."""

import functools
import json
import math
import os
import shutil
from collections.abc import Sequence
from typing import Any

from transformers import Trainer

from ..callbacks.boundary_checkpoints import BoundaryCheckpoints
from ..callbacks.wandb_run import wandb_identity
from ..checkpoints.export import load_team, save_team, team_card
from ..checkpoints.metadata import TEAM_STATE_FILE


class TeamSaving(Trainer):
    """
    The part of [`MultiAgentTrainer`] that saves the team, and resumes a training from a checkpoint.
    """

    _saving_checkpoint = False
    # Where the checkpoint that is being written goes, if not to `output_dir`
    _checkpoint_parent: str | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial=None,
        ignore_keys_for_eval: list[str] | None = None,
        checkpoint_dir: str | os.PathLike | None = None,
        checkpoint_interval: int = 1,
    ):
        """
        Train as `transformers.Trainer.train`; afterwards the actors use their caches as they did before.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint, of either kind, or `True` for the latest one in `output_dir`.
            trial, ignore_keys_for_eval:
                As for `transformers.Trainer.train`.
            checkpoint_dir (`str`, *optional*):
                Where to save `checkpoint-1`, `checkpoint-2`, ... at the ends of epochs and of the training. Default:
                nowhere; `save_strategy` saves into `output_dir` as usual.
            checkpoint_interval (`int`, *optional*, defaults to `1`):
                Every how many epochs.
        """
        boundaries = None
        if checkpoint_dir is not None:
            save = functools.partial(self._save_boundary, os.fspath(checkpoint_dir))
            boundaries = BoundaryCheckpoints(save, checkpoint_interval)
            self.add_callback(boundaries)
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            self._check_checkpoint(resume_from_checkpoint)
        self._step, self._buffered_inputs = 0, None  # what an earlier training left is not used
        self._set_caches([self.args.use_cache] * len(self.agents))
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            self._set_caches(self._loaded_caches)
            if boundaries is not None:
                self.remove_callback(boundaries)

    def _check_checkpoint(self, checkpoint: str | os.PathLike) -> None:
        """Raise an error, before anything is loaded, if a checkpoint is not one of this kind of trainer."""
        path = os.path.join(checkpoint, TEAM_STATE_FILE)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{checkpoint!r} is no checkpoint of a team: it has no {TEAM_STATE_FILE}.")
        with open(path, encoding="utf-8") as file:
            held = sorted(json.load(file))
        if held != sorted(self._team_state()):
            raise ValueError(
                f"The checkpoint {checkpoint!r} was written by another kind of trainer: it holds {held}, expected "
                f"{sorted(self._team_state())}. Resume it with the trainer that wrote it."
            )

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
        output_dir = self.args.output_dir if output_dir is None else output_dir
        tokenizers = [*self.tokenizers, *self.critic_tokenizers]
        # A training checkpoint is loaded into the same model, so its adapters are not merged
        merged = None if self._saving_checkpoint else self._merged_in_exports
        current = [getattr(actor.config, "use_cache", None) for actor in self.agents]
        self._set_caches(self._loaded_caches)  # in an export, also in the middle of training
        try:
            save_team(self.model, tokenizers, output_dir, self.accelerator, merged)
        finally:
            self._set_caches(current)
        if self._saving_checkpoint and self.args.should_save:  # now: the checkpoint may be pushed right after
            with open(os.path.join(output_dir, TEAM_STATE_FILE), "w", encoding="utf-8") as file:
                json.dump(self._team_state(), file)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Team save", revision=self.args.hub_revision)

    def _get_output_dir(self, trial) -> str:
        return super()._get_output_dir(trial) if self._checkpoint_parent is None else self._checkpoint_parent

    def _save_boundary(self, directory: str, number: int) -> None:
        """Save `directory/checkpoint-<number>`, which appears under this name when it is complete."""
        self._checkpoint_parent = os.path.join(directory, f".checkpoint-{number}.partial")
        target = os.path.join(directory, f"checkpoint-{number}")
        if self.is_world_process_zero():
            shutil.rmtree(self._checkpoint_parent, ignore_errors=True)
        try:
            self._save_checkpoint(self.model_wrapped, None)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                shutil.rmtree(target, ignore_errors=True)
                os.replace(os.path.join(self._checkpoint_parent, f"checkpoint-{self.state.global_step}"), target)
                shutil.rmtree(self._checkpoint_parent)
            self.accelerator.wait_for_everyone()
        finally:
            self._checkpoint_parent = None

    def _save_checkpoint(self, model, trial) -> None:
        self._saving_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_checkpoint = False

    def _team_state(self) -> dict[str, Any]:
        """What the run's future depends on besides models and optimizer, as JSON."""
        return {
            "wandb": wandb_identity() if "wandb" in self.args.report_to else None,
            "env_step": self.env_step,
            "influence": self._influence.state(),
            "entropy_control": [agent.entropy_control() for agent in self.agent_trainers]
            if self.args.use_adaptive_entropy
            else None,
        }

    def _load_team_state(self, state: dict[str, Any]) -> None:
        self.env_step = state["env_step"]
        self._influence.load(state["influence"])
        if self.args.use_adaptive_entropy and state["entropy_control"] is not None:
            for agent, control in zip(self.agent_trainers, state["entropy_control"], strict=True):
                agent.load_entropy_control(control)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            with open(os.path.join(checkpoint, TEAM_STATE_FILE), encoding="utf-8") as file:
                self._load_team_state(json.load(file))
            sampler, accumulation = self._train_sampler, self.args.gradient_accumulation_steps
            self._step = self.state.global_step * accumulation
            if sampler is not None:
                # Accelerate does not tell the sampler of the epoch where several processes share it
                sampler.set_epoch(math.floor(round(self.state.epoch or 0, 6)))
                updates = -(-sampler.num_batches * sampler.repeat_count // accumulation)  # in an epoch
                self._step = self.state.global_step % updates * accumulation

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        load_team(self.model, resume_from_checkpoint, self.args.trust_remote_code)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            load_team(self.model, self.state.best_model_checkpoint, self.args.trust_remote_code)
