"""The hook that exchanges experts between the ranks of ep by their measured load (`layout.place_experts_every`).

Every rank knows the load of all experts (`ParallelModel.load`), so every rank computes the same orders. A checkpoint
has the experts in the order of the model: they move home before it is saved, and back before the next step.
"""

from collections.abc import Mapping

from torch import Tensor

from shardwright.config import RunConfig
from shardwright.parallel.placement import Orders
from shardwright.split.placement import Order, busiest, place
from shardwright.system.units import counted, format_bytes
from shardwright.training.checkpoint.state import named_tensors
from shardwright.training.hooks import Hook, RunStart, TakenStep, due
from shardwright.training.run_log import RunLog
from shardwright.training.step import Trainer


class PlaceExperts(Hook):
    """Places experts every N steps by the load of these N steps. It precedes the hook that saves checkpoints."""

    def __init__(self, config: RunConfig, trainer: Trainer, log: RunLog) -> None:
        assert trainer.model.places is not None
        self.layout, self.trainer, self.log = config.layout.layout(), trainer, log
        self.places, self.moe = trainer.model.places, trainer.model.spec.moe
        self._orders: Orders = self.places.orders
        """The orders of the experts in the next step."""
        self._counts_LE: Tensor | None = None

    def on_rollback(self, start: RunStart) -> None:
        self.places.forget()
        self._orders, self._counts_LE = self.places.home, None

    def before_step(self, step: int) -> None:
        self._move(self._orders)

    def after_step(self, taken: TakenStep) -> None:
        load = self.trainer.model.load
        if load is not None:
            self._counts_LE = load.counts_LE if self._counts_LE is None else self._counts_LE + load.counts_LE
        if due(taken.step, self.layout.place_experts_every) and self._counts_LE is not None:
            self._place(taken.step, self._counts_LE.tolist())
            self._counts_LE = None

    def on_save(self, taken: TakenStep) -> None:
        self._move(self.places.home)

    def _place(self, step: int, loads: list[list[int]]) -> None:
        """Compute the orders for the loads of experts, by layer, and report them."""
        assert self.moe is not None
        together, ep = self.moe.movable_together, self.layout.ep
        before = self._orders
        self._orders = {layer: place(loads[layer], order, ep, together) for layer, order in before.items()}
        self.log.tell("placement", step, placement_in_words(loads, before, self._orders, ep, self._expert_bytes()))

    def _move(self, orders: Orders) -> None:
        if orders != self.places.orders:
            self.trainer.announce_change()
            self.places.move(orders, named_tensors(self.trainer))

    def _expert_bytes(self) -> float:
        """Return the bytes of an expert with all that a run keeps of it, on average over this rank's layers."""
        return self.places.expert_bytes(named_tensors(self.trainer))


def placement_in_words(
    loads: list[list[int]], before: Mapping[int, Order], after: Mapping[int, Order], ep: int, expert_bytes: float
) -> str:
    """Return a sentence about a placement: the load of the busiest rank before and after, a mean over layers, and the
    experts that change their rank, with their bytes. `expert_bytes`: of one expert."""
    then, now = (
        sum(busiest(loads[layer], order, ep) for layer, order in orders.items()) / len(orders)
        for orders in (before, after)
    )
    n_experts = sum(map(len, before.values()))
    moved = sum(old != new for layer, order in before.items() for old, new in zip(order, after[layer], strict=True))
    if not moved:
        return f"experts stay: the busiest rank of ep has {then:.2f} times the mean load, and no exchange lowers it"
    return (
        f"{counted(moved, 'expert')} of {n_experts} moved, {format_bytes(moved * expert_bytes)}: the busiest rank of "
        f"ep has {now:.2f} times the mean load instead of {then:.2f}"
    )
