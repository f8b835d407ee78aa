# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The data loaders of a team trainer: groups of joint samples for each prompt."""

import datasets
from transformers import Trainer

from .._compat import RepeatSampler, repeat_iterable_dataset
from ..checkpoints.stateful import Stateful
from ..rollouts.fetching import FetchedRows, FetchedStream, makes_rows
from ..rollouts.sampling import JointSampler


class TeamData(Trainer):
    """
    The part of [`MultiAgentTrainer`] that loads prompts, in the order and the groups in which they are trained.
    """

    _train_sampler: JointSampler | None = None
    # The training set, where its rows are made when they are fetched
    _fetched_rows: FetchedRows | None = None

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = []

    def get_train_dataloader(self):
        """A loader of generation batches: each is visited by every micro-step that uses it, as in TRL."""
        args, dataset = self.args, self.train_dataset
        if dataset is None:
            raise ValueError("Training needs a `train_dataset`.")
        self._fetched_rows = None
        if isinstance(dataset, datasets.IterableDataset):
            dataset = dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
            dataset = repeat_iterable_dataset(
                dataset,
                mini_repeat_count=args.num_generations,
                batch_size=args.generation_batch_size // args.num_generations,
                repeat_count=args.updates_per_rollout * args.steps_per_generation,
            )
            dataset = FetchedStream(dataset, args.seed)
        elif makes_rows(dataset):
            if isinstance(dataset, Stateful) and args.dataloader_num_workers:
                raise ValueError(
                    f"The training set has a state_dict(), and dataloader_num_workers={args.dataloader_num_workers}: "
                    "its workers would have copies of it, whose states no checkpoint sees. Set it to 0."
                )
            dataset = self._fetched_rows = FetchedRows(dataset, args.seed)
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=self._train_batch_size * args.steps_per_generation,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, dataset=None) -> JointSampler:
        args = self.args
        self._train_sampler = JointSampler(
            self.train_dataset if dataset is None else dataset,
            num_generations=args.num_generations,
            num_prompts=args.generation_batch_size // args.num_generations,
            repeat_count=args.updates_per_rollout * args.steps_per_generation,
            shuffle=args.shuffle_dataset,
            seed=args.seed if args.data_seed is None else args.data_seed,
            placed=self._fetched_rows is not None,
        )
        return self._train_sampler

    def _get_eval_sampler(self, eval_dataset) -> RepeatSampler:
        return RepeatSampler(eval_dataset, mini_repeat_count=self._num_generations("eval"), shuffle=False)

    def get_eval_dataloader(self, eval_dataset=None):
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("Evaluation needs an `eval_dataset`.")
        if (self.args.eval_batch_size * self.accelerator.num_processes) % self._num_generations("eval"):
            raise ValueError(
                f"An evaluation step has {self.args.eval_batch_size} joint samples on each of "
                f"{self.accelerator.num_processes} processes, expected a multiple of the "
                f"{self._num_generations('eval')} generations of a prompt. Change `per_device_eval_batch_size` or "
                "`num_generations_eval`."
            )
        if isinstance(dataset, datasets.IterableDataset):
            self.accelerator.dataloader_config.dispatch_batches = False
            dataset = repeat_iterable_dataset(dataset, mini_repeat_count=self._num_generations("eval"))
        return self._get_dataloader(
            dataset=dataset,
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
        )

    def _num_generations(self, mode: str) -> int:
        generations = self.args.num_generations
        return generations if mode == "train" else self.args.num_generations_eval or generations
