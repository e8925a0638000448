"""The variables with which a program sees the devices of the mock."""

import os
import sys
from pathlib import Path

from run_file import python_path


def environment(mock: Path) -> dict[str, str]:
    """What to add to the variables of a program; `mock`: the folder that build.py has filled.

    `MOCK_DEVICES`, `MOCK_BYTES` (of each device) and `MOCK_NCCL_LOG` (a folder) may be set as well.
    """
    return {
        "LD_PRELOAD": str(mock / "mock.so"),
        "LD_LIBRARY_PATH": str(mock),
        "TRITON_LIBCUDA_PATH": str(mock),
        # cuDNN loads the parts with its kernels by itself, and these look for a real device.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }


def start_on_mock(mock: Path) -> None:
    """Start this program again with the variables, unless it has them: libraries are replaced when a process starts."""
    wanted = environment(mock.resolve())
    if os.environ.get("LD_PRELOAD") != wanted["LD_PRELOAD"]:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
