"""Proves that adapters pass between peft and runs: equal logits of peft's model, of the exported adapter and of the
merged export, and that an adapter of another base is refused."""

import json
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.hugging_face.architecture import architecture_of
from shardwright.hugging_face.peft import adapter_files
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.transformer import Transformer
from shardwright.system.errors import CheckpointError, ConfigError, InputError
from shardwright.training.adapters import ImportedAdapter, export_adapter, import_adapter
from shardwright.training.exporting import export
from shardwright.training.weights import fill, open_weights

pytest.importorskip("transformers")

from tests.hugging_face.models import FAMILIES, saved
from tests.training.adapted_models import save_adapted

RANK, ALPHA = 4, 6.0
FUSED = ("self_attn.qkv_proj",)
TARGETS = {
    "llama": ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"),
    "gpt2": ("mlp.c_fc", "mlp.c_proj"),
    "mixtral": ("self_attn.q_proj", "w1", "w2", "w3"),
}
BEGIN = {"llama": "model.layers", "gpt2": "transformer.h", "mixtral": "model.layers"}


def adapter(folder: Path, base: Path, family: str, **keys: Any) -> Path:
    """Write the files that peft writes for an adapter of `base` with random values."""
    folder.mkdir()
    tensors, held = {}, load_file(base / "model.safetensors")
    for name, matrix in held.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(TARGETS.get(family, FUSED)):
            n_out, n_in = matrix.shape if family != "gpt2" else matrix.shape[::-1]
            full = module if module.startswith(BEGIN.get(family, "model")) else f"transformer.{module}"
            begin = f"base_model.model.{full}"
            tensors[f"{begin}.lora_A.weight"] = torch.randn(RANK, n_in) / 5
            tensors[f"{begin}.lora_B.weight"] = torch.randn(n_out, RANK) / 5
            if keys.get("use_dora"):
                tensors[f"{begin}.lora_magnitude_vector"] = torch.rand(n_out) + 0.5
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({each.rpartition(".")[2] for each in TARGETS.get(family, FUSED)})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
    config |= {"task_type": "CAUSAL_LM", "fan_in_fan_out": family == "gpt2"} | keys
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=TARGETS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_an_adapter_of_peft_is_exported_as_it_was_imported_and_merged_as_it_is_read(family: str):
    check_that_an_adapter_passes_unchanged(family)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_with_dora_is_exported_as_it_was_imported_and_merged_as_it_is_read(family: str):
    check_that_an_adapter_passes_unchanged(family, use_dora=True)


def check_that_an_adapter_passes_unchanged(family: str, **keys: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        tmp_path = Path(name)
        base = saved(tmp_path / "base", FAMILIES[family])
        given = adapter(tmp_path / "given", base, family, **keys)
        start = tmp_path / "start"
        imported = import_adapter(given, base, start)
        assert imported.spec.lora is not None
        assert imported.spec.lora.scale == ALPHA / RANK
        export_adapter(start, tmp_path / "out")
        ours, theirs = (load_file(tmp_path / at / "adapter_model.safetensors") for at in ("out", "given"))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():  # a magnitude is the sum of a norm, of about 1, and the trained difference
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6 if "magnitude" in name else 0)
        export(start, tmp_path / "merged", merge=True)
        for file in given.iterdir():
            shutil.copy(file, base / file.name)  # a base with its adapter is read merged
        merged, read = open_weights(tmp_path / "merged"), open_weights(base)
        for name, shape in read.shapes.items():
            torch.testing.assert_close(
                merged.read(name, (0,) * len(shape), shape), read.read(name, (0,) * len(shape), shape)
            )


