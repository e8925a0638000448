"""The models that configurations of torchtitan name, and the configurations that have no price."""

import re
from pathlib import Path

import pytest

from shardwright.cost.hardware import cluster
from shardwright.planner.choice import PricedLayout
from shardwright.readers.foreign_run import ForeignRun
from shardwright.readers.torchtitan_models import FLAVORS
from shardwright.system.errors import InputError
from tests.readers.test_files import IN_TOKENS, LLAMA_405B, read

PARAMETERS = {
    "llama3": "1b 1235814400 3b 3212749824 8b 8030261248 70b 70553706496 405b 405853388800 debugmodel 6163712",
    "qwen3": "0.6b 596049920 1.7b 1720574976 4b 4022468096 8b 8190735360 14b 14768307200 32b 32762123264 "
    "30b-a3b 30532122624 235b-a22b 235093634560 debugmodel 31987968 debugmodel_non_fused_qkv 31987968 "
    "debugmodel_moe 315758848",
    "qwen3_5": "0.8b 1006672704 2b 2390384448 4b 4841450496 9b 8953803264 27b 26895998464 35b-a3b 34660610688 "
    "122b-a10b 122111526912 397b-a17b 396346350336 debugmodel 132412336 debugmodel_moe 135290456",
    "deepseek_v3": "16b 15706484224 236b 235741434880 671b 671026404352 debugmodel 33014016",
    "gpt_oss": "20b 20914757184 120b 116829156672 debugmodel 81489440",
    "kimi_k2_7": "moonlight-16b-a3b 15960108544 kimi-vl-a3b 15960108544 kimi-k2.5 1026408209408 debugmodel 33014016",
}
"""Model -> parameters of each flavor, counted in the models of torchtitan 0.3.0 without `vision_encoder`; selection
biases of experts are buffers there and are not counted."""
ONE = """\
from {module} import model_registry
def train():
    return Trainer.Config(model_spec=model_registry("{flavor}"), training=TrainingConfig(local_batch_size=1))
"""


def read_one(path: Path, module: str = ".", flavor: str = "8B", old: str = "", new: str = "") -> ForeignRun:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ONE.format(module=module, flavor=flavor).replace(old, new)
    return read(path.parent, {path.name: text}, world=8)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_flavor_has_the_parameters_of_the_model_of_torchtitan(name: str) -> None:
    words = PARAMETERS[name].split()
    expected = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert expected.keys() == FLAVORS[name].keys()
    for flavor, model in FLAVORS[name].items():
        n_experts = model.moe.n_experts if model.moe and model.moe.bias_rate else 0
        biases = n_experts * (model.n_layers - model.moe.first_dense if model.moe else 0)
        assert model.n_parameters - biases == expected[flavor], flavor


@pytest.mark.parametrize(
    ("path", "module", "flavor", "name"),
    [
        ("llama3/config_registry.py", ".", "8B", "llama3"),
        ("torchft/qwen3_5/config_registry.py", ".", "4B", "qwen3_5"),
        ("file.py", "torchtitan.models.gpt_oss", "20B", "gpt_oss"),
        ("llama3/config_registry.py", "torchtitan.models.qwen3", "8B", "qwen3"),
        ("llama3/config_registry.py", "torchtitan.models.qwen3.registry", "8B", "qwen3"),
        ("llama3/config_registry.py", ".registry", "8B", "llama3"),
        ("llama3/config_registry.py", ".registry.flavors", "8B", "llama3"),
        ("llama3/config_registry.py", "..qwen3", "8B", "qwen3"),
        ("llama3/config_registry.py", "..qwen3.registry", "8B", "qwen3"),
        ("llama3/configs/config_registry.py", "..", "8B", "llama3"),
        ("llama3/configs/config_registry.py", "..registry", "8B", "llama3"),
    ],
)
def test_the_module_names_the_model(tmp_path: Path, path: str, module: str, flavor: str, name: str) -> None:
    run = read_one(tmp_path / path, module, flavor)
    assert run.described.model == FLAVORS[name][flavor.lower()]
    assert not any("names none" in each for each in run.assumed)
    assert any("its vision encoder is not" in each for each in run.assumed) == (name == "qwen3_5")


