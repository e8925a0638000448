"""Text from a checkpoint, on one process, whatever the layout that trained it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from shardwright.config import load as load_run_file
from shardwright.config.mixture import sources_of
from shardwright.data.shards import TOKENIZER
from shardwright.data.shards import Manifest as DataManifest
from shardwright.errors import CheckpointError, DataError
from shardwright.model.transformer import Transformer
from shardwright.run_folder import CHECKPOINTS, RUN_FILE, published
from shardwright.training.checkpoint.manifest import read_manifest
from shardwright.training.checkpoint.state import read_into


@dataclass(frozen=True)
class Sampler:
    """A trained model with its tokenizer. `model` is in evaluation mode, on the CPU, in the type it was trained in."""

    model: Transformer
    tokenizer: Tokenizer
    context: int

    @torch.no_grad()
    def complete(
        self, prompt: str, n_tokens: int = 80, *, temperature: float = 0.8, top_k: int = 40, seed: int = 0
    ) -> str:
        """`prompt` and up to `n_tokens` more, each sampled from the `top_k` most probable ones at this `temperature`.

        Raises DataError for a prompt without a token. The model attends to the last `context` tokens.
        """
        ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if not ids:
            raise DataError("the prompt is empty; give it at least one character to go on from")
        generator = torch.Generator().manual_seed(seed)
        for _ in range(n_tokens):
            logits_V = self.model(torch.tensor([ids[-self.context :]]))[0, -1]
            likeliest = torch.topk(logits_V / max(temperature, 1e-6), min(top_k, logits_V.numel()))
            drawn = torch.multinomial(likeliest.values.softmax(-1), 1, generator=generator)
            ids.append(int(likeliest.indices[drawn]))
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def open_sampler(run_dir: Path) -> Sampler:
    """A sampler with the newest checkpoint of a run. Raises CheckpointError or DataError if something is missing."""
    checkpoint = newest_checkpoint(run_dir)
    manifest = read_manifest(checkpoint)
    config = load_run_file(checkpoint / RUN_FILE)
    folder = sources_of(config.data)[0].path  # all sources have one tokenizer
    tokenizer = Path(folder) / TOKENIZER
    data = DataManifest.read(folder)
    if data.fingerprint != manifest.data["mixture"]["sources"][0]["fingerprint"]:
        raise DataError(
            f"{folder} holds other data now than the run was trained on, so its tokenizer may be another; "
            f"prepare it again as it was"
        )
    return Sampler(restore(checkpoint), Tokenizer.from_file(str(tokenizer)), config.batch.seq_len)


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest checkpoint of a run. Raises CheckpointError if there is none."""
    saved = published(run_dir / CHECKPOINTS)
    if not saved:
        raise CheckpointError(
            f"{run_dir} has no checkpoint; train first: shardwright train RUN.toml --set out={run_dir}"
        )
    return saved[-1]


def restore(checkpoint: Path) -> Transformer:
    """The whole model of a checkpoint, on the CPU, in evaluation mode, in the type it was trained in.

    Raises CheckpointError for one that is not there or damaged.
    """
    manifest = read_manifest(checkpoint)
    with torch.device("meta"):
        model = Transformer(load_run_file(checkpoint / RUN_FILE).model.spec())
    dtype = manifest.tensors["model/embedding.weight"].dtype
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu").eval()
    read_into(checkpoint, manifest, {f"model/{name}": p.data for name, p in model.named_parameters()})
    return model
