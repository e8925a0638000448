"""shardwright sample: let a trained model write."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.common import AsJson, print_json, verb


@verb
def sample(
    run_dir: Annotated[Path, typer.Argument(help="the folder of a run (`out` of its run file)")],
    prompt: Annotated[str, typer.Option(help="the text to go on from")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="tokens to write")] = 80,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token; higher is wilder")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="draw from this many likeliest tokens")] = 40,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    json: AsJson = False,
) -> None:
    """Write text with the newest checkpoint of a run, on one process.

    shardwright sample quickstart/run --prompt "import os"
    """
    from shardwright.training.sample import open_sampler

    text = open_sampler(run_dir).complete(prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    if json:
        print_json({"prompt": prompt, "text": text})
    else:
        typer.echo(text)
