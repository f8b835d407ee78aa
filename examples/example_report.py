# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""What the example scripts show a person: the plan before training, the outcome after it, and the reward's curve.

The text is plain and at most 100 columns wide, so that it reads the same in a terminal and in a log file.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


WIDTH = 100
SAMPLE_LINES = 4
RUNNING_MEAN = 10


@dataclass
class RewardRow:
    """
    One line of the outcome: a reward on the held-out prompts, before and after training.

    Args:
        name (`str`):
            Which reward this is.
        before (`float`), after (`float`):
            Mean over all samples, before and after training.
        num_prompts (`int`):
            Number of held-out prompts.
        samples_per_prompt (`int`):
            Number of samples drawn for each of them.
    """

    name: str
    before: float
    after: float
    num_prompts: int
    samples_per_prompt: int


@dataclass
class SampleRow:
    """
    What one actor wrote for one prompt, before and after training.

    Args:
        actor (`str`):
            The actor's name.
        prompt (`str`):
            The prompt.
        before (`str`), after (`str`):
            The completions.
    """

    actor: str
    prompt: str
    before: str
    after: str


def print_plan(items: dict[str, str], title: str = "Plan") -> None:
    """
    Print what is about to run, as two columns.

    Args:
        items (`dict[str, str]`):
            What to print: the left column by the right one. Long values are wrapped.
        title (`str`, *optional*, defaults to `"Plan"`):
            The line above.
    """
    width = max(map(len, items), default=0)
    print(f"\n{_rule(title)}")
    for name, value in items.items():
        _print_wrapped(f"  {name:<{width}}  ", str(value))
    print(_rule(), flush=True)


def print_result(
    rewards: Sequence[RewardRow],
    samples: Sequence[SampleRow] = (),
    title: str = "Samples",
    more: Mapping[str, str] | None = None,
) -> None:
    """
    Print the rewards on held-out prompts before and after training, then what the actors wrote.

    Args:
        rewards (`Sequence[RewardRow]`):
            One line of the table each.
        samples (`Sequence[SampleRow]`, *optional*):
            Completions to show; those that follow each other with the same prompt share its line. Text is shortened
            to a few lines.
        title (`str`, *optional*, defaults to `"Samples"`):
            The line above the completions.
        more (`Mapping[str, str]`, *optional*):
            What else was measured, by its title; shown below the table.
    """
    print(f"\n{_rule('Reward on held-out prompts')}")
    names = [textwrap.shorten(row.name, 40, placeholder="...") for row in rewards]
    width = max(map(len, [*names, "reward"]))
    print(f"  {'reward':<{width}}  {'before':>9}  {'after':>9}  {'change':>9}  prompts x samples")
    for name, row in zip(names, rewards, strict=True):
        numbers = f"{row.before:>9.4f}  {row.after:>9.4f}  {row.after - row.before:>+9.4f}"
        print(f"  {name:<{width}}  {numbers}  {row.num_prompts} x {row.samples_per_prompt}")
    for name, text in (more or {}).items():
        print(f"\n{_rule(name)}")
        _print_wrapped("  ", text)
    if samples:
        print(f"\n{_rule(title)}")
        _print_samples(samples)
    print(_rule(), flush=True)


def _print_samples(samples: Sequence[SampleRow]) -> None:
    width = max(len(row.actor) for row in samples)
    prompt = None
    for row in samples:
        if row.prompt != prompt:
            prompt = row.prompt
            _print_wrapped("  Prompt: ", prompt, max_lines=SAMPLE_LINES)
        _print_wrapped(f"    {row.actor:<{width}}  before  ", row.before, max_lines=SAMPLE_LINES)
        _print_wrapped(f"    {'':<{width}}  after   ", row.after, max_lines=SAMPLE_LINES)


def _print_wrapped(head: str, text: str, max_lines: int | None = None) -> None:
    """Print `text` to the right of `head`, its line breaks and repeated spaces turned into single spaces."""
    # A head that fills the line by itself leaves the text a column of its own rather than none.
    room = max(WIDTH - len(head), 20)
    lines = textwrap.wrap(" ".join(text.split()), room, max_lines=max_lines, placeholder=" ...") or ["(empty)"]
    print(head + lines[0])
    for line in lines[1:]:
        print(" " * len(head) + line)


def _rule(title: str = "") -> str:
    return f"-- {title} ".ljust(WIDTH, "-") if title else "-" * WIDTH


def plot_reward(
    log_history: list[dict], path: str | Path, title: str = "Reward during training", is_learned: bool = False
) -> None:
    """
    Draw the training reward, its running mean where there are many points, and the evaluations, into a PNG file.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`. Entries without `"reward"` or `"eval_reward"`, or with one that is not a
            finite number, are left out.
        path (`str` or `Path`):
            Where to write; missing directories are made.
        title (`str`, *optional*, defaults to `"Reward during training"`):
            The title.
        is_learned (`bool`, *optional*, defaults to `False`):
            Whether the training reward is that of a reward model. Its scale is its own, so the evaluations, which show
            the task's reward, get axes of their own.
    """
    steps, rewards = _series(log_history, "reward")
    eval_steps, eval_rewards = _series(log_history, "eval_reward")
    figure = Figure(figsize=(8, 6 if is_learned else 4.5), layout="constrained")
    # The Agg canvas is tied to this figure alone, so that no display is needed and pyplot's back end stays as it is.
    FigureCanvasAgg(figure)
    panels = figure.subplots(2 if is_learned else 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(title)
    panels[0].set_ylabel("reward model's reward" if is_learned else "reward")
    panels[-1].set(xlabel="update", ylabel="task's reward" if is_learned else "reward")
    if steps:
        # A line through few points shows little without markers, and their running mean nothing
        many = len(steps) > RUNNING_MEAN
        style = {"alpha": 0.4, "linewidth": 0.8} if many else {"marker": "o"}
        panels[0].plot(steps, rewards, color="tab:blue", label="training", **style)
        if many:
            mean_label = f"mean of the last {RUNNING_MEAN}"
            panels[0].plot(steps, _running_mean(rewards), color="tab:blue", linewidth=2, label=mean_label)
    if eval_steps:
        panels[-1].plot(eval_steps, eval_rewards, "D--", color="tab:orange", label="held-out prompts")
    if steps or eval_steps:
        panels[0].set_xlim(min(steps + eval_steps) - 0.5, max(steps + eval_steps) + 0.5)
        panels[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    else:
        note = "no reward was logged (is `logging_steps` above the number of updates?)"
        panels[0].text(0.5, 0.5, note, ha="center", transform=panels[0].transAxes)
    for axes in panels:
        if axes.lines:
            axes.legend()
        axes.grid(alpha=0.3)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


def _series(log_history: list[dict], key: str) -> tuple[list[int], list[float]]:
    points = [(entry.get("step"), entry.get(key)) for entry in log_history]
    points = [
        (step, value) for step, value in points if step is not None and value is not None and math.isfinite(value)
    ]
    return [step for step, _ in points], [value for _, value in points]


def _running_mean(values: list[float]) -> list[float]:
    """Mean of each value and the ones before it, at most `RUNNING_MEAN` in all."""
    windows = [values[max(0, end - RUNNING_MEAN) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
