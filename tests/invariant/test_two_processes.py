# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Two processes give the weights of one, with DDP, ZeRO-2 and ZeRO-3, on the CPU.

This file is also the script that the two processes run (`main`): `torchrun --nproc_per_node 2 <this file> <command>
<directory> <ZeRO stage>`. A process trains all cases of its back end one after the other, exports each team, and
leaves what it saw in `<case>/rank_<i>.json`. One process does the same cases inside the test.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from safetensors.torch import load_file
from tiny import CHAT_TEMPLATE, dataset, gpt2, llama, lm, tok, weights_hash
from transformers import AutoModelForCausalLM, set_seed

from trl_multiagent import (
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLOOConfig,
    MARLOOTrainer,
)
from trl_multiagent.agents.grpo_agent import GRPOAgent
from trl_multiagent.rollouts.interaction import Interaction


pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_TIMEOUT = 600  # seconds; a launch takes a small part of it, so what runs into it hangs
# float32: sums over two processes are rounded in another order than those over one. The second moments' epsilon is
# raised so that AdamW does not turn the rounding of a gradient that is 0 into a step of the learning rate.
TOLERANCE = 2e-6
ADAM_EPSILON = 1e-3

CRITIC = {"critic_learning_rate": 5e-3, "reward_weights": [0.1]}
# Per-device batches are those of two processes; one process gets the double
SINGLE_TURN_CASES = {
    "accumulation": {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "num_generations": 4,
        "weight_decay": 0.1,
    },
    "from disk with KL": {"beta": 0.1, "num_iterations": 2, "loss_type": "grpo", "num_generations": 4},
    "LoRA beside full": {"beta": 0.1, "num_generations": 4},
    "one frozen": {"num_generations": 4},
    "groups over both processes": {"num_generations": 8},
    "groups cut unevenly": {"num_generations": 4, "per_device_train_batch_size": 6},
    "MAAC": {"critic_type": "q", "num_generations": 4, "beta": 0.1, "num_iterations": 2, "critic_learning_rate": 5e-3},
    "MAAC with missing rewards": {"critic_type": "v", "num_generations": 4, "critic_learning_rate": 5e-3},
    "clipped": {"num_generations": 4, "max_grad_norm": 0.1},
    "IAC": {**CRITIC, "critic_type": "q", "num_generations": 4, "beta": 0.1, "num_iterations": 2},
    "IAC, shared": {
        **CRITIC,
        "use_separate_critic": False,
        "value_clip_range": 0.2,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "num_generations": 4,
        "weight_decay": 0.1,
    },
    "IAC with LoRA": {**CRITIC, "num_generations": 4, "beta": 0.1, "critic_warmup_steps": 1},
    "IAC, shared, with LoRA": {**CRITIC, "use_separate_critic": False, "num_generations": 4, "beta": 0.1},
    "IAC, shared, tokens": {
        **CRITIC,
        "use_separate_critic": False,
        "advantage_level": "token",
        "kl_in_reward": True,
        "beta": 0.1,
        "value_normalization": True,
        "critic_warmup_steps": 1,
        "num_generations": 1,
    },
    "RLOO over both processes": {"num_generations": 8, "reward_weights": [0.1], "max_steps": 2},
    "cross": {"joint_mode": "cross", "num_generations": 4, "max_steps": 2},
    "cross over both processes": {"joint_mode": "cross", "num_generations": 8, "max_steps": 2},
    "cross, sampled": {"joint_mode": "cross", "cross_samples": 2, "num_generations": 4, "max_steps": 2},
    "sequential, cut unevenly": {
        "turn_order": "sequential",
        "num_generations": 4,
        "per_device_train_batch_size": 6,
        "max_steps": 2,
    },
    "influence": {"influence_steps": 1, "num_generations": 4, "per_device_train_batch_size": 6, "max_steps": 2},
}
# The threshold is near the mean reward, so that some go on and some do not
CHAIN = {
    "rollout_mode": "chain",
    "num_turns": 3,
    "num_generations": 4,
    "early_termination_threshold": 22.0,
    "discount": 0.9,
    "max_steps": 2,
}
# For advantages that nothing scales: rounding grows with them
SMALL_REWARDS = {"reward_weights": [0.1], "early_termination_threshold": 2.2}
TREE = {"num_turns": 3, "num_generations": 2, "discount": 0.9, "max_steps": 2}
SEVERAL_TURN_CASES = {
    "tree": {**TREE, "per_device_train_batch_size": 2},
    "tree cut unevenly": {
        **TREE,
        "per_device_train_batch_size": 3,
        "early_termination_threshold": 22.0,
        "beta": 0.1,
        "loss_type": "grpo",
    },
    "tree, cross": {**TREE, "num_turns": 2, "joint_mode": "cross", "per_device_train_batch_size": 2},
    "chain that ends unevenly": {**CHAIN, "early_termination_threshold": 28.0, "loss_type": "grpo"},
    "chain with nothing on one process": {**CHAIN, "shuffle_dataset": False, "beta": 0.1, "max_steps": 3},
    # Messages in the first turn, texts in the second; a process without a second turn has only messages to fill up
    "chain of messages, then texts": {
        **CHAIN,
        "shuffle_dataset": False,
        "external_prompt_passthrough": True,
        "num_turns": 2,
        "max_steps": 3,
    },
    "chain over both processes": {**CHAIN, "num_generations": 8, "loss_type": "dr_grpo"},
    "chain, accumulated": {
        **CHAIN,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "num_iterations": 2,
        "weight_decay": 0.1,
        "max_steps": 3,
    },
    "sequential chain": {**CHAIN, "turn_order": "sequential"},
    "chain beside a frozen actor": {**CHAIN, "trainable_agents": [True, False]},
    "RLOO chain": {**CHAIN, "scale_rewards": "batch"},
    "ReMax chain": {**CHAIN, **SMALL_REWARDS, "remax_baseline": "greedy"},
    "role baselines": {
        **CHAIN,
        **SMALL_REWARDS,
        "advantage_groups": "role",
        "role_baseline_column": "game",
        "role_baseline_decay": 0.8,
        "scale_rewards": "none",
    },
    "actor groups with missing rewards": {**CHAIN, "advantage_groups": "actor"},
    "MAAC tree, cut unevenly": {
        **TREE,
        **CRITIC,
        "per_device_train_batch_size": 3,
        "early_termination_threshold": 2.2,
        "critic_type": "q",
        "critic_warmup_steps": 1,
        "max_steps": 3,
        "weight_decay": 0.1,
    },
    "MAAC chain": {**CHAIN, **CRITIC, **SMALL_REWARDS, "individual_rewards": True, "value_normalization": True},
    "IAC, tokens, nothing on one process": {
        **CHAIN,
        **CRITIC,
        **SMALL_REWARDS,
        "shuffle_dataset": False,
        "advantage_level": "token",
        "bootstrap_truncated": True,
        "max_steps": 3,
    },
    "IAC, shared, chain": {
        **CHAIN,
        **CRITIC,
        **SMALL_REWARDS,
        "use_separate_critic": False,
        "critic_type": "q",
        "value_normalization": True,
        "kl_in_reward": True,
        "beta": 0.1,
        "num_generations": 1,
    },
}
CASES = {**SINGLE_TURN_CASES, **SEVERAL_TURN_CASES}
# Tasks that end after their first turn, by `gold`: those of the second process in step 1, of the first in step 2, all
# in step 3
ENDING = {
    case: ["w1", "w2", "w4", "w5"]
    for case in SEVERAL_TURN_CASES
    if "nothing on one process" in case or "messages" in case
}
EVALUATED = ["accumulation", "chain that ends unevenly"]
FROZEN = {"one frozen": "agent_0", "chain beside a frozen actor": "agent_1"}
# Cases whose trainer is not MAGRPO
TRAINERS = {
    "MAAC": (MAACConfig, MAACTrainer),
    "IAC": (IACConfig, IACTrainer),
    "RLOO": (MARLOOConfig, MARLOOTrainer),
    "ReMax": (MAReMaxConfig, MAReMaxTrainer),
}
# DeepSpeed clips by one norm over the team, so that case has no match there
ZERO_CASES = [
    "from disk with KL",  # first: nothing has told DeepSpeed of the processes before
    "accumulation",
    "LoRA beside full",
    "one frozen",
    "groups over both processes",
    "MAAC",
    "cross over both processes",
    "tree",
    "chain that ends unevenly",
    "chain with nothing on one process",
    "chain, accumulated",
    "sequential chain",
    "chain beside a frozen actor",
    "RLOO chain",
    "ReMax chain",
    "role baselines",
    "actor groups with missing rewards",
    "IAC",
    "IAC with LoRA",
    "IAC, shared",
    "IAC, shared, with LoRA",
    "IAC, shared, tokens",
    "MAAC tree, cut unevenly",
    "MAAC chain",
    "IAC, tokens, nothing on one process",
    "IAC, shared, chain",
]
BACKENDS = {"DDP": (0, list(CASES)), "ZeRO-2": (2, ZERO_CASES), "ZeRO-3": (3, ZERO_CASES)}
RUNS = [(backend, case) for backend, (_, cases) in BACKENDS.items() for case in cases]
EVERY_RUN = pytest.mark.parametrize(("backend", "case"), RUNS)
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
# With ZeRO-3 each process holds its own part of every weight
WHOLE_WEIGHTS = pytest.mark.parametrize(("backend", "case"), [run for run in RUNS if run[0] != "ZeRO-3"])


