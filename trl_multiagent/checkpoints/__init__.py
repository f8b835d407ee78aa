# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Teams on disk: the export of every entity for `from_pretrained`."""
