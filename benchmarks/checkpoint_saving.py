# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
What a checkpoint costs: saving a whole training state, against `torch.save` of the same tensors.

    python benchmarks/checkpoint_saving.py
    python benchmarks/checkpoint_saving.py --hidden 1024 --layers 12 --rounds 9

Two actors and a critic are built from configs and trained for a step, so that AdamW has its moments. Then, in turn:
the trainer's own save (models, tokenizers, optimizer, random states, manifest, waiting for the disk, rename);
`torch.save` of all weights and the optimizer's state in one file; and the same with waiting for the disk (fsync).
Nothing else should run beside it.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from trl_multiagent import MAACConfig, MAACTrainer


VOCABULARY = 8192


def build_model(hidden: int, layers: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<pad>", "<eos>", *(f"w{index}" for index in range(VOCABULARY - 3))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def build_trainer(directory: Path, hidden: int, layers: int) -> MAACTrainer:
    args = MAACConfig(
        output_dir=str(directory / "run"),
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=4,
        save_strategy="steps",
        save_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
    )
    return MAACTrainer(
        agents=[build_model(hidden, layers) for _ in range(2)],
        critic_model=build_model(hidden, layers),
        tokenizer=build_tokenizer(),
        reward_func=lambda first, second: [float(len(a) + len(b)) for a, b in zip(first, second, strict=True)],
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3 w4"]}),
        args=args,
    )


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_save(trainer: MAACTrainer, path: Path, sync: bool) -> None:
    """Weights and optimizer in one file."""
    with path.open("wb") as file:
        torch.save({"weights": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of each model")
    parser.add_argument("--layers", type=int, default=8, help="layers of each model")
    parser.add_argument("--rounds", type=int, default=7, help="times that each way is measured")
    parser.add_argument("--directory", default=None, help="where to write; default: a temporary directory")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        trainer = build_trainer(directory, arguments.hidden, arguments.layers)
        written = []
        # In the middle of a training, where a save happens
        trainer._save_checkpoint = lambda model, trial: measure(trainer, directory, arguments.rounds, written)
        trainer.args.save_steps = trainer.state.save_steps = 1
        trainer.train()
        assert written, "the training saved nothing"


def measure(trainer: MAACTrainer, directory: Path, rounds: int, written: list) -> None:
    target, file = directory / "checkpoint-1", directory / "plain.pt"
    ways = {
        "checkpoint": lambda: trainer._write(str(target)),
        "torch.save": lambda: plain_save(trainer, file, sync=False),
        "torch.save and fsync": lambda: plain_save(trainer, file, sync=True),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    sizes = {}
    for number in range(rounds + 1):
        for way, work in ways.items():
            os.sync()
            spent = seconds(work)
            if number:  # the first round warms up
                times[way].append(spent)
            path = target if way == "checkpoint" else file
            sizes[way] = size(path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    written.append(sizes)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{parameters / 1e6:.0f} M parameters in float32, AdamW; {rounds} rounds, in turn; medians (min to max)\n")
    median = {way: statistics.median(values) for way, values in times.items()}
    print("| Way | Seconds | GB | MB/s | Time against it |\n| --- | --- | --- | --- | --- |")
    for way, values in times.items():
        rate = sizes[way] / median[way] / 1e6
        ratio = median["checkpoint"] / median[way]
        spread = f"{median[way]:.2f} ({min(values):.2f} to {max(values):.2f})"
        print(f"| {way} | {spread} | {sizes[way] / 1e9:.2f} | {rate:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