class RecordingReward:
    """
    Word numbers of the joint response; keeps what it was called with. With `gaps` some have no reward. The tasks whose
    `gold` is in `ending` get more than any threshold.
    """

    def __init__(self, gaps: bool = False, ending: list[str] = ()):
        self.calls = []
        self.gaps = gaps
        self.ending = ending
        self.trainer = None

    def __call__(self, first, second, batch_items, turn):
        values = [
            float(sum(int(word[1:]) % 7 for word in f"{a} {b}".split() if word[0] == "w"))
            for a, b in zip(first, second, strict=True)
        ]
        if self.gaps:
            values = [None if value % 3 == 0 else value for value in values]
        if batch_items[0]["gold"] in self.ending:
            values = [value + 100 for value in values]
        call = {"prompts": [row["prompt"] for row in batch_items], "values": values, "turn": turn}
        call["texts"] = [f"{a} | {b}" for a, b in zip(first, second, strict=True)]
        call["step"] = self.trainer.state.global_step
        self.calls.append(call)
        return values


def pass_on(prompt, agent_completions, num_agents, turn, **history):
    """The environment: each actor reads the task again, and what the other one said."""
    assert [len(past) for past in history["response_history_per_agent"]] == [turn] * num_agents
    first, second = agent_completions
    return [f"{prompt} w2{turn} {second}", f"{prompt} w2{turn} {first}"]


