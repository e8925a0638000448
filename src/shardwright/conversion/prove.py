"""The proof of a conversion: both checkpoints compute the same, each with a model that reads its own names.

Each side is evaluated in float64 on the CPU: logits, loss and gradient of a fixed batch, and the next update of AdamW.
Shardwright's names are evaluated with its `Transformer`, the names of `transformers` with that library, and the names
of torchtitan and of Megatron with functions of this file. Both results are then compared under Shardwright's names.
"""

import sys
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.optim.adamw import AdamW

from shardwright.conversion.dcp_state import TrainerWeights
from shardwright.conversion.names import MEGATRON, TORCHTITAN, TRANSFORMERS
from shardwright.conversion.state import STEP, TrainingState, trained_parameters
from shardwright.hugging_face.architecture import architecture_of
from shardwright.hugging_face.float64 import Float64
from shardwright.hugging_face.reader import MappedTensors
from shardwright.model.rotary import frequencies
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.system.errors import InputError, ProofError
from shardwright.training.weights import Weights

SEQUENCES, LENGTH = 2, 64
TOLERANCE = 1e-9
"""Largest difference of two tensors, relative to the largest element of all gradients (all updates, ...): sums in
another order in float64."""
_KINDS = ("logits", "loss", "gradient", "update")


def compare(source: TrainingState, written: TrainingState) -> list[str]:
    """Compute both sides and return a description of the agreement. Raises ProofError with the tensors that differ, and
    InputError if a side cannot be evaluated here.

    Memory: 76 bytes a parameter, measured on 96M parameters.
    """
    problems = [f"{name} has other bits after the conversion" for name in _other_bits(source, written)]
    if written.step is not None and written.step != source.step:
        problems.append(f"step {source.step} became {written.step}")
    expected = compute(source)
    largest = {
        kind: max((_size(value) for name, value in expected.items() if _kind(name) == kind), default=0.0)
        for kind in _KINDS
    }
    errors = {
        name: _size(tensor - expected[name]) / max(largest[_kind(name)], sys.float_info.min)
        for name, tensor in compute(written).items()
    }
    problems += [
        f"{name} differs by {error:.2g}, relative to the largest {_kind(name)}; allowed: {TOLERANCE:g}"
        for name, error in errors.items()
        if not error <= TOLERANCE
    ]
    if problems:
        raise ProofError("\n".join(["the converted checkpoint computes other values:", *problems[:8]]))
    lines = [f"proved: every tensor has the bits of {source.weights.path} when it is read back"]
    for kind in dict.fromkeys(map(_kind, errors)):
        worst = max(error for name, error in errors.items() if _kind(name) == kind)
        lines.append(f"proved: {kind}: largest relative difference {worst:.1e}")
    return lines


def _other_bits(source: TrainingState, written: TrainingState) -> list[str]:
    kinds = [("", source.weights, written.weights)]
    kinds += [(f"{kind} of ", source.moments[kind], moments) for kind, moments in written.moments.items()]
    return [
        f"{kind}{name}"
        for kind, one, other in kinds
        for name in one.shapes
        if not torch.equal(_whole(one, name), _whole(other, name))
    ]


def _whole(weights: Weights | MappedTensors, name: str) -> Tensor:
    shape = weights.shapes[name]
    return weights.read(name, (0,) * len(shape), shape)


