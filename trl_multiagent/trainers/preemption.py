# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""SIGTERM, by which schedulers and clouds announce that they take a machine back."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

import torch
from accelerate import Accelerator


logger = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM


class Preemption:
    """
    Notes SIGTERM, and lets all processes agree that it came.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            The processes: one that is told is enough.
        enabled (`bool`):
            Whether SIGTERM is noted; otherwise it ends the process as usual.
    """

    def __init__(self, accelerator: Accelerator, enabled: bool):
        self.accelerator = accelerator
        self.enabled = enabled
        self._noted = False
        self._launcher: int | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, SIGTERM is noted. A handler that the program itself has set is left alone."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if not self.enabled or not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        self._launcher = _accelerate_launcher()
        signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._noted:  # after the last step: the training is complete, and the program ends as it was told to
            signal.raise_signal(signal.SIGTERM)

    def _note(self, signum, frame) -> None:
        self._noted = True

    def requested(self) -> bool:
        """Whether any process was told to end. Call it on every process."""
        if not self.enabled:
            return False
        if self._launcher is not None and os.getppid() != self._launcher:
            self._noted = True
        if self.accelerator.num_processes == 1:
            return self._noted
        flag = torch.tensor(float(self._noted), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)


def _accelerate_launcher() -> int | None:
    """
    The process id of `accelerate launch`, if it started this process alone: it ends at SIGTERM without passing it on.
    """
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            words = {os.path.basename(word).decode(errors="replace") for word in file.read().split(b"\0")}
    except OSError:  # no Linux, or no permission
        return None
    by_command = "launch" in words and words & {
        "accelerate",
        "accelerate_cli.py",
        "accelerate.commands.accelerate_cli",
    }
    return parent if by_command or words & {"accelerate-launch", "accelerate.commands.launch"} else None