def as_messages(row):
    return [{"role": "user", "content": row["prompt"]}]


def hear(row, earlier_completions=()):
    return " ".join([row["prompt"], *earlier_completions])


def sample_by_row(patch: pytest.MonkeyPatch) -> None:
    """
    Sample every row by itself, with random numbers that belong to the row, on whatever process it is: to the step, the
    prompt and the place among the samples that share the prompt by design. In a chain no others do after the first
    turn; two chains that came to the same prompt by chance go on alike.
    """
    sample, generate = Interaction._sample, GRPOAgent._generate_single_turn

    def sample_numbered(self, branches, size, limit, settings, fillers):
        is_first = not any(branch.history.responses[0] for branch in branches)
        start = self.accelerator.process_index * limit if is_first else 0  # later, no group spans processes
        group = settings.num_generations if is_first or settings.tree else 1
        for actor in self.actors:
            actor.places = [(start + row) % group for row in range(size)]
        return sample(self, branches, size, limit, settings, fillers)

    def generate_rows(self, prompt_ids, *args, **kwargs):
        places, self.places = self.places[: len(prompt_ids)], self.places[len(prompt_ids) :]
        completions = []
        for ids, place in zip(prompt_ids, places, strict=True):
            key = f"{self.model.config.vocab_size} {self.state.global_step} {ids} {place}"
            with torch.random.fork_rng():
                torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big"))
                completions += generate(self, [ids], *args, **kwargs)[0]
        return completions, None

    patch.setattr(Interaction, "_sample", sample_numbered)
    patch.setattr(GRPOAgent, "_generate_single_turn", generate_rows)


