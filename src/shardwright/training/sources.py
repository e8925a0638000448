"""The data of a run: its sources, the order of its samples, and the records of both in a checkpoint."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from shardwright.config import RunConfig, load_kept
from shardwright.config.mixture import Mixture, mixtures_of, name_of, sources_of
from shardwright.config.sections import DataSection
from shardwright.data.batches import Batch, Batches, References, evaluation_batches, merged
from shardwright.data.mixture import MixedSamples, MixtureOrder, MixtureStage, stages_of
from shardwright.data.order import SampleOrder
from shardwright.data.samples import PairSamples, Samples, SplitSamples, open_sources, samples_of
from shardwright.data.shard_order import MOST_SAMPLES, ShardOrder
from shardwright.data.shards import data_folder, tokenizer_folder
from shardwright.data.token_manifest import TOKENIZER, DataManifest
from shardwright.data.tokenizer import tokenizer_difference
from shardwright.runs.folder import CHECKPOINTS, RUN_FILE, published
from shardwright.runs.records import SamplePlace
from shardwright.split.documents import attended_tokens
from shardwright.system.errors import DataError, collecting
from shardwright.system.files import find_inside
from shardwright.training.checkpoint.manifest import (
    CheckpointManifest,
    DataRecord,
    MixtureRecord,
    SourceRecord,
    StageRecord,
    TrainingProgress,
)
from shardwright.training.hooks import RunStart


def readable_sources(data: DataSection) -> dict[Path, DataManifest]:
    """Return the existing folders of a run's sources, in order, with their manifests."""
    manifests = {}
    for source in sources_of(data):
        with suppress(DataError):
            folder = data_folder(source.path, data.token_cache)
            manifests[folder] = DataManifest.read(folder, check_files=False)
    return manifests


def ends_of_text(data: DataSection) -> list[int]:
    """Return the ids of tokens that end a text: the separators, then the ends of conversations' answers."""
    manifests = readable_sources(data).values()
    answers = [manifest.answer_end_id for manifest in manifests if manifest.answer_end_id is not None]
    return list(dict.fromkeys([*(manifest.separator_id for manifest in manifests), *answers]))


def weighted_mean(mixtures: Sequence[Mixture], names: Sequence[str], step: int, values: Mapping[str, float]) -> float:
    """Return a weighted mean, as `Sources.mean`."""
    weights = [mixture for mixture in mixtures if mixture.from_step < max(step, 1)][-1].weights
    shares = {name: weight for name, weight in zip(names, weights, strict=True) if name in values}
    shares = shares if any(shares.values()) else dict.fromkeys(values, 1)
    return sum(weight * values[name] for name, weight in shares.items() if weight) / sum(shares.values())


