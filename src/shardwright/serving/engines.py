"""Serving engines and their generations, and how to recognise them in the text of a source."""

import re
from dataclasses import dataclass
from math import inf

from shardwright.cost.hardware import Accelerator
from shardwright.serving.rates import OTHERS
from shardwright.system.units import GiB

LARGE_MEMORY_BYTES = 70 * GiB
REQUESTS_ON_SMALL = 256
"""`max_num_seqs` of vLLM on accelerators with less memory than the threshold of `sampled_requests`, and on an A100."""
VLLM_LOGIT_BYTES = 42.0
"""Bytes of each logit in vLLM's sampler: logits in 16 bits and in fp32, sorted values and their indices, and buffers of
the sort. Once the sampler was profiled, OPT-125m had 58,928 tokens of 36,864 bytes less cache for 1,024 requests with
50,272 logits each (vllm-project/vllm#13594). It explains two other logs: Llama-3-8B on H100 reports 1.26 GiB of peak
activations for 256 requests (#10511; this: 1.28), and Llama-3.1-8B on L40S has 5.6 GiB that are neither weights nor
cache for 1,024 (#17122; this and 0.5 GiB of CUDA)."""


@dataclass(frozen=True)
class ServingEngine:
    """One generation of a serving engine. `name`: key of its constants in rates.toml. `words`: a pattern for its name
    in sources. `since`: the first version of the generation. `like`: the engine whose constants it uses if few rows
    measure its own: the next generation, whose kernels and scheduler are nearest; "others" for current engines.

    `max_batch`: requests in a pass in its published measurements at maximum load. `max_tokens`: tokens of a pass.
    `mixed`: whether prompts are read in the same pass in which other requests decode, in chunks if they are longer than
    `max_tokens`, instead of in a pass before. `chunked`: whether they are cut in that case. `kv_fp8`: whether the
    default cache is in fp8 if the weights are.

    `memory_share`: largest share of an accelerator's memory that the engine uses. `cache_share`: share of the memory
    after weights and working memory that the cache gets. They are the defaults of `gpu_memory_utilization` of vLLM,
    `mem_fraction_static` of SGLang and `free_gpu_memory_fraction` of TensorRT-LLM. `reserved`: share of an answer for
    which the cache must have room before the request is admitted. By default TensorRT-LLM never evicts a request
    (`capacity_scheduler_policy`), so it reserves the whole answer. The others evict a request that finds no room, which
    is not simulated; requests at different places of their answers have half of each on average. `logit_bytes`: bytes
    of each logit in the sampler, if the engine runs it before it allocates the cache.

    `hold_passes`: prompts wait for at most this number of passes while other requests decode, until the prompts have
    `hold_share` of `max_tokens`, or are `hold_prompts` (`batch_wait_timeout_iters` and `attention_dp_config` of
    TensorRT-LLM). 0: they do not wait.
    """

    name: str
    words: str
    since: tuple[int, int] = (0, 0)
    max_batch: int = 2048
    max_tokens: int = 8192
    mixed: bool = True
    chunked: bool = True
    kv_fp8: bool = False
    like: str = OTHERS
    memory_share: float = 1.0
    cache_share: float = 0.9
    reserved: float = 0.5
    logit_bytes: float = 0.0
    hold_passes: int = 0
    hold_share: float = inf
    hold_prompts: float = inf

    def sampled_requests(self, accelerator: Accelerator) -> int:
        """Return the number of requests that the engine samples to measure its memory: the default of vLLM's
        `max_num_seqs`, by the accelerator's memory and name (vllm/engine/arg_utils.py, v0.10)."""
        small = accelerator.memory_bytes < LARGE_MEMORY_BYTES or "a100" in accelerator.name
        return min(self.max_batch, REQUESTS_ON_SMALL if small else self.max_batch)


def _tensorrt(name: str, since: tuple[int, int], max_batch: int, *, mixed: bool, like: str = OTHERS) -> ServingEngine:
    words = r"trt-?llm|tensorrt-?llm"
    return ServingEngine(
        name, words, since, max_batch, mixed=mixed, chunked=False, kv_fp8=True, like=like, reserved=1.0
    )


ENGINES = (
    ServingEngine("fastertransformer", r"fastertransformer|\bft-gpt|\bft\b", mixed=False, like="trtllm-0.5"),
    _tensorrt("trtllm-0.5", (0, 0), 256, mixed=False, like="trtllm-0.8"),
    _tensorrt("trtllm-0.8", (0, 7), 1024, mixed=False, like="trtllm-0.17"),
    _tensorrt("trtllm-0.17", (0, 10), 2048, mixed=True),
    _tensorrt("trtllm-1", (1, 0), 2048, mixed=True),
    ServingEngine(
        "vllm", r"vllm", (0, 0), 1024, kv_fp8=True, memory_share=0.9, cache_share=1.0, logit_bytes=VLLM_LOGIT_BYTES
    ),
    ServingEngine("sglang", r"sglang", (0, 0), 1024, memory_share=0.88, cache_share=1.0),
    ServingEngine("lmdeploy", r"lmdeploy|turbomind", (0, 0), 256, mixed=False, like="trtllm-0.5"),
)
"""The generations of all engines; each engine's from old to new."""
UNNAMED = ServingEngine(OTHERS, r"(?!)", max_batch=1024, kv_fp8=True)
"""The engine of a table that names none: the settings that current engines share."""
GENERATE = ServingEngine("generate", r"\bshardwright\b", max_batch=256, mixed=False)
"""`shardwright generate`. Its constants are measured by `shardwright measure` (`serving.host`), and no published table
names it."""
USUAL = ENGINES[4]
"""The default engine of `plan serve`, except on a processor that was measured."""


def engine_of(text: str) -> ServingEngine | None:
    """Return the engine that a text names first, and its generation if a version follows the name; the newest
    generation without a version. Returns None if the text names none."""
    matches = [
        (match.start(), engine)
        for engine in ENGINES
        if (match := re.search(engine.words, text, re.IGNORECASE)) is not None
    ]
    if not matches:
        return None
    _, first = min(matches, key=lambda pair: pair[0])
    version = re.search(rf"(?:{first.words})\W*v?(\d+)\.(\d+)", text, re.IGNORECASE)
    of_it = [engine for engine in ENGINES if engine.words == first.words]
    if version is None:
        return of_it[-1]
    number = (int(version[1]), int(version[2]))
    return max((engine for engine in of_it if engine.since <= number), key=lambda engine: engine.since)
