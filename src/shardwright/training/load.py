"""What a record says of the load of experts."""

from shardwright.model.balance import entropy, max_over_mean
from shardwright.model.sections import MoESpec
from shardwright.parallel.model import ExpertLoad
from shardwright.run_folder import Record


def expert_numbers(load: ExpertLoad, moe: MoESpec) -> Record:
    """What a record says of the experts of one step: their load as a mean over the layers that have some, and of each
    of those layers that of its busiest expert; losses as they add to the cross-entropy, summed over layers. `load` is
    on the host. What the run file leaves off is left out."""
    layers = range(moe.first_dense, len(load.counts_LE))
    busiest = [float(max_over_mean(load.counts_LE[layer])) for layer in layers]
    balance_loss, z_loss = load.losses_L2.sum(0).tolist()
    record: Record = {
        "load_max_over_mean": sum(busiest) / len(busiest),
        "load_entropy": sum(float(entropy(load.counts_LE[layer])) for layer in layers) / len(busiest),
        "load_by_layer": [round(value, 4) for value in busiest],
    }
    if moe.capacity_factor:
        record["dropped_fraction"] = int(load.dropped_L.sum()) / int(load.counts_LE.sum())
    if moe.aux_loss:
        record["balance_loss"] = balance_loss
    if moe.z_loss:
        record["z_loss"] = z_loss
    return record
