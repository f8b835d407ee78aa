# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Configs of the critic-free trainers."""

from dataclasses import dataclass, field

from .multi_agent_config import MultiAgentConfig, check_choice, check_number


@dataclass
class ReinforceConfig(MultiAgentConfig):
    """
    Configuration of the critic-free trainers. They differ in the default of `advantage_mode` alone, and in whether
    advantages are scaled.

    Parameters:
        advantage_mode (`str`, *optional*, defaults to the trainer's own):
            Baseline of a return: `"raw"` none, `"mean"` the mean of its group, `"rloo"` the mean of the others of its
            group, `"max"` the maximum of its group. See [`~trl_multiagent.functional.advantages.group_advantages`].
        advantage_groups (`str`, *optional*, defaults to `"turn"`):
            What a return is compared with. `"turn"`: what the same actor said to the same context, in a tree, or to
            the same task in the same turn, in a chain (AT-GRPO, arXiv 2510.11062). `"actor"`: all that the same actor
            said to the same task, in all turns, where each trajectory counts once (Dr. MAS, arXiv 2602.08847); only
            with `advantage_mode="mean"`. `"role"`: a running mean of the actor's own returns (RAE of SPIRAL, arXiv
            2506.24119) in the same turn, which begins at 0 and needs no group; it replaces the baseline of
            `advantage_mode`, and needs `scale_rewards="none"`.
        role_baseline_decay (`float`, *optional*, defaults to `0.95`):
            With `advantage_groups="role"`, how much of the running mean a sample keeps.
        role_baseline_column (`str`, *optional*):
            With `advantage_groups="role"`, a column of the dataset that names the game; each game has running means of
            its own. Default: all tasks are one game.
        joint_mode (`str`, *optional*, defaults to `"aligned"`):
            `"aligned"`: sample g of every actor forms joint response g. `"cross"`: samples form joint responses in all
            combinations, and a sample is credited with the mean over its own (COMA's counterfactual advantage,
            Foerster et al. 2018).
        cross_samples (`int`, *optional*):
            With `joint_mode="cross"`, that many random tuples of teammates for each actor instead of all
            `num_generations ** (num_agents - 1)`; then a context of N actors takes at most
            `N * num_generations * cross_samples` reward evaluations. In a tree each combination branches.
    """

    advantage_mode: str = field(
        default="mean",
        metadata={
            "help": "Baseline of a return: none (raw), or the mean, the mean of the others, or the maximum of its "
            "group.",
            "choices": ["raw", "mean", "rloo", "max"],
        },
    )
    advantage_groups: str = field(
        default="turn",
        metadata={
            "help": "What a return is compared with: those of the same context and turn, all of the same actor and "
            "task, or a running mean of the actor's role.",
            "choices": ["turn", "actor", "role"],
        },
    )
    role_baseline_decay: float = field(
        default=0.95,
        metadata={"help": "With advantage_groups='role', how much of the running mean a sample keeps."},
    )
    role_baseline_column: str | None = field(
        default=None,
        metadata={"help": "With advantage_groups='role', the dataset's column that names the game."},
    )
    joint_mode: str = field(
        default="aligned",
        metadata={
            "help": "Whether samples form joint responses number by number, or in all combinations.",
            "choices": ["aligned", "cross"],
        },
    )
    cross_samples: int | None = field(
        default=None,
        metadata={"help": "With joint_mode='cross', random tuples of teammates for each actor. Not set: all."},
    )

    def __post_init__(self):
        check_choice("advantage_mode", self.advantage_mode, ("raw", "mean", "rloo", "max"))
        check_choice("advantage_groups", self.advantage_groups, ("turn", "actor", "role"))
        check_choice("joint_mode", self.joint_mode, ("aligned", "cross"))
        check_choice("scale_rewards", self.scale_rewards, ("group", "batch", "none", True, False))
        super().__post_init__()
        self._check_credit()
        self._check_cross()

    def _min_generations(self) -> int:
        return 2 if self._has_group_baseline() else 1

    def _has_group_baseline(self) -> bool:
        """Whether the baseline of a return is taken from its group."""
        return self.advantage_mode != "raw" and self.advantage_groups != "role"

    def _baseline(self) -> str:
        """The options that choose the baseline, for errors."""
        return f"advantage_mode={self.advantage_mode!r}, advantage_groups={self.advantage_groups!r}"

    def _check_credit(self) -> None:
        check_number("role_baseline_decay", self.role_baseline_decay, float, 0, 1)
        if self.role_baseline_decay == 1:
            raise ValueError("role_baseline_decay=1 keeps the running mean at 0 forever. Set a number below 1.")
        if self.scale_rewards != "none" and not self._has_group_baseline():
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r} with a baseline that is not the group's ({self._baseline()}): "
                "rewards that are almost equal would be divided by almost 0. Set scale_rewards='none'."
            )
        plain = self.advantage_mode == "mean" and self.advantage_groups == "turn" and self.joint_mode == "aligned"
        if self.multi_objective_aggregation == "normalize_then_sum" and not plain:
            raise ValueError(
                "multi_objective_aggregation='normalize_then_sum' takes the mean of each group off each reward "
                f"function, whatever the estimator. It fits advantage_mode='mean', advantage_groups='turn' and "
                f"joint_mode='aligned' only, got {self.advantage_mode!r}, {self.advantage_groups!r} and "
                f"{self.joint_mode!r}. Weigh the functions with `reward_weights` instead."
            )
        if self.advantage_groups == "actor" and (self.advantage_mode != "mean" or self.scale_rewards == "batch"):
            raise ValueError(
                "advantage_groups='actor' is defined for advantage_mode='mean' and scale_rewards 'group' or 'none', "
                f"got {self.advantage_mode!r} and {self.scale_rewards!r}."
            )
        if self.role_baseline_column is not None and self.advantage_groups != "role":
            raise ValueError(
                f"role_baseline_column={self.role_baseline_column!r} is read with advantage_groups='role' only."
            )

    def _check_cross(self) -> None:
        if self.cross_samples is not None:
            check_number("cross_samples", self.cross_samples, int, 1)
            if self.joint_mode != "cross":
                raise ValueError(
                    f"cross_samples={self.cross_samples} is read with joint_mode='cross' only, got "
                    f"{self.joint_mode!r}."
                )
        if self.joint_mode != "cross":
            return
        if self.turn_order == "sequential":
            raise ValueError(
                "joint_mode='cross' with turn_order='sequential': a later actor answered what the earlier one said, "
                "so its answer does not belong beside another. Set joint_mode='aligned'."
            )
        if self.advantage_groups != "turn":
            raise ValueError(
                f"joint_mode='cross' credits a sample within its context, so it needs advantage_groups='turn', got "
                f"{self.advantage_groups!r}."
            )
        if self.num_turns > 1 and self.rollout_mode == "chain":
            raise ValueError(
                "joint_mode='cross' with rollout_mode='chain': after the first turn the chains stand in different "
                "places, and there is nothing to combine. Set rollout_mode='tree'."
            )
        if self.num_turns > 1:
            self._check_whole_groups("joint_mode='cross' over several turns")

    def _check_whole_groups(self, what: str) -> None:
        rows = self.per_device_train_batch_size * self.steps_per_generation
        if rows % self.num_generations:
            raise ValueError(
                f"{what} needs whole groups on each process, but a process has {rows} joint samples "
                f"(per_device_train_batch_size * steps_per_generation), which is no multiple of num_generations="
                f"{self.num_generations}. Change one of them."
            )


