"""The sections [metrics] and [profile] of the run file: the destinations of a run's records, and traces of some
steps."""

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from shardwright.config.sections import Positive, RunFileSection

HTTP = ("http", "https")


class MetricsSection(RunFileSection):
    """Metrics that are written while training. JSON lines always go to OUT/metrics.jsonl."""

    every: Positive = Field(10, description="steps between logged lines; logging synchronises with the accelerator")
    tensorboard: bool = Field(False, description="also write TensorBoard events (extra: tensorboard)")
    wandb_project: str | None = Field(None, description="also log to this W&B project (extra: wandb)")
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="also serve the newest numbers to Prometheus, at http://127.0.0.1:PORT/metrics of the machine of "
        "rank 0 (extra: prometheus)",
    )
    mlflow_uri: str | None = Field(
        None,
        description="also log to the MLflow server at this URL, such as http://HOST:5000, or to a store of MLflow: "
        "sqlite:///FILE (needs sqlalchemy), file:///FOLDER (needs MLFLOW_ALLOW_FILE_STORE=true), databricks (extra: "
        "mlflow)",
    )
    mlflow_experiment: Annotated[str, Field(min_length=1)] = Field(
        "shardwright", description="the MLflow experiment in which the run is listed"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="also send the numbers, and spans of steps and their phases, to the OpenTelemetry collector at "
        "this URL by OTLP over HTTP, such as http://HOST:4318 (extra: opentelemetry)",
    )

    otlp_ranks: Literal["first", "all"] = Field(
        "first", description="ranks that send spans: rank 0, or all; each span has the attribute `rank`"
    )

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each URL that no server can have."""
        for key, also, example in (
            ("mlflow_uri", ("sqlite", "file", "databricks"), "http://127.0.0.1:5000"),
            ("otlp_endpoint", (), "http://127.0.0.1:4318"),
        ):
            url = getattr(self, key)
            if url is not None and not _is_url(url, also):
                ways = ", ".join(f"{scheme}://" for scheme in ("http", "https", *also))
                yield f"metrics.{key}={url!r} is not the URL of a server; valid: {ways}, such as {example}"
        if self.mlflow_uri is None and self.mlflow_experiment != "shardwright":
            yield (
                f"metrics.mlflow_experiment={self.mlflow_experiment!r} without metrics.mlflow_uri is not used; set "
                f"mlflow_uri, or leave it out"
            )
        if self.otlp_endpoint is None and self.otlp_ranks != "first":
            yield f"metrics.otlp_ranks={self.otlp_ranks!r} needs metrics.otlp_endpoint; set it, or leave otlp_ranks out"


class ProfileSection(RunFileSection):
    """Traces of some steps by torch.profiler, and snapshots of the memory of GPUs."""

    first_step: Positive | None = Field(
        None,
        description="first step that is traced by torch.profiler, counted from 1, to OUT/profile; `shardwright report "
        "--trace` merges the traces of all ranks; if not given, no step is traced",
    )
    steps: Annotated[int, Field(ge=1, le=100)] = Field(3, description="number of steps that are traced")
    ranks: list[int] = Field([], description="ranks that are traced; empty: all")
    memory: bool = Field(
        False,
        description="GPUs only: record each allocation with its stack, and write a snapshot of PyTorch's allocator "
        "after the traced steps and on out of memory",
    )

    @property
    def requested(self) -> bool:
        """Return whether a run does anything for this section."""
        return self.first_step is not None or self.memory

    @property
    def last_step(self) -> int:
        """The last step that is traced; 0 if none is."""
        return 0 if self.first_step is None else self.first_step + self.steps - 1


def profile_problems(profile: ProfileSection, steps: int | None, world_size: int | None, device: str) -> Iterator[str]:
    """Yield each broken rule on [profile]. `steps`: steps of the run, `world_size`: its ranks; None if not valid."""
    first = profile.first_step
    if first is not None and steps is not None and first > steps:
        yield f"profile.first_step={first} is after the last step of the run, steps={steps}; valid: 1 to {steps}"
    if first is None:
        for name in ("steps", "ranks"):
            if getattr(profile, name) != ProfileSection.model_fields[name].default:
                yield (
                    f"profile.{name}={getattr(profile, name)} without profile.first_step: no step is traced; set "
                    f"profile.first_step, or leave {name} out"
                )
    if world_size is not None and (outside := [rank for rank in profile.ranks if not 0 <= rank < world_size]):
        yield (
            f"profile.ranks={profile.ranks}: the layout has {world_size} ranks, so there is no rank "
            f"{', '.join(map(str, outside))}; valid: 0 to {world_size - 1}"
        )
    if profile.memory and device == "cpu":
        yield MEMORY_ON_CPU.format(device="device='cpu'")


MEMORY_ON_CPU = (
    "profile.memory=true with {device}: only the allocator of GPUs has snapshots; leave it out: a trace "
    "(profile.first_step) has the allocations of a CPU"
)


def _is_url(url: str, also: tuple[str, ...]) -> bool:
    """Return whether a text is the URL of an HTTP server, or has another scheme of `also`."""
    try:
        parts = urlsplit(url)
        return (parts.scheme in HTTP and bool(parts.hostname) and parts.port != 0) or url.partition(":")[0] in also
    except ValueError:
        return False