class Sources:
    """The sources of a run, each opened once, so that a run keeps its training and validation data even if a folder
    is rewritten. Raises DataError as `open_sources` does."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.names = [name_of(source) for source in sources_of(config.data)]
        self.folders = [source.path for source in sources_of(config.data)]
        self.mixtures = mixtures_of(config.data)
        opened: dict[str, list[SplitSamples]] = {"validation": []}
        problems: list[str] = []
        for split in ("train", "validation") if config.evaluation.samples else ("train",):
            with collecting(problems, DataError):
                opened[split] = open_sources(config, split)
        if problems:
            raise DataError(*dict.fromkeys(problems))
        self.schedule = config.batch.schedule
        self.by_shards = config.data.order == "shards"
        self._opened = opened["train"]
        self.train = MixedSamples(opened["train"], [MOST_SAMPLES] * len(self.names) if self.by_shards else None)
        self.by_length: dict[int, Samples] = {self.train.seq_len: self.train}
        """By number of tokens, the samples of `train` cut into sequences of a stage of the batch."""
        for stage in self.schedule.stages:
            if stage.seq_len not in self.by_length:
                cut = [samples_of(source.split, config.data, stage.seq_len) for source in opened["train"]]
                sizes = [size * self.schedule.cuts(stage) for size in self.train.sizes]
                self.by_length[stage.seq_len] = MixedSamples(cut, sizes)
        self.validation = dict(zip(self.names, opened["validation"], strict=False))
        self._attended = {
            seq_len: {
                name: self._attended_tokens(source, seq_len)
                for name, source in zip(self.names, opened["train"], strict=True)
            }
            for seq_len in self.by_length
        }
        self.fingerprints = [source.split.manifest.fingerprint for source in opened["train"]]

    def _attended_tokens(self, samples: SplitSamples, seq_len: int) -> float:
        if self.config.data.attention == "sequence":
            return float(seq_len)
        return attended_tokens(samples_of(samples.split, self.config.data, seq_len).document_lengths())

    @property
    def mixed(self) -> bool:
        """Return whether the run file gives sources with weights instead of one folder."""
        return bool(self.config.data.sources)

    @property
    def remarks(self) -> list[str]:
        """Remarks about the data folders, printed at the start of a run."""
        rows = self.config.spec().vocab_size
        manifests = {source.origin(0)[0].folder: source.origin(0)[0].manifest for source in self.train.sources}
        remarks = [f"{folder}: {remark}" for folder, data in manifests.items() for remark in data.remarks(rows)]
        given = {"init.weights": self.config.init.weights, "model.from": self.config.model.folder}
        models = {f"{key}={path!r}": Path(path) for key, path in given.items() if path is not None}
        return remarks + unchecked_tokenizers(models)

    def order(self, progress: TrainingProgress, past: Sequence[MixtureStage] = ()) -> MixtureOrder:
        """Return the order of samples of a run that has reached `progress` through the stages `past`."""
        stages = stages_of(self.mixtures, self.schedule.samples, past, progress.step, progress.samples)
        seed, opened = self.config.seed, self._opened
        if self.by_shards:
            return MixtureOrder([ShardOrder(seed, samples, k) for k, samples in enumerate(opened)], stages)
        return MixtureOrder([SampleOrder(seed, len(samples), k) for k, samples in enumerate(opened)], stages)

    def by_name(self, values: Sequence[float]) -> dict[str, float] | None:
        """Return source name -> value, or None for a run on one folder."""
        return dict(zip(self.names, values, strict=True)) if self.mixed else None

    def mean(self, step: int, values: Mapping[str, float]) -> float:
        """Return the mean of `values` over sources, with the mixture weights of step number `step` (the first step
        for 0). Sources without a value are omitted. If no remaining source takes part, their weights are equal."""
        return weighted_mean(self.mixtures, self.names, step, values)

    def attended_tokens(self, step: int, seq_len: int) -> float:
        """Return the mean number of tokens that a token of a sequence of `seq_len` tokens attends to, with the mixture
        of step number `step`, for FLOPs."""
        return self.mean(step, self._attended[seq_len])

    def places(self, order: MixtureOrder, samples: Sequence[int]) -> list[SamplePlace]:
        """Return the places in the data of some running samples."""
        return [self._place(n, int(i)) for n, i in zip(samples, order(np.array(samples, np.int64)), strict=True)]

    def _place(self, sample: int, i: int) -> SamplePlace:
        split, _ = self.train.origin(i)
        start, n_tokens = self.train.span(i)
        file, offset = split.place(start)
        documents = (split.document_at(start), split.document_at(start + n_tokens - 1)) if split.n_documents else None
        return SamplePlace(sample, str(file), offset, n_tokens, documents)

    def described(self, stages: Sequence[Mixture | MixtureStage]) -> DataRecord:
        """Return the settings that determine sample number n, for a checkpoint's manifest. `stages`: the stages that
        had started by then, or all stages to check whether a run can continue from a checkpoint, which ignores
        `from_sample`."""
        if self.by_shards:
            sources = [
                record_of_shards(name, part.split.manifest) for name, part in zip(self.names, self._opened, strict=True)
            ]
        else:
            sources = [
                SourceRecord(name=name, fingerprint=fingerprint)
                for name, fingerprint in zip(self.names, self.fingerprints, strict=True)
            ]
        data: DataRecord = {
            "seq_len": self.train.seq_len,
            "sequences": self.config.data.sequences,
            "mixture": {
                "sources": sources,
                "stages": [
                    StageRecord(
                        from_step=stage.from_step,
                        from_sample=stage.from_sample if isinstance(stage, MixtureStage) else 0,
                        weights=list(stage.weights),
                    )
                    for stage in stages
                ],
            },
        }
        if self.by_shards:
            data["order"] = "shards"
        return data


def record_of_shards(name: str, manifest: DataManifest) -> SourceRecord:
    """Return the record of a source whose shards are read one after another and may become more."""
    fixed = f"{manifest.dtype} {manifest.tokenizer_sha256}"
    fingerprint = hashlib.sha256(fixed.encode()).hexdigest()
    return SourceRecord(name=name, fingerprint=fingerprint, shards=manifest.shard_sums("train"))


def is_of(record: SourceRecord, manifest: DataManifest) -> bool:
    """Return whether a record is of the tokens of a data folder."""
    if "shards" in record:
        return same_tokens(record, record_of_shards(record["name"], manifest))
    return record["fingerprint"] == manifest.fingerprint


def same_tokens(one: SourceRecord, other: SourceRecord) -> bool:
    """Return whether two records are of the same tokens or, of shards, whether one has the first shards of the
    other."""
    first, second = one.get("shards"), other.get("shards")
    if first is None or second is None:
        return first is second and one["fingerprint"] == other["fingerprint"]
    n = min(len(first), len(second))
    return one["fingerprint"] == other["fingerprint"] and first[:n] == second[:n]


class RunReferences:
    """The reference's log-probability of each document of the sources of a run, by SPLIT/N for source N; `values` is
    None for a loss without a reference."""

    def __init__(self, sources: Sources, values: Mapping[str, np.ndarray] | None, digest: str | None = None) -> None:
        """`digest`: of the weights of the reference."""
        self.sources, self.values, self.digest = sources, values, digest

    def train(self, i: int) -> Sequence[float]:
        """Return the log-probability of each answer of training sample i, over all sources."""
        source, inside = self.sources.train.located(i)
        [number] = [n for n, candidate in enumerate(self.sources.train.sources) if candidate is source]
        return self._values(f"train/{number}", source, inside)

    def validation(self, samples: Samples, i: int) -> Sequence[float]:
        """Return the log-probability of each answer of validation sample i of a source."""
        [number] = [n for n, candidate in enumerate(self.sources.validation.values()) if candidate is samples]
        return self._values(f"validation/{number}", samples, i)

    def _values(self, name: str, samples: Samples, i: int) -> Sequence[float]:
        return values_of_answers(None if self.values is None else self.values[name], samples, i)


def values_of_answers(values: np.ndarray | None, samples: Samples, i: int) -> Sequence[float]:
    """Return the values of the answers of sample i from the values of all documents of its split; zeros for None."""
    assert isinstance(samples, PairSamples), samples
    answers = samples.answers(i)
    result: list[float] = [0.0] * len(answers) if values is None else values[answers.start : answers.stop].tolist()
    return result


def split_batches(
    config: RunConfig, rank: int, samples: Samples, references: References | None, max_samples: int | None = None
) -> Iterator[Batch]:
    """Return the batches of a rank of the samples of a split, of the whole split without `max_samples`: the same for
    every stage of the batch."""
    layout = config.layout.layout()
    return evaluation_batches(
        samples,
        micro_batch=config.batch.schedule.longest.micro_batch,
        data_rank=layout.data_rank(rank),
        data_ranks=layout.data_ranks,
        vocab_size=config.spec().vocab_size,
        within_documents=config.data.attention == "document",
        references=references,
        max_samples=max_samples,
    )


class RunSamples:
    """The samples that a run trains on and is evaluated on, from a start onward. Every rank has the same order."""

    def __init__(
        self,
        config: RunConfig,
        sources: Sources,
        rank: int,
        device: torch.device,
        start: RunStart,
        references: RunReferences | None = None,
    ) -> None:
        """`references`: of a run on pairs of answers."""
        self.config, self.sources, self.layout = config, sources, config.layout.layout()
        self.rank, self.device, self.vocab_size = rank, device, config.spec().vocab_size
        self.within_documents = config.data.attention == "document"
        self.references = references
        self.left_out = merged(start.left_out)
        """Ranges of running samples that the run does not train on, from rollbacks after spikes."""
        self.begin_at(start)

    def begin_at(self, start: RunStart) -> None:
        """Continue in the order of a run that has reached `start`."""
        self.order = self.sources.order(TrainingProgress(start.step, start.samples, self.config.seed), start.past)

    def leave_out(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Exclude ranges of running samples (first, last + 1) from training."""
        self.left_out = merged([*self.left_out, *ranges])

    def places(self, samples: Iterable[int]) -> list[SamplePlace]:
        """Return the places in the data of running samples, without excluded samples."""
        trained = [i for i in samples if not any(first <= i < end for first, end in self.left_out)]
        return self.sources.places(self.order, trained)

    def described(self, step: int) -> DataRecord:
        """Return the sources and the stages that started before `step` steps, as recorded in a checkpoint."""
        data = self.sources.described([stage for stage in self.order.stages if stage.from_step < step])
        if self.references is not None and self.references.digest is not None:
            data["reference"] = self.references.digest
        return data

    def batches(self, start: RunStart) -> Batches:
        """Return the training batches of this rank after `start`."""
        self.begin_at(start)
        config = self.config
        return Batches(
            self.sources.by_length,
            self.order,
            schedule=self.sources.schedule,
            data_rank=self.layout.data_rank(self.rank),
            data_ranks=self.layout.data_ranks,
            vocab_size=self.vocab_size,
            within_documents=self.within_documents,
            start_step=start.step,
            references=None if self.references is None else self.references.train,
            start_sample=start.samples,
            left_out=self.left_out,
            is_readable=self.order.is_within,
            prefetch=config.data.prefetch,
            pin_memory=self.device.type == "cuda",
        )

    def evaluation_batches(self, samples: Samples) -> Iterable[Batch]:
        """Return the batches of this rank of the validation samples of a source: the same for every stage."""
        references = None if self.references is None else partial(self.references.validation, samples)
        return split_batches(self.config, self.rank, samples, references, self.config.evaluation.samples)


