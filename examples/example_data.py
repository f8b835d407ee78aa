# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The prompts that the example scripts train on, read from anywhere under one column name, some of them held out."""

import logging
from pathlib import Path

import numpy as np
from datasets import Dataset, load_dataset, load_from_disk


logger = logging.getLogger(__name__)

DATA = Path(__file__).parent / "data"
KEPT_AS = "original_prompt"
READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_prompts(
    dataset_name: str | None = None,
    prompt_column: str = "prompt",
    split: str = "train",
    eval_size: int = 16,
    min_train_size: int = 1,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """
    Load training and held-out prompts.

    Args:
        dataset_name (`str`, *optional*):
            A file (`.json`, `.jsonl`, `.csv`, `.parquet`; also `.json.gz`, `.jsonl.gz`, `.csv.gz`), a directory
            written by `save_to_disk`, a directory of data files, or the id of a dataset on the hub. `None` takes the
            questions that lie beside this file: 64 to train on and 16 held out.
        prompt_column (`str`, *optional*, defaults to `"prompt"`):
            The column with the prompts, each a string or a list of messages. It is renamed to `"prompt"`; another
            column of that name is then kept as `"original_prompt"`. All other columns stay.
        split (`str`, *optional*, defaults to `"train"`):
            The split to read. A file has only `"train"`, and so have the questions beside this file.
        eval_size (`int`, *optional*, defaults to `16`):
            How many rows to hold out.
        min_train_size (`int`, *optional*, defaults to `1`):
            How many rows must be left to train on.
        seed (`int`, *optional*, defaults to `0`):
            Decides which rows are held out; both parts keep their rows in the order of the source.

    Returns:
        `tuple[Dataset, Dataset]`: the training rows and the held-out rows.

    Raises:
        `ValueError`: if the data cannot be read, lacks the column, has rows without a prompt, or too few rows.
    """
    if eval_size < 1 or min_train_size < 1:
        raise ValueError(f"Got eval_size={eval_size}, min_train_size={min_train_size}; expected at least 1 for each.")
    if dataset_name is None:
        train = _prompts_of(_read_file(DATA / "prompts.jsonl", split), prompt_column)
        held_out = _prompts_of(_read_file(DATA / "prompts_eval.jsonl", split), prompt_column)
        _check_size("training questions shipped with the examples", len(train), min_train_size)
        _check_size("held-out questions shipped with the examples", len(held_out), eval_size)
        return train, held_out.select(range(eval_size))

    rows = _prompts_of(_read(dataset_name, split), prompt_column)
    _check_size(
        f"rows of {dataset_name!r} ({eval_size} to hold out and {min_train_size} to train on)",
        len(rows),
        eval_size + min_train_size,
    )
    order = np.random.default_rng(seed).permutation(len(rows))
    return rows.select(sorted(order[eval_size:])), rows.select(sorted(order[:eval_size]))


def _check_size(what: str, got: int, needed: int) -> None:
    if got < needed:
        raise ValueError(
            f"Too few {what}: got {got}, expected at least {needed}. Ask for fewer, or give a larger dataset."
        )


def _read(dataset_name: str, split: str) -> Dataset:
    path = Path(dataset_name)
    if path.is_dir():
        return _read_directory(path, split)
    if path.is_file():
        return _read_file(path, split)
    if _reader(path) is not None:
        raise ValueError(f"There is no file {dataset_name!r} (looked in {Path.cwd()}). Check the path.")
    return _read_with(dataset_name, split)


def _reader(path: Path) -> str | None:
    name = path.name.lower()
    # `datasets` unpacks gzip by itself, except around Parquet, which is compressed inside.
    unpacked = Path(name.removesuffix(".gz")).suffix
    return None if name.endswith(".parquet.gz") else READERS.get(unpacked)


def _read_file(path: Path, split: str) -> Dataset:
    reader = _reader(path)
    if reader is None:
        raise ValueError(
            f"Cannot tell how to read {str(path)!r} from its name: expected one ending in {', '.join(READERS)}, or in "
            ".gz after one of the first three. Rename or convert the file."
        )
    return _read_with(reader, split, data_files=str(path))


def _read_directory(path: Path, split: str) -> Dataset:
    if (path / "dataset_dict.json").is_file():
        saved = load_from_disk(str(path))
        if split not in saved:
            raise ValueError(
                f"{str(path)!r} has no split {split!r}, only {sorted(saved)}. Name one of them as the split."
            )
        return saved[split]
    if (path / "state.json").is_file():
        if split != "train":
            raise ValueError(
                f"{str(path)!r} holds one dataset without splits, got split {split!r}. Leave it at 'train'."
            )
        return load_from_disk(str(path))
    return _read_with(str(path), split)


def _read_with(name: str, split: str, data_files: str | None = None) -> Dataset:
    source = data_files or name
    try:
        return load_dataset(name, data_files=data_files, split=split)
    except Exception as error:  # each reader, and the hub's client, has exception types of its own
        raise ValueError(
            f"Cannot load split {split!r} of the dataset {source!r} ({type(error).__name__}: {error}). Expected a "
            "file that matches its name's ending, a directory of such files, a directory written by `save_to_disk`, "
            "or the id of a dataset on the hub. Check the spelling, the split and the file's content."
        ) from error


def _prompts_of(rows: Dataset, prompt_column: str) -> Dataset:
    """Give the prompts their name, and check that every row has one."""
    if prompt_column not in rows.column_names:
        raise ValueError(
            f"There is no column {prompt_column!r} in the dataset, only {rows.column_names}. Name one of them with "
            "`--prompt_column`."
        )
    if prompt_column != "prompt":
        if "prompt" in rows.column_names:
            rows = _set_aside(rows, prompt_column)
        rows = rows.rename_column(prompt_column, "prompt")
    bad = next((i for i, prompt in enumerate(rows["prompt"]) if not (isinstance(prompt, str | list) and prompt)), None)
    if bad is not None:
        raise ValueError(
            f"Row {bad} of the column {prompt_column!r} is no prompt: got {rows[bad]['prompt']!r}, expected a "
            "non-empty string or list of messages. Remove such rows or name another column with `--prompt_column`."
        )
    return rows


def _set_aside(rows: Dataset, prompt_column: str) -> Dataset:
    if KEPT_AS in rows.column_names:
        raise ValueError(
            f"The column {prompt_column!r} cannot become 'prompt': the dataset already has the columns 'prompt' and "
            f"{KEPT_AS!r}. Rename or remove one of them."
        )
    logger.warning(
        "Column %r is used as 'prompt'; the dataset's own column 'prompt' becomes %r.", prompt_column, KEPT_AS
    )
    return rows.rename_column("prompt", KEPT_AS)
