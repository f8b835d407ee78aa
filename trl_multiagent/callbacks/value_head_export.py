# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Value heads written during training."""

import os
from pathlib import Path

from transformers import TrainerCallback

from ..checkpoints.export import entity_directories
from ..models.team import MultiAgentModel
from ..models.value_head import save_value_head
from ..placement.backends import full_parameters


class ValueHeadExportCallback(TrainerCallback):
    """
    Writes the value heads alone, while a team trains: small files, to follow what the critics predict, or to keep the
    heads of more steps than checkpoints are kept of. Checkpoints and `save_model` hold the heads without it.

    After every `export_steps` optimizer steps and at the end, head by head
    `<output_dir>/step-<k>/critic/value_head.pt` for a central critic, `agent_i/critic/value_head.pt` for separate
    ones, `agent_i/value_head.pt` for heads on actors: where `save_model` has them, also when the backbone has an
    adapter.

    Args:
        output_dir (`str` or path, *optional*):
            Parent directory. Default: `value_heads` in the trainer's `output_dir`.
        export_steps (`int`, *optional*):
            Every how many optimizer steps. Default: whenever `save_strategy` saves a checkpoint, and at the end.

    Raises:
        ValueError: `export_steps` is below 1, or, when training begins, the trainer's model has no value head.
    """

    def __init__(self, output_dir: str | os.PathLike | None = None, export_steps: int | None = None):
        if export_steps is not None and export_steps < 1:
            raise ValueError(f"export_steps={export_steps}, expected 1 or more, or None.")
        self.output_dir = output_dir
        self.export_steps = export_steps
        self._exported_step = -1

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        has_heads = isinstance(model, MultiAgentModel) and any(_heads(model))
        if not has_heads:
            raise ValueError(
                "ValueHeadExportCallback needs a trainer whose models have value heads: IACTrainer or MAACTrainer."
            )
        self._exported_step = -1

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        due = self.export_steps is not None and state.global_step % self.export_steps == 0
        if due or control.should_training_stop:  # now: at the end of training the best model may be in its place
            self._export(args, state, model)

    def on_save(self, args, state, control, model=None, **kwargs) -> None:
        if self.export_steps is None or control.should_training_stop:
            self._export(args, state, model)

    def on_train_end(self, args, state, control, model=None, **kwargs) -> None:
        self._export(args, state, model)

    def _export(self, args, state, model: MultiAgentModel) -> None:
        if self._exported_step == state.global_step:
            return
        self._exported_step = state.global_step
        parent = Path(self.output_dir or Path(args.output_dir) / "value_heads") / f"step-{state.global_step}"
        for directory, head in _heads(model):
            with full_parameters(head):  # on every process
                if state.is_world_process_zero:
                    (parent / directory).mkdir(parents=True, exist_ok=True)
                    save_value_head(head, parent / directory)


def _heads(team: MultiAgentModel) -> list:
    return [(name, module.value_head) for name, module in entity_directories(team) if "value_head" in module._modules]
