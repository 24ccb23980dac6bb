# ---
# jupyter:
#   minifsdp:
#     lab: "04"
#     title: The flat parameter
#     minutes: 45
# ---

# %% [markdown]
# # Lab 04: the flat parameter

# %% tags=["setup"]
# set-up
import torch
from torch import Tensor

from minifsdp.course.workshop import exercise, outcome, predict

# %% [markdown]
# ## 4.1 Pad and chunk

# %%
predict("4.1", ..., "elements of padding for 7 elements over 4 ranks")


# %% tags=["exercise-4.1"]
@exercise("4.1")
def pad_and_chunk(flat: Tensor, ranks: int) -> list[Tensor]:
    """Cut `flat` [numel] into one equal shard per rank, [ceil(numel / ranks)] each, the last ones filled with zeros."""
    ...


# %%
shards = pad_and_chunk(torch.arange(1.0, 8.0), 4)
outcome("4.1", sum(s.numel() for s in shards) - 7, ranks=4)
