# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Files of offline W&B runs, written by W&B itself."""

import pytest
import wandb

from trl_multiagent.callbacks.wandb_records import offline_files, rows


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A run of 300 rows, some of them longer than a block of the file."""
    directory = tmp_path_factory.mktemp("wandb")
    run = wandb.init(project="p", dir=str(directory), mode="offline", settings=wandb.Settings(silent=True))
    for number in range(300):
        run.log({"number": number, "text": "x" * (50_000 if number % 100 == 7 else 200), "nested": {"inner": 0.5}})
    run.finish()
    wandb.teardown()  # ends the process that writes: it may have the last rows in its memory still
    (found,) = offline_files(directory / "wandb", run.id)
    assert offline_files(directory / "wandb", "another") == []
    return found


def test_every_row_is_read(file):
    found = rows(file)
    assert [row["number"] for row in found] == list(range(300))
    assert len(found[7]["text"]) == 50_000 and len(found[8]["text"]) == 200
    assert found[0]["nested.inner"] == 0.5 or found[0]["nested"] == {"inner": 0.5}


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_file_that_breaks_off_has_the_rows_before(file, share, tmp_path):
    data = file.read_bytes()
    cut = tmp_path / "run-cut.wandb"
    cut.write_bytes(data[: int(len(data) * share)])
    found = [row["number"] for row in rows(cut)]
    assert found == list(range(len(found))) and len(found) < 300


@pytest.mark.parametrize("size", [0, 7, 10])
def test_a_file_with_nothing_in_it_has_no_rows(file, size, tmp_path):
    empty = tmp_path / "run-empty.wandb"
    empty.write_bytes(file.read_bytes()[:size])
    assert rows(empty) == []
