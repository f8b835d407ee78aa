# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Iterative multi-agent direct preference optimization."""

from typing import Any

import torch

from .iterative_trainer import IterativePreferenceTrainer
from .madpo_trainer import MADPOTrainer
from .preference_config import MADPOIterConfig


class MADPOIterTrainer(IterativePreferenceTrainer, MADPOTrainer):
    """
    Iterative MADPO: the team answers, learns from the pairs by [`MADPOTrainer`]'s loss, and answers again. The
    reference stays the team's start. See [`IterativePreferenceTrainer`].

    Iterations differ in how many pairs they find. Each takes an equal share of the learning-rate schedule, and the
    number of steps that is left is estimated by the iteration that runs.

    Args: see [`PreferenceTrainer`].
    """

    config_class = MADPOIterConfig

    # Optimizer step at which the iteration began; steps of the first iteration, by which the schedule is planned
    _first_step = 0
    _planned_steps = 0

    def _prepare_iteration(self) -> None:
        super()._prepare_iteration()
        self._first_step = self.state.global_step if self._iteration else 0
        if self._iteration and self._pairs:
            self.get_train_dataloader()
            self.state.max_steps = self._first_step + self._updates * self._epochs_left
            self._collect_point_of_begin()

    @property
    def _updates(self) -> int:
        """Optimizer steps in an epoch of this iteration."""
        return -(-len(self._loader) // self.args.gradient_accumulation_steps)

    @property
    def _epochs_left(self) -> int:
        """Epochs from the begin of this iteration on."""
        return int(self.args.num_train_epochs) * (self.args.num_iterations - self._iteration)

    def set_initial_training_values(self, args, dataloader):
        *values, _ = super().set_initial_training_values(args, dataloader)
        if self._iteration == 0:
            self._planned_steps = self._updates * int(args.num_train_epochs)
        return (*values, self._first_step + self._updates * self._epochs_left)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer = None):
        """The schedule of as many steps as if all iterations were like the first, gone through at the true pace."""
        scheduler = super().create_scheduler(self._planned_steps * self.args.num_iterations, optimizer)
        if self._created_lr_scheduler and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            scheduler.lr_lambdas = [self._at_true_pace(factor) for factor in scheduler.lr_lambdas]
        return scheduler

    def _at_true_pace(self, factor):
        def factor_at(step: int) -> float:
            steps = self._updates * int(self.args.num_train_epochs)
            done = self._planned_steps * (self._iteration + (step - self._first_step) / steps)
            return factor(done if done % 1 else int(done))

        return factor_at

    def _run_epoch(self, *, epoch: int, **kwargs) -> None:
        if not self._pairs:  # this iteration found none
            self._steps_in_epoch = 0
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            return
        of_iteration = {
            "train_dataloader": self._loader,
            "steps_in_epoch": len(self._loader),
            "num_update_steps_per_epoch": self._updates,
        }
        super()._run_epoch(epoch=epoch, **{**kwargs, **of_iteration})

    def _team_state(self) -> dict[str, Any]:
        state = super()._team_state()
        state["preferences"] |= {"first_step": self._first_step, "planned_steps": self._planned_steps}
        return state

    def _load_preferences(self, state: dict[str, Any]) -> None:
        super()._load_preferences(state)
        self._first_step, self._planned_steps = state["first_step"], state["planned_steps"]