def build(case: str, directory: Path, processes: int, stage: int):
    changed = {
        "per_device_train_batch_size": 4,
        "max_grad_norm": 0.0,
        "max_steps": 3,
        "influence_steps": 0,  # it measures on other tasks, with calls of its own
        **CASES[case],
    }
    changed["per_device_train_batch_size"] *= 2 // processes
    kind = next((name for name in TRAINERS if name in case), None)
    config_class, trainer_class = TRAINERS.get(kind, (MAGRPOConfig, MAGRPOTrainer))
    args = config_class(
        output_dir=str(directory / case / "run"),
        max_completion_length=4,
        learning_rate=1e-2,
        adam_epsilon=ADAM_EPSILON,
        logging_steps=1,
        per_device_eval_batch_size=8,
        report_to=["wandb"] if case == "accumulation" else [],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        seed=3,
        deepspeed=zero(stage),
        **changed,
    )
    assert args.gradient_checkpointing
    agents = [lm(0), llama(1, vocab=40)]
    if case == "from disk with KL":
        agents = [str(directory / "sources" / "qwen2"), str(directory / "sources" / "llama")]
    reward = RecordingReward(gaps="missing" in case, ending=ENDING.get(case, []))
    arguments = {
        "agents": agents,
        "tokenizer": [tok(32), tok(40)],
        "reward_func": reward,
        "args": args,
        "train_dataset": dataset(6).add_column("game", ["chess", "go", "go", "chess", "go", "go"]),
        "eval_dataset": dataset(3).add_column("game", ["chess", "go", "go"]),
    }
    if args.num_turns > 1:
        arguments["external_transition"] = pass_on
    if args.turn_order == "sequential":
        arguments["formatters"] = hear
    if args.external_prompt_passthrough:
        arguments["formatters"] = as_messages
        arguments["tokenizer"] = [tok(size, chat_template=CHAT_TEMPLATE) for size in (32, 40)]
    if case == "one frozen":
        agents[0].requires_grad_(False)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if "LoRA" in case:
        arguments["peft_config"] = [None, lora]
    if trainer_class is MAACTrainer:
        arguments |= {"critic_model": gpt2(7, vocab=48), "critic_tokenizer": tok(48)}
    if trainer_class is IACTrainer and args.use_separate_critic:
        arguments["critics"] = [gpt2(7, vocab=32), lm(8, vocab=48, hidden=24)]
        arguments["critic_peft_config"] = [None, lora if "LoRA" in case else None]
    set_seed(5)
    reward.trainer = trainer_class(**arguments)
    return reward.trainer


