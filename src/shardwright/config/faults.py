"""The section [faults] of the run file: the handling of spikes, nonfinite numbers, hangs and differing replicas."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from shardwright.config.checkpoint import CheckpointSection
from shardwright.config.precision import PrecisionSection
from shardwright.config.sections import (
    DataSection,
    NotNegative,
    Positive,
    RunFileSection,
)
from shardwright.layout.keys import ERROR_FEEDBACK
from shardwright.layout.layout import Layout

SPIKE_WINDOW = 128
"""Number of previous steps whose losses and gradient norms are the reference for spike detection."""
LEAST_WINDOW = 64
"""Number of steps in the window from which on finite values are checked, too."""
IN_A_ROW = 3
"""Number of consecutive spikes, without a step taken in between, that stop a run."""

OnSpike = Literal["skip", "rollback", "stop", "off"]


class FaultsSection(RunFileSection):
    """The response to loss spikes, numbers that are not finite, ranks that hang and copies that differ."""

    spike: OnSpike = Field(
        "off",
        description="before weights change, loss and gradient norm of a step have to be finite and, once 64 steps are "
        "known, not above mean + spike_sigma x standard deviation of the last 128; if they are not: skip the update, "
        "go back (rollback) to the last checkpoint and leave out the samples of the step, or stop; off: a number that "
        "is not finite stops the run before the next logged line or checkpoint, and finite ones are not judged",
    )
    spike_sigma: Annotated[float, Field(gt=0)] = Field(
        6.0, description="standard deviations above the mean from which on a loss or gradient norm is a spike"
    )
    recheck: bool = Field(
        False,
        description="whether a step with a loss or gradient norm that is not finite is run again in place, with the "
        "same samples, weights and random numbers, before `spike` decides: if the second result differs, a device is "
        "faulty, and the step is taken if that result is finite; if it is the same, the data or the model is the cause",
    )
    hang_after: Annotated[float, Field(ge=0)] = Field(
        60.0,
        description="seconds that each phase of a step (data, forward and backward, optimizer, evaluation, checkpoint) "
        "may take at least; one that takes longer, and 5 times longer than it ever has, is a hang: ranks are compared, "
        "those at fault named, and the run ends; 600 for the first turns of a phase; 0: never",
    )
    min_ranks: Positive | None = Field(
        None,
        description="fewest ranks with which a run continues after ranks are lost: dp_replicate and dp_shard are "
        "reduced, other degrees, the global batch and the order of samples stay; with --max-restarts a rank counts as "
        "lost after two faults in a row on the same GPU, under torchrun when it starts fewer ranks; if not given, all "
        "are needed",
    )
    grow_after: Annotated[float, Field(ge=0)] = Field(
        3600.0,
        description="with min_ranks and --max-restarts, seconds after which a run that continues with fewer ranks "
        "saves, and starts again with all of them, also on the place that was lost; doubled after each try; 0: never",
    )
    spares: NotNegative = Field(
        0,
        description="with --max-restarts, places (GPUs) of this machine in addition to the layout's places: after a "
        "fault the run continues at one of them instead of the place at fault, which becomes the last spare",
    )
    check_copies_every: NotNegative = Field(
        0,
        description="steps between comparisons, by checksum, of weights and optimizer states that several ranks hold "
        "the same shard of, and before each checkpoint; a difference, which a faulty device or memory makes, ends the "
        "run; 0: none",
    )


_SIGMA: float = FaultsSection.model_fields["spike_sigma"].default


def fault_problems(
    faults: FaultsSection,
    layout: Layout | None,
    data: DataSection | None,
    checkpoint: CheckpointSection | None,
    precision: PrecisionSection | None,
) -> Iterator[str]:
    """Yield every broken rule between [faults] and the other sections, one sentence each; None for a section that is
    not valid itself."""
    spike = faults.spike
    if faults.recheck:
        yield from _recheck_problems(spike, layout, precision)
    if layout and faults.min_ranks is not None and faults.min_ranks > layout.world_size:
        yield (
            f"faults.min_ranks={faults.min_ranks} is more than the {layout.world_size} ranks of the layout; valid: "
            f"1 to {layout.world_size}"
        )
    if spike == "off" and "spike_sigma" in faults.model_fields_set and faults.spike_sigma != _SIGMA:
        yield (
            f"faults.spike_sigma={faults.spike_sigma:g} with faults.spike='off' is not used; leave it out, or set "
            f"faults.spike to 'skip', 'rollback' or 'stop'"
        )
    if spike == "skip" and layout and layout.compress_gradients in ERROR_FEEDBACK:
        yield (
            f"faults.spike='skip' with layout.compress_gradients={layout.compress_gradients!r}: the part of "
            f"a gradient that is not sent is added to the next one, also after a spike; set faults.spike='rollback' or "
            f"'stop', or compress_gradients='bf16'"
        )
    if spike == "rollback" and checkpoint and not checkpoint.every:
        yield (
            "faults.spike='rollback' needs checkpoints to go back to, and checkpoint.every=0 saves none before the "
            "end; set checkpoint.every, or faults.spike='skip'"
        )
    if spike == "rollback" and data and data.stages:
        yield (
            "faults.spike='rollback' with data.stages: a stage starts with a sample that is counted from the start of "
            "the run, and samples that are left out would move it; set faults.spike='skip'"
        )


def _recheck_problems(spike: OnSpike, layout: Layout | None, precision: PrecisionSection | None) -> Iterator[str]:
    if spike == "off":
        yield (
            "faults.recheck=true with faults.spike='off': no step is judged, so none is run again; set faults.spike "
            "to 'skip', 'rollback' or 'stop', or leave faults.recheck out"
        )
    if layout and layout.compress_gradients in ERROR_FEEDBACK:
        yield (
            f"faults.recheck=true with layout.compress_gradients={layout.compress_gradients!r}: the second try "
            f"would add the part of the gradients that the first try has not sent; set compress_gradients='bf16', "
            f"or leave faults.recheck out"
        )
    if precision and precision.compute == "fp16":
        yield (
            "faults.recheck=true with precision.compute='fp16': gradients that are not finite are left to the loss "
            "scale there, which skips the step; set precision.compute='bf16', or leave faults.recheck out"
        )
