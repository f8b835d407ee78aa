# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""One actor: its TRL trainer, and the loading of actors, critics and tokenizers with all their checks."""
