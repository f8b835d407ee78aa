# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Multi-agent direct preference optimization."""

import copy
import functools
import logging
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.checkpoint import checkpoint
from torch.utils.data import SequentialSampler

from ..functional.preference_losses import preference_loss
from ..models.log_probabilities import completion_logps
from ..models.team import MultiAgentModel
from ..rollouts.pair_tokens import check_tokens, collate_pairs, encode_pair
from ..rollouts.preferences import PreferencePair, holds_pairs, pairs_of_dataset
from ..rollouts.sampling import JointSampler
from .multi_agent_config import MultiAgentConfig
from .preference_config import MADPOConfig
from .preference_trainer import PreferenceTrainer, has_pairs


logger = logging.getLogger(__name__)


class MADPOTrainer(PreferenceTrainer):
    """
    Multi-Agent Direct Preference Optimization: DPO (Rafailov et al. 2023, [Direct Preference
    Optimization](https://huggingface.co/papers/2305.18290)) of the joint policy, which is the product of the actors'.
    With `m_i` the difference between winner and loser of actor i's `log pi_i - log pi_i^ref`, the loss of a pair is
    `-log sigmoid(beta * sum_i m_i)`. With one actor it is TRL's `DPOTrainer`'s.

    Each actor learns from its own tokens alone, weighed by how much the whole team still errs.

    Args: see [`PreferenceTrainer`].
    """

    config_class = MADPOConfig

    def _actor_args(self) -> MADPOConfig:
        args = copy.copy(super()._actor_args())
        args.loss_type = MultiAgentConfig.loss_type  # of rollouts, which this trainer has in evaluation only
        if args.reference_free:
            args.beta = 0.0
        return args

    # Data

    def get_train_dataloader(self):
        """A loader of pairs. Sampled pairs are sampled here, so that the length of the training is known."""
        if self._resumed_point is not None and self._iteration < 0:
            self._load_preferences(self._resumed_point["team"]["preferences"])
        elif self._iteration < 0:
            self._begin_iteration(0)
        if not self._pairs:
            raise ValueError("There is no preference pair to train on, see the log.")
        self._loader = self._get_dataloader(
            dataset=self._pairs,
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )
        return self._loader

    def _get_train_sampler(self, dataset=None) -> JointSampler:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._train_sampler = JointSampler(
            self._pairs, num_generations=1, num_prompts=1, shuffle=self.args.shuffle_dataset, seed=seed
        )
        self._train_sampler.set_epoch(self._position.epoch)
        return self._train_sampler

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        # An optimizer step's loss is the mean over all its pairs, however they are cut into micro-batches
        own = torch.tensor(sum(len(batch) for batch in batches), device=self.accelerator.device)
        self._pairs_in_step = self.accelerator.reduce(own, reduction="sum").item()
        return batches, num_items

    def _prepare_iteration(self) -> None:
        if self._learns_from_dataset:
            check_tokens(self.tokenizers, self._pairs)
        pairs = self._encoded(self._pairs)
        num_dropped = len(self._pairs) - len(pairs)
        if num_dropped:
            logger.warning(
                "%d of %d preference pairs are dropped: a prompt or a completion in them has no token.",
                num_dropped,
                len(self._pairs),
            )
        self._pairs = pairs
        if self.args.precompute_ref_log_probs and not self.args.reference_free:
            self._precompute_references()

    def _encoded(self, pairs: list[PreferencePair]) -> list[PreferencePair]:
        """The pairs with their tokens, without those that have none for some actor."""
        return [pair for pair in map(self._with_tokens, pairs) if pair is not None]

    def _with_tokens(self, pair: PreferencePair) -> PreferencePair | None:
        """A pair with the tokens of its texts, no longer than the actors may answer; `None` if nothing is left."""
        if not pair.has_tokens:
            sides = zip(self.tokenizers, pair.prompts, pair.winner_completions, pair.loser_completions, strict=True)
            parts = [encode_pair(*side) for side in sides]
            pair.prompt_ids, pair.winner_ids, pair.loser_ids = (list(ids) for ids in zip(*parts, strict=True))
        limit = self.args.max_completion_length
        pair.winner_ids = [ids[:limit] for ids in pair.winner_ids]
        pair.loser_ids = [ids[:limit] for ids in pair.loser_ids]
        return pair if all([*pair.prompt_ids, *pair.winner_ids, *pair.loser_ids]) else None

    def _micro_batches(self, rows: list[Any]) -> list[Any]:
        return [rows]

    # Loss

    def _step_loss(self, team: MultiAgentModel, inputs: list[PreferencePair]) -> torch.Tensor:
        margins = [self._margins(team, index, inputs) for index in range(len(team.agents))]
        joint = functools.reduce(torch.add, margins)  # (P,)
        losses = preference_loss(joint, self.args.beta, self.args.loss_type, self.args.label_smoothing)
        self._note_margins(margins)
        if not self.model.training:
            return losses.mean()
        for index, learns in enumerate(self.trainable):
            if learns:
                self._note_taught(team, f"agent_{index}", True)
        return losses.sum() * self.accelerator.num_processes / self._pairs_in_step  # back ends average over processes

    def _margins(self, team: MultiAgentModel, index: int, pairs: list[PreferencePair]) -> torch.Tensor:
        """`m_i` of one actor, `(P,)`."""
        agent, model, args = self.agent_trainers[index], team.agents[index], self.args
        device = self.accelerator.device
        if not agent.trainable and not args.reference_free:
            return torch.zeros(len(pairs), device=device)  # it is its own reference
        inputs = collate_pairs(pairs, index, agent.processing_class.pad_token_id, device)
        policy = functools.partial(completion_logps, model, **inputs, average=args.loss_type == "ipo")
        if args.reference_free:
            reference = 0.0
        elif args.precompute_ref_log_probs and self.model.training:
            reference = torch.tensor([pair.reference_margins[index] for pair in pairs], device=device)
        else:
            reference = _difference(agent.reference_logps(model, inputs, average=args.loss_type == "ipo"))
        if args.recompute_activations and sum(self.trainable) > 1 and torch.is_grad_enabled():
            # So that the backward pass has one actor's activations at a time
            logps = checkpoint(policy, use_reentrant=False)
        else:
            logps = policy()
        return _difference(logps) - reference

    def _precompute_references(self) -> None:
        """Give every pair its `log pi_ref` differences; each process computes a part."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        size = self.args.per_device_train_batch_size
        own = []
        per_process = -(-len(self._pairs) // processes)
        places = [place % len(self._pairs) for place in range(rank * per_process, (rank + 1) * per_process)]
        with self._sampling():
            for start in range(0, per_process, size):
                pairs = [self._pairs[place] for place in places[start : start + size]]
                by_actor = [self._reference_margins(index, pairs) for index in range(len(self.agents))]
                own += [list(row) for row in zip(*by_actor, strict=True)]
        margins = gather_object(own)[: len(self._pairs)]
        for pair, row in zip(self._pairs, margins, strict=True):
            pair.reference_margins = row

    def _reference_margins(self, index: int, pairs: list[PreferencePair]) -> list[float]:
        agent = self.agent_trainers[index]
        if not agent.trainable:
            return [0.0] * len(pairs)
        inputs = collate_pairs(pairs, index, agent.processing_class.pad_token_id, self.accelerator.device)
        logps = agent.reference_logps(self.agents[index], inputs, average=self.args.loss_type == "ipo")
        return _difference(logps).tolist()

    def _note_margins(self, margins: list[torch.Tensor]) -> None:
        """Metrics under TRL's names, of every pair of all processes."""
        mode = "train" if self.model.training else "eval"
        scaled = self.args.beta * torch.stack(margins, dim=1).detach().float()  # (P, N)
        for own in gather_object(scaled.tolist()):
            joint = sum(own)
            self._metrics.add(mode, "rewards/margins", joint)
            self._metrics.add(mode, "rewards/accuracies", float(joint > 0))
            for name, margin in zip(self.agent_names, own, strict=True):
                self._metrics.add(mode, f"{name}/rewards/margins", margin)

    # Evaluation

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset) if has_pairs(eval_dataset) else super()._get_eval_sampler(eval_dataset)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """On pairs their loss; on tasks no loss: the team answers them, and the rewards are the metrics."""
        if holds_pairs(inputs[0]):
            pairs = self._encoded(pairs_of_dataset(inputs, len(self.agents)))
            with torch.no_grad(), self.compute_loss_context_manager():
                return self.compute_loss(model, pairs).detach(), None, None
        self._sample_and_score(inputs)
        return None, None, None


def _difference(logps: torch.Tensor) -> torch.Tensor:
    """Winners' minus losers' log-probabilities, `(2P,) -> (P,)`."""
    winners, losers = logps.chunk(2)
    return winners - losers
