"""shardwright import: weights of Hugging Face transformers in the format of Shardwright's checkpoints."""

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
    json: AsJson = False,
) -> None:
    """Write the weights of a Hugging Face model as a folder that runs begin with.

    The folder has the weights with a checksum of each shard, the section [model] of a run file (model.toml), and the
    tokenizer. A folder of transformers can also be given to model.from and init.weights as it is.

    shardwright import smollm2/ --out weights/smollm2
    """
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