@pytest.mark.prove
def test_peft_loads_an_exported_adapter_with_the_logits_of_the_merged_weights(family: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = saved(tmp_path / "base", FAMILIES[family])
    import_adapter(adapter(tmp_path / "given", base, family), base, tmp_path / "start")
    export_adapter(tmp_path / "start", tmp_path / "out")
    export(tmp_path / "start", tmp_path / "merged", merge=True)
    tokens_BT = torch.arange(12).reshape(2, 6)

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    with torch.no_grad():
        plain = load(base)(tokens_BT).logits
        adapted = peft.PeftModel.from_pretrained(load(base), tmp_path / "out").eval()(tokens_BT).logits
        merged = load(tmp_path / "merged")(tokens_BT).logits
    assert (adapted - plain).abs().max() > 0.01
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_has_the_logits_and_gradients_of_peft(family: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = saved(tmp_path / "base", FAMILIES[family])
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.1, init_lora_weights=False, fan_in_fan_out=family == "gpt2",
        target_modules=[name.rpartition(".")[2] for name in TARGETS[family]], use_dora=True,
    )  # fmt: skip
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings).eval()
    adapters = {name: value for name, value in theirs.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for name, value in adapters.items():
            if "magnitude" in name:
                value.mul_(1 + torch.randn_like(value) / 5)
    theirs.save_pretrained(tmp_path / "given")
    imported = import_adapter(tmp_path / "given", base, tmp_path / "start")
    assert imported.left_out == {"lora_dropout=0.1": "dropout of adapters with DoRA is not supported"}
    ours = Transformer(imported.spec)
    fill(ours.named_parameters(), imported.spec, open_weights(tmp_path / "start"))
    tokens_BT = torch.arange(12).reshape(2, 6)
    logits = [theirs(tokens_BT).logits, ours(tokens_BT)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    for each in logits:
        functional.cross_entropy(each.flatten(0, 1), tokens_BT.flatten()).backward()
    written = adapter_files(architecture_of(replace(imported.spec, lora=None), family), imported.spec, "base").tensors
    assert len(written) == len(adapters)
    of_ours = dict(ours.named_parameters())
    for tensor in written:
        begin, _, last = tensor.name.rpartition(".")
        name = f"{tensor.name}.default.weight" if "magnitude" in last else f"{begin}.default.{last}"
        (part,) = tensor.parts
        gradient, expected = of_ours[part.name].grad, adapters[name].grad
        assert gradient is not None
        assert expected is not None
        assert expected.abs().max() > 1e-3
        gradient = gradient if tensor.order is None else gradient[list(tensor.order)]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    export_adapter(tmp_path / "start", tmp_path / "out")
    export(tmp_path / "start", tmp_path / "merged", merge=True)
    again = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "out").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        for model in (again, merged):
            torch.testing.assert_close(model(tokens_BT).logits, logits[0], rtol=1e-4, atol=1e-5)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path):
    base, family = saved(tmp_path / "base", FAMILIES["llama"]), "llama"
    given = adapter(tmp_path / "given", base, family)
    import_adapter(given, base, tmp_path / "start")
    export_adapter(tmp_path / "start", tmp_path / "out")
    held = load_file(base / "model.safetensors")
    changed = {name: tensor + 1 for name, tensor in held.items()}
    save_file(changed, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is an adapter for other weights than"):
        import_adapter(tmp_path / "out", base, tmp_path / "again")
    with pytest.raises(CheckpointError, match="that folder has other weights now"):
        export_adapter(tmp_path / "start", tmp_path / "more")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
    ],
)
def test_adapters_that_no_run_can_have_are_refused(keys: dict[str, Any], said: str, tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    with pytest.raises(InputError, match=said):
        import_adapter(adapter(tmp_path / "given", base, "llama", **keys), base, tmp_path / "start")


def test_an_adapter_that_train_refuses_is_refused(tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["mixtral"])
    given = adapter(tmp_path / "given", base, "mixtral", use_dora=True)
    with pytest.raises(CheckpointError, match=r"merge_and_unload of peft: lora\.dora=true with an adapter of"):
        import_adapter(given, base, tmp_path / "start")
    assert not (tmp_path / "start").exists()


@pytest.mark.parametrize("dora", [False, True])
def test_the_json_of_import_has_the_keys_of_lora_and_what_is_left_out(dora: bool, tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    given = adapter(tmp_path / "given", base, "llama", use_dora=dora, use_rslora=None, lora_dropout=0.1)
    said = CliRunner().invoke(
        app, ["import", str(given), "--base", str(base), "--out", str(tmp_path / "start"), "--json"]
    )
    assert said.exit_code == 0, said.output
    answer = json.loads(said.stdout)
    lora = {key: answer[key] for key in ("rank", "alpha", "targets", "dropout", "rslora", "dora")}
    assert lora == {
        "rank": RANK, "alpha": ALPHA, "targets": ["attention.o", "attention.q", "ffn.down"],
        "dropout": 0.0 if dora else 0.1, "rslora": False, "dora": dora,
    }  # fmt: skip
    left_out = {"lora_dropout=0.1": "dropout of adapters with DoRA is not supported"}
    assert answer["left_out"] == (left_out if dora else {})


def test_adapters_of_some_layers_or_of_several_ranks_are_refused(tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    given = adapter(tmp_path / "given", base, "llama")
    tensors = load_file(given / "adapter_model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".layers.0." in n}, given / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"there is no adapter for layers\.1\."):
        import_adapter(given, base, tmp_path / "start")
    first = next(name for name in tensors if name.endswith("lora_A.weight"))
    narrow = {first: tensors[first][:2], first.replace("_A", "_B"): tensors[first.replace("_A", "_B")][:, :2]}
    save_file({n: t.contiguous() for n, t in (tensors | narrow).items()}, given / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="have the ranks 2, 4"):
        import_adapter(given, base, tmp_path / "start")


def test_dropout_passes_between_peft_and_runs(tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    given = adapter(tmp_path / "given", base, "llama", lora_dropout=0.1)
    lora = import_adapter(given, base, tmp_path / "start").spec.lora
    assert lora is not None
    assert lora.dropout == 0.1
    export_adapter(tmp_path / "start", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_dropout"] == 0.1


def test_an_imported_adapter_is_trained_exported_and_imported_for_the_same_base(alone: None, tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    lora = import_adapter(adapter(tmp_path / "given", base, "llama"), base, tmp_path / "start").spec.lora
    assert lora is not None
    save_adapted(tmp_path / "start", tmp_path / "run", tp=1, lora=asdict(lora) | {"targets": [*lora.targets]})
    export_adapter(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    import_adapter(tmp_path / "out", base, tmp_path / "again")
    with pytest.raises(CheckpointError, match=f"has adapters itself; give their base with --base {base}"):
        import_adapter(tmp_path / "out", tmp_path / "run", tmp_path / "other")


def test_an_adapter_of_a_matrix_that_is_several_in_a_run_is_refused(tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["phi3"])
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight is layers.0.attention.q.weight and .* in a run"):
        import_adapter(adapter(tmp_path / "given", base, "phi3"), base, tmp_path / "start")
    spec = replace(open_weights(base).spec, lora=LoraSpec(rank=2, targets=("k",)))
    with pytest.raises(ConfigError, match=r"layers.0.attention.k is a part of model.layers.0.self_attn.qkv_proj"):
        adapter_files(architecture_of(replace(spec, lora=None), "phi3"), spec, "base")


def test_adapters_of_experts_that_peft_or_a_run_cannot_have_are_refused(tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["mixtral"])
    given = adapter(tmp_path / "given", base, "mixtral")
    tensors = load_file(given / "adapter_model.safetensors")
    fewer = {name: tensor for name, tensor in tensors.items() if "experts.1.w2" not in name}
    save_file(fewer, given / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"no adapter for expert 1 of layers.0.ffn.experts.down,"):
        import_adapter(given, base, tmp_path / "start")
    for family, targets, said in (
        ("gpt-oss", ("experts",), "ffn.experts.gate of all experts is in one tensor in the files of GptOss"),
        ("deepseek-v3", ("ffn", "experts"), "have adapters and the same last name, and peft takes all matrices"),
    ):
        weights = open_weights(saved(tmp_path / family, FAMILIES[family]))
        spec = replace(weights.spec, lora=LoraSpec(rank=2, targets=targets))
        with pytest.raises(ConfigError, match=said):
            adapter_files(architecture_of(weights.spec, family.replace("-", "_")), spec, "base")


def test_multi_token_prediction_modules_need_no_adapter_of_peft(tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    given = adapter(tmp_path / "given", base, "llama")
    weights = open_weights(base)
    weights.spec = replace(weights.spec, mtp_modules=1)  # as of a run that trained one beside the layers
    imported = ImportedAdapter(given, weights)
    assert imported.spec.lora is not None
    assert not any(name.startswith("layers.2.") for name in imported.shapes)
    with pytest.raises(ConfigError, match=r"layers.2.block.attention.q is not in the files of LlamaForCausalLM"):
        adapter_files(architecture_of(weights.spec), imported.spec, "base")


def test_weights_without_adapters_are_not_exported_as_adapters(tmp_path: Path):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    with pytest.raises(CheckpointError, match="has no adapters"):
        export_adapter(base, tmp_path / "out")
    import_adapter(adapter(tmp_path / "given", base, "llama"), base, tmp_path / "start")
    with pytest.raises(CheckpointError, match="give --adapter to write them alone, or --merge"):
        export(tmp_path / "start", tmp_path / "merged")
