# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What W&B recorded of offline runs, read from their files: there is no server that could be asked."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from wandb.proto import wandb_internal_pb2

# A file has a header of 7 bytes, and then blocks. A record is in one piece, or in a first, middle ones and a last; no
# piece crosses a block (the log format of LevelDB)
BLOCK = 32768
HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator["wandb_internal_pb2.Record"]:
    """The records of a `.wandb` file; one that a killed process left ends with its last whole record."""
    from wandb.proto import wandb_internal_pb2  # here, since a run without W&B does without the package

    data = file.read_bytes()
    position, pieces = 7, b""
    while position + HEADER.size <= len(data):
        if BLOCK - position % BLOCK < HEADER.size:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        piece = data[position : position + length]
        if not kind or len(piece) < length:
            return
        position += length
        pieces = piece if kind in (FULL, FIRST) else pieces + piece
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            yield record


def offline_files(directory: str | Path, run_id: str = "*") -> list[Path]:
    """The files of offline runs in a `wandb` directory, of one or all ids, in the order in which they were started."""
    return sorted(Path(directory).glob(f"offline-run-*/run-{run_id}.wandb"))


def rows(file: Path) -> list[dict]:
    """What was logged, row by row."""
    return [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]
