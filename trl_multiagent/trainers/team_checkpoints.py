# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""A team trainer's training state: what a checkpoint holds, when it is written, and how a run goes on from one."""

import copy
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from .._compat import get_callable_name, rotate_checkpoints
from ..checkpoints import storage
from ..checkpoints.export import entity_directories, load_team, load_weights
from ..checkpoints.metadata import RUN_FILE, read_run_file
from ..checkpoints.optimizer_state import load_optimizer_state, optimizer_state
from ..checkpoints.random_states import random_states, set_random_states
from ..checkpoints.settings import (
    as_json,
    check_settings,
    describe_dataset,
    describe_model,
    describe_options,
    describe_tokenizer,
    sample_of_weights,
    versions,
)
from ..checkpoints.stateful import RunTracker, Stateful, check_plain
from ..checkpoints.storage import Attempt, CheckpointError, Sealer
from ..placement.backends import describe_backend, full_parameters, load_engine, save_engine
from .preemption import EXIT_CODE, Preemption
from .team_data import TeamData
from .team_saving import TeamSaving


logger = logging.getLogger(__name__)

TRAINER_STATE_FILE = "trainer_state.json"  # transformers' own
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
SCALER_FILE = "scaler.pt"
REFERENCES = "references"


@dataclass
class Position:
    """Where in its data a training stands: the epoch, and how many of its batches were trained on this process."""

    epoch: int = 0
    batches: int = 0


@dataclass
class Boundaries:
    """The documents' checkpoints: where, and every how many epochs."""

    directory: str
    interval: int

    def __post_init__(self):
        if self.interval < 1:
            raise ValueError(f"checkpoint_interval={self.interval}, expected 1 or more.")


