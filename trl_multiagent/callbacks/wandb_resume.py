# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One W&B run for a training, also when it is resumed: everything that the package knows of W&B."""

import copy
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import TrainerCallback
from transformers.integrations import WandbCallback, rewrite_logs

from .wandb_records import offline_files, rows


logger = logging.getLogger(__name__)

# The x-axis of all metrics, as transformers names it in W&B
X_AXIS = "train/env_step"

# A row of metrics: its kind ("train", or the first metric of an evaluation) and its optimizer step
Row = tuple[str, int]


@dataclass
class KnownRows:
    """
    What is known of the rows that a run has.

    Attributes:
        logged (`dict`): names of the metrics of each row, by the row; several may be logged for one.
        summary (`dict`): the last values, of a run that W&B resumed: it may lack some rows of its last step.
        complete_until (`int`): a step up to which it has all.
        is_told (`bool`): whether W&B told of rows from before this process.
    """

    logged: dict[Row, list[set[str]]] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    complete_until: int = -1
    is_told: bool = False

    def add(self, row: dict[str, Any], step: int) -> None:
        self.logged.setdefault((_kind(row), step), []).append(set(row))

    def has(self, row: dict[str, Any], step: int) -> bool:
        if step <= self.complete_until or any(set(row) <= names for names in self.logged.get((_kind(row), step), [])):
            return True
        if step != self.summary.get("train/global_step"):
            return False
        # It is the row of the summary, if that has its numbers; times are others where a step is done again
        numbers = [name for name in row if not name.endswith(("time", "_per_second", "epoch", "env_step"))]
        return all(self.summary.get(name) == row[name] for name in numbers)


# Ids of the runs that were started here; such a run ends when the next training starts one of its own
_started: set[str] = set()
# The rows of each run that was logged to in this process
_rows_of_runs: dict[str, KnownRows] = {}


