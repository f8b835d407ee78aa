# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What differs between one process, DDP and DeepSpeed."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from .._compat import separate_accelerate_state


def start_backend(args: TrainingArguments) -> None:
    """
    Tell DeepSpeed of the processes before models are loaded. On a CPU, Accelerate starts them without it, and ZeRO-3,
    which partitions weights while they are loaded, would take each process for the only one.
    """
    if args.deepspeed_plugin is None or not torch.distributed.is_initialized():
        return
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(dist_backend=torch.distributed.get_backend())


def check_backend(accelerator: Accelerator) -> None:
    """Raise a `ValueError` for a back end that the package does not support."""
    supported = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "DEEPSPEED")
    if accelerator.distributed_type not in supported:
        raise ValueError(
            f"The back end {accelerator.distributed_type} is not supported. Use one process, DDP, or DeepSpeed "
            f"ZeRO-1, 2 or 3; see accelerate_configs/."
        )


def share_accelerator(source: Any, target: Any) -> None:
    """Let a trainer use another's accelerator: one with a DeepSpeed plugin can be made only once a process."""
    for name in ("accelerator", "gather_function", "is_deepspeed_enabled", "is_fsdp_enabled"):
        setattr(target, name, getattr(source, name))


@contextlib.contextmanager
def single_process(args: TrainingArguments) -> Iterator[None]:
    """
    Inside, another trainer can be made and run, by this process alone: it knows of no other process, and of no
    DeepSpeed.
    """
    told = ("ACCELERATE_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(told)}
    plugin = args.deepspeed_plugin
    if plugin is not None:
        unset_hf_deepspeed_config()
    try:
        with separate_accelerate_state():
            yield
    finally:
        os.environ.update(hidden)
        if plugin is not None:
            set_hf_deepspeed_config(plugin.dschf)


def check_optimizer(accelerator: Accelerator, learning_rates: set[float]) -> None:
    """Raise a `ValueError` if DeepSpeed's config brings an optimizer, which has one learning rate for all entities."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and "optimizer" in plugin.deepspeed_config and len(learning_rates) > 1:
        raise ValueError(
            f"The DeepSpeed config has an 'optimizer' section, which gives all entities one learning rate, but "
            f"{sorted(learning_rates)} were asked for. Remove the section; the trainer's own optimizer is used then."
        )


def states_by_group(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each parameter group of a prepared optimizer, with the state of each of its parameters or flat parts of them."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        # A group's parameters stand in it only while it steps, one part after the other
        for number, part in enumerate(inner.fp32_partitioned_groups_flat):
            group = inner.optimizer.param_groups[inner.sub_group_to_group_id[number]]
            yield group, inner.optimizer.state.get(part, {})
        return
    for group in inner.param_groups:
        for parameter in group["params"]:
            yield group, inner.state.get(parameter, {})


def describe_backend(accelerator: Accelerator) -> dict[str, Any]:
    """How many processes train, in which precision, and how their states are partitioned."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return {
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "zero_stage": None if plugin is None else plugin.zero_stage,
    }


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter: all of it, or its part where ZeRO-3 partitions it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter


@contextlib.contextmanager
def _guarded_checkpoints(
    engine: Any, attempt: Callable[..., None], save_tensors: Callable[[Any, str], None] = torch.save
) -> Iterator[None]:
    """
    Inside, a DeepSpeed engine writes by `attempt`, so that an error on one process does not leave the others waiting,
    and loads tensors and a few known classes only: its own way runs whatever code a file holds.
    """
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]

    class GuardedCheckpointEngine(TorchCheckpointEngine):
        def save(self, state_dict, path):
            attempt(save_tensors, state_dict, path)

        def load(self, path, map_location=None):
            with torch.serialization.safe_globals(known):
                return torch.load(path, map_location=map_location, weights_only=True)

    own, engine.checkpoint_engine = engine.checkpoint_engine, GuardedCheckpointEngine()
    try:
        yield
    finally:
        engine.checkpoint_engine = own


ENGINE_TAG = "deepspeed"  # directory of an engine's files in a checkpoint


def save_engine(
    engine: Any, directory: str, attempt: Callable[..., None], save_tensors: Callable[[Any, str], None] = torch.save
) -> None:
    """
    Write what a DeepSpeed engine needs to go on into `directory/deepspeed`; without frozen weights, which do not
    change. Call it on every process.
    """
    with _guarded_checkpoints(engine, attempt, save_tensors):
        engine.save_checkpoint(directory, tag=ENGINE_TAG, save_latest=False, exclude_frozen_parameters=True)


def load_engine(engine: Any, directory: str) -> None:
    """Let a DeepSpeed engine, with optimizer and scheduler, go on from what `save_engine` wrote."""
    with _guarded_checkpoints(engine, lambda part, *args: part(*args)):
        loaded, _ = engine.load_checkpoint(directory, tag=ENGINE_TAG, load_module_strict=False)
    if loaded is None:
        raise ValueError(f"DeepSpeed found no checkpoint in {directory}/{ENGINE_TAG}.")


def clips_gradients_itself(accelerator: Accelerator) -> bool:
    """Whether the back end clips by the norm over all parameters, out of our reach (DeepSpeed)."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


@contextlib.contextmanager
def full_parameters(module: nn.Module, write: bool = False) -> Iterator[None]:
    """
    Inside, every process sees the whole parameters of `module`. Enter it on every process.

    Args:
        write (`bool`, *optional*, defaults to `False`):
            Whether what the main process writes into the parameters is kept.
    """
    # ZeRO-3 marks what it partitioned; a model that was not loaded under it, only when training starts
    parameters = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
        yield


def clip_grad_norms(accelerator: Accelerator, modules: Iterable[nn.Module], max_norm: float) -> list[torch.Tensor]:
    """
    Clip the gradients of each module by its own norm.

    Returns:
        list of scalar `torch.Tensor`: the norms before clipping.
    """
    accelerator.unscale_gradients()  # once: a gradient scaler refuses a second time
    norms = [torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm) for module in modules]
    return [norm.to(accelerator.device) for norm in norms]  # a module without a gradient has its 0 on the CPU


def takes_several_backwards(accelerator: Accelerator) -> bool:
    """
    Whether parts of a loss may have backward passes of their own. DDP and DeepSpeed act on the first one, and so does
    LOMO, whose optimizer steps within it.
    """
    return accelerator.distributed_type == DistributedType.NO and not accelerator.has_lomo_optimizer


@contextlib.contextmanager
def accumulate_only(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Inside, a backward pass adds to the gradients: it neither exchanges them nor steps the optimizer."""
    state = accelerator.gradient_state
    synchronizes = state.sync_gradients
    state._set_sync_gradients(False)  # DeepSpeed's engine is told by it
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    try:
        with contextlib.nullcontext() if is_deepspeed else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(synchronizes)
