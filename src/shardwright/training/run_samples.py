"""The samples of a run: their order, those that are left out, and the batches of this rank."""

from collections.abc import Iterable

import torch

from shardwright.config import RunConfig
from shardwright.data.batches import Batch, Batches, evaluation_batches, merged
from shardwright.data.samples import Samples
from shardwright.run_folder import SamplePlace
from shardwright.training.checkpoint.manifest import DataRecord, Progress
from shardwright.training.hooks import Start
from shardwright.training.sources import Sources


class RunSamples:
    """The samples that a run trains on and is evaluated on, from a start on; every rank has the same order."""

    def __init__(self, config: RunConfig, sources: Sources, rank: int, device: torch.device, start: Start) -> None:
        self.config, self.sources, self.layout = config, sources, config.layout.layout()
        self.rank, self.device, self.vocab_size = rank, device, config.model.spec().vocab_size
        self.within_documents = config.data.attention == "document"
        self.padded = config.data.sequences == "documents"
        self.left_out = merged(start.left_out)
        """Ranges of running samples that the run does not train on, of spikes that it went back from."""
        self.begin_at(start)

    def begin_at(self, start: Start) -> None:
        """Continue in the order of a run that has come to `start`."""
        self.order = self.sources.order(Progress(start.step, start.samples, self.config.seed), start.past)

    def leave_out(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do not train on these ranges of running samples (first, one after the last)."""
        self.left_out = merged([*self.left_out, *ranges])

    def places(self, samples: Iterable[int]) -> list[SamplePlace]:
        """Return where running samples are in the data, without those that are left out."""
        trained = [i for i in samples if not any(first <= i < end for first, end in self.left_out)]
        return self.sources.places(self.order, trained)

    def described(self, step: int) -> DataRecord:
        """Return the sources and the stages that have begun before `step` steps, as a checkpoint contains them."""
        return self.sources.described([stage for stage in self.order.stages if stage.from_step < step])

    def batches(self, start: Start) -> Batches:
        """Return the training batches of this rank after `start`."""
        self.begin_at(start)
        config = self.config
        return Batches(
            self.sources.train,
            self.order,
            global_batch=config.batch.global_batch,
            micro_batch=config.batch.micro_batch,
            data_rank=self.layout.data_rank(self.rank),
            data_ranks=self.layout.data_ranks,
            vocab_size=self.vocab_size,
            within_documents=self.within_documents,
            padded=self.padded,
            start_sample=start.samples,
            left_out=self.left_out,
            prefetch=config.data.prefetch,
            pin_memory=self.device.type == "cuda",
        )

    def evaluation_batches(self, samples: Samples) -> Iterable[Batch]:
        """Return the batches of this rank of the validation samples of a source."""
        config = self.config
        return evaluation_batches(
            samples,
            micro_batch=config.batch.micro_batch,
            data_rank=self.layout.data_rank(self.rank),
            data_ranks=self.layout.data_ranks,
            vocab_size=self.vocab_size,
            within_documents=self.within_documents,
            padded=self.padded,
            max_samples=config.evaluation.samples,
        )