class WandbResumeCallback(WandbCallback):
    """
    Logs a training to W&B as transformers' own callback does, with `env_step` as the x-axis, and goes on in the same
    run when a training is resumed. Rows that it has already, of steps that are done again, are not logged twice; rows
    up to the checkpoint that it has not, since a killed process takes its last ones along, are logged anew.

    It takes the place of transformers' callback, which `report_to="wandb"` brings; team trainers put it there by
    themselves. In another trainer pass it as a callback with `report_to="none"`; its x-axis is the optimizer step.

    Which run: an `id` or `resume` in `config`, or `WANDB_RUN_ID` or `WANDB_RESUME` in the environment, decides.
    Otherwise a resumed training goes on in the run that its checkpoint names, and any other starts a run of its own.

    Args:
        config (`dict`, *optional*):
            What `wandb.init` is called with: `project`, `entity`, `name`, `tags`, `dir`, `id`, `resume`, ... Its
            `config_sections`, a `dict`, is added to the run's config, one entry for each section.
    """

    tracker = "wandb"

    def __init__(self, config: Mapping[str, Any] | None = None):
        super().__init__()
        self.config = dict(config or {})
        sections = self.config.pop("config_sections", None)
        if sections is not None and not isinstance(sections, Mapping):
            raise TypeError(
                f"wandb_config['config_sections'] must be a dict of sections, got {type(sections).__name__}."
            )
        self._sections = dict(sections or {})
        self._checkpoint_identity: dict[str, Any] | None = None
        # What the run had when this training began; a step that is done again is not logged twice
        self._before = KnownRows()
        # Whether the run was told of its x-axis
        self._has_axis = False
        # The run of an evaluation before the training, which uses it too
        self._evaluated_run: str | None = None
        self._table: pd.DataFrame | None = None

    # A tracker of a resumed run, see `RunTracker`

    def identity(self) -> dict[str, Any] | None:
        """`id`, `project` and `entity` of the active run; `None` without one."""
        run = self._wandb.run
        return None if run is None else {"id": run.id, "project": run.project, "entity": run.entity or None}

    def continue_run(self, identity: dict[str, Any]) -> None:
        self._checkpoint_identity = dict(identity)

    def on_preemption(self) -> None:
        """Let W&B show the run as preempted."""
        if self._wandb.run is not None:
            self._wandb.run.mark_preempting()

    # Events

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        self._initialized = False  # a second training may have another run
        super().on_train_begin(args, state, control, model=model, **kwargs)
        if state.is_world_process_zero and self._continues_checkpoint():
            self._log_missing(args, state, control)
        self._checkpoint_identity = self._evaluated_run = None

    def setup(self, args, state, model, **kwargs) -> None:
        if state.is_world_process_zero:
            self._start(args, state)
        super().setup(args, state, model, **kwargs)
        if state.is_world_process_zero:
            if self._sections:
                self._wandb.config.update(self._sections, allow_val_change=True)
            self._has_axis = False

    def _start(self, args, state) -> None:
        """Start or continue the run."""
        wanted = self._wanted(args)
        run = self._wandb.run
        own = wanted.get("id", self._evaluated_run)
        if run is not None and run.id in _started - {own}:
            self._wandb.finish()
        if self._wandb.run is None:
            _started.add(self._wandb.init(**wanted).id)
        elif self.config and run.id != own:
            logger.warning("A W&B run is active already (%s); it is used, and not `wandb_config`.", run.id)
        run = self._wandb.run
        if run.id not in _rows_of_runs:
            _rows_of_runs[run.id] = self._find_rows(run)
        known = _rows_of_runs[run.id]
        self._before = copy.deepcopy(known) if known.is_told or state.global_step > 0 else KnownRows()
        if not known.is_told and not known.logged:  # the rows up to the checkpoint are taken to be there
            self._before.complete_until = state.global_step or -1

    def _wanted(self, args) -> dict[str, Any]:
        """What `wandb.init` is called with."""
        defaults = {"project": os.environ.get("WANDB_PROJECT", "huggingface")}
        if args.run_name is not None:
            defaults["name"] = args.run_name
        wanted = {**defaults, **self.config}
        explicit = {"id", "resume"} & wanted.keys() or {"WANDB_RUN_ID", "WANDB_RESUME"} & os.environ.keys()
        if self._checkpoint_identity is not None and not explicit:
            wanted |= {**self._checkpoint_identity, "resume": "allow"}
        return wanted

    def _continues_checkpoint(self) -> bool:
        return self._checkpoint_identity is not None and self._checkpoint_identity["id"] == self._wandb.run.id

    def _find_rows(self, run) -> KnownRows:
        """
        Find which rows a run has from before this process. W&B knows it of a run that it resumed; offline, the files
        of its earlier parts do.
        """
        if run.resumed:
            summary = dict(run.summary)
            return KnownRows(summary=summary, complete_until=summary.get("train/global_step", 0) - 1, is_told=True)
        files = offline_files(run.settings.wandb_dir, run.id) if run.offline else []
        earlier = [file for file in files if file.parent != Path(run.settings.sync_dir)]
        known = KnownRows(is_told=bool(earlier))
        for row in [row for file in earlier for row in rows(file) if "train/global_step" in row]:
            known.add(row, int(row["train/global_step"]))
        return known

    def _log_missing(self, args, state, control) -> None:
        """Log the rows up to the checkpoint that are not there."""
        for logs in state.log_history:
            past = copy.copy(state)
            past.global_step = logs["step"]
            self.on_log(args, past, control, logs={name: logs[name] for name in logs if name != "step"})

    def on_completions(self, args, state, control, table: pd.DataFrame) -> None:
        """Keep a table of completions for the row that is logged next."""
        self._table = table

    def on_log(self, args, state, control, model=None, logs=None, **kwargs) -> None:
        table, self._table = self._table, None
        if not state.is_world_process_zero:
            return
        if not self._initialized:  # an evaluation before any training
            self.setup(args, state, model)
            self._evaluated_run = self._wandb.run.id
        if "train_runtime" in logs:  # the end of a call of `train`: numbers of the run, and no step of its own
            self._wandb.run.summary.update({name: logs[name] for name in logs if name not in ("epoch", "env_step")})
            return
        row = rewrite_logs(logs)
        if self._before.has(row, state.global_step):
            return  # done again since the checkpoint, to the same numbers
        _rows_of_runs[self._wandb.run.id].add(row, state.global_step)
        if "env_step" in logs and not self._has_axis:  # other trainers than the package's have none
            self._has_axis = True
            self._wandb.define_metric(X_AXIS)
            self._wandb.define_metric("*", step_metric=X_AXIS, step_sync=True)
        if table is not None:
            logs = {**logs, "completions": self._wandb.Table(dataframe=table)}
        super().on_log(args, state, control, model=model, logs=logs, **kwargs)


def _kind(names: Iterable[str]) -> str:
    """The kind of a row with some metrics."""
    return min((name for name in names if name.startswith("eval/")), default="train")


def install_wandb(callbacks: list[TrainerCallback], config: Mapping[str, Any] | None) -> None:
    """
    Let the package's callback take the place of transformers' in a trainer's callbacks; one that a user passed stays.

    Raises:
        ValueError: a callback was passed, and a config for another.
    """
    own = [callback for callback in callbacks if isinstance(callback, WandbResumeCallback)]
    if own and config is not None:
        raise ValueError("Both `wandb_config` and a WandbResumeCallback were given. Give its config to one of them.")
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, WandbCallback)]
    callbacks.insert(0, own[0] if own else WandbResumeCallback(config))