_SCALING = {"help": "Deviation that advantages are divided by: 'group', 'batch' or 'none'. Nothing is centred."}


def _mode(default: str) -> str:
    """`advantage_mode` with another default."""
    return field(default=default, metadata=ReinforceConfig.__dataclass_fields__["advantage_mode"].metadata)


@dataclass
class MAGRPOConfig(ReinforceConfig):
    """
    Configuration of [`MAGRPOTrainer`]: `advantage_mode="mean"`, and `scale_rewards` as in [`~trl.GRPOConfig`]. See
    [`ReinforceConfig`].
    """


@dataclass
class MAREINFORCEConfig(ReinforceConfig):
    """
    Configuration of [`MAREINFORCETrainer`]. See [`ReinforceConfig`].

    > [!NOTE]
    > These parameters have default values different from [`ReinforceConfig`]:
    > - `advantage_mode`: Defaults to `"raw"` instead of `"mean"`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`.
    """

    advantage_mode: str = _mode("raw")
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Must stay 'none': a return without a baseline is not scaled."},
    )


@dataclass
class MARLOOConfig(ReinforceConfig):
    """
    Configuration of [`MARLOOTrainer`]. See [`ReinforceConfig`].

    > [!NOTE]
    > These parameters have default values different from [`ReinforceConfig`]:
    > - `advantage_mode`: Defaults to `"rloo"` instead of `"mean"`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`, as in [`~trl.RLOOConfig`]. Scaled by the deviation
    >   of the group, RLOO is GRPO times `G / (G - 1)`.
    """

    advantage_mode: str = _mode("rloo")
    scale_rewards: str = field(default="none", metadata=_SCALING)


@dataclass
class MAReMaxConfig(ReinforceConfig):
    """
    Configuration of [`MAReMaxTrainer`]. See [`ReinforceConfig`].

    Parameters:
        remax_baseline (`str`, *optional*, defaults to `"max"`):
            `"max"`: the highest return of the group, so that advantages are never positive. `"greedy"`: the return of
            one more joint response for each task, in which every actor takes its most probable tokens (ReMax, Li et
            al. 2024, arXiv 2310.10505); over several turns, that interaction's return from the same turn on.

    > [!NOTE]
    > These parameters have default values different from [`ReinforceConfig`]:
    > - `advantage_mode`: Defaults to `"max"` instead of `"mean"`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`.
    """

    advantage_mode: str = _mode("max")
    scale_rewards: str = field(default="none", metadata=_SCALING)
    remax_baseline: str = field(
        default="max",
        metadata={
            "help": "The group's highest return, or the return of one greedy joint response.",
            "choices": ["max", "greedy"],
        },
    )

    def __post_init__(self):
        check_choice("remax_baseline", self.remax_baseline, ("max", "greedy"))
        super().__post_init__()
        if self.remax_baseline != "greedy":
            return
        if self.advantage_mode != "max" or self.advantage_groups != "turn":
            raise ValueError(
                "remax_baseline='greedy' is a baseline of its own: leave advantage_mode='max' and "
                f"advantage_groups='turn', got {self.advantage_mode!r} and {self.advantage_groups!r}."
            )
        self._check_whole_groups("remax_baseline='greedy'")

    def _baseline(self) -> str:
        greedy = self.remax_baseline == "greedy"
        return f"remax_baseline={self.remax_baseline!r}" if greedy else super()._baseline()

    def _has_group_baseline(self) -> bool:
        return self.remax_baseline != "greedy" and super()._has_group_baseline()
