"""Settings with which InferenceX starts the servers that it measures, if its scripts differ from an engine's defaults.

It starts one server for each length of prompts and answers and each concurrency. Source: the scripts in benchmarks/ of
github.com/SemiAnalysisAI/InferenceX (InferenceMAX until 2025): dsr1_fp8_h200_trt_slurm.sh (2e46dba),
dsr1_fp8_h200.sh (161e7f6), and 70b_fp8_h200_trt_slurm.sh as in github.com/jyothisambolu/InferenceMAX (1b563c8). A later
commit of InferenceX (73ef922) lowers the latter's max_num_tokens to the longest request; with it, 128 prompts at a time
would wait three times as long as measured. 70b_fp8_h200_slurm.sh, of vLLM, has the defaults. These are settings, as
the lengths are: nothing here is fitted.
"""

from dataclasses import replace

from shardwright.serving.engines import ServingEngine
from shardwright.serving.setting import Degrees

CLIENT = "InferenceX client"
"""Words in the notes of a row that InferenceX measured."""


def server(
    engine: ServingEngine, model: str, chip: str, degrees: Degrees, lengths: tuple[int, int], requests: int
) -> ServingEngine:
    """Return the engine as InferenceX starts it for `requests` at a time, of at most `lengths` (prompt, answer)."""
    match chip, model, engine.name:
        case "h200", "llama-3.1-70b", "trtllm-1":
            engine = replace(engine, max_tokens=16384)
            if lengths == (1024, 1024) and degrees.tp < 8:
                return replace(engine, hold_passes=20, hold_share=0.9)
        case "h200", "deepseek-v3", "trtllm-1":
            prompt_and_others = -(-(requests + lengths[0] + 64) // 64) * 64
            engine = replace(engine, max_tokens=degrees.dp * prompt_and_others, cache_share=0.75)
            if degrees.dp > 1:
                return replace(engine, hold_passes=60, hold_prompts=one_each(degrees.dp))
        case "h200", "deepseek-v3", "sglang":
            return replace(engine, max_tokens=32768, memory_share=0.82)
    return engine


def one_each(ranks: int) -> float:
    """Return the expected number of prompts until each rank has one, if each goes to a random rank."""
    return ranks * sum(1 / k for k in range(1, ranks + 1))
