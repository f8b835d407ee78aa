# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One W&B run for a training, also when it is resumed: everything that the package knows of W&B."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import TrainerCallback
from transformers.integrations import WandbCallback


logger = logging.getLogger(__name__)

# Ids of the runs that were started here; such a run ends when the next training starts one of its own
_started: set[str] = set()

# The x-axis of all metrics, as transformers names it in W&B
X_AXIS = "train/env_step"


class WandbResumeCallback(WandbCallback):
    """
    Logs a training to W&B as transformers' own callback does, with `env_step` as the x-axis, and goes on in the same
    run when a training is resumed: what is done again since the checkpoint is not logged twice.

    It takes the place of transformers' callback, which `report_to="wandb"` brings; team trainers put it there by
    themselves. In another trainer pass it as a callback with `report_to="none"`.

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
        # For each kind of row, the last step of which the run has one: of earlier processes, and in all
        self._logged_before: dict[str, int] = {}
        self._logged: dict[str, int] = {}
        self._logged_file: Path | None = None
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
        if state.is_world_process_zero:
            self._start(args, state)
        self._checkpoint_identity = None
        self._initialized = False  # a second training may have another run
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def setup(self, args, state, model, **kwargs) -> None:
        super().setup(args, state, model, **kwargs)
        if state.is_world_process_zero:
            if self._sections:
                self._wandb.config.update(self._sections, allow_val_change=True)
            self._wandb.define_metric(X_AXIS)
            self._wandb.define_metric("*", step_metric=X_AXIS, step_sync=True)

    def _start(self, args, state) -> None:
        """Start or continue the run."""
        wanted = self._wanted(args)
        run = self._wandb.run
        if run is not None and run.id in _started - {wanted.get("id")}:
            self._wandb.finish()
        if self._wandb.run is None:
            _started.add(self._wandb.init(**wanted).id)
        elif self._wandb.run.id != wanted.get("id") and self.config:
            logger.warning("A W&B run is active already (%s); it is used, and not `wandb_config`.", run.id)
        self._find_logged(args, state)

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

    def _find_logged(self, args, state) -> None:
        """
        Find up to where the run has rows. W&B knows it of a run that it resumed; offline, and where the last rows are
        still on their way, a small file in `output_dir` does.
        """
        run = self._wandb.run
        self._logged_file = Path(args.output_dir) / f"wandb-{run.id}.json"
        self._logged_before = {}
        if state.global_step > 0:
            if self._logged_file.is_file():
                self._logged_before = json.loads(self._logged_file.read_text(encoding="utf-8"))
            if run.resumed:
                known = int(run.summary.get("train/global_step", 0))
                self._logged_before["train"] = max(self._logged_before.get("train", 0), known)
        self._logged = dict(self._logged_before)

    def on_completions(self, args, state, control, table: pd.DataFrame) -> None:
        """Keep a table of completions for the row that is logged next."""
        self._table = table

    def on_log(self, args, state, control, model=None, logs=None, **kwargs) -> None:
        table, self._table = self._table, None
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:  # the end of a call of `train`: numbers of the run, and no step of its own
            self._wandb.run.summary.update({name: logs[name] for name in logs if name not in ("epoch", "env_step")})
            return
        kind = min((name for name in logs if name.startswith("eval_")), default="train")
        if state.global_step <= self._logged_before.get(kind, -1):
            return  # done again since the checkpoint, to the same numbers
        if table is not None:
            logs = {**logs, "completions": self._wandb.Table(dataframe=table)}
        super().on_log(args, state, control, model=model, logs=logs, **kwargs)
        self._note_logged(kind, state.global_step)

    def _note_logged(self, kind: str, step: int) -> None:
        self._logged[kind] = step
        partial = self._logged_file.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(self._logged), encoding="utf-8")
        os.replace(partial, self._logged_file)


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
