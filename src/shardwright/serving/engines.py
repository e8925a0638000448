"""Serving engines and their generations, and how to tell them from the words of a source."""

import re
from dataclasses import dataclass

from shardwright.serving.rates import OTHERS


@dataclass(frozen=True)
class Engine:
    """`name`: of the generation, with constants in rates.toml. `words`: a pattern for its name in sources. `since`: the
    first version of the generation. `like`: the engine that it has the constants of where few rows say otherwise: the
    next one in time, whose kernels and scheduler are nearest; "others" for those of today.

    `max_batch`: requests in a pass that its tables at maximum load are run with; `max_tokens`: tokens of a pass;
    `mixed`: whether prompts are read in the same pass as others decode, cut into chunks where they are longer than
    `max_tokens`, rather than before. `kv_fp8`: whether its cache is in fp8 where the weights are and nothing is said.
    """

    name: str
    words: str
    since: tuple[int, int] = (0, 0)
    max_batch: int = 2048
    max_tokens: int = 8192
    mixed: bool = True
    kv_fp8: bool = False
    like: str = OTHERS


ENGINES = (
    Engine("fastertransformer", r"fastertransformer|\bft-gpt|\bft\b", mixed=False, like="trtllm-0.5"),
    Engine("trtllm-0.5", r"trt-?llm|tensorrt-?llm", (0, 0), 256, mixed=False, kv_fp8=True, like="trtllm-0.8"),
    Engine("trtllm-0.8", r"trt-?llm|tensorrt-?llm", (0, 7), 1024, mixed=False, kv_fp8=True, like="trtllm-0.17"),
    Engine("trtllm-0.17", r"trt-?llm|tensorrt-?llm", (0, 10), 2048, kv_fp8=True),
    Engine("trtllm-1", r"trt-?llm|tensorrt-?llm", (1, 0), 2048, kv_fp8=True),
    Engine("vllm", r"vllm", (0, 0), 1024, kv_fp8=True),
    Engine("sglang", r"sglang", (0, 0), 1024),
    Engine("lmdeploy", r"lmdeploy|turbomind", (0, 0), 256, mixed=False, like="trtllm-0.5"),
)
"""By engine, generations from old to new."""
UNNAMED = Engine(OTHERS, r"(?!)", max_batch=1024, kv_fp8=True)
"""Of a table that names no engine: what those of today have in common."""
GENERATE = Engine("generate", r"\bshardwright\b", max_batch=256, mixed=False)
"""`shardwright generate`, whose constants are those that `shardwright measure` has measured (`serving.host`), and which
no published table names."""
USUAL = ENGINES[4]
"""Of `plan serve`, but on a processor that was measured."""


def engine_of(text: str) -> Engine | None:
    """The engine, and its generation if a version follows its name, that a text names first; the newest generation
    without a version. None if it names none."""
    found = [
        (match.start(), each) for each in ENGINES if (match := re.search(each.words, text, re.IGNORECASE)) is not None
    ]
    if not found:
        return None
    _, first = min(found, key=lambda pair: pair[0])
    version = re.search(rf"(?:{first.words})\W*v?(\d+)\.(\d+)", text, re.IGNORECASE)
    of_it = [each for each in ENGINES if each.words == first.words]
    if version is None:
        return of_it[-1]
    number = (int(version[1]), int(version[2]))
    return max((each for each in of_it if each.since <= number), key=lambda each: each.since)
