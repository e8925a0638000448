"""The matmuls that are priced are those of the model, whatever the layout; and a matmul is slower than its peak."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.blocks import blocks
from shardwright.cost.calibration import CALIBRATED
from shardwright.cost.flops import executed_flops, model_flops
from shardwright.cost.formats import FORMATS
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates
from shardwright.cost.layer import layer
from shardwright.cost.matmuls import Matmul, head_matmul, layer_matmuls, reached_flops_per_s
from shardwright.cost.passes import reached_bytes_per_s
from shardwright.cost.stack import STACKS
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.planner.software import read_stack
from tests.cost.jobs import candidates, job


@pytest.mark.parametrize("name", ["gpt-175b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "cut", [{}, {"tp": 4}, {"tp": 4, "sequence_parallel": False}, {"tp": 2, "cp": 2, "ep": 4, "dp_shard": 2}]
)
def test_the_matmuls_of_all_ranks_are_twice_the_matrices_a_token_meets(name: str, cut: dict[str, int]):
    the_job, of = job(name), candidates(**cut)
    spec = the_job.model
    tokens = of.tokens(the_job.seq_len)
    flops = float(head_matmul(the_job, of, tokens).flops[0])
    for block, layers in blocks(spec).items():
        for each in layer_matmuls(the_job, of, block, tokens):
            flops += len(layers) * float(np.ravel(each.flops)[0])
    tp, cp = int(of.tp[0]), int(of.cp[0])
    # What latent attention makes narrow vectors with: without token shards every rank of tp does it over again.
    latent = spec.latent_attention
    again = 0
    if latent is not None and not of.sequence_parallel[0]:
        again = spec.n_layers * spec.d_model * (latent.q_rank + latent.kv_rank + latent.rope_dim) * (tp - 1)
    assert flops * tp * cp == pytest.approx(2 * (spec.n_matmul_parameters + again) * the_job.seq_len)


@given(
    st.integers(1, 100_000),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.sampled_from(["h100", "a100", "b200", "mi300x"]),
    st.sampled_from(["bf16", "fp32"]),
)
def test_no_matmul_beats_the_peak_or_its_bytes(m: int, k: int, n: int, chip: str, precision: str):
    the_job = job(on=f"{chip}:8", precision=precision)
    matmul = Matmul("", float(m), float(k), float(n))
    accelerator = the_job.cluster.accelerator
    seconds = float(matmul.seconds(the_job))
    assert seconds >= float(matmul.flops) / accelerator.flops_per_s[precision]
    n_bytes = the_job.element_bytes * (m * k + k * n + m * n)
    assert seconds >= n_bytes / accelerator.memory_bytes_per_s * (1 - 1e-12)


@given(st.integers(64, 50_000), st.integers(64, 10_000), st.integers(64, 10_000))
def test_a_larger_matmul_takes_longer_and_reaches_more_of_the_peak(m: int, k: int, n: int):
    small, large = Matmul("", float(m), float(k), float(n)), Matmul("", 2.0 * m, 2.0 * k, 2.0 * n)
    small_s, large_s = float(small.seconds(job())), float(large.seconds(job()))
    assert large_s > small_s
    assert float(large.flops) / large_s >= float(small.flops) / small_s * (1 - 1e-12)


def test_the_matmuls_of_the_backward_pass_have_as_many_flops_each():
    matmul = Matmul("", 4096.0, 1024.0, 3072.0, 8.0)
    assert matmul.for_input.flops == matmul.for_weight.flops == matmul.flops


def test_recomputation_adds_a_forward_pass_of_the_layers_to_what_runs():
    the_job = job("gpt-175b", seq_len=2048, stack=STACKS["megatron"])
    h, layers, s, vocab = 12288, 96, 2048, the_job.model.vocab_size
    none, selective, full = executed_flops(the_job, candidates(recompute=[0, 1, 2])).full
    # Korthikanti et al., equation 7, and Narayanan et al., equation 3, for one token. Equation 8 of the former has
    # s / (3 h): three passes of the square more, where its forward pass alone runs again.
    assert none == pytest.approx(72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h)), rel=1e-9)
    head = vocab / (12 * layers * h)
    assert selective == pytest.approx(72 * layers * h**2 * (1 + 2 * s / (9 * h) + head), rel=1e-9)
    assert full == pytest.approx(96 * layers * h**2 * (1 + s / (6 * h) + 3 / 4 * head), rel=1e-9)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_hfu_has_the_layers_that_recompute_and_no_others(kind: str):
    check_recomputed_layers(kind)


def check_recomputed_layers(kind: str = "full") -> None:
    def flops(**layout: int | str) -> float:
        of = Candidates.from_layout(Layout(sequence_parallel=False, **layout), 1)  # type: ignore[arg-type]
        return float(executed_flops(job("gpt-175b", seq_len=2048), of).full[0])

    none, every = flops(), flops(recompute=kind)
    for layers, pp, expected in ((1, 1, 1), (12, 1, 12), (96, 1, 96), (5, 4, 20), (24, 4, 96)):
        some = flops(recompute=kind, recompute_layers=layers, pp=pp)
        assert some - none == pytest.approx((every - none) * expected / 96, rel=1e-9), (layers, pp)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_causal_flops_are_fewer_by_half_of_the_square(name: str):
    spec, the_job = PRESETS[name], job(name)
    found = model_flops(the_job)
    attended = sum(spec.attended(layer, the_job.seq_len) for layer in range(spec.n_layers))
    square = 6 * spec.n_heads * (spec.qk_dim + spec.head_dim) * attended
    assert float(found.full) - float(found.causal) == pytest.approx(square / 2)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        # Peak x measured share x what lasts in training, of fp8 for narrower formats, x the rate of the format.
        ("bf16", 2250e12 * 0.776 * 0.5),
        ("fp8", 4500e12 * 0.763 * 0.25),
        ("fp8-row", 4500e12 * 0.763 * 0.25 * 0.79),
        ("nvfp4", 9000e12 * 0.763 * 0.25),
        ("tf32", 1125e12 * 0.77 * 0.5),
        ("fp32", 80e12 * 0.9 * 0.5),
    ],
)
def test_a_rate_is_that_of_the_die_and_the_format(precision: str, expected: float):
    shares = {"b200": {"bf16": 0.5, "fp8": 0.25}, "others": {"bf16": 0.1}}
    by = replace(CALIBRATED, product_share=shares)
    on_b200 = job(on="b200:8", precision=precision, calibration=by)
    assert reached_flops_per_s(on_b200, precision) == pytest.approx(expected)
    tuned = replace(on_b200, stack=replace(on_b200.stack, speed=replace(on_b200.stack.speed, matmul_gain=1.1)))
    assert reached_flops_per_s(tuned, precision) == pytest.approx(1.1 * expected)


def test_attention_is_faster_on_longer_sequences_and_wider_heads():
    def rate(seq_len: int, head_dim: int) -> float:
        the_job = job(replace(PRESETS["llama-3.1-8b"], head_dim=head_dim), seq_len=seq_len, global_batch=8)
        of = candidates()
        (block,) = blocks(the_job.model)
        seconds = float(np.ravel(layer(the_job, of, block).forward["attention"])[0])
        return 4 * seq_len**2 * 32 * head_dim * (0.5 + 64 / seq_len) / seconds

    by = CALIBRATED
    length, width = by.flash_length, by.flash_width
    assert rate(8192, 128) / rate(1024, 128) == pytest.approx((1024 + length) / 1024 * 8192 / (8192 + length))
    assert rate(4096, 128) / rate(4096, 64) == pytest.approx((64 + width) / 64 * 128 / (128 + width))


@pytest.mark.parametrize(
    ("kernel", "padded"), [("fa1", {24: 32, 64: 64, 80: 128, 128: 128, 160: 160}), ("fa2", {64: 64, 80: 96, 160: 160})]
)
def test_a_kernel_that_pads_heads_takes_the_time_of_the_padded_width(kernel: str, padded: dict[int, int]):
    def seconds(head_dim: int) -> float:
        the_job = job(replace(PRESETS["llama-3.1-8b"], head_dim=head_dim), on="a100-80:8", global_batch=8)
        the_job = replace(the_job, stack=read_stack(f"megatron,flash=1,attention={kernel}", the_job))
        (block,) = blocks(the_job.model)
        return float(np.ravel(layer(the_job, candidates(), block).forward["attention"])[0])

    for width, computed in padded.items():
        assert seconds(width) == pytest.approx(seconds(computed))


TOKENS = 512, 1024, 2048, 4096, 8192, 16384
PUBLISHED = {
    ("a100-80gb", "FlashAttention"): {64: (58, 70, 77, 87, 92), 128: (53, 72, 81, 87, 91)},
    ("a100-80gb", "FlashAttention-2"): {64: (88, 119, 140, 158, 165, 171), 128: (99, 131, 155, 182, 189, 189)},
    ("h100", "FlashAttention-2"): {64: (141, 192, 232, 257, 273, 284), 128: (163, 221, 265, 294, 308, 328)},
}
"""TFLOP/s of attention with a causal mask, forward and backward, by width of a head (Dao, arXiv 2307.08691, figures 4
and 7). They are of 3.5 x 2 x s^2 FLOPs for each of h d_model; the kernels compute whole blocks of the diagonal."""


def shares(die: str, kernels: str, width: float, length: float) -> dict[tuple[int, int], float]:
    """`flash_share` by the published rates, by width of a head and tokens."""
    chip, found = cluster(f"{die}:8").accelerator, {}
    for c, rates in PUBLISHED[die, kernels].items():
        for s, rate in zip(TOKENS, rates, strict=False):
            computed = (0.5 + 64 / s) * 4 * (1 + CALIBRATED.flash_backward) / (3.5 * 2)
            reached = chip.flops_per_s["bf16"] * chip.matmul_share["bf16"] * c / (c + width) * s / (s + length)
            found[c, s] = rate * 1e12 * computed / reached
    return found


def test_attention_on_a100_has_the_published_rate():
    found = shares("a100-80gb", "FlashAttention", CALIBRATED.flash_width, CALIBRATED.flash_length)
    long = [share for (_, tokens), share in found.items() if tokens >= 2048]
    assert np.mean(long) == pytest.approx(CALIBRATED.flash("a100-80gb"), abs=0.01)


@pytest.mark.parametrize("stack", ["fsdp-compiled", "nanotron", "shardwright", "shardwright-compiled"])
def test_flash_attention_2_on_a100_has_the_published_gain_with_every_stack_of_today(stack: str):
    first, second = PUBLISHED["a100-80gb", "FlashAttention"], PUBLISHED["a100-80gb", "FlashAttention-2"]
    gains = [second[c][i] / first[c][i] for c in (64, 128) for i in range(TOKENS.index(2048), len(first[c]))]
    assert STACKS[stack].speed.on("a100-80gb").flash_gain == pytest.approx(np.mean(gains), abs=0.01)
    for name in ("megatron", "deepspeed"):
        newest = read_stack(f"{name},flash=1", job(on="a100-80:8")).speed.on("a100-80gb")
        assert newest.flash_gain == STACKS[stack].speed.on("a100-80gb").flash_gain
    described = (read_stack(f"fsdp,date={date}", job(on="a100-80:8")) for date in ("2023", "2024-03"))
    assert [one.speed.on("a100-80gb").flash_gain for one in described] == [
        1.0,
        STACKS[stack].speed.on("a100-80gb").flash_gain,
    ]


@pytest.mark.parametrize(("die", "share"), [("a100-80gb", 0.95), ("h100", 0.536)])
def test_rates_of_flash_attention_2_grow_with_width_and_length_as_the_formula_says(die: str, share: float):
    for found in shares(die, "FlashAttention-2", width=20, length=320).values():
        assert found == pytest.approx(share, rel=0.04)


@pytest.mark.parametrize(
    ("microbatch", "stack", "apart"), [(1, "megatron", True), (2, "megatron", False), (1, "megatron-core", False)]
)
def test_a_softmax_of_stored_scores_is_one_kernel_for_a_multiple_of_four_heads(
    microbatch: int, stack: str, apart: bool
):
    """A rank has 2 heads. The host needs a second for the kernels of a fused layer, longer than all of its work."""
    the_job = job(stack=STACKS[stack])
    hosted = replace(the_job, stack=replace(STACKS[stack], speed=replace(STACKS[stack].speed, launch_s=1.0)))
    of, (block,) = candidates(tp=16, dp_shard=4, micro_batch=microbatch), blocks(the_job.model)
    found, bound = layer(the_job, of, block), layer(hosted, of, block)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shardwright.cost.attention.SOFTMAX_TOGETHER", 1)
        fused = layer(the_job, of, block)
    scores = microbatch * 2 * 4096**2
    for name, n_bytes in (("F", 33), ("I", 34)):
        longer = float((found.parts[name]["attention"] - fused.parts[name]["attention"])[0])
        assert longer == pytest.approx(apart * n_bytes * scores / float(reached_bytes_per_s(the_job)), rel=1e-6)
    backward = STACKS[stack].speed.launch_backward
    assert float(bound.totals[0][0]) == pytest.approx(1 + 0.25 * apart)
    assert float((bound.totals[1] + bound.totals[2])[0]) == pytest.approx(backward * (1 + 0.25 * apart))


def test_casts_move_the_bytes_of_the_recipe():
    (block,) = blocks(job().model)
    of = candidates()
    moved = {}
    for precision in ("bf16", "fp8", "mxfp8", "nvfp4"):
        passes = layer(job(on="b200:64", precision=precision), of, block)
        moved[precision] = float(np.ravel(passes.forward["element-wise"])[0])
    casts = {name: moved[name] - moved["bf16"] for name in moved}
    assert casts["fp8"] / casts["mxfp8"] == pytest.approx(5 / 4.06)
    assert FORMATS["fp8"].casts(fused=True) == 4
    assert casts["nvfp4"] / casts["fp8"] == pytest.approx(5.13 / 5)


def element_wise(stack: str, precision: str, **layout: int) -> float:
    """Seconds of F of a layer's element-wise work on a GB200, by a stack."""
    the_job = job(on="gb200:64", precision=precision, stack=STACKS[stack])
    (block,) = blocks(the_job.model)
    return float(np.ravel(layer(the_job, candidates(**layout), block).forward["element-wise"])[0])


