# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Checkpoints that are whole or not there: written under another name, listed in a manifest, and renamed in one step.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash


MANIFEST_FILE = "manifest.json"
_CHUNK = 1 << 22  # bytes that are hashed at once


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names what is wrong with it."""


class Attempt:
    """
    Runs the parts of a save. The first that fails is kept in `error`, and those after it are left out, so that a
    process whose disk is full still meets the others in every collective call.
    """

    def __init__(self):
        self.error: Exception | None = None

    def __call__(self, part: Callable[..., Any], *args, **kwargs) -> None:
        if self.error is None:
            try:
                part(*args, **kwargs)
            except Exception as error:
                self.error = error


# Writing


def stage(target: str | os.PathLike) -> Path:
    """Where the files of a checkpoint `target` are written until it is complete: a hidden directory beside it."""
    target = Path(target)
    return target.parent / f".{target.name}.partial"


def begin(target: str | os.PathLike) -> None:
    """Make the stage of a checkpoint, and remove what saves that were killed left beside it."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    restore_replaced(target.parent)
    for leftover in [*target.parent.glob(".checkpoint-*.partial"), *target.parent.glob(".checkpoint-*.replaced")]:
        shutil.rmtree(leftover)
    stage(target).mkdir()


def save_tensors(value: Any, path: str | os.PathLike) -> None:
    """`torch.save` without its checksums, which take more time than the writing: the manifest has better ones."""
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, path)
    finally:
        torch.serialization.set_crc32_options(computes)


class Sealer:
    """
    Hashes the files of a stage and lets them reach the disk, in the background, while others are still written.

    Args:
        target (`str` or path):
            The checkpoint.
    """

    def __init__(self, target: str | os.PathLike):
        self.staged = stage(target)
        self._pool = ThreadPoolExecutor()  # hashing and waiting for the disk leave Python's lock alone
        self._digests: dict[Path, Future[str]] = {}

    def seal(self, *names: str) -> None:
        """Begin with the files of some directories, to which no process writes any more."""
        for name in names:
            for path in sorted((self.staged / name).rglob("*")):
                if path.is_file() and path not in self._digests:
                    self._digests[path] = self._pool.submit(_hash_and_sync, path)

    def files(self) -> dict[str, dict[str, Any]]:
        """Size and hash of every file, by its name in the checkpoint; nothing writes any more."""
        self.seal(".")
        return {
            path.relative_to(self.staged).as_posix(): {"size": path.stat().st_size, "xxh3_128": digest.result()}
            for path, digest in self._digests.items()
        }

    def close(self) -> None:
        """Leave out what was not begun."""
        self._pool.shutdown(cancel_futures=True)


def commit(target: str | os.PathLike, sealer: Sealer | None = None) -> None:
    """
    Turn a stage into the checkpoint `target`: list its files, let them reach the disk, and rename it.

    Args:
        target (`str` or path):
            The checkpoint.
        sealer ([`Sealer`], *optional*):
            What began with its files.
    """
    target, staged = Path(target), stage(target)
    sealer = Sealer(target) if sealer is None else sealer
    try:
        manifest = {"saved_at": time.time(), "files": sealer.files()}
    finally:
        sealer.close()
    with open(staged / MANIFEST_FILE, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    replaced = target.parent / f".{target.name}.replaced"
    if target.exists():
        os.replace(target, replaced)
    os.replace(staged, target)
    _sync_directory(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(target: str | os.PathLike) -> None:
    """Remove the stage of a checkpoint that could not be written."""
    shutil.rmtree(stage(target), ignore_errors=True)


def restore_replaced(directory: str | os.PathLike) -> None:
    """Put back a checkpoint whose replacement was killed between its two renames."""
    for replaced in Path(directory).glob(".checkpoint-*.replaced"):
        target = replaced.parent / replaced.name[1 : -len(".replaced")]
        if not target.exists():
            os.replace(replaced, target)


def _hash_and_sync(path: Path) -> str:
    digest = _hash(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return digest


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_directory(directory: Path) -> None:
    """Let a rename reach the disk, where directories can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Reading


def verify(checkpoint: str | os.PathLike) -> None:
    """
    Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: it has no readable manifest, or a file is missing, has another size or other content; the
            file is named.
    """
    checkpoint = Path(checkpoint)
    files = _manifest(checkpoint)["files"]
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"The checkpoint {str(checkpoint)!r} is not complete: {name} is missing.")
        size = path.stat().st_size
        if size != expected["size"]:
            raise CheckpointError(
                f"The checkpoint {str(checkpoint)!r} is damaged: {name} has {size} bytes, expected {expected['size']}."
            )
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(_hash, [checkpoint / name for name in files])
        for (name, expected), digest in zip(files.items(), hashes, strict=True):
            if digest != expected["xxh3_128"]:
                raise CheckpointError(
                    f"The checkpoint {str(checkpoint)!r} is damaged: the content of {name} is not what was saved."
                )


def _manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST_FILE
    if not path.is_file():
        why = "it is no directory" if not checkpoint.is_dir() else f"it has no {MANIFEST_FILE}"
        raise CheckpointError(f"{str(checkpoint)!r} is no checkpoint of a team that was saved to its end: {why}.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return {"saved_at": float(manifest["saved_at"]), "files": dict(manifest["files"])}
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"The checkpoint {str(checkpoint)!r} is damaged: {MANIFEST_FILE}: {error!r}.") from error


def newest_valid(directories: Iterable[str | os.PathLike]) -> tuple[Path | None, Sequence[str]]:
    """
    Find the checkpoint that was saved last, among those that are whole.

    Args:
        directories (iterable of `str` or path):
            Parents of `checkpoint-<number>` directories.

    Returns:
        The checkpoint, or `None`, and why each newer one was skipped.
    """
    found, skipped = [], []
    for directory in dict.fromkeys(Path(directory).resolve() for directory in directories):
        restore_replaced(directory)
        for checkpoint in sorted(directory.glob("checkpoint-*")):
            try:
                found.append((_manifest(checkpoint)["saved_at"], checkpoint))
            except CheckpointError as error:
                skipped.append(str(error))
    for _, checkpoint in sorted(found, reverse=True):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return checkpoint, skipped
    return None, skipped
