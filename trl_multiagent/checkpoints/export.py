# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""
Export of a team: `agent_0/`, `agent_1/`, ..., and `critic/`, or `agent_0/critic/`, ..., each a directory for
`from_pretrained`, with `value_head.pt` beside the backbone it belongs to.
"""

import contextlib
import copy
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .._compat import find_file
from ..models.critic import ValueModel, is_own_critic, without_value_head
from ..models.language_model import base_language_model
from ..models.team import MultiAgentModel
from ..models.value_head import VALUE_HEAD_CONFIG_FILE, VALUE_HEAD_FILE, load_value_head, save_value_head
from ..placement.backends import full_parameters


logger = logging.getLogger(__name__)


def entity_directories(team: MultiAgentModel) -> list[tuple[str, nn.Module]]:
    """Directory name and module of every entity that is exported."""
    critics = ["critic"] if team.central else [f"agent_{i}/critic" for i in range(len(team.critics))]
    return [
        *((f"agent_{index}", agent) for index, agent in enumerate(team.agents)),
        *zip(critics, team.critics, strict=True),
    ]


def save_team(
    team: MultiAgentModel,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    output_dir: str | os.PathLike,
    writes: bool,
    merged: Collection[str] | None = None,
    attempt: Callable[..., None] = lambda part, *args: part(*args),
) -> None:
    """
    Write every entity into its directory. Call it on every process: one entity at a time is gathered where parameters
    are partitioned, and the main process writes.

    An actor with adapters is written as its adapter, or merged with its base if it is among `merged`.

    Args:
        team ([`MultiAgentModel`]):
            The team, not wrapped.
        tokenizers (sequence):
            One for each entity, in the order of `entity_directories`.
        output_dir (`str` or path):
            Parent directory.
        writes (`bool`):
            Whether this process writes.
        merged (collection of `str`, *optional*):
            Directories of the actors whose adapters are merged, see `check_saveable`; also those whose base is gone
            meanwhile. `None`: no adapter is merged, for a training checkpoint, which is loaded into the same model.
        attempt (`Callable`, *optional*):
            What calls each part that writes, such as an [`~trl_multiagent.checkpoints.storage.Attempt`]. Default: an
            error is raised at once.
    """
    for (name, module), tokenizer in zip(entity_directories(team), tokenizers, strict=True):
        with full_parameters(module):
            if writes:
                merge = merged is not None and _must_merge(name, module, merged)
                attempt(_save_entity, module, tokenizer, Path(output_dir) / name, merge)


def _must_merge(name: str, module: nn.Module, merged: Collection[str]) -> bool:
    model = module.backbone if isinstance(module, ValueModel) else module
    if not hasattr(model, "get_base_model"):
        return False
    return name in merged or find_file(base_language_model(model).config._name_or_path, "config.json") is None


def _save_entity(module: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path, merge: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model = module.backbone if isinstance(module, ValueModel) else module
    is_adapter = hasattr(model, "get_base_model") and not merge
    # An adapter beside the weights of a full model would be read on top of them, and the other way round
    for stale in directory.glob("model*.safetensors*" if is_adapter else "adapter_*"):
        stale.unlink()
    if is_adapter:
        (directory / "config.json").unlink(missing_ok=True)
    with without_value_head(model), _no_progress_bars():
        if merge:
            # Merging changes weights in the last bits and merging back does not restore them, so a copy is merged
            copy.deepcopy(model).merge_and_unload().save_pretrained(directory)
        elif is_adapter:
            _save_adapter(model, directory)
        else:
            model.save_pretrained(directory)
    if "value_head" in module._modules:
        save_value_head(module.value_head, directory)
    else:  # one that an earlier export left is not this model's
        for stale in (VALUE_HEAD_FILE, VALUE_HEAD_CONFIG_FILE):
            (directory / stale).unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)


def _save_adapter(model: nn.Module, directory: Path) -> None:
    """Save the active adapter where `from_pretrained` looks: PEFT gives those with a name directories of their own."""
    name = model.active_adapter
    model.save_pretrained(directory, selected_adapters=[name])
    if name != "default":
        for path in (directory / name).iterdir():
            os.replace(path, directory / path.name)
        (directory / name).rmdir()


def base_is_found_by_name(model: nn.Module) -> bool:
    """
    Whether loading the base of a PEFT model by its name (a directory or a hub id) gives the base that it has now: it
    was not built from a config or a GGUF file, not resized, and its weights were not changed after loading.
    """
    base = base_language_model(model)
    name = base.config._name_or_path
    config = find_file(name, "config.json")
    if config is None:
        return False
    files = sorted(Path(config).parent.glob("*.safetensors"))
    if not files:
        return True  # weights in another format; the name is all there is to go by
    own = {key.replace(".base_layer.", "."): tensor for key, tensor in base.state_dict().items() if "lora_" not in key}
    compared = 0
    for file in files:
        with safe_open(file, framework="pt") as saved:
            for key in saved.keys():  # noqa: SIM118 - not a dict
                # Some files leave the prefix of the inner model out
                name = key if key in own else f"{base.base_model_prefix}.{key}"
                if name in own:
                    compared += 1
                    if not _equal(own[name], saved.get_tensor(key)):
                        return False
    return compared > 0


def _equal(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    return tensor.shape == saved.shape and torch.equal(tensor.cpu(), saved.to(tensor.dtype))


def team_card(team: MultiAgentModel, trainer: str, name: str | None = None, dataset: str | None = None) -> str:
    """A model card for a team, as Markdown: its entities, and how to load them."""
    rows = [
        f"| `{directory}/` | {type(base_language_model(getattr(module, 'backbone', module))).__name__} | "
        f"{_role(module)} |"
        for directory, module in entity_directories(team)
    ]
    trained_on = f" on {dataset}" if dataset else ""
    return "\n".join(
        [
            "---\nlibrary_name: transformers\ntags:\n- trl\n- multi-agent\n---",
            f"# {name or 'A team of language models'}\n",
            f"Trained together{trained_on} by `trl_multiagent.{trainer}`.\n",
            "| Directory | Model | Role |\n| --- | --- | --- |",
            *rows,
            "\nEach directory loads by itself:\n",
            '```python\nAutoModelForCausalLM.from_pretrained(repository, subfolder="agent_0")\n```\n',
        ]
    )


def _role(module: nn.Module) -> str:
    if isinstance(module, ValueModel):
        return "critic with `value_head.pt`"
    return "actor, and critic with `value_head.pt`" if is_own_critic(module) else "actor"


def check_saveable(
    team: MultiAgentModel,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    loaded_by_name: Collection[str] = (),
    trust_remote_code: bool = False,
) -> set[str]:
    """
    Find what would make an export fail before any training is done: save everything but the weights.

    Args:
        team, tokenizers:
            As for `save_team`.
        loaded_by_name (collection of `str`, *optional*):
            Directories of the entities that were loaded by an identifier: their base is found again by it.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether tokenizers may bring code.

    Returns:
        `set` of `str`: directories of the actors whose adapters must be merged in exports, since the base model that
        they have cannot be found again by its name.

    Raises:
        ValueError: an entity cannot be saved; it is named with the reason.
    """
    merged = set()
    for (name, module), tokenizer in zip(entity_directories(team), tokenizers, strict=True):
        model = module.backbone if isinstance(module, ValueModel) else module
        language_model = base_language_model(model)
        if hasattr(model, "get_base_model") and name not in loaded_by_name and not base_is_found_by_name(model):
            merged.add(name)
        quantizer = getattr(language_model, "hf_quantizer", None)
        if quantizer is not None and not hasattr(model, "get_base_model") and not quantizer.is_serializable():
            raise ValueError(
                f"{name} is quantized by a method that cannot be saved ({type(quantizer).__name__}). Train an "
                f"adapter on it (`peft_config=`), or load it without quantization."
            )
        with tempfile.TemporaryDirectory() as scratch:
            try:
                language_model.config.save_pretrained(scratch)
                if language_model.can_generate():
                    language_model.generation_config.save_pretrained(scratch)
                tokenizer.save_pretrained(scratch)
                reloaded = AutoTokenizer.from_pretrained(scratch, trust_remote_code=trust_remote_code)
            except Exception as error:
                raise ValueError(
                    f"{name} could not be saved after training: {type(error).__name__}: {error} Mend its config, "
                    f"generation config or tokenizer first."
                ) from error
        if reloaded.get_vocab() != tokenizer.get_vocab():
            logger.warning(
                "%s: its tokenizer is no usual one for a %s, and `AutoTokenizer` would read the export's as a %s "
                "with other ids. A new team trainer reads it right; elsewhere use "
                "`PreTrainedTokenizerFast.from_pretrained`.",
                name,
                type(language_model).__name__,
                type(reloaded).__name__,
            )
    return merged


def load_weights(model: nn.Module, path: str | os.PathLike, trust_remote_code: bool = False) -> None:
    """Load a language model's directory into a model of the same architecture, in place and to the bit."""
    kinds = {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()}
    # The widest holds all others, so that copying into the model's own types changes no bit
    widest = max(kinds, key=lambda kind: kind.itemsize)
    dtype = widest if len(kinds) == 1 else torch.promote_types(torch.float32, widest)
    with _no_progress_bars():
        saved = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    with without_value_head(model):
        model.load_state_dict(saved.state_dict())


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Inside, saving and loading shows no bar for each model: a checkpoint is one thing, and is written often."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def load_team(team: MultiAgentModel, directory: str | os.PathLike, trust_remote_code: bool = False) -> None:
    """
    Load the entities of an export into a team of the same architectures, in place: ties and optimizer references hold.

    Raises:
        FileNotFoundError: an entity's directory or its value head is missing; nothing is loaded then.
    """
    entities = [(Path(directory) / name, module) for name, module in entity_directories(team)]
    needed = [path / VALUE_HEAD_FILE if "value_head" in module._modules else path for path, module in entities]
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"{directory} holds no complete team of this kind: {', '.join(missing)} missing. Resume with the kind of "
            "trainer that wrote it."
        )
    for path, module in entities:
        model = module.backbone if isinstance(module, ValueModel) else module
        if hasattr(model, "get_base_model"):
            from peft import load_peft_weights, set_peft_model_state_dict

            set_peft_model_state_dict(model, load_peft_weights(str(path), device="cpu"), model.active_adapter)
        else:
            load_weights(model, path, trust_remote_code)
        if "value_head" in module._modules:
            load_value_head(module.value_head, path)