@pytest.mark.parametrize(("level", "folder"), [(".", "llama3"), ("..", "llama3/configs")])
def test_a_module_that_is_imported_from_a_relative_package_names_the_model(
    tmp_path: Path, level: str, folder: str
) -> None:
    text = ONE.format(module="x", flavor="8B").replace("from x import model_registry", f"from {level} import registry")
    path = tmp_path / folder / "config_registry.py"
    path.parent.mkdir(parents=True)
    run = read(path.parent, {path.name: text.replace("=model_reg", "=registry.model_reg")}, world=8)
    assert run.described.model == FLAVORS["llama3"]["8b"]
    assert not run.assumed


def test_a_name_that_the_file_does_not_state_is_an_assumption(tmp_path: Path) -> None:
    run = read_one(tmp_path / "qwen3_5" / "mine.py", flavor="2B")
    assert run.described.model == FLAVORS["qwen3_5"]["2b"]
    assert any("the model is qwen3_5, the name in the path" in each for each in run.assumed)
    text = LLAMA_405B.replace('name = "llama3"\n', "")
    run = read(tmp_path, {"x.toml": text}, world=128)
    assert any("the model is llama3, torchtitan's default" in each for each in run.assumed)
    assert not read(tmp_path, {"x.toml": LLAMA_405B}, world=128).assumed


NVFP4 = {
    "model.converters": ("x.toml", LLAMA_405B.replace('"float8"', '"nvfp4"'), 5),
    "model_converters.converters": ("x.toml", f'{LLAMA_405B}[model_converters]\nconverters = ["NVFP4"]\n', 21),
    "model_spec.converters": ("x.py", ONE.replace('r}")', 'r}", converters=[NVFP4LinearConverter.Config()])'), 3),
}


@pytest.mark.parametrize("key", NVFP4)
def test_nvfp4_is_refused_at_the_key_and_line_that_state_it(tmp_path: Path, key: str) -> None:
    name, text, line = NVFP4[key]
    with pytest.raises(InputError, match=rf"{name}:{line}: {key} .*: a step in nvfp4 has no price"):
        read(tmp_path, {name: text.format(module="torchtitan.models.llama3", flavor="8B")}, world=128)


def test_what_a_configuration_has_beyond_the_prediction_is_named(tmp_path: Path) -> None:
    text = IN_TOKENS.replace("[Float8LinearConverter", "[LoRAConverter.Config(rank=8), Float8LinearConverter")
    text = text.replace("compile=compile_config", "compile=compile_config, checkpoint=make_checkpoint()")
    run = read(tmp_path, {"file.py": text}, ":qwen3_14b_pipeline", world=64)
    notes = " ".join([*run.assumed, *run.skipped])
    assert "LoRAConverter has no counterpart; it is left out" in notes
    assert "checkpoint = make_checkpoint(...) of another file is not evaluated" in notes


CHUNKED = "ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=1){})"
LOSSES = [
    (CHUNKED.format(""), 2048),
    (CHUNKED.format(", num_chunks=2"), 8192),
    (CHUNKED.format(", num_chunks=1"), 0),
    ("ChunkedCELoss.Config(num_chunks=4)", 4096),
    ("CrossEntropyLoss.Config()", 0),
]


def read_loss(folder: Path, loss: str) -> ForeignRun:
    """A micro-batch of 2 sequences of 8,192 tokens on a rank."""
    training = "TrainingConfig(num_tokens_per_microbatch_per_dp_rank=16384, max_context_length=8192)"
    return read_one(folder / "llama3/x.py", old="TrainingConfig(local_batch_size=1)", new=f"{training}, loss={loss}")