def test_weights_are_cast_once_a_step_where_the_casts_are_kept_and_inputs_before_they_are_gathered():
    # Llama 8B: 4096 tokens, q k v 4096 to 6144, o 4096 to 4096, gate up 4096 to 28672, down 14336 to 4096. 256
    # sequences on one data rank are 256 micro-batches. mxfp8: 4.06 bytes an element, at 0.9 of 8 TB/s.
    inputs, weights = 4096 * (4096 + 4096 + 4096 + 14336), 4096 * (6144 + 4096 + 28672 + 14336)
    of_core = element_wise("megatron-core", "mxfp8") - element_wise("megatron-core", "bf16")
    assert of_core == pytest.approx(4.06 * (inputs + weights / 256) / 7.2e12 / CALIBRATED.memory_share)
    # With tp 4 a rank casts a quarter of each: of the inputs of q k v, gate and up its token shard.
    over_tp = element_wise("megatron-core", "mxfp8", tp=4) - element_wise("megatron-core", "bf16", tp=4)
    assert over_tp == pytest.approx(of_core / 4)
    # This system casts the weights of every micro-batch, and inputs after they are gathered.
    ours = element_wise("shardwright", "mxfp8", tp=4) - element_wise("shardwright", "bf16", tp=4)
    gathered = 4096 * (4096 + 4096) + 4096 * (4096 + 14336) / 4
    assert ours == pytest.approx(4.06 * (gathered + weights / 4) / 7.2e12 / CALIBRATED.memory_share)


def test_the_matmuls_of_experts_have_a_last_wave_each_unless_they_are_one_kernel():
    # 1024 x 4096 tiles of 256 x 128: 4 x 32 = 128 on 148 processors are 0.865 of a wave, of 8 experts 6.92.
    on = job(on="b200:8")
    one_kernel, apart = (Matmul("experts", 1024, 7168, 4096, 8, apart=each) for each in (False, True))
    w0, waves = CALIBRATED.partial_wave, 128 / 148
    expected = ((waves + w0) / waves) / ((8 * waves + w0) / (8 * waves))
    assert float(apart.seconds(on) / one_kernel.seconds(on)) == pytest.approx(expected)
    assert apart.for_input.apart
    assert apart.for_weight.apart


@pytest.mark.parametrize(("stack", "precision"), [("shardwright", "fp32"), ("megatron-core", "bf16")])
def test_the_router_is_in_fp32_where_its_input_is_copied_to_it(stack: str, precision: str):
    the_job = job("qwen3-30b-a3b", stack=STACKS[stack])
    (block,) = blocks(the_job.model)
    of = candidates()
    (router,) = (each for each in layer_matmuls(the_job, of, block, of.tokens(4096)) if "router" in each.name)
    assert router.precision == precision
