"""Shardwright trains large models on many accelerators, and verifies that the result equals a single device's.

import shardwright

found = shardwright.plan("llama-3.1-70b", "h100:64", global_batch=1024, seq_len=8192)
report = shardwright.verify(shardwright.Layout(tp=2, dp_shard=2))
run = shardwright.train("examples/debug.toml", {"steps": 50})
model = shardwright.parallelize("debug", shardwright.Layout(dp_shard=2))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.layout.layout import Layout
from shardwright.system.errors import InputError, ShardwrightError
from shardwright.system.version import PACKAGE_VERSION

if TYPE_CHECKING:
    from shardwright.api.distributed import Continuation, DistributedModel, parallelize
    from shardwright.api.verbs import Run, dryrun, extend, load_run, plan, preset, train, verify
    from shardwright.model.spec import ModelSpec
    from shardwright.model.transformer import Transformer

__version__ = PACKAGE_VERSION
__all__ = [
    "Continuation",
    "DistributedModel",
    "InputError",
    "Layout",
    "ModelSpec",
    "Run",
    "ShardwrightError",
    "Transformer",
    "dryrun",
    "extend",
    "load_run",
    "parallelize",
    "plan",
    "preset",
    "train",
    "verify",
]
_FROM = {
    "Continuation": "api.distributed",
    "DistributedModel": "api.distributed",
    "ModelSpec": "model.spec",
    "Run": "api.verbs",
    "dryrun": "api.verbs",
    "extend": "api.verbs",
    "Transformer": "model.transformer",
    "load_run": "api.verbs",
    "parallelize": "api.distributed",
    "plan": "api.verbs",
    "preset": "api.verbs",
    "train": "api.verbs",
    "verify": "api.verbs",
}
"""The module of each name. It is imported when the name is used, so that `plan` starts without PyTorch."""


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    return getattr(import_module(f"shardwright.{_FROM[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_FROM]
