"""Times of a pass against what can be counted by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwright.serving import forms
from shardwright.serving.engines import REQUESTS_ON_SMALL, UNNAMED, VLLM_LOGIT_BYTES, engine_of
from shardwright.serving.formats import format_of_config
from shardwright.serving.memory import BLOCK_TOKENS, largest_batch, memory
from shardwright.serving.setting import Degrees, PassBatch, Settings
from shardwright.serving.work import cache_bytes_per_token, latency_s, period_s
from shardwright.system.units import GiB
from tests.serving.cases import IDEAL, serving

ONE = Settings.from_layouts([Degrees(1)])


def test_a_token_of_one_request_takes_as_long_as_reading_weights_and_cache():
    there = serving(rates=IDEAL)
    found = forms.decode_s(there, ONE, 1.0, 1000.0)
    model, bandwidth = there.model, there.cluster.accelerator.memory_bytes_per_s
    weights = 2 * (model.n_parameters - model.vocab_size * model.d_model)  # the embedding is looked up, not read
    cache = 1000 * model.n_layers * cache_bytes_per_token(model, 1, 2)
    assert float(found[0]) == pytest.approx((weights + cache) / bandwidth, rel=0.01)


def test_the_soft_cap_of_logits_takes_as_long_as_its_reads_and_writes():
    there = serving(rates=IDEAL)
    model, requests = there.model, 64.0
    capped = replace(there, model=replace(model, logit_softcap=30.0))
    more = forms.decode_s(capped, ONE, requests, 1000.0) - forms.decode_s(there, ONE, requests, 1000.0)
    moved = requests * model.vocab_size * 6 * 2
    assert float(more[0]) == pytest.approx(moved / there.bytes_per_s, rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "bits", "computes"),
    [("nvfp4", 4.5, "nvfp4"), ("mxfp4", 4.25, "bf16"), ("int4", 4 + 20 / 128, "bf16"), ("int8", 8, "bf16")],
)
def test_weights_of_fewer_bits_are_read_with_their_scales_and_compute_in_their_format(
    precision: str, bits: float, computes: str
):
    narrow, wide = (serving(machine="b200:1/1", precision=name, rates=IDEAL) for name in (precision, "bf16"))
    model, bandwidth = narrow.model, narrow.cluster.accelerator.memory_bytes_per_s
    head = 2 * model.vocab_size * model.d_model
    weights = bits / 8 * (model.n_parameters - 2 * model.vocab_size * model.d_model) + head
    found = float(forms.decode_s(narrow, ONE, 1.0, 0.0)[0])
    assert found == pytest.approx(weights / bandwidth, rel=0.02)
    assert narrow.compute == computes
    prompt = PassBatch(prompt=8192, attended=4096, logits=1)
    faster = float(latency_s(wide, ONE, prompt)[0]) / float(latency_s(narrow, ONE, prompt)[0])
    assert (faster > 1.5) == (computes == "nvfp4")


def test_a_cache_in_8_bits_holds_twice_the_requests():
    base = serving(precision="int4")
    engine = engine_of("vllm")
    assert engine is not None
    sizes = [
        float(largest_batch(replace(base, kv_precision=name), ONE, 1000.0, engine)[0])
        for name in ("bf16", "fp8", "int8")
    ]
    assert sizes[1] == sizes[2] == pytest.approx(2 * sizes[0], rel=0.01)


def test_a_long_prompt_takes_as_long_as_its_flops():
    there = serving(rates=IDEAL)
    tokens = 4096
    found = float(latency_s(there, ONE, PassBatch(prompt=tokens, attended=tokens / 2, logits=1))[0])
    model = there.model
    matmuls = 2 * (model.n_matmul_parameters - model.vocab_size * model.d_model) * tokens
    attention = 2 * model.n_layers * model.n_heads * 2 * model.head_dim * tokens * tokens / 2
    least = (matmuls + attention) / float(there.flops_per_s("bf16"))
    assert least < found < 1.35 * least  # waves of tiles that are not full, element-wise kernels


def test_experts_that_a_batch_touches_are_those_that_random_choices_touch():
    there = serving("qwen3-235b-a22b", "h100:8", precision="fp8", rates=replace(IDEAL, matmul_share=1e9))
    settings, moe = Settings.from_layouts([Degrees(8, ep=8)]), there.model.moe
    assert moe is not None
    random = np.random.default_rng(0)
    for tokens in (1, 16, 200):
        seconds = float(period_s(there, settings, PassBatch(requests=tokens, logits=tokens))[0])
        dense = replace(there, rates=replace(there.rates, expert_share=1e9))
        of_experts = seconds - float(period_s(dense, settings, PassBatch(requests=tokens, logits=tokens))[0])
        chosen = [random.permuted(np.tile(np.arange(128), (tokens, 1)), axis=1)[:, : moe.top_k] for _ in range(300)]
        touched = float(np.mean([len(np.unique(each)) for each in chosen])) / 8
        expert_bytes = 3 * there.model.d_model * moe.d_ffn
        reading = there.model.n_layers * touched * expert_bytes / there.cluster.accelerator.memory_bytes_per_s
        assert of_experts == pytest.approx(reading, rel=0.1), tokens


def test_time_grows_with_requests_context_and_prompts():
    there = serving("llama-3.1-70b", "h100:8", precision="fp8")
    settings = Settings.from_layouts([Degrees(tp) for tp in (1, 2, 4, 8)])
    base = PassBatch(requests=8.0, context=1000.0, logits=8.0)
    least = period_s(there, settings, base)
    for more in ({"requests": 64.0}, {"context": 8000.0}, {"prompt": 512.0, "attended": 256.0}, {"drafted": 4.0}):
        assert (period_s(there, settings, replace(base, **more)) > least).all(), more
    assert (np.diff(least) < 0).all()  # and less with tp


def test_a_pipeline_has_as_many_tokens_a_second_and_waits_for_its_stages():
    there = serving("llama-3.1-70b", "h100:8", rates=IDEAL)
    one, four = (Settings.from_layouts([Degrees(1, pp)]) for pp in (1, 4))
    together = period_s(there, one, PassBatch(requests=1.0, logits=1.0))
    apart = period_s(there, four, PassBatch(requests=4.0, logits=4.0))
    assert float(apart[0]) == pytest.approx(float(together[0]), rel=0.1)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "qwen3-235b-a22b", "gpt-20b"])
def test_weights_and_cache_of_one_rank_are_those_of_the_model(model: str):
    there = serving(model, "h100:1/1")
    found = memory(there, ONE, UNNAMED, 1000)
    assert float(found.weights[0]) == 2 * there.model.n_parameters
    each = there.model.n_layers * cache_bytes_per_token(there.model, 1, 2)
    assert float(found.token[0]) == each


def test_experts_of_dp_attention_are_shared_by_all_ranks_and_the_rest_is_not():
    there = serving("deepseek-v3", "h100:8")
    found = memory(there, Settings.from_layouts([Degrees(8, ep=8), Degrees(1, dp=8, ep=8)]), UNNAMED, 1000)
    experts = sum(block.expert_numel * len(layers) for block, layers in _blocks(there).items())
    rest = there.model.n_parameters - experts
    assert float(found.weights[1]) == pytest.approx(2 * (experts / 8 + rest), rel=1e-3)
    assert float(found.weights[0]) < float(found.weights[1])


def _blocks(there):  # type: ignore[no-untyped-def]
    from shardwright.cost.blocks import blocks

    return blocks(there.model)


def test_the_largest_batch_fills_the_cache_and_one_more_does_not_fit():
    there = serving("llama-3.1-8b", "h100:1/1")
    held = memory(there, ONE, UNNAMED, 1000)
    n = float(largest_batch(there, ONE, 1000, UNNAMED)[0])
    each = float(held.token[0]) * (1000 + BLOCK_TOKENS / 2)
    assert n * each <= float(held.cache[0]) < (n + 1) * each


def test_an_engine_takes_its_part_of_all_memory_or_of_what_is_left():
    there = serving("llama-3.1-8b", "h100:1/1")
    whole = float(there.cluster.accelerator.memory_bytes)
    part, left = (replace(UNNAMED, memory_share=a, cache_share=b) for a, b in ((0.5, 1.0), (1.0, 0.5)))
    of_all, of_rest = (memory(there, ONE, engine, 1000) for engine in (part, left))
    used = float(of_all.weights[0] + of_all.working[0])
    assert float(of_all.cache[0]) == pytest.approx(0.5 * whole - used)
    assert float(of_rest.cache[0]) == pytest.approx(0.5 * (whole - used))


def test_vllm_leaves_the_cache_what_its_sampler_does_not_need():
    """Published: 8.11 GiB of cache on each rank, and 16.46 GiB under SGLang with a static share of 0.93
    (vllm-project/vllm#21348)."""
    vllm = engine_of("vllm")
    assert vllm is not None
    there = serving("qwen3-235b-a22b", "h100:4", precision="fp8", kv_precision="bf16")
    four = Settings.from_layouts([Degrees(4)])
    assert float(memory(there, four, vllm, 1000).cache[0]) / GiB == pytest.approx(8.11, rel=0.01)
    # Without the sampler, 13.7 GiB are planned.
    assert float(memory(there, four, replace(vllm, logit_bytes=0.0), 1000).cache[0]) / GiB > 13
    static = replace(vllm, logit_bytes=0.0, max_tokens=0, memory_share=0.93)
    assert float(memory(there, four, static, 1000).cache[0]) / GiB == pytest.approx(16.46, rel=0.01)


@pytest.mark.parametrize(
    ("quantised", "name"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "gptq", "bits": [4]}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
        *(
            ({"quant_method": "compressed-tensors",
              "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": block}}}}, name)
            for block, name in ((16, "nvfp4"), (32, "mxfp4"))
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
         "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
         "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, None),
        (None, "fp16"),
    ],
)  # fmt: skip
def test_a_published_model_is_served_in_the_format_of_its_weights(quantised: dict[str, Any] | None, name: str | None):
    assert format_of_config({"torch_dtype": "float16", "quantization_config": quantised}) == name
    assert format_of_config({"text_config": {"dtype": "float16", "quantization_config": quantised}}) == name


