"""Runs a function on the ranks of a layout, for the verbs that generate, score and evaluate."""

from collections.abc import Callable
from typing import Any

import torch

from shardwright.layout.layout import Layout
from shardwright.training.ranks import ProcessRank, pick_device, place_from_environment, process_group
from shardwright.verification.ranks import run_ranks


def run_on_layout(layout: Layout, device: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args, device)` of this rank, if torchrun or srun started the ranks or the layout has one rank;
    otherwise of the first of the ranks that are forked here, on CPUs. Raises LayoutError if torchrun or srun started
    another number of ranks."""
    place = place_from_environment()
    if place is None and layout.world_size > 1:
        return run_ranks(function, layout.world_size, *args, torch.device("cpu"))[0]
    place = place or ProcessRank()
    layout.check_world(place.world_size)
    where = pick_device(device, place)
    with process_group(place, where):
        return function(*args, where)