class RunHooks(TrainerCallback):
    """Tells a trainer of moments for which `Trainer` has no method. Stands before all other callbacks."""

    def __init__(self, trainer: "TeamCheckpoints"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.trainer._on_train_begin()

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.trainer._on_epoch_begin()

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self.trainer._on_epoch_end(control.should_training_stop)


class TeamCheckpoints(TeamData, TeamSaving, Trainer):
    """
    The part of [`MultiAgentTrainer`] that saves and resumes a training.

    One writer serves Hugging Face's saves (`save_strategy`, `output_dir/checkpoint-<step>`), those at the ends of
    epochs (`checkpoint_dir/checkpoint-<epoch>`) and SIGTERM. What it writes besides models and optimizer is a *point*:
    a dict of all that the run's future depends on, the same on whichever occasion it is collected. Trainers with a
    state of their own extend `_team_state` and `_load_team_state`.
    """

    # Where the training stands
    _position = Position()
    _steps_in_epoch: int | None = None
    _epoch_ended = False
    _boundaries: Boundaries | None = None
    _preemption: Preemption | None = None
    # The checkpoint that this training goes on from, and its point; the point after the last step
    _resumed: str | None = None
    _resumed_point: dict[str, Any] | None = None
    _point: dict[str, Any] | Exception | None = None
    # Gradient norm and learning rate of the last step
    _last_step: tuple[Any, float | None] = (None, None)
    # Whether the random states of the checkpoint are set again
    _random_states_wait = False
    # The optimizer and the scheduler that the user gave
    _given_optimizers: tuple = (None, None)
    # The step of each checkpoint that this training wrote or read; what the run is set up with
    _written: dict[str, int]
    _settings: dict[str, Any]

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike | bool | None = None,
        trial=None,
        ignore_keys_for_eval: list[str] | None = None,
        checkpoint_dir: str | os.PathLike | None = None,
        checkpoint_interval: int = 1,
    ):
        """
        Train as `transformers.Trainer.train`; afterwards the actors use their caches as they did before.

        Where checkpoints are saved (by `save_strategy` or `checkpoint_dir`), SIGTERM lets the running micro-step end,
        saves, and exits with status 143.

        Args:
            resume_from_checkpoint (`str`, path or `bool`, *optional*):
                A checkpoint of either kind, or `True` for the one that was saved last, in `output_dir` or
                `checkpoint_dir`, among those that are whole.
            trial, ignore_keys_for_eval:
                As for `transformers.Trainer.train`.
            checkpoint_dir (`str` or path, *optional*):
                Where to save `checkpoint-1`, `checkpoint-2`, ... at the ends of epochs and of the training. Default:
                nowhere; `save_strategy` saves into `output_dir` as usual.
            checkpoint_interval (`int`, *optional*, defaults to `1`):
                Every how many epochs.

        Raises:
            CheckpointError: the checkpoint is damaged, or was written by a run that was set up otherwise. Nothing is
                loaded then.
            TypeError: a `state_dict()` of the dataset, a callback or a reward function holds what cannot be saved.
        """
        self._boundaries = (
            None if checkpoint_dir is None else Boundaries(os.fspath(checkpoint_dir), checkpoint_interval)
        )
        self._check_directories()
        saves = self._boundaries is not None or self.args.save_strategy != "no"
        self._settings = self._describe() if saves or resume_from_checkpoint else {}
        if saves:
            for name, stateful in self._stateful().items():
                check_plain(name, stateful.state_dict())
        self._resumed = self._find_checkpoint(resume_from_checkpoint)
        self._resumed_point = None if self._resumed is None else self._read_point(self._resumed)
        self._written = {} if self._resumed is None else {os.path.realpath(self._resumed): self._resumed_point["step"]}
        self._random_states_wait = self._resumed is not None
        # What an earlier training left is not used
        self._step, self._buffered_inputs, self._point = 0, None, None
        self._metrics.clear()
        self._completions.load([])
        self._step_time, self._last_step = 0.0, (None, None)
        if self._decay_guard is not None:
            self._decay_guard.clear()
        self._set_caches([self.args.use_cache] * len(self.agents))
        self._preemption = Preemption(self.accelerator, saves)
        hooks, evaluates_on_start = RunHooks(self), self.args.eval_on_start
        self.callback_handler.callbacks.insert(0, hooks)
        self.args.eval_on_start = evaluates_on_start and self._resumed is None  # the run has started long ago
        try:
            with self._preemption.noted():
                return super().train(self._resumed, trial, ignore_keys_for_eval)
        finally:
            self._set_caches(self._loaded_caches)
            self.callback_handler.callbacks.remove(hooks)
            self.args.eval_on_start = evaluates_on_start
            self._resumed = self._resumed_point = self._point = None

    def _check_directories(self) -> None:
        """Refuse one directory for both kinds of checkpoints, whose names have different numbers."""
        if self._boundaries is None or self.args.save_strategy == "no":
            return
        directory = self._boundaries.directory
        if os.path.realpath(directory) == os.path.realpath(self.args.output_dir):
            raise ValueError(
                f"checkpoint_dir={directory!r} is the output_dir too, in which save_strategy numbers checkpoints by "
                "steps: they would overwrite each other. Use another directory, or save_strategy='no'."
            )

    # What a run is, and what its future depends on

    def _describe(self) -> dict[str, Any]:
        """What the run is set up with, as JSON: what must be the same at a resume."""
        tokenizers = [*self.tokenizers, *self.critic_tokenizers]
        entities = entity_directories(self.model)
        description = {
            "trainer": type(self).__name__,
            "options": describe_options(self.args),
            "agent_names": self.agent_names,
            "trainable_agents": self.trainable,
            **{name: describe_model(module) for name, module in entities},
            **{
                f"{name}/tokenizer": describe_tokenizer(tokenizer)
                for (name, _), tokenizer in zip(entities, tokenizers, strict=True)
            },
            **{
                f"agent_{index}/reference": sample_of_weights(agent.ref_model.named_parameters())
                for index, agent in enumerate(self.agent_trainers)
                if agent.ref_model is not None and not self.args.sync_ref_model  # those that move are saved
            },
            "train_dataset": describe_dataset(self.train_dataset),
            "reward_func": self.reward.names,
            "formatters": [get_callable_name(formatter.formatter) for formatter in self.formatters],
            "external_transition": None if self.transition is None else self.transition.name,
            "optimizers": [None if given is None else type(given).__name__ for given in self._given_optimizers],
            "backend": describe_backend(self.accelerator),
        }
        return json.loads(as_json(description))

    def _stateful(self) -> dict[str, Stateful]:
        """The user's objects that have a state, by names that are the same in a trainer built alike."""
        found: dict[str, Stateful] = {}
        # A stream is gone through again instead, which leaves it in the same state
        streamed = isinstance(self.train_dataset, torch.utils.data.IterableDataset)
        objects = [] if streamed else [("train_dataset", self.train_dataset)]
        objects += [(f"callback {type(callback).__name__}", callback) for callback in self.callback_handler.callbacks]
        objects += [
            (f"reward function {name}", f) for name, f in zip(self.reward.names, self.reward.funcs, strict=True)
        ]
        for name, thing in objects:
            if isinstance(thing, Stateful) and not isinstance(thing, (nn.Module, torch.optim.Optimizer)):
                same = sum(other.split(" #")[0] == name for other in found)
                found[name if not same else f"{name} #{same + 1}"] = thing
        return found

    def _trackers(self) -> dict[str, RunTracker]:
        return {c.tracker: c for c in self.callback_handler.callbacks if isinstance(c, RunTracker)}

    def _team_state(self) -> dict[str, Any]:
        """What the trainer's future depends on besides models and optimizer; tensors, numbers, texts, lists, dicts."""
        return {
            "influence": self._influence.state(),
            "entropy_control": [agent.entropy_control() for agent in self.agent_trainers],
        }

    def _load_team_state(self, state: dict[str, Any]) -> None:
        self._influence.load(state["influence"])
        for agent, control in zip(self.agent_trainers, state["entropy_control"], strict=True):
            agent.load_entropy_control(control)

    def _collect_point(self) -> dict[str, Any]:
        """What the future of this process depends on besides models and optimizer, after a step."""
        uses = self.args.steps_per_generation * self.args.updates_per_rollout
        position = self._position
        if self.control.should_epoch_stop and not self._epoch_ended:  # a callback ended the epoch in its middle
            position = Position(position.epoch + 1)
        states = {name: copy.deepcopy(stateful.state_dict()) for name, stateful in self._stateful().items()}
        if self._fetched_rows is not None and "train_dataset" in states:
            states["train_dataset"] = self._fetched_rows.state_before(self._position.batches)
        return {
            "step": self.state.global_step,
            "env_step": self.env_step,
            "num_input_tokens_seen": self.state.num_input_tokens_seen,
            "micro_step": self._step,
            "epoch": position.epoch,
            "batches": position.batches,
            "rollout_buffer": self._buffered_inputs if self._step % uses else None,
            "random_states": random_states(),
            "loss": {
                "sum": self._tr_loss.detach().cpu().clone(),
                "last_logged": self._globalstep_last_logged,
                "last_step": [float(value) if value is not None else None for value in self._last_step],
            },
            "metrics": self._metrics.state(),
            "completions": self._completions.state(),
            "team": self._team_state(),
            "stateful": states,
        }

    def _try_to_collect(self) -> "dict[str, Any] | Exception":
        """The point; or why there is none, for the time when it is needed."""
        try:
            return self._collect_point()
        except Exception as error:
            return error

    # When: after a step's log and evaluation, at the end of an epoch after those of the epoch

    def _on_train_begin(self) -> None:
        """Go on with what waited for the next log, which `Trainer` sets to its start."""
        if self._resumed_point is not None:
            self._tr_loss += self._resumed_point["loss"]["sum"].to(self._tr_loss)
            self._globalstep_last_logged = self._resumed_point["loss"]["last_logged"]
            self._last_step = tuple(self._resumed_point["loss"]["last_step"])
        elif self.state.global_step == 0:
            self._position = Position()

    def _on_epoch_begin(self) -> None:
        self._epoch_ended = False
        if self._position.batches == 0:  # before what other callbacks draw; in mid-epoch they drew long ago
            self._restore_random_states()

    def _on_epoch_end(self, training_stops: bool) -> None:
        self._epoch_ended = True
        complete = self._position.batches == self._steps_in_epoch
        if complete or not training_stops:
            self._position = Position(self._position.epoch + 1)
            if self._fetched_rows is not None:
                self._fetched_rows.start(0)

    def _run_epoch(self, *, epoch: int, steps_in_epoch: int, **kwargs) -> None:
        if self._had_ended():
            self.control.should_training_stop = True
            return
        self._steps_in_epoch = steps_in_epoch
        if epoch != self._position.epoch:
            self._position = Position(epoch)
        if self._fetched_rows is not None:
            self._fetched_rows.start(self._position.batches)
        super()._run_epoch(epoch=epoch, steps_in_epoch=steps_in_epoch, **kwargs)

    def _had_ended(self) -> bool:
        """Whether the checkpoint is that of a run's end, within an epoch: by its length, or by early stopping."""
        stopped = any(
            callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
            if isinstance(callback, EarlyStoppingCallback)
        )
        return self.state.global_step >= self.state.max_steps or (self._resumed is not None and stopped)

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args, learning_rate=None, **kwargs) -> None:
        if learning_rate is None:  # no step was done since the resume: this is the end of the last one's epoch
            grad_norm, learning_rate = self._last_step
        self._last_step = grad_norm, learning_rate
        if self._position.batches == self._steps_in_epoch and not self._epoch_ended:
            return  # the epoch's end follows at once, and logs, evaluates and saves: a checkpoint holds that too
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)
        if self._boundaries is not None and self._epoch_ended:
            is_last = self.control.should_training_stop or self._position.epoch >= self.state.num_train_epochs
            number, complete = self._completed()
            if is_last or (complete and number % self._boundaries.interval == 0):
                self._write(self._boundary(number))
        if self._preemption.enabled:
            self._point = self._try_to_collect()

    def _completed(self) -> tuple[int, bool]:
        """Number of the boundary at the end of an epoch, and whether it is one (the training may end elsewhere)."""
        return self._position.epoch + (self._position.batches > 0), True

    def _boundary(self, number: int) -> str:
        return os.path.join(self._boundaries.directory, f"checkpoint-{number}")

    def _end_if_preempted(self) -> None:
        """Before a micro-step: if SIGTERM came, save the run as it was after the last step, and exit."""
        if not self._preemption.requested():
            return
        step = self.state.global_step
        if self._boundaries is not None:
            target = self._boundary(max(1, self._completed()[0]))
        else:
            target = os.path.join(self.args.output_dir, f"checkpoint-{step}")
        at_this_step = [checkpoint for checkpoint, written in self._written.items() if written == step]
        if at_this_step:
            saved = at_this_step[-1]
        elif self._point is None:
            saved = None
        else:
            saved = target if self._write(target, self._point, models_only=False) else None
        if saved is not None:
            message = f"It can be resumed from {saved}."
        elif step == 0:
            message = "No step was done yet, so nothing was saved."
        else:
            message = "No checkpoint could be saved."
        if self.is_world_process_zero():
            logger.warning("The training was ended by SIGTERM after %d optimizer steps. %s", step, message)
        for tracker in self._trackers().values():
            tracker.on_preemption()
        raise SystemExit(EXIT_CODE)

    # Writing

    def _save_checkpoint(self, model, trial) -> None:
        """Write `output_dir/checkpoint-<step>`, push it, and remove the oldest."""
        directory = self._get_output_dir(trial)
        target = os.path.join(directory, f"checkpoint-{self.state.global_step}")
        best, is_best = self.state.best_model_checkpoint, self.state.best_global_step == self.state.global_step
        if is_best:
            self.state.best_model_checkpoint = target
        if not self._write(target):
            self.state.best_model_checkpoint = best
            return
        if self.args.push_to_hub:
            self._push_from_checkpoint(target)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=directory,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _write(
        self, target: str, point: dict[str, Any] | Exception | None = None, models_only: bool | None = None
    ) -> bool:
        """
        Write the checkpoint `target`, which appears when it is complete. Call it on every process.

        Args:
            target (`str`):
                Directory of the checkpoint.
            point (`dict`, *optional*):
                What `_try_to_collect` returned after the last step. Default: as it is now.
            models_only (`bool`, *optional*):
                Leave out what a run needs to go on. Default: `save_only_model`.

        Returns:
            `bool`: whether it was written. Otherwise the reason is in the log, earlier checkpoints are as they were,
            and so is the training.
        """
        self.store_flos()
        point = self._try_to_collect() if point is None else point
        models_only = self.args.save_only_model if models_only is None else models_only
        attempt, writes, staged, sealer = Attempt(), self.args.should_save, storage.stage(target), Sealer(target)
        if isinstance(point, Exception):
            attempt.error = point
        if writes:
            attempt(storage.begin, target)
        self._agree(attempt)
        self._write_models(staged, None, attempt)
        if writes:
            attempt(sealer.seal, *(name for name, _ in entity_directories(self.model)))
        if not models_only:
            self._write_references(staged / REFERENCES, attempt)
            self._write_more(staged, attempt)
            self._write_optimizer(staged, attempt)
            attempt(self._save_point, point, staged)
        if writes:
            attempt(self._write_run, staged, point, models_only)
        self._agree(attempt)
        if writes:
            attempt(storage.commit, target, sealer)
        self._agree(attempt)
        if attempt.error is None:
            if not models_only:
                self._written[os.path.realpath(target)] = self.state.global_step
            return True
        sealer.close()
        if writes:
            storage.discard(target)
        logger.error(
            "The checkpoint %s could not be saved: %s: %s. The training goes on; earlier checkpoints are untouched.",
            target,
            type(attempt.error).__name__,
            attempt.error,
            exc_info=attempt.error,
        )
        return False

    def _save_point(self, point: dict[str, Any], staged: Path) -> None:
        check_plain("the training", point, "the point")
        storage.save_tensors(point, staged / _point_file(self.accelerator.process_index))

    def _agree(self, attempt: Attempt) -> None:
        """Let every process know if a part failed on any."""
        own = None if attempt.error is None else f"{type(attempt.error).__name__}: {attempt.error}"
        errors = gather_object([own])
        failed = [f"process {index}: {error}" for index, error in enumerate(errors) if error is not None]
        if failed and attempt.error is None:
            attempt.error = RuntimeError("; ".join(failed))

    def _write_references(self, directory: Path, attempt: Attempt) -> None:
        """Write the reference models that move during training."""
        for name, reference in self._moving_references():
            with full_parameters(reference):
                if self.args.should_save:
                    attempt(reference.save_pretrained, directory / name)

    def _write_more(self, staged: Path, attempt: Attempt) -> None:
        """Write what a trainer goes on with besides, into the stage of a checkpoint. Called on every process."""

    def _read_more(self, checkpoint: Path) -> None:
        """Load what `_write_more` wrote, when models, optimizer and point are loaded."""

    def _moving_references(self) -> list[tuple[str, nn.Module]]:
        if not self.args.sync_ref_model:
            return []
        return [
            (f"agent_{index}", self.accelerator.unwrap_model(agent.ref_model))
            for index, agent in enumerate(self.agent_trainers)
            if agent.trainable
        ]

    def _write_optimizer(self, staged: Path, attempt: Attempt) -> None:
        if self.is_deepspeed_enabled:
            save_engine(self.model_wrapped, str(staged), attempt, storage.save_tensors)
        elif self.args.should_save:
            attempt(self._save_optimizer, staged / OPTIMIZER_FILE)
        if self.args.should_save:
            attempt(self._save_scheduler, staged)

    def _save_optimizer(self, path: Path) -> None:
        storage.save_tensors(optimizer_state(self.optimizer, self.model), path)

    def _save_scheduler(self, staged: Path) -> None:
        storage.save_tensors(self.lr_scheduler.state_dict(), staged / SCHEDULER_FILE)
        if self.accelerator.scaler is not None:
            storage.save_tensors(self.accelerator.scaler.state_dict(), staged / SCALER_FILE)

    def _write_run(self, staged: Path, point: dict[str, Any], models_only: bool) -> None:
        """Write transformers' state, and what the checkpoint says of its run."""
        callbacks = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        self.state.stateful_callbacks = {}
        for callback in callbacks:
            self.state.stateful_callbacks.setdefault(type(callback).__name__, []).append(callback.state())
        seen, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen, point["num_input_tokens_seen"]
        try:
            self.state.save_to_json(str(staged / TRAINER_STATE_FILE))
        finally:
            self.state.num_input_tokens_seen = seen
        run = {
            "step": point["step"],
            "env_step": point["env_step"],
            "max_steps": self.state.max_steps,
            "models_only": models_only,
            "trackers": {name: tracker.identity() for name, tracker in self._trackers().items()},
            "versions": versions(),
            "settings": self._settings,
        }
        (staged / RUN_FILE).write_text(json.dumps(run, indent=1), encoding="utf-8")

    # Resuming

    def _find_checkpoint(self, wanted: str | os.PathLike | bool | None) -> str | None:
        """The checkpoint to resume, verified and checked against this trainer, the same on every process."""
        if wanted is None or wanted is False:
            return None
        found: list[Any] = [None, None]
        if self.is_world_process_zero():
            try:
                found[0] = self._verified(wanted)
            except Exception as error:
                found[1] = error
        error = found[1]
        told = broadcast_object_list([found[0], None if error is None else str(error)])
        if told[1] is not None:
            raise error if error is not None else CheckpointError(told[1])
        return told[0]

    def _verified(self, wanted: str | os.PathLike | bool) -> str:
        if wanted is not True:
            storage.restore_replaced(Path(wanted).parent)
            storage.verify(wanted)
            checkpoint = os.fspath(wanted)
        else:
            directories = [self.args.output_dir, *([self._boundaries.directory] if self._boundaries else [])]
            newest, skipped = storage.newest_valid(directories)
            for reason in skipped:
                logger.warning("A checkpoint is skipped: %s", reason)
            if newest is None:
                raise CheckpointError(
                    f"resume_from_checkpoint=True, but {' and '.join(directories)} hold no checkpoint that is whole. "
                    + " ".join(skipped)
                )
            checkpoint = str(newest)
            logger.warning("The training goes on from %s.", checkpoint)
        run = read_run_file(checkpoint)
        if run["models_only"]:
            raise CheckpointError(
                f"The checkpoint {checkpoint!r} was saved with save_only_model=True: it holds models and no training "
                "state. Start a new run from its `agent_i/` directories."
            )
        saved = run["settings"]["trainer"]
        if saved != type(self).__name__:
            raise CheckpointError(
                f"The checkpoint {checkpoint!r} was written by another kind of trainer, {saved}; this is a "
                f"{type(self).__name__}. Resume it with the trainer that wrote it."
            )
        check_settings(checkpoint, run["settings"], self._settings)
        now = versions()
        changed = [f"{name} {old} -> {now.get(name)}" for name, old in run["versions"].items() if now.get(name) != old]
        if changed:
            logger.warning(
                "The checkpoint was written with other versions, so bits may differ: %s", ", ".join(changed)
            )
        return checkpoint

    def _read_point(self, checkpoint: str) -> dict[str, Any]:
        attempt, read = Attempt(), []
        attempt(lambda: read.append(self._load_own_point(checkpoint)))
        self._agree(attempt)
        if attempt.error is not None:
            raise attempt.error
        return read[0]

    def _load_own_point(self, checkpoint: str) -> dict[str, Any]:
        path = os.path.join(checkpoint, _point_file(self.accelerator.process_index))
        if not os.path.isfile(path):
            raise CheckpointError(
                f"{path} is not there for this process, although the main one found the checkpoint whole. All "
                "processes must see the directory; without a shared one, copy it to each machine."
            )
        return torch.load(path, map_location="cpu", weights_only=True)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial):
        if checkpoint is not None:
            before = read_run_file(checkpoint)["max_steps"]
            if max_steps < before:
                raise CheckpointError(
                    f"This run has {max_steps} steps in all, the one that wrote {checkpoint!r} had {before}. "
                    "`num_train_epochs` and `max_steps` count the whole run; they may be raised, not lowered."
                )
        start = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        if checkpoint is None:
            self._position = Position()
            return start
        if not self.is_deepspeed_enabled:
            load_team(self.model, checkpoint, self.args.trust_remote_code)
        self.state.compute_steps(self.args, max_steps)  # the intervals of this config, not of the checkpoint's
        self._find_best_checkpoint(checkpoint)
        point = self._resumed_point
        self._position = Position(point["epoch"], point["batches"])
        self._load_user_states(point["stateful"])
        self._load_callback_attributes()
        identities = read_run_file(checkpoint)["trackers"]
        for name, tracker in self._trackers().items():
            if identities.get(name) is not None:
                tracker.continue_run(identities[name])
        return self._position.epoch, self._position.batches

    def _find_best_checkpoint(self, checkpoint: str) -> None:
        """Where the best checkpoint lies now, if it was moved with the others; transformers forgets it."""
        with open(os.path.join(checkpoint, TRAINER_STATE_FILE), encoding="utf-8") as file:
            best = json.load(file)["best_model_checkpoint"]
        if best is None or self.state.best_model_checkpoint is not None:
            return
        moved = os.path.join(os.path.dirname(os.path.abspath(checkpoint)), os.path.basename(best))
        if os.path.isdir(moved):
            self.state.best_model_checkpoint = moved
        else:
            logger.warning("The best checkpoint so far, %s, is not there any more, so it cannot be loaded.", best)

    def _load_user_states(self, states: dict[str, Any]) -> None:
        stateful = self._stateful()
        for name, thing in stateful.items():
            if name in states:
                thing.load_state_dict(states[name])
        missing = sorted(states.keys() - stateful.keys())
        if missing:
            logger.warning("The checkpoint holds states that nothing in this trainer takes: %s.", ", ".join(missing))

    def _load_callback_attributes(self) -> None:
        """Give transformers' own stateful callbacks, such as early stopping, what they had."""
        left = {name: list(states) for name, states in self.state.stateful_callbacks.items()}
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState) and left.get(type(callback).__name__):
                for name, value in left[type(callback).__name__].pop(0)["attributes"].items():
                    setattr(callback, name, value)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Nothing yet: the run's length, which may be refused, is known in `_init_training_state`."""

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            self._load_training_state(Path(resume_from_checkpoint), self._resumed_point)
        return prepared

    def _load_training_state(self, checkpoint: Path, point: dict[str, Any]) -> None:
        if self.is_deepspeed_enabled:
            load_engine(self.model_wrapped, str(checkpoint))
        else:
            saved = torch.load(checkpoint / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
            load_optimizer_state(self.optimizer, self.model, saved)
        self.lr_scheduler.load_state_dict(torch.load(checkpoint / SCHEDULER_FILE, weights_only=True))
        if self.state.max_steps != read_run_file(checkpoint)["max_steps"]:
            self._follow_longer_schedule()
        if self.accelerator.scaler is not None and (checkpoint / SCALER_FILE).is_file():
            self.accelerator.scaler.load_state_dict(torch.load(checkpoint / SCALER_FILE, weights_only=True))
        for name, reference in self._moving_references():
            with full_parameters(reference, write=True):
                load_weights(reference, checkpoint / REFERENCES / name, self.args.trust_remote_code)
        self.env_step, self._step = point["env_step"], point["micro_step"]
        buffer = point["rollout_buffer"]
        self._buffered_inputs = None if buffer is None else send_to_device(buffer, self.accelerator.device)
        self._metrics.load(point["metrics"])
        self._completions.load(point["completions"])
        self._load_team_state(point["team"])
        self._read_more(checkpoint)
        if self._train_sampler is not None:
            # Accelerate does not tell the sampler of the epoch where several processes share it
            self._train_sampler.set_epoch(point["epoch"])

    def _follow_longer_schedule(self) -> None:
        """
        Let the next step have the learning rates that the longer run's schedule gives it: those of the checkpoint are
        of a shorter one, zero if it had come to its end.
        """
        scheduler = self.lr_scheduler
        if self._created_lr_scheduler and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
            rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self._restore_random_states()

    def _restore_random_states(self) -> None:
        """Set the checkpoint's random states, once: at the epoch's begin, or after its first batches were fetched."""
        if self._random_states_wait:
            self._random_states_wait = False
            set_random_states(self._resumed_point["random_states"])

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.is_deepspeed_enabled:
            load_engine(self.model_wrapped, best)
        else:
            load_team(self.model, best, self.args.trust_remote_code)


def _point_file(process: int) -> str:
    return f"process_{process}.pt"
