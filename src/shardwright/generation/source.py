"""Where a model comes from: its sizes, its weights, its tokenizer, and the token that ends a text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from shardwright.config import load as load_run_file
from shardwright.data.shards import TOKENIZER
from shardwright.data.shards import Manifest as DataManifest
from shardwright.errors import CheckpointError, DataError, InputError
from shardwright.model.spec import ModelSpec
from shardwright.run_folder import RUN_FILE
from shardwright.training.checkpoint.manifest import FILE_NAME, read_manifest
from shardwright.training.checkpoint.state import read_into
from shardwright.training.checkpoint.whole import newest_checkpoint


@dataclass(frozen=True)
class Text:
    """The tokenizer of a model, and the id of the token that ends a text."""

    tokenizer: Tokenizer
    end_id: int | None


@dataclass(frozen=True)
class Source:
    """The model of a checkpoint. `spec` is that of its run, without what only training does: no expert has a capacity,
    and no router draws."""

    checkpoint: Path
    spec: ModelSpec
    dtype: torch.dtype

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill parameters, whole or sharded, by their global names; where there are several ranks, each calls this.

        Raises DamagedError for a checkpoint that is not as it was written.
        """
        tensors = {f"model/{name}": parameter.data for name, parameter in parameters.items()}
        read_into(self.checkpoint, read_manifest(self.checkpoint), tensors)

    def text(self) -> Text:
        """The tokenizer of the data that the run was trained on. Raises DataError where it is not there any more, or
        is another one."""
        folder = Path(load_run_file(self.checkpoint / RUN_FILE).data.path)
        try:
            data = DataManifest.read(folder, check_files=False)
            if data.fingerprint != read_manifest(self.checkpoint).data["fingerprint"]:
                raise DataError(f"{folder} holds other data now than the run was trained on")
            tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        except DataError as error:
            problems = [
                f"{problem}; the tokenizer of a run is that of its data.path: prepare that folder again as it was"
                for problem in error.problems
            ]
            raise DataError(*problems) from None
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{folder / TOKENIZER}: the tokenizer of the run cannot be read: {error}; prepare the data again"
            ) from None
        return Text(tokenizer, data.separator_id)


def open_source(folder: Path) -> Source:
    """The model in a folder: a run (its newest checkpoint) or a checkpoint.

    Raises InputError for a folder that is none of these, CheckpointError for one that is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name a run (`out` of its run file) or a checkpoint")
    checkpoint = folder if (folder / FILE_NAME).is_file() else newest_checkpoint(folder)
    manifest = read_manifest(checkpoint)
    spec = load_run_file(checkpoint / RUN_FILE).model.spec()
    if spec.moe is not None:
        spec = replace(spec, moe=replace(spec.moe, capacity_factor=0.0, force_balance=False))
    found = manifest.tensors.get("model/embedding.weight")
    if found is None:
        raise CheckpointError(f"{checkpoint} holds no model: there is no model/embedding.weight in it")
    return Source(checkpoint, spec, getattr(torch, found.dtype))
