# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""The modules that are trained: the team, its critics and their value heads."""