def past_stages(manifest: CheckpointManifest) -> list[MixtureStage]:
    """Return the stages that had started when a checkpoint was saved."""
    stages = manifest.data["mixture"]["stages"] if manifest.data is not None else []
    return [MixtureStage(stage["from_step"], stage["from_sample"], tuple(stage["weights"])) for stage in stages]


def past_problems(saved: MixtureRecord, current: MixtureRecord, step: int) -> list[str]:
    """Return the reasons why a run with the sources and stages `current` cannot continue from a checkpoint after `step`
    steps with `saved`. Later stages may be added; the sources and stages already trained on may not change."""
    before, now = saved["stages"], [stage for stage in current["stages"] if stage["from_step"] < step]
    way_out = (
        "steps that were taken keep their weights; give the stages of these steps as they were, and other weights "
        f"in a stage with from_step >= {step}"
    )
    problems = [
        f"it was trained with {_weights(was, saved)} from step {was['from_step']} on, and this run file has "
        f"{_weights(given, current) if given else 'no such stage'}; {way_out}"
        for was, given in zip(before, _matched(before, now), strict=True)
        if given is None or _trimmed(was["weights"]) != _trimmed(given["weights"])
    ]
    problems += [
        f"this run file has a stage from step {stage['from_step']} on, and the {step} steps that are done were trained "
        f"without it; {way_out}"
        for stage in now
        if stage["from_step"] not in {was["from_step"] for was in before}
    ]
    used = max((len(_trimmed(stage["weights"])) for stage in before), default=0)
    for place in range(used):
        was, given = saved["sources"][place], current["sources"][place] if place < len(current["sources"]) else None
        if given is None or not same_tokens(was, given):
            stands = "there is none" if given is None else f"{given['name']!r} ({_tokens(given)}) stands"
            problems.append(
                f"source {place + 1} was {was['name']!r} with tokens of fingerprint {_tokens(was)}, and "
                f"{stands} there now; keep the sources that were trained on in their order, and append new ones"
            )
    return problems


