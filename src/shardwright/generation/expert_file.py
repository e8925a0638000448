"""The file of recorded choices of experts: safetensors, with a tensor (T, L, K) of int16 for each record, named by its
line or by the number of its prompt.

T counts the tokens of the record except the last, which no pass reads; L the layers with experts, whose numbers are in
the metadata; K the experts of a token.

Between ranks the choices of a sequence are text: base64 of int16.
"""

import base64
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from shardwright.model.expert_choices import choice_problems, choice_shape, layers_with_experts
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError
from shardwright.system.files import open_regular, reason, write_whole


def as_text(experts_TLK: Tensor) -> str:
    """Return choices as text, for `from_text`."""
    return base64.b64encode(experts_TLK.to(torch.int16).numpy().tobytes()).decode()


def from_text(text: str, spec: ModelSpec) -> Tensor:
    """Return the choices (T, L, K) int16 of `as_text`."""
    values = np.frombuffer(base64.b64decode(text), dtype=np.int16).copy()
    return torch.from_numpy(values).view(-1, *choice_shape(spec))


def write_choices(path: Path, choices: Mapping[int, str], spec: ModelSpec) -> None:
    """Write the choices of records by their line or number."""
    tensors = {str(number): from_text(text, spec) for number, text in choices.items()}
    write_whole(path, save(tensors, {"layers": ",".join(map(str, layers_with_experts(spec)))}))


def read_choices(path: Path, n_tokens: Mapping[int, int], spec: ModelSpec) -> dict[int, Tensor]:
    """Return the choices of records by their line. `n_tokens`: the tokens of each record.

    Raises InputError for a file that is damaged, lacks a record, or has choices that the model cannot replay.
    """
    try:
        with open_regular(path) as file:
            tensors = load(file.read())
    except OSError as error:
        raise InputError(f"--replay-experts {path}: {reason(error)}") from None
    except SafetensorError as error:
        raise InputError(f"--replay-experts {path}: not a whole safetensors file: {error}") from None
    problems = []
    for number, n in n_tokens.items():
        name, experts = f"--replay-experts {path}, record {number}", tensors.get(str(number))
        if experts is None:
            problems.append(f"{name}: not in the file, which has {', '.join(sorted(tensors)[:5]) or 'none'}")
        elif experts.dim() != 3 or len(experts) != n - 1:
            shape = " x ".join(map(str, experts.shape))
            problems.append(
                f"{name}: choices of shape {shape}, and the {n} tokens of the line need {n - 1} rows, one for each "
                f"token except the last"
            )
        else:
            problems += [f"{name}: {problem}" for problem in choice_problems(spec, experts)]
    if problems:
        raise InputError(*problems)
    return {number: tensors[str(number)] for number in n_tokens}
