# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Joint rollouts: which prompts a step takes, what the actors answer, and what each answer is worth."""
