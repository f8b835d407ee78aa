# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The datasets that tasks come from."""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import torch
from transformers import TrainingArguments

from .formatters import ActorFormatter, check_formatters


def check_tasks(
    dataset: Any, formatters: Sequence[ActorFormatter], tokenizers: Sequence, sequential: bool = False
) -> dict[str, Any]:
    """
    Check a dataset, and every actor's formatter and chat template on its first row, which is returned.

    Raises:
        TypeError: it is no dataset of the library `datasets`, nor one of torch that can be indexed and gives dicts.
        ValueError: it is empty, or its rows do not fit the formatters and tokenizers.
    """
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    of_torch = isinstance(dataset, torch.utils.data.Dataset) and not is_stream
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)) and not of_torch:
        raise TypeError(
            "A dataset must be a `datasets.Dataset` or `IterableDataset`, or a `torch.utils.data.Dataset` that can be "
            f"indexed, got {type(dataset).__name__}. `Dataset.from_list(rows)` makes one."
        )
    if is_stream:
        row = next(iter(dataset), None)
    else:
        row = dataset[0] if len(dataset) else None
    if row is None:
        raise ValueError("The dataset is empty; it needs at least one row.")
    if not isinstance(row, Mapping):
        raise TypeError(f"A row of the dataset must be a dict of columns, got {type(row).__name__}.")
    check_formatters(row, formatters, tokenizers, sequential)
    return row


def prepare_streaming(args: TrainingArguments) -> None:
    """Set up streamed rows so that they reach every process whole and in order; else groups would mix prompts."""
    if args.accelerator_config.dispatch_batches:
        raise ValueError("A streamed dataset needs `accelerator_config={'dispatch_batches': False}`.")
    if args.dataloader_num_workers:
        raise ValueError(
            f"A streamed dataset needs dataloader_num_workers=0, got {args.dataloader_num_workers}: several workers "
            "would interleave the rows and split the groups."
        )
    args.accelerator_config.dispatch_batches = False
