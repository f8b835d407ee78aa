# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Preference pairs of joint responses: how they are chosen, kept in files, and read from datasets."""

import json
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .formatters import Prompt, check_prompt


@dataclass
class Candidate:
    """
    A joint response that may become part of a pair.

    Attributes:
        completions (list of N `str`): what each actor answered.
        reward (`float`): NaN where there is none.
        ids (list of N lists of `int`, *optional*): the tokens that the actors sampled; `None` for texts of others.
        source (`str`): `"current"` for the team that learns, `"comparator"` for another policy.
    """

    completions: list[str]
    reward: float
    ids: list[list[int]] | None = None
    source: str = "current"


@dataclass
class PreferencePair:
    """
    Two joint responses to one task, of which one is preferred. Its fields are the columns of the files.

    Attributes:
        task (`int`): number of the task in its dataset.
        prompts (list of N `str` or message lists): what each actor was asked. Where only some were asked by messages,
            these are written as text, since the column of a table has one type.
        winner_completions, loser_completions (list of N `str`): what each actor answered.
        winner_reward, loser_reward (`float`, *optional*): their rewards, where they have some.
        winner_source, loser_source (`str`): `"current"`, `"comparator"` or, from a dataset, `"dataset"`.
        prompt_ids, winner_ids, loser_ids (list of N lists of `int`, *optional*): tokens of each actor. A completion
            that ended by itself has its EOS token; one that was cut has none.
        reference_margins (list of N `float`, *optional*): differences of the references' log-probabilities, where they
            were computed beforehand.
    """

    task: int
    prompts: list[Prompt]
    winner_completions: list[str]
    loser_completions: list[str]
    winner_reward: float | None = None
    loser_reward: float | None = None
    winner_source: str = "dataset"
    loser_source: str = "dataset"
    prompt_ids: list[list[int]] | None = None
    winner_ids: list[list[int]] | None = None
    loser_ids: list[list[int]] | None = None
    reference_margins: list[float] | None = None

    @property
    def has_tokens(self) -> bool:
        return not (self.prompt_ids is None or self.winner_ids is None or self.loser_ids is None)


@dataclass
class Group:
    """
    The candidates of one task.

    Attributes:
        task (`int`): number of the task in its dataset.
        prompts (list of N `str` or message lists): what each actor was asked.
        prompt_ids (list of N lists of `int`): the same as tokens.
        candidates (list of [`Candidate`]): the team's answers.
        others (list of [`Candidate`]): a comparator's answers, if there is one.
    """

    task: int
    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    candidates: list[Candidate]
    others: list[Candidate] = field(default_factory=list)

    def pair(self, winner: Candidate, loser: Candidate) -> PreferencePair:
        """A pair of two candidates; with the tokens that were sampled, where both have them."""
        known = winner.ids is not None and loser.ids is not None
        return PreferencePair(
            task=self.task,
            prompts=self.prompts,
            winner_completions=winner.completions,
            loser_completions=loser.completions,
            winner_reward=winner.reward,
            loser_reward=loser.reward,
            winner_source=winner.source,
            loser_source=loser.source,
            prompt_ids=self.prompt_ids if known else None,
            winner_ids=winner.ids if known else None,
            loser_ids=loser.ids if known else None,
        )


# Choosing


def select_pairs(
    candidates: Sequence[Candidate], mode: str, limit: int | None, rng: random.Random
) -> list[tuple[Candidate, Candidate]]:
    """
    Winner and loser of the pairs of one task's candidates. Ties and candidates without a reward form none.

    Args:
        candidates (sequence of [`Candidate`]):
            The candidates.
        mode (`str`):
            `"reward_gap"` the largest differences first, `"random"` in random order, `"all"` all, in the candidates'
            order.
        limit (`int`, *optional*):
            Most pairs, except for `"all"`.
        rng (`random.Random`):
            Source of the random order.
    """
    pairs = [(a, b) for a in candidates for b in candidates if a.reward > b.reward]  # never true for NaN
    return _chosen(pairs, mode, limit, rng)


def select_comparisons(
    current: Sequence[Candidate], others: Sequence[Candidate], mode: str, limit: int | None, rng: random.Random
) -> list[tuple[Candidate, Candidate]]:
    """
    Winner and loser of candidate i of the team and candidate i of the comparator, for each i that both have.

    Args: as for `select_pairs`; `mode` may also be `"comparator_reward"`: the pairs whose comparator got the highest
        reward first, and among equal ones the largest difference.
    """
    pairs = []
    for own, other in zip(current, others, strict=False):
        if own.reward != other.reward and not math.isnan(own.reward + other.reward):
            pairs.append((own, other) if own.reward > other.reward else (other, own))
    return _chosen(pairs, mode, limit, rng)