def _kind(name: str) -> str:
    return name.partition(" of ")[0]


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def compute(state: TrainingState) -> dict[str, Tensor]:
    """Return the logits, the loss, the gradients and, with an optimizer, the next update of each parameter."""
    values = {name: value.double() for name, value in _in_files(state.weights).items()}
    trained = set(trained_parameters(state.spec))
    names = [name for name in values if trained.issuperset(_parameters(state, name))]
    parameters = {name: values[name].requires_grad_() for name in names}
    shape = (SEQUENCES, min(LENGTH, state.spec.max_seq_len))
    tokens_BT = torch.randint(state.spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    logits_BTV = _logits(state, values, tokens_BT)
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    gradients = dict(zip(parameters, grads, strict=True))
    result = {"logits": logits_BTV.detach(), "loss": loss.detach()} | _named(state, "gradient", gradients)
    if state.step is not None:
        result |= _named(state, "update", _updates(state, parameters, gradients))
    return result


def _in_files(weights: Weights) -> dict[str, Tensor]:
    """Return every tensor under its name in the files, as it is there."""
    if isinstance(weights, TrainerWeights):
        return weights.read_all()
    if isinstance(weights, MappedTensors):
        return {name: weights.read_in_file(name) for name in weights.in_files}
    return {name: _whole(weights, name) for name in weights.shapes}


def _parameters(state: TrainingState, name: str) -> list[str]:
    """Return our parameters in a tensor of the files."""
    weights = state.weights
    return [part.name for part in weights.in_files[name].parts] if isinstance(weights, MappedTensors) else [name]


def _named(state: TrainingState, what: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values of the tensors of the files as values of our parameters."""
    names = [parameter for name in values for parameter in _parameters(state, name)]
    if not isinstance(state.weights, MappedTensors):
        return {f"{what} of {name}": values[name] for name in names}
    in_files = state.weights.in_files
    mapped = MappedTensors(
        state.spec,
        list(in_files.values()),
        dict.fromkeys(in_files, "float64"),
        lambda name, spans: values[name][tuple(slice(*span) for span in spans)],
    )
    return {f"{what} of {name}": _whole(mapped, name) for name in dict.fromkeys(names)}


def _updates(
    state: TrainingState, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the change of each parameter in AdamW's next step."""
    groups = [
        {"params": [parameter], **state.settings[_parameters(state, name)[0]].group()}
        for name, parameter in parameters.items()
    ]
    optimizer = AdamW(groups)
    moments = {kind: _in_files(values) for kind, values in state.moments.items()}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
        optimizer.state[parameter] = {kind: values[name].double() for kind, values in moments.items()}
        optimizer.state[parameter][STEP] = torch.tensor(float(state.step or 0))
    optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in parameters.items()}


def _logits(state: TrainingState, values: Mapping[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Return the logits of a model that reads the names of the files."""
    if state.format == "shardwright":
        with torch.device("meta"):
            model = Transformer(state.spec).double().eval()
        logits: Tensor = functional_call(model, dict(values), (tokens_BT,))
        return logits
    if state.naming == TRANSFORMERS:
        return _logits_of_transformers(state, values, tokens_BT)
    if state.naming == MEGATRON:
        return _logits_of_megatron(state.spec, values, tokens_BT)
    return _logits_of_torchtitan(state.spec, values, tokens_BT, state.naming)


def _logits_of_transformers(state: TrainingState, values: Mapping[str, Tensor], tokens_BT: Tensor) -> Tensor:
    try:
        import transformers
    except ImportError:
        raise InputError(
            "--prove evaluates names of transformers with that library: pip install transformers"
        ) from None
    architecture = architecture_of(state.spec)
    config = transformers.AutoConfig.for_model(**architecture.config(state.spec))
    with Float64():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    if others := sorted(values.keys() - model.state_dict().keys()):
        raise InputError(
            f"--prove cannot evaluate {architecture.class_name}: in {transformers.__version__} of transformers the "
            f"model has no tensor {others[0]}, and combines tensors of the files while it loads them"
        )
    with Float64():
        logits: Tensor = functional_call(model, dict(values), (tokens_BT,), {"use_cache": False}).logits
    return logits


def _logits_of_torchtitan(spec: ModelSpec, values: Mapping[str, Tensor], tokens_BT: Tensor, naming: str) -> Tensor:
    """Return the logits of torchtitan's Llama 3: pairs of neighbouring elements are rotated as complex numbers."""
    heads, head = ("attention.qkv_linear", "lm_head") if naming == TORCHTITAN else ("attention", "output")
    angles_TC = torch.arange(tokens_BT.shape[1], dtype=torch.float64)[:, None] * frequencies(spec)
    turns_TC = torch.polar(torch.ones_like(angles_TC), angles_TC)

    def normed(x_BTD: Tensor, name: str) -> Tensor:
        return F.rms_norm(x_BTD, (spec.d_model,), values[f"{name}.weight"], spec.norm_eps)

    def multiplied(x_BTD: Tensor, name: str) -> Tensor:
        return F.linear(x_BTD, values[f"{name}.weight"])

    def split(x_BTD: Tensor, rotates: bool) -> Tensor:
        x_BHTC = x_BTD.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)
        if not rotates:
            return x_BHTC
        return torch.view_as_real(torch.view_as_complex(x_BHTC.unflatten(-1, (-1, 2)).contiguous()) * turns_TC).flatten(
            -2
        )

    x_BTD = F.embedding(tokens_BT, values["tok_embeddings.weight"])
    for layer in (f"layers.{number}." for number in range(spec.n_layers)):
        y_BTD = normed(x_BTD, f"{layer}attention_norm")
        q, k, v = (split(multiplied(y_BTD, f"{layer}{heads}.{name}"), name != "wv") for name in ("wq", "wk", "wv"))
        mixed_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BTD = x_BTD + multiplied(mixed_BHTC.transpose(1, 2).flatten(2), f"{layer}attention.wo")
        y_BTD = normed(x_BTD, f"{layer}ffn_norm")
        gated = F.silu(multiplied(y_BTD, f"{layer}feed_forward.w1")) * multiplied(y_BTD, f"{layer}feed_forward.w3")
        x_BTD = x_BTD + multiplied(gated, f"{layer}feed_forward.w2")
    return multiplied(normed(x_BTD, "norm"), head)


def _logits_of_megatron(spec: ModelSpec, values: Mapping[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Return the logits of Megatron's GPTModel: queries, key and value of a kv head are one block of linear_qkv, and
    element i of a head is rotated with element i + C / 2."""
    angles_TC = torch.arange(tokens_BT.shape[1], dtype=torch.float64)[:, None] * frequencies(spec)
    cos_TC, sin_TC = (wave.repeat(1, 2) for wave in (angles_TC.cos(), angles_TC.sin()))

    def normed(x_BTD: Tensor, name: str) -> Tensor:
        return F.rms_norm(x_BTD, x_BTD.shape[-1:], values[name], spec.norm_eps) if name in values else x_BTD

    def multiplied(x_BTD: Tensor, name: str) -> Tensor:
        return F.linear(x_BTD, values[f"{name}.weight"], values.get(f"{name}.bias"))

    def rotated(x_BHTC: Tensor) -> Tensor:
        low, high = x_BHTC.chunk(2, -1)
        return x_BHTC * cos_TC + torch.cat((-high, low), -1) * sin_TC

    def attention(y_BTD: Tensor, name: str) -> Tensor:
        qkv_BTKGC = multiplied(y_BTD, f"{name}.linear_qkv").unflatten(-1, (spec.n_kv_heads, -1, spec.head_dim))
        q_BTHC, k_BTHC, v_BTHC = qkv_BTKGC[..., :-2, :].flatten(2, 3), qkv_BTKGC[..., -2, :], qkv_BTKGC[..., -1, :]
        q, k = normed(q_BTHC, f"{name}.q_layernorm.weight"), normed(k_BTHC, f"{name}.k_layernorm.weight")
        heads = (rotated(q.transpose(1, 2)), rotated(k.transpose(1, 2)), v_BTHC.transpose(1, 2))
        mixed_BHTC = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return multiplied(mixed_BHTC.transpose(1, 2).flatten(2), f"{name}.linear_proj")

    def gated(x_BTD: Tensor, first: Tensor, second: Tensor) -> Tensor:
        gate, up = F.linear(x_BTD, first).chunk(2, -1)
        return F.linear(F.silu(gate) * up, second)

    def network(y_BTD: Tensor, name: str) -> Tensor:
        if spec.moe is None:
            gate, up = multiplied(y_BTD, f"{name}.linear_fc1").chunk(2, -1)
            return multiplied(F.silu(gate) * up, f"{name}.linear_fc2")
        scores_BTE = multiplied(y_BTD, f"{name}.router").softmax(-1)
        top_BTE, chosen_BTE = scores_BTE.topk(spec.moe.top_k)
        if spec.moe.normalise:
            top_BTE = top_BTE / top_BTE.sum(-1, keepdim=True)
        weights_BTE = torch.zeros_like(scores_BTE).scatter(-1, chosen_BTE, top_BTE)
        first, second = (values[f"{name}.experts.experts.linear_fc{n}.weight"] for n in (1, 2))
        outputs = [gated(y_BTD, first[n], second[n]) * weights_BTE[..., n : n + 1] for n in range(len(first))]
        return torch.stack(outputs).sum(0)

    x_BTD = F.embedding(tokens_BT, values["embedding.word_embeddings.weight"])
    for layer in (f"decoder.layers.{number}." for number in range(spec.n_layers)):
        y_BTD = normed(x_BTD, f"{layer}self_attention.linear_qkv.layer_norm_weight")
        x_BTD = x_BTD + attention(y_BTD, f"{layer}self_attention")
        norm = "mlp.linear_fc1.layer_norm_weight" if spec.moe is None else "pre_mlp_layernorm.weight"
        x_BTD = x_BTD + network(normed(x_BTD, layer + norm), f"{layer}mlp")
    x_BTD = normed(x_BTD, "decoder.final_layernorm.weight")
    return F.linear(x_BTD, values["embedding.word_embeddings.weight" if spec.tied_embedding else "output_layer.weight"])