def _tokens(record: SourceRecord) -> str:
    """Format the fingerprint of a source, of shards with the last of them."""
    shards = record.get("shards") or []
    return f"{record['fingerprint'][:12]}..." + (f" and {len(shards)} shards up to {shards[-1]}" if shards else "")


def _matched(before: list[StageRecord], now: list[StageRecord]) -> list[StageRecord | None]:
    """Return, for each stage of a checkpoint, this run's stage that starts at the same step, or None."""
    by_step = {stage["from_step"]: stage for stage in now}
    return [by_step.get(was["from_step"]) for was in before]


def _trimmed(weights: Sequence[int]) -> list[int]:
    """Return the weights without trailing zeros, which belong to sources that did not take part."""
    kept = list(weights)
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _weights(stage: StageRecord, described: MixtureRecord) -> str:
    """Format a stage's weights, as `web 7 : code 3`."""
    pairs = zip(described["sources"], stage["weights"], strict=False)
    return " : ".join(f"{source['name']} {weight}" for source, weight in pairs if weight)


def tokenizer_file(folder: Path) -> Path | None:
    """Return the path of tokenizer.json for the weights or model in a folder: in the folder itself, or else in the
    data of the run. None if there is none."""
    if saved := published(folder / CHECKPOINTS):
        folder = saved[-1]
    if not (folder / TOKENIZER).is_file() and (folder / RUN_FILE).is_file():
        folder = tokenizer_folder(load_kept(folder).data)
    return find_inside(folder, TOKENIZER, DataError)


def unchecked_tokenizers(models: Mapping[str, Path]) -> list[str]:
    """Return a remark on each model without a tokenizer, which cannot be compared with the tokenizer of data."""
    return [
        f"{model} has no {TOKENIZER}, so nothing shows that the data's token ids mean the same texts in it"
        for model, folder in models.items()
        if folder.is_dir() and tokenizer_file(folder) is None
    ]


def tokenizer_problems(data: Mapping[str, Path], models: Mapping[str, Path], way_out: str = "") -> list[str]:
    """Return the reasons why the data's token ids do not fit the models. `data`, `models`: name for the error ->
    folder. `way_out`: an additional remedy for the error text."""
    problems = []
    for model, folder in models.items():
        theirs = tokenizer_file(folder)
        for called, prepared in data.items() if theirs is not None else ():
            ours = find_inside(prepared, TOKENIZER, DataError)
            difference = tokenizer_difference(ours, theirs) if theirs is not None and ours is not None else None
            if difference:
                problems.append(
                    f"{called} was not prepared with the tokenizer of {model} ({difference}), so its token "
                    f"ids mean other texts; prepare it again with --tokenizer {theirs}{way_out}"
                )
    return problems
