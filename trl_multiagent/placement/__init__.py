# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Back ends: the only package that knows how DeepSpeed and torch.distributed hold parameters and gradients."""