def zero(stage: int) -> dict | None:
    if not stage:
        return None
    return {
        "zero_optimization": {
            "stage": stage,
            # Everything is split up, also the small parameters that would stay whole
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def record_wandb() -> dict:
    """Replace what logs to W&B by a recorder; no run is started."""
    import wandb

    seen = {"init": 0, "log": []}
    run = MagicMock(resumed=False, offline=False)

    def init(*args, **kwargs):
        seen["init"] += 1
        wandb.run = run
        return run

    def log(data, *args, **kwargs):
        seen["log"].append(sorted(data))

    run.log = log
    wandb.run, wandb.init, wandb.log, wandb.config, wandb.define_metric = None, init, log, MagicMock(), MagicMock()
    return seen


def run_case(case: str, directory: Path, processes: int, stage: int) -> dict:
    """Train, evaluate and export one case; returns what is to be known about it."""
    wandb = record_wandb() if case == "accumulation" else None
    trainer = build(case, directory, processes, stage)
    reward = trainer.reward.funcs[0]
    before = None
    if case == "from disk with KL":  # before there is a wrapper or an engine
        before = trainer.evaluate()
        reward.calls.clear()
    trainer.train()
    report = {
        "evaluation_before": before,
        "processes": trainer.accelerator.num_processes,
        "zero_stage": trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0,
        "wrapper": type(trainer.model_wrapped).__name__,
        "calls": list(reward.calls),
        "logs": [step for step in trainer.state.log_history if "loss" in step],
        "wandb": wandb and dict(wandb, log=list(wandb["log"])),
        "distinct": trainer.agents[0] is not trainer.agents[1],
    }
    if stage == 3:
        references = [agent.ref_model for agent in trainer.agent_trainers if agent.ref_model is not None]
        parameters = [p for module in [trainer.model, *references] for p in module.parameters()]
        report["whole"] = sum(p.numel() > 0 or p.ds_tensor.numel() >= p.ds_numel > 1 for p in parameters)
        report["references"] = len(references)
    else:
        report["hashes"] = [weights_hash(module) for _, module in trainer.model.entities()]
    if case in EVALUATED:
        reward.calls.clear()
        report["evaluation"] = trainer.evaluate()
        report["evaluation_calls"] = list(reward.calls)
    trainer.save_model(str(directory / case / "export"))
    return report


def main(command: str, directory: str, stage: str) -> None:
    directory, stage = Path(directory), int(stage)
    sample_by_row(pytest.MonkeyPatch())
    if command == "raise":
        train_with_a_reward_that_raises(directory)
        return
    for case in dict(BACKENDS.values())[stage]:
        report = run_case(case, directory, 2, stage)
        assert report["processes"] == 2
        assert report["zero_stage"] == stage
        rank = int(os.environ["RANK"])
        (directory / case / f"rank_{rank}.json").write_text(json.dumps(report))
        AcceleratorState._reset_state()  # the next trainer may bring its own DeepSpeed plugin


def train_with_a_reward_that_raises(directory: Path) -> None:
    trainer = build("groups over both processes", directory, 2, 0)
    assert trainer.accelerator.num_processes == 2
    reward = trainer.reward.funcs[0]

    def score(*args, **kwargs):
        if trainer.state.global_step == 1 and trainer.accelerator.process_index == 0:
            raise KeyError("the grader lost this task")
        return reward(*args, **kwargs)

    trainer.reward.funcs[0] = score
    trainer.train()


# The tests


def separate_critics(case: str) -> bool:
    return "IAC" in case and CASES[case].get("use_separate_critic", True)


def launch(command: str, directory: Path, stage: int) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # DeepSpeed builds an operator and finds ninja by PATH only
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    worker = [str(Path(__file__).resolve()), command, str(directory), str(stage)]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *worker],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LAUNCH_TIMEOUT,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Models on disk, for the case that loads its actors by name."""
    directory = tmp_path_factory.mktemp("sources")
    lm(0).save_pretrained(directory / "sources" / "qwen2")
    llama(1, vocab=40).save_pretrained(directory / "sources" / "llama")
    return directory / "sources"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, sources):
    """Directory and reports of all cases in one process."""
    directory = tmp_path_factory.mktemp("one")
    (directory / "sources").symlink_to(sources)
    with pytest.MonkeyPatch.context() as patch:
        sample_by_row(patch)
        for name in ("run", "init", "log", "config", "define_metric"):
            patch.setattr(f"wandb.{name}", None)
        reports = {case: run_case(case, directory, 1, 0) for case in CASES}
    assert {report["processes"] for report in reports.values()} == {1}
    return directory, reports


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, sources):
    """From a back end to the directory and the reports (`[case][rank]`) of all its cases; each is launched once."""

    @functools.cache
    def run(backend: str):
        stage, cases = BACKENDS[backend]
        if stage:
            pytest.importorskip("deepspeed")
        directory = tmp_path_factory.mktemp("two")
        (directory / "sources").symlink_to(sources)
        done = launch("train", directory, stage)
        assert done.returncode == 0, done.stderr[-5000:]
        reports = {
            case: [json.loads((directory / case / f"rank_{rank}.json").read_text()) for rank in range(2)]
            for case in cases
        }
        return directory, reports

    return run


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of an export, named by its place."""
    tensors = {}
    for path in sorted(directory.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            tensors[f"{path.parent.relative_to(directory)}/{name}"] = tensor
    for path in sorted(directory.rglob("value_head.pt")):
        for name, tensor in torch.load(path, weights_only=True).items():
            tensors[f"{path.parent.relative_to(directory)}/value_head/{name}"] = tensor
    return tensors


@EVERY_RUN
def test_exported_weights_equal_those_of_one_process(backend, case, one_process, two_processes):
    directory, _ = two_processes(backend)
    one, two = exported(one_process[0] / case / "export"), exported(directory / case / "export")
    assert len(one) > 20 and one.keys() == two.keys()
    far = {name: (one[name] - two[name]).abs().max().item() for name in one}
    for name in [name for name in far if name.endswith("_extra_state")]:  # sums over returns, not weights
        far[name] = ((one[name] - two[name]).abs() / one[name].abs().clamp(min=1)).max().item()
    worst = max(far, key=far.get)
    assert far[worst] <= TOLERANCE, f"{worst} is {far[worst]} away"


@pytest.mark.parametrize("case", CASES)
def test_one_process_has_learned_something(case, one_process):
    """The comparison is worth something: what can learn has moved, by rewards that differ within a group."""
    directory, reports = one_process
    tensors = exported(directory / case / "export")
    start = {"agent_0": lm(0).state_dict(), "agent_1": llama(1, vocab=40).state_dict()}
    for actor, weights in start.items():
        own = {name.removeprefix(f"{actor}/"): t for name, t in tensors.items() if name.startswith(f"{actor}/")}
        moved = {name for name, weight in weights.items() if (own[name] - weight).abs().max() > 10 * TOLERANCE}
        if actor == FROZEN.get(case):
            assert moved == set()
        elif "LoRA" in case and actor == "agent_1":
            assert moved == {name for name in weights if "q_proj" in name or "v_proj" in name}
        else:
            assert moved == set(weights)
    assert len(reports[case]["logs"]) == CASES[case].get("max_steps", 3)
    calls = reports[case]["calls"]
    steps = {call["step"] for call in calls}
    if CASES[case]["num_generations"] == 1:  # a call is one prompt's, and the critic compares prompts
        calls = [
            {"step": step, "values": [value for call in calls if call["step"] == step for value in call["values"]]}
            for step in steps
        ]
    taught = {call["step"] for call in calls if len({value for value in call["values"] if value is not None}) > 1}
    assert taught == steps


@WHOLE_WEIGHTS
def test_both_processes_end_with_the_same_weights(backend, case, two_processes):
    """B48"""
    first, second = two_processes(backend)[1][case]
    assert first["hashes"] == second["hashes"]
    critics = 1 if "MAAC" in case else 2 if separate_critics(case) else 0
    assert len(set(first["hashes"])) == len(first["hashes"]) == 2 + critics


@EVERY_RUN
def test_the_back_end_is_the_one_that_was_asked_for(backend, case, two_processes):
    for report in two_processes(backend)[1][case]:
        assert report["processes"] == 2
        assert report["zero_stage"] == BACKENDS[backend][0]
        assert report["wrapper"] == ("DistributedDataParallel" if backend == "DDP" else "DeepSpeedEngine")
        assert report["distinct"]
        if backend == "ZeRO-3":
            assert report["whole"] == 0  # every weight is split up, those of the references too
            expected = 0 if "beta" not in CASES[case] else 1 if "LoRA" in case else 2
            assert report["references"] == expected


@EVERY_RUN
def test_logged_numbers_equal_those_of_one_process(backend, case, one_process, two_processes):
    logs, expected = two_processes(backend)[1][case][0]["logs"], one_process[1][case]["logs"]
    apart = {"step_time"}
    if backend != "DDP":  # DeepSpeed has no norm of each entity
        apart |= {name for step in [*logs, *expected] for name in step if name.endswith("grad_norm")}
    if case == "influence":  # measured on a task of each process
        apart |= {f"agent_{i}/reward_variance_share" for i in range(2)}
    if "gradient_accumulation_steps" in CASES[case] or case in SEVERAL_TURN_CASES:
        # TRL averages these over the tokens of each micro-batch, then over micro-batches, which hold other rows here
        means = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
        apart |= {f"agent_{i}/{name}" for i in range(2) for name in means}
    if case in SEVERAL_TURN_CASES:
        apart |= {f"agent_{i}/clip_ratio/{name}" for i in range(2) for name in ("low_min", "high_max")}
        apart.add("num_tokens")  # see below
    assert len(logs) == len(expected)
    for ours, theirs in zip(logs, expected, strict=True):
        assert ours.keys() | apart == theirs.keys() | apart
        for name in ours.keys() - apart:
            message = f"step {theirs['step']}: {name}"
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), message
    named = {"reward", "reward_std", "env_step"}
    if case in SEVERAL_TURN_CASES:
        named |= {f"turn_{k}/{name}" for k in (1, 2) for name in ("reward_mean", "expected_return")}
    assert named <= set(logs[0])
    assert logs[0]["env_step"] < logs[1]["env_step"] or "num_iterations" in CASES[case]


@pytest.mark.parametrize(("backend", "case"), [run for run in RUNS if run[1] != "influence"])
def test_a_reward_function_sees_whole_groups_each_once(backend, case, one_process, two_processes):
    ranks = two_processes(backend)[1][case]
    calls = [call for report in ranks for call in report["calls"]]
    group = CASES[case]["num_generations"]
    for call in calls:
        assert len(call["prompts"]) == len(call["texts"])
        assert len(set(call["prompts"])) == 1
        if case in SINGLE_TURN_CASES and "sampled" not in case:
            assert len(call["texts"]) == group ** (2 if "cross" in case else 1)
    expected = one_process[1][case]["calls"]
    assert sorted(map(json.dumps, calls)) == sorted(map(json.dumps, expected))
    if "over both processes" not in case:  # there, a batch is one group
        assert all(report["calls"] for report in ranks)  # the work is shared out


def samples_of_turn(report: dict, step: int, turn: int) -> int:
    """Joint responses that a process had scored; where no group spans processes, they are its own samples."""
    return sum(len(call["texts"]) for call in report["calls"] if (call["step"], call["turn"]) == (step, turn))


@EVERY_BACKEND
def test_chains_that_end_early_leave_the_processes_uneven_batches(backend, two_processes):
    """So the comparison of weights is about that."""
    ranks = two_processes(backend)[1]["chain that ends unevenly"]
    for step in range(2):
        counts = [[samples_of_turn(report, step, turn) for report in ranks] for turn in (1, 2, 3)]
        assert counts[0] == [4, 4]
        assert counts[1][0] != counts[1][1] and min(counts[1]) > 0
        assert sum(counts[1]) >= sum(counts[2]) > 0


@pytest.mark.parametrize(("backend", "case"), [run for run in RUNS if run[1] in ENDING])
def test_a_process_without_a_second_turn_still_takes_part_in_it(backend, case, two_processes):
    ranks = two_processes(backend)[1][case]
    counts = [[samples_of_turn(report, step, 2) for report in ranks] for step in range(3)]
    assert counts[0][0] > 0 and counts[0][1] == 0
    assert counts[1][0] == 0 and counts[1][1] > 0
    assert counts[2] == [0, 0]  # and then nobody has one


def test_tokens_that_only_fill_up_a_batch_are_not_counted(one_process, two_processes):
    """A process with fewer samples than the other one samples some that are thrown away."""
    case = "chain that ends unevenly"
    counts = [step["num_tokens"] for step in two_processes("DDP")[1][case][0]["logs"]]
    assert counts == [step["num_tokens"] for step in one_process[1][case]["logs"]]


def test_the_influence_of_an_actor_is_the_same_on_both_processes(two_processes):
    first, second = two_processes("DDP")[1]["influence"]
    for ours, theirs in zip(first["logs"], second["logs"], strict=True):
        for name in ("agent_0/reward_variance_share", "agent_1/reward_variance_share"):
            assert 0 < ours[name] == theirs[name]


@EVERY_RUN
def test_exports_hold_whole_tensors_and_load(backend, case, two_processes):
    """B46"""
    folder = two_processes(backend)[0] / case / "export"
    models = {"agent_0": lm(0), "agent_1": llama(1, vocab=40)} | (
        {"critic": gpt2(7, vocab=48)} if "MAAC" in case else {}
    )
    assert {path.name for path in folder.iterdir()} == set(models)
    if separate_critics(case):
        models |= {"agent_0/critic": gpt2(7, vocab=32), "agent_1/critic": lm(8, vocab=48, hidden=24)}
    for entity, original in models.items():
        model, loading = AutoModelForCausalLM.from_pretrained(folder / entity, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        shapes = {name: tensor.shape for name, tensor in original.state_dict().items()}
        assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    for name, tensor in exported(folder).items():
        assert tensor.numel() > 0 and torch.isfinite(tensor).all(), name


@EVERY_BACKEND
def test_evaluating_before_training_sees_the_start_of_the_training(backend, two_processes, one_process):
    """There is no wrapper and no engine yet; that the training is not changed is seen in the weights."""
    alone = one_process[1]["from disk with KL"]["evaluation_before"]["eval_reward"]
    for report in two_processes(backend)[1]["from disk with KL"]:
        assert report["evaluation_before"]["eval_reward"] == pytest.approx(alone)


@EVERY_BACKEND
def test_evaluation_counts_exactly_its_prompts(backend, one_process, two_processes):
    """B36"""
    ranks = two_processes(backend)[1]["accumulation"]
    calls = [call for report in ranks for call in report["evaluation_calls"]]
    assert sorted(call["prompts"] for call in calls) == sorted([prompt] * 4 for prompt in dataset(3)["prompt"])
    mean = sum(value for call in calls for value in call["values"]) / 12
    for report in [*ranks, one_process[1]["accumulation"]]:
        assert report["evaluation"]["eval_reward"] == pytest.approx(mean, rel=1e-6)


@EVERY_BACKEND
def test_evaluating_several_turns_gives_the_rewards_of_one_process(backend, one_process, two_processes):
    alone = one_process[1]["chain that ends unevenly"]
    ranks = two_processes(backend)[1]["chain that ends unevenly"]
    calls = [call for report in ranks for call in report["evaluation_calls"]]
    assert sorted(map(json.dumps, calls)) == sorted(map(json.dumps, alone["evaluation_calls"]))
    assert {call["turn"] for call in calls} >= {1, 2}
    names = ["eval_reward", "eval_reward_std"]
    names += [f"eval_turn_{k}/{name}" for k in (1, 2) for name in ("reward_mean", "expected_return")]
    for report in ranks:
        for name in names:
            assert report["evaluation"][name] == pytest.approx(alone["evaluation"][name], rel=1e-6), name


@EVERY_BACKEND
def test_one_wandb_run_and_one_row_for_each_logged_step(backend, two_processes):
    """B11"""
    ranks = two_processes(backend)[1]["accumulation"]
    first, second = (report["wandb"] for report in ranks)
    assert first["init"] == 1 and second["init"] == 0
    assert second["log"] == []
    steps = [row for row in first["log"] if "train/loss" in row]
    assert len(steps) == len(ranks[0]["logs"]) == 3
    for row in steps:  # every actor's metrics are in the row of the step
        assert {"train/agent_0/entropy", "train/agent_1/entropy", "train/reward"} <= set(row)
    assert len(first["log"]) == 3  # the numbers of the whole run are in its summary


def test_one_wandb_run_for_three_actors(tmp_path, monkeypatch):
    """B11"""
    import wandb

    for name in ("run", "init", "log", "config", "define_metric"):
        monkeypatch.setattr(wandb, name, None)
    seen = record_wandb()
    trainer = MAACTrainer(
        agents=[lm(0), lm(1), lm(2)],
        critic_model=lm(3),
        tokenizer=tok(),
        reward_func=lambda *texts: [float(len(text)) for text in texts[0]],
        args=MAACConfig(
            output_dir=str(tmp_path),
            num_generations=4,
            max_completion_length=4,
            max_steps=4,
            logging_steps=2,
            report_to=["wandb"],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        ),
        train_dataset=dataset(4),
    )
    trainer.train()
    assert seen["init"] == 1
    assert len([row for row in seen["log"] if "train/loss" in row]) == 2
    assert len(seen["log"]) == 2  # the numbers of the whole run are in its summary


def test_a_reward_function_that_raises_on_one_process_ends_the_job(tmp_path):
    """B33"""
    done = launch("raise", tmp_path, 0)  # the launch has a time limit: what hangs runs into it
    assert done.returncode != 0
    assert "KeyError: 'the grader lost this task'" in done.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
