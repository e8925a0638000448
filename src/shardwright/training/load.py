"""The load of experts, as recorded in metrics.jsonl."""

from shardwright.model.balance import entropy, max_over_mean
from shardwright.model.sections import MoESpec
from shardwright.parallel.model import ExpertLoad
from shardwright.run_folder import Record


def expert_numbers(load: ExpertLoad, moe: MoESpec) -> Record:
    """Return the record's keys for the experts of one step, from `load` on the host.

    The load is the mean over the layers with experts. `load_by_layer` has the load of the busiest expert of each layer.
    The auxiliary losses are their contributions to the cross-entropy, summed over layers. A loss that is off has no
    key.
    """
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