def _chosen(
    pairs: list[tuple[Candidate, Candidate]], mode: str, limit: int | None, rng: random.Random
) -> list[tuple[Candidate, Candidate]]:
    if mode == "all":
        return pairs
    if mode == "random":
        rng.shuffle(pairs)
    elif mode == "reward_gap":
        pairs.sort(key=_gap, reverse=True)
    elif mode == "comparator_reward":
        pairs.sort(key=lambda pair: (_comparator_reward(pair), _gap(pair)), reverse=True)
    else:
        raise ValueError(f"pair_selection={mode!r}, expected reward_gap, random, all or comparator_reward.")
    return pairs[:limit]


def _gap(pair: tuple[Candidate, Candidate]) -> float:
    return pair[0].reward - pair[1].reward


def _comparator_reward(pair: tuple[Candidate, Candidate]) -> float:
    return next(candidate.reward for candidate in pair if candidate.source == "comparator")


# Files


def write_pairs(path: str | os.PathLike, pairs: Iterable[PreferencePair]) -> None:
    """Write pairs as JSON Lines, one object for each, its keys the fields of `PreferencePair`; whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        for pair in pairs:
            file.write(json.dumps(asdict(pair), ensure_ascii=False) + "\n")
    os.replace(partial, path)


def read_pairs(path: str | os.PathLike) -> list[PreferencePair]:
    """The pairs of a file that `write_pairs` wrote."""
    with open(path, encoding="utf-8") as file:
        return [PreferencePair(**json.loads(line)) for line in file]


# Datasets

JOINT_COLUMNS = ("prompts", "winner_completions", "loser_completions")
SINGLE_COLUMNS = ("prompt", "chosen", "rejected")


def holds_pairs(row: Mapping[str, Any]) -> bool:
    """Whether a dataset with such a row has preference pairs, and not tasks to answer."""
    return all(name in row for name in JOINT_COLUMNS) or all(name in row for name in SINGLE_COLUMNS[1:])


def pairs_of_dataset(rows: Iterable[Mapping[str, Any]], num_agents: int) -> list[PreferencePair]:
    """
    The pairs of a dataset.

    Args:
        rows (iterable of `dict`):
            With `prompts`, `winner_completions` and `loser_completions`, each with one entry for each actor, and
            perhaps more fields of `PreferencePair`; or, for one actor, with TRL's `prompt`, `chosen` and `rejected`.
        num_agents (`int`):
            Number N of actors.

    Raises:
        ValueError: a row has other columns, or a wrong number or kind of entries; it is named.
    """
    return [_pair_of_row(number, row, num_agents) for number, row in enumerate(rows)]


def _pair_of_row(number: int, row: Mapping[str, Any], num_agents: int) -> PreferencePair:
    where = f"Row {number} of the preference dataset"
    if not all(name in row for name in JOINT_COLUMNS):
        row = _joint_row(where, row, num_agents)
    known = {column.name for column in fields(PreferencePair)}
    values = {name: value for name, value in row.items() if name in known and value is not None}
    for name in JOINT_COLUMNS:
        entries = values.get(name)
        if not isinstance(entries, (list, tuple)) or len(entries) != num_agents:
            got = f"{len(entries)} entries" if isinstance(entries, (list, tuple)) else type(entries).__name__
            raise ValueError(f"{where}: `{name}` has {got}, expected a list of {num_agents}, one for each actor.")
        values[name] = list(entries)
    for prompt in values["prompts"]:
        check_prompt(prompt, where)
    for name in JOINT_COLUMNS[1:]:
        for text in values[name]:
            if not isinstance(text, str):
                raise ValueError(f"{where}: `{name}` holds a {type(text).__name__}, expected a text for each actor.")
    return PreferencePair(**{"task": number, **values})


def _joint_row(where: str, row: Mapping[str, Any], num_agents: int) -> dict[str, Any]:
    """TRL's columns of one actor as a joint row."""
    if not all(name in row for name in SINGLE_COLUMNS):
        raise ValueError(
            f"{where} has the columns {sorted(row)}, expected {', '.join(JOINT_COLUMNS)} (a list with one entry for "
            f"each actor) or, for one actor, {', '.join(SINGLE_COLUMNS)}. `trl.extract_prompt` finds the prompt "
            "where it is part of both completions."
        )
    if num_agents != 1:
        raise ValueError(
            f"{where} has the columns {', '.join(SINGLE_COLUMNS)} of one actor, but the team has {num_agents}. Give "
            f"{', '.join(JOINT_COLUMNS)}, each a list with one entry for each actor."
        )
    texts = [_answer(where, name, row[name]) for name in SINGLE_COLUMNS[1:]]
    return {"prompts": [row["prompt"]], "winner_completions": texts[:1], "loser_completions": texts[1:]}


def _answer(where: str, name: str, completion: Any) -> str:
    """A completion as text: itself, or the content of its one message."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0].get("content"), str):
        return completion[0]["content"]
    raise ValueError(f"{where}: `{name}` must be a text or a list with one message, got {str(completion)[:80]!r}.")
