# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The command line of the example scripts: TRL's parser, with a help that can be read."""

import argparse
from typing import Any

from trl import TrlParser

from trl_multiagent.trainers.multi_agent_config import REFUSED_OPTIONS


# Title of the help's sections, by the package whose config class brings the option
_SECTIONS = {
    "example": "what is trained, on what",
    "trl_multiagent": "the team",
    "trl": "each actor: sampling, loss, reference (trl.GRPOConfig)",
    "transformers": "the run: optimizer, schedule, logging, evaluation, saving (transformers.TrainingArguments)",
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # One spelling is enough to read; `--max-steps` works too
        if action.nargs == 0 or not action.option_strings:
            return super()._format_action_invocation(action)
        few_choices = action.choices is not None and len(action.choices) <= 8
        value = "{" + ",".join(map(str, action.choices)) + "}" if few_choices else "VALUE"
        return f"{action.option_strings[0]} {value}{' ...' if action.nargs == '+' else ''}"


class ExampleParser(TrlParser):
    """
    `TrlParser` whose help is grouped by where an option comes from and leaves out what a team refuses.

    Options can also come from a YAML file, `--config FILE`; the command line wins.

    Args:
        dataclass_types (tuple of dataclasses):
            The script's arguments and the trainer's config.
        description (`str`):
            First lines of the help.
        defaults (`dict`):
            Defaults of this script.
    """

    def __init__(self, dataclass_types: tuple[type, ...], description: str, defaults: dict[str, Any]):
        super().__init__(
            dataclass_types,
            description=description,
            usage="%(prog)s [--config FILE.yaml] [--OPTION VALUE ...]",
            formatter_class=_Help,
        )
        self.set_defaults(**defaults)
        self._group_help()

    def _group_help(self) -> None:
        refused = set(REFUSED_OPTIONS).union(*(getattr(owner, "_refused", {}) for owner in self.dataclass_types))
        sections = {name: self.add_argument_group(title) for name, title in _SECTIONS.items()}
        for action in list(self._optionals._group_actions):
            section = _section(self.dataclass_types, action.dest)
            if section is None:
                continue
            is_negation = action.option_strings[0].startswith("--no_")
            if is_negation or action.dest in refused:
                action.help = argparse.SUPPRESS
            self._optionals._group_actions.remove(action)
            sections[section]._group_actions.append(action)


def _section(dataclass_types: tuple[type, ...], name: str) -> str | None:
    """The section of an option: that of the most basic class that declares it; None for `--help`."""
    for dataclass_type in dataclass_types:
        for owner in reversed(dataclass_type.__mro__):
            if name in owner.__dict__.get("__annotations__", {}):
                package = owner.__module__.split(".")[0]
                return package if package in _SECTIONS else "example"
    return None
