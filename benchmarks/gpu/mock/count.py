"""An extension of runs on the mock: counts the work that the host gives to the device.

`MOCK_COUNTS` names a file that gets, after each step, the counts of that step: launches of kernels (those of cuBLAS are
not counted), waits of the host for the device, copies, CPU-seconds of the process, and for the whole run so far the
frames that `torch.compile` compiled, and its graph breaks.
"""

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

from shardwright.system.torch_private import compile_counters
from shardwright.training.step import Trainer

_step = Trainer.step
_runtime, _driver = ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1")
COUNTERS = {
    "launches": (_runtime.mock_launches, _driver.mock_driver_launches),
    "waits": (_runtime.mock_waits,),
    "copies": (_runtime.mock_copies,),
}
for _functions in COUNTERS.values():
    for _function in _functions:
        _function.restype = ctypes.c_ulonglong


def counts() -> dict[str, float]:
    """The counters of the process since its start."""
    now: dict[str, float] = {name: sum(each() for each in functions) for name, functions in COUNTERS.items()}
    return now | {"host_s": time.process_time()}


def counted_step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """A step, after which its counts are written."""
    before = counts()
    result = _step(self, *args, **kwargs)
    of_step = {name: value - before[name] for name, value in counts().items()}
    frames, breaks = compile_counters()["frames"]["ok"], sum(compile_counters()["graph_break"].values())
    Path(os.environ["MOCK_COUNTS"]).write_text(json.dumps(of_step | {"frames": frames, "graph_breaks": breaks}))
    return result


Trainer.step = counted_step  # type: ignore[method-assign]
