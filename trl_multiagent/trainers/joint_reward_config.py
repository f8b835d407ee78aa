# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Config of the joint reward model's trainer."""

from dataclasses import dataclass, field

from transformers.utils import is_torch_bf16_gpu_available
from trl import RewardConfig

from .multi_agent_config import check_number


@dataclass
class JointRewardConfig(RewardConfig):
    """
    Configuration of [`JointRewardTrainer`]. All other parameters are those of [`~trl.RewardConfig`].

    Parameters:
        freeze_backbone (`bool`, *optional*, defaults to `False`):
            Whether only the head is trained. It does not go with `peft_config`.
        max_length (`int` or `None`, *optional*, defaults to `1024`):
            Most tokens of a text. A longer one loses its beginning; its end, where the responses are, is kept. `None`:
            what the model has positions for.

    > [!NOTE]
    > This differs from [`~trl.RewardConfig`]:
    > - `max_length`: Pairs with longer texts are shortened and kept instead of dropped, in every dataset format.
    > - `bf16`: Defaults to `True` only where the device supports it, so that a default config works on a CPU.
    """

    freeze_backbone: bool = field(
        default=False,
        metadata={"help": "Whether only the head is trained. It does not go with `peft_config`."},
    )
    max_length: int | None = field(
        default=1024,
        metadata={
            "help": "Most tokens of a text. A longer one loses its beginning. None: what the model has positions for."
        },
    )

    def __post_init__(self):
        if self.max_length is not None:
            check_number("max_length", self.max_length, int, 1)
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        # transformers warns about the older of two words, whose default TRL sets
        if getattr(self, "activation_checkpointing", False) is None:
            self.activation_checkpointing = self.gradient_checkpointing
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        super().__post_init__()
