# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Tables of completions in trackio."""

import pandas as pd
from transformers import TrainerCallback


class TrackioCompletionsCallback(TrainerCallback):
    """
    Logs the tables of completions (`log_completions`) to trackio, beside the metrics that transformers' own callback
    logs there. Team trainers with `report_to="trackio"` have it by themselves.
    """

    def on_completions(self, args, state, control, table: pd.DataFrame) -> None:
        import trackio

        trackio.log({"completions": trackio.Table(dataframe=table)})