@pytest.mark.parametrize(("machine", "requests"), [("h100:1/1", 1024), ("a100-80:1/1", 256), ("l40s:1/1", 256)])
def test_the_requests_that_vllm_samples_depend_on_the_accelerator(machine: str, requests: int):
    vllm = engine_of("vllm")
    assert vllm is not None
    assert REQUESTS_ON_SMALL == 256
    there = serving("llama-3.1-8b", machine)
    # With a short pass, so that the sampler is what needs most.
    found = [
        float(memory(there, ONE, replace(vllm, max_tokens=512, logit_bytes=each), 1000).working[0])
        for each in (VLLM_LOGIT_BYTES, 2 * VLLM_LOGIT_BYTES)
    ]
    assert found[1] - found[0] == pytest.approx(requests * there.model.vocab_size * VLLM_LOGIT_BYTES)


def test_a_prompt_lengthens_a_pass_by_less_where_several_share_it():
    there = serving()
    alone, together = (
        float(forms.prompt_in_passing_s(there, ONE, 32.0, 576, 512, prompts)[0]) for prompts in (1.0, 8.0)
    )
    assert 0 < together < alone


@pytest.mark.parametrize("length", [512, 32768])
def test_linear_layers_keep_a_state_of_constant_size_and_full_layers_a_growing_cache(length: int):
    """Qwen3-Next has full attention in 12 of 48 layers, and in the others 32 states of 128 x 128, in 32 bits."""
    there = serving("qwen3-next-80b-a3b", rates=IDEAL)
    state = 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    whole = 12 * length * cache_bytes_per_token(there.model, 1, 2) + 36 * state
    assert float(memory(there, ONE, UNNAMED, length).token[0]) * length == pytest.approx(whole)
    short, long = (float(forms.decode_s(there, ONE, 1.0, float(n))[0]) for n in (length, 2 * length))
    read = 12 * length * cache_bytes_per_token(there.model, 1, 2) / there.cluster.accelerator.memory_bytes_per_s
    assert long - short == pytest.approx(read, rel=0.01)


@pytest.mark.parametrize("length", [512, 32768])
def test_layers_with_windows_keep_and_read_their_window_alone(length: int):
    """Gemma 3 has a window of 1,024 tokens in five of six layers."""
    there = serving("gemma3-27b", rates=IDEAL)
    model = there.model
    windows = [model.layer_window(layer) for layer in range(model.n_layers)]
    assert (windows.count(0), windows.count(1024)) == (10, 52)
    kept = 10 * length + 52 * min(length, 1024)
    assert model.kept_share(length) == pytest.approx(kept / (62 * length))
    whole = replace(there, model=replace(model, window=0, global_interval=0, window_rope_theta=0.0))
    cut, full = (memory(each, ONE, UNNAMED, length) for each in (there, whole))
    assert float(cut.token[0] / full.token[0]) == pytest.approx(model.kept_share(length))
    seconds = [float(forms.decode_s(each, ONE, 1.0, float(length))[0]) for each in (there, whole)]
    saved = (62 * length - kept) * cache_bytes_per_token(model, 1, 2) / there.cluster.accelerator.memory_bytes_per_s
    assert seconds[1] - seconds[0] == pytest.approx(saved, rel=0.01, abs=1e-9)
