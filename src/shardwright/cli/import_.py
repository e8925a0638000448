"""shardwright import: weights of Hugging Face transformers in the format of Shardwright's checkpoints."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.common import AsJson, print_json, print_text, reading_verb
from shardwright.system.units import format_bytes, format_count


@reading_verb
def import_(
    source: Annotated[
        str, typer.Argument(metavar="HF_DIR_OR_ID", help="a folder of transformers, or an id of the hub (OWNER/NAME)")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="the new folder that is written")],
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="HF_DIR has an adapter of peft alone; take it as adapters of these weights, for [lora]",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Write the weights of a Hugging Face model as a folder that runs begin with.

    The folder has the weights with a checksum of each shard, the section [model] of a run file (model.toml), and the
    tokenizer. A folder of transformers can also be given to model.from and init.weights as it is.

    shardwright import smollm2/ --out weights/smollm2
    """
    if base is not None:
        _adapter(source, base, out, json)
        return
    from shardwright.training.importing import bytes_of, import_weights
    from shardwright.training.weights import by_reason

    weights = import_weights(source, out)
    architecture, n_bytes = weights.folder.architecture.class_name, bytes_of(weights)
    if json:
        print_json(
            {
                "out": str(out),
                "architecture": architecture,
                "parameters": weights.spec.n_parameters,
                "tensors": len(weights.shapes),
                "bytes": n_bytes,
                "left_out": weights.left_out,
            }
        )
        return
    print_text(
        f"{architecture}, {format_count(weights.spec.n_parameters)} parameters, {format_bytes(n_bytes)} -> {out}"
    )
    if weights.folder.untied:
        print_text(
            "the head is not tied: config.json ties it to the embedding, and the files have a head with other values, "
            "which transformers keeps too"
        )
    for line in by_reason(weights.left_out):
        print_text(f"left out: {line}")
    if weights.folder.tokenizer is None:
        print_text("no tokenizer.json in it: data has to be prepared with a tokenizer of the same vocabulary")
    print_text(f"  shardwright train RUN.toml --set model.from={out} --set init.weights={out}")


def _adapter(source: str, base: Path, out: Path, json: bool) -> None:
    from shardwright.training.adapters import import_adapter
    from shardwright.training.weights import by_reason

    given = import_adapter(source, base, out)
    lora, n = given.spec.lora, given.spec.n_trained_parameters
    assert lora is not None
    if json:
        print_json({"out": str(out), "base": str(base), "rank": lora.rank, "parameters": n})
        return
    print_text(f"adapters of rank {lora.rank}, {format_count(n)} parameters, for {base} -> {out}")
    targets = dumps([*lora.targets])
    keys = f"lora.rank={lora.rank} --set lora.alpha={lora.alpha:g} --set 'lora.targets={targets}'"
    keys += f" --set lora.dropout={lora.dropout:g}" if lora.dropout else ""
    keys += "".join(f" --set lora.{key}=true" for key in ("rslora", "dora") if getattr(lora, key))
    for line in by_reason(given.left_out):
        print_text(f"left out: {line}")
    print_text(f"  shardwright train RUN.toml --set model.from={base} --set init.weights={out} --set {keys}")