@pytest.mark.parametrize(("loss", "expected"), LOSSES)
def test_a_loss_with_chunks_has_the_logits_of_a_chunk(tmp_path: Path, loss: str, expected: int) -> None:
    whole, run = (read_loss(tmp_path, each) for each in ("CrossEntropyLoss.Config()", loss))
    assert run.described.layout.loss_chunk_tokens == expected
    chunks = run.system.write(run.described, run.choice)["loss.num_chunks"]
    assert chunks == (16384 // expected if expected else None)
    job = run.job(cluster("h100:8"))
    peaks = [PricedLayout.from_choice(job, each.choice).peak_bytes for each in (whole, run)]
    # 14 bytes a logit of the rank, of all tokens or of a chunk; the gradients of the head and its input are kept
    saved = 14 * (16384 - expected) * 128256 - 4 * 128256 * 4096 if expected else 0
    assert peaks[0] - peaks[1] == pytest.approx(saved, rel=0.12)


def test_chunks_that_do_not_divide_a_sequence_and_losses_that_have_no_price_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x.py:3: loss.num_chunks 3: 3 chunks; valid: a divisor of the 8,192 tokens"):
        read_loss(tmp_path, "ChunkedLossWrapper.Config(num_chunks=3)")
    with pytest.raises(InputError, match=r"x.py:3: loss losses.make: a function makes it, and it may have chunks"):
        read_loss(tmp_path, "losses.make(num_chunks=8)")
    notes = {each.option: each.note for each in read_loss(tmp_path, "MSELoss.Config(num_chunks=4)").records}
    assert "priced as a cross entropy" in notes["loss"]
    assert "all logits of a micro-batch are priced" in notes["loss.num_chunks"]


FOLLOWED = [
    ('model_registry("8B")', 'model_registry(flavor="8B")'),
    ("TrainingConfig(local_batch_size=1)", 'TrainingConfig(**{"local_batch_size": 1})'),
    ("TrainingConfig(local_batch_size=1)", "TrainingConfig(**dict(local_batch_size=1))"),
    ("return Trainer", "size = 2\n    size -= 1\n    return Trainer"),
    ("def train():", "def more(**given):\n    return TrainingConfig(**given)\ndef train():"),
    ("from torchtitan.models.llama3 import model_registry", "import torchtitan.models.llama3 as m"),
    ("from torchtitan.models.llama3 import model_registry", "from torchtitan.models import llama3 as m"),
]


@pytest.mark.parametrize("change", FOLLOWED)
def test_other_forms_of_the_same_configuration_have_the_same_values(tmp_path: Path, change: tuple[str, str]) -> None:
    text = ONE.format(module="torchtitan.models.llama3", flavor="8B").replace(*change)
    for start, old, new in (
        ("import", "model_registry(", "m.model_registry("),
        ("from torchtitan.models import", "model_registry(", "m.model_registry("),
        ("def more", "training=TrainingConfig", "training=more"),
    ):
        text = text.replace(old, new) if f"\n{text}".find(f"\n{start}") >= 0 else text
    text = text.replace("batch_size=1", "batch_size=size") if "size = 2" in text else text
    run = read(tmp_path, {"file.py": text}, ":train", world=8)
    assert run.described.model == FLAVORS["llama3"]["8b"]
    assert run.described.micro_batch == 1


COMPUTED = {
    "min(8192, 4096)": 4096,
    "max(2 * 1024, LENGTH, 512)": 4096,
    "int(LENGTH / 2)": 2048,
    "int(8192)": 8192,
    'int(os.environ["SEQ"])': None,
    "get_len()": None,
    "get_len(8192)": None,
    "lengths.get_len(8192)": None,
    'os.environ.get("SEQ", 8192)': None,
    "min(8192, get_len())": None,
    "min(LENGTH)": None,
    "max([1, 2], key=abs)": None,
    "int(8192, 10)": None,
    "replace(8192)": None,
    "int(-4096) * -1": 4096,
}
"""An expression -> its number, or None for a number that only a run has."""


@pytest.mark.parametrize("expression", COMPUTED)
def test_a_call_is_computed_or_its_value_is_unknown(tmp_path: Path, expression: str) -> None:
    name, number = f"{expression.partition('(')[0]}(", COMPUTED[expression]
    text = ONE.format(module="torchtitan.models.llama3", flavor="8B").replace(
        "batch_size=1", f"batch_size=1, seq_len={expression}"
    )
    text = f"LENGTH = 4096\n{text}"
    if number is None:
        with pytest.raises(InputError, match=rf"x\.py:4: training\.seq_len: its value is unknown: .*{re.escape(name)}"):
            read(tmp_path, {"x.py": text}, world=8)
    else:
        assert read(tmp_path, {"x.py": text}, world=8).described.seq_len == number


@pytest.mark.parametrize("option", ["optimizer", "activation_checkpoint"])
def test_the_arguments_of_a_function_that_names_a_kind_are_no_kind(tmp_path: Path, option: str) -> None:
    run = read_one(tmp_path / "llama3/config_registry.py", old="training=", new=f"{option}=muon('adamw'), training=")
    assert {each.value for each in run.records if each.option == option} == {"muon"}


PASSED = """\
from torchtitan.models.llama3 import model_registry
from lengths import UNKNOWN
BASE = dict(local_batch_size=2, seq_len=4096)
PAIR = [2, 4096]
def plain(batch=8, seq=2048, *, more=1): return T(local_batch_size=batch, seq_len=seq, global_batch_size=64 * more)
def keys(batch=8, seq=2048, **given): return T(local_batch_size=batch, seq_len=seq, **given)
def rest(batch, *sizes): return T(local_batch_size=batch, seq_len=2048, converters=sizes)
def train(): return Trainer.Config(model_spec=model_registry("8B"), training={call})
"""
GIVEN: dict[str, tuple[int, int] | str] = {
    "T(**dict(BASE, seq_len=8192))": (2, 8192),
    "T(**dict(BASE))": (2, 4096),
    "T(**dict(dict(BASE, local_batch_size=4), **{'seq_len': 1024}))": (4, 1024),
    "dict(BASE, seq_len=8192)": (2, 8192),
    "plain(*PAIR)": (2, 4096),
    "plain(1, *[1024])": (1, 1024),
    "keys(3, seq=1024)": (3, 1024),
    "plain(2, 4096, **{'more': 2})": (2, 4096),
    "T(**dict(UNKNOWN, local_batch_size=2, seq_len=4096))": "write the values of training.",
    "T(**dict(UNKNOWN))": "write the values of training.",
    "T(**dict(*UNKNOWN))": "write the values of training.",
    "dict([('seq_len', 4096)])": "write the values of training.",
    "T(UNKNOWN)": "write the values of training.",
    "T(1024, UNKNOWN)": "it is a section",
    "T(lengths(1024))": "write the values of training.",
    "T(*UNKNOWN)": "write the values of training.",
    "plain(**UNKNOWN)": "training.local_batch_size",
    "plain(2, **UNKNOWN)": "training.seq_len",
    "plain(2, 4096, **UNKNOWN)": "training.global_batch_size",
    "plain(seq=4096, **UNKNOWN)": "training.local_batch_size",
    "plain(*UNKNOWN)": "training.local_batch_size",
    "plain(2, *UNKNOWN)": "training.seq_len",
    "plain(*[2, *UNKNOWN])": "training.local_batch_size",
    "keys(**UNKNOWN)": "training.local_batch_size",
    "keys(2, **UNKNOWN)": "training.seq_len",
    "keys(2, 4096, **UNKNOWN)": "write the values of training.",
    "keys(2, *UNKNOWN)": "training.seq_len",
    "rest(*UNKNOWN)": "training.local_batch_size",
    "rest(2, *UNKNOWN)": (2, 2048),
}
"""A call -> local_batch_size and seq_len, or the problem of a value that only a run has."""


@pytest.mark.parametrize("call", GIVEN)
def test_arguments_that_a_call_may_give_are_unknown_and_the_others_are_known(tmp_path: Path, call: str) -> None:
    text, expected = PASSED.format(call=call), GIVEN[call]
    if isinstance(expected, tuple):
        described = read(tmp_path, {"x.py": text}, ":train", world=8).described
        assert (described.micro_batch, described.seq_len) == expected
        return
    with pytest.raises(InputError) as error:
        read(tmp_path, {"x.py": text}, ":train", world=8)
    known = {"plain(2": "local_batch_size", "keys(2": "local_batch_size", "plain(seq": "seq_len"}
    problems = "\n".join(error.value.problems)
    assert expected in problems
    assert not any(call.startswith(start) and name in problems for start, name in known.items())


REFUSED = [
    (
        "llama3/config_registry.py",
        ("local_batch_size=1", "**more()"),
        ":3: **more() would have to be executed; write the values of training.",
    ),
    ("llama3/config_registry.py", ('("8B")', "(f'{8}B')"), ":3: model_spec: its value is unknown"),
    (
        "llama3/config_registry.py",
        ("local_batch_size=1", "local_batch_size=1, max_context_length=4096"),
        ":3: training.local_batch_size 1: contradicts the batch that the file states in tokens",
    ),
    (
        "llama3/config_registry.py",
        ("training=", "parallelism=P(tensor_parallel_degree=0), training="),
        ":3: parallelism.tensor_parallel_degree 0: valid: 1 or more",
    ),
    (
        "llama3/config_registry.py",
        (
            "training=",
            "parallelism=P(pipeline_parallel_degree=8, pipeline_parallel_schedule='Interleaved1F1B', "
            "pipeline_parallel_layers_per_stage=9), training=",
        ),
        "32 layers make one stage for each of 8 ranks, and Interleaved1F1B needs 2 or more; valid: 3 or fewer",
    ),
    ("x.py", ("", ""), "x.py:3: model_spec 8B: the file does not name the model of this flavor"),
    ("flux/config_registry.py", ("", ""), "the sizes of flux 8B are not known here (known models: llama3,"),
    ("llama3/config_registry.py", ("8B", "9B"), "the sizes of llama3 9B are not known here (flavors of llama3: 8b,"),
    (
        "llama3/config_registry.py",
        ("training=", 'hf_model="Qwen/Qwen3-4B", training='),
        ":3: hf_model Qwen/Qwen3-4B: flavor 8B changes the sizes of its config.json, which is not here",
    ),
    (
        "llama3/config_registry.py",
        ("def train():\n", "from a.b import to_graph\ndef train():\n    return to_graph(llama3_8b())\n"),
        ":4: train takes its values from to_graph(...) of a.b, which is no function at the top level of",
    ),
    (
        "llama3/config_registry.py",
        ("training=", "trainer=Policy.Config(training=TrainingConfig(seq_len=8)), training="),
        ":3: trainer.training.seq_len 8: reinforcement learning",
    ),
]


@pytest.mark.parametrize(
    ("section", "read_here"),
    [
        *(("parallelism", True), ("training", True), ("compile", True), ("model_spec", True), ("hf_model", True)),
        *(("checkpoint", False), ("metrics", False), ("of_a_later_version", False)),
    ],
)
@pytest.mark.parametrize("made", ["make()", "make(2, a=1)", "other.make()"])
def test_a_section_that_another_file_makes_is_refused_if_options_of_it_are_read(
    tmp_path: Path, section: str, read_here: bool, made: str
) -> None:
    text = ONE.format(module="torchtitan.models.llama3", flavor="8B")
    text = re.sub(rf"{section}=\w+\([^)]*\)", "", text).replace("Config(, ", "Config(")
    text = text.replace("Trainer.Config(", f"Trainer.Config({section}={made}, ")
    note = f"x.py:3: {section} = {made.partition('(')[0]}(...) of another file is not evaluated"
    if read_here:
        with pytest.raises(InputError, match=rf"{re.escape(note)}; write the values of {section}\."):
            read(tmp_path, {"x.py": text}, world=8)
    else:
        run = read(tmp_path, {"x.py": text}, world=8)
        assert [each for each in run.skipped if each.endswith(note)]
        assert run.described.micro_batch == 1


@pytest.mark.parametrize(("pp", "bound"), [(2, 15), (4, 7), (8, 3), (31, 1), (32, 0), (64, 0)])
def test_layers_for_each_stage_are_valid_up_to_the_bound_that_the_error_states(
    tmp_path: Path, pp: int, bound: int
) -> None:
    options = f"pipeline_parallel_degree={pp}, pipeline_parallel_schedule='Interleaved1F1B'"
    text = ONE.format(module="torchtitan.models.llama3", flavor="8B").replace(
        "training=", f"parallelism=P({options}, pipeline_parallel_layers_per_stage=LAYERS), training="
    )
    if bound:
        described = read(tmp_path, {"x.py": text.replace("LAYERS", str(bound))}, world=pp).described
        assert described.layout.virtual_stages >= 2
    said = f"valid: {bound} or fewer" if bound else f"the model has too few layers for pipeline_parallel_degree {pp}"
    with pytest.raises(InputError, match=f"and Interleaved1F1B needs 2 or more; {said}$"):
        read(tmp_path, {"x.py": text.replace("LAYERS", str(bound + 1))}, world=pp)


@pytest.mark.parametrize(("path", "change", "said"), REFUSED)
def test_a_model_or_a_configuration_that_is_not_known_is_refused(
    tmp_path: Path, path: str, change: tuple[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as error:
        read_one(tmp_path / path, old=change[0], new=change[1])
    assert len(error.value.problems) == 1
