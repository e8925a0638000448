"""The reference: a model trained by one process in plain PyTorch, without a layout or micro-batches. Of Shardwright it
uses only the model and the optimizer's row; the whole batch is one forward pass (with fp8 a micro-batch), and loss and
clipping are PyTorch's.

It computes PowerSGD (Vogels et al., arXiv 1905.13727) on whole gradients: each logical matrix becomes the product of
two thin ones, and the remainder is added to the next gradient. It computes top-k (Stich et al., arXiv 1809.07599) on
the gradient of each replica's sequences: its largest elements, summed over replicas.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shardwright.data.samples import IGNORE
from shardwright.model.documents import Documents
from shardwright.model.fp8 import use_fp8
from shardwright.model.init import initialise
from shardwright.model.modules import row_of
from shardwright.model.moe import Routing, expert_layers, learn_from_load, take_load
from shardwright.model.random import EVALUATION, sample_keys
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.training.optimizer import make_optimizer, set_learning_rate
from shardwright.verification.case import ADAPTER_STD, DTYPES, PLAIN_SGD, Case
from shardwright.verification.reference_compression import LargestElements, Products, columns_of_block, n_sequences
from shardwright.verification.trace import RankTrace, TracedQuantity, TraceRecorder

Losses = tuple[Tensor, Tensor | None]
"""The loss of the next token, and the mean loss of multi-token prediction (MTP) modules, if there are any."""


def train_alone(case: Case, folder: Path) -> RankTrace:
    """Take the steps of a case with each optimizer, in a world of one rank."""
    recorder = TraceRecorder(folder)
    for training in case.trainings:
        trainer = _LoneTrainer(case, training, recorder)
        for step in range(case.steps):
            trainer.step(step)
        recorder.tensors(TracedQuantity("parameter", training, case.steps), trainer.parameters)
        if case.average.kind != "none":
            average = {name: _average(case, [after[name] for after in trainer.seen]) for name in trainer.parameters}
            recorder.tensors(TracedQuantity("average", training, case.steps), average)
    return recorder.trace


class _LoneTrainer:
    """A whole model and an optimizer; records the losses, gradients and norms of its steps."""

    def __init__(self, case: Case, training: str, recorder: TraceRecorder) -> None:
        """Initialise the model, and record its parameters for plain SGD."""
        self.case, self.training, self.recorder = case, training, recorder
        self.model = Transformer(case.spec).to_types(*DTYPES[case.dtype])
        initialise(self.model, case.spec, case.seed, b_std=ADAPTER_STD)
        self.model.train()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = _optimizer(training, self.parameters, case)
        self.products = Products(self.parameters, case) if case.powersgd_rank else None
        self.largest = LargestElements(self.parameters, case) if case.largest_gradients else None
        self.loss_scale = 1.0 if case.loss_scaling is None else case.loss_scaling.loss_scale
        self.routers = _RouterLosses(self.model, self.loss_scale)
        _round_inputs(self.model, case)
        if case.fp8 is not None:
            use_fp8(self.model, case.spec, case.fp8)
        if training == PLAIN_SGD:
            recorder.tensors(TracedQuantity("initial", training, 0), self.parameters)
        self.answers = _Answers(self.model, case, self.parameters)
        self.seen: list[dict[str, Tensor]] = []
        """The parameters after each step, if the case averages them."""

    def step(self, step: int) -> None:
        """Take a step, and after the first step evaluate if the case does."""
        self._record_losses(("loss", "mtp loss"), step, self._forward_backward(step))
        if step == self.case.overflow_step:
            self._clip_norms().append(math.inf)
            self.optimizer.zero_grad()
            take_load(self.model)
        else:
            self._update(step)
            if self.case.evaluate and step == 0:
                self._record_losses(("evaluation", "mtp evaluation"), step, self._evaluate())
        copied = self.case.average.kind != "none"
        self.seen.append({name: p.detach().clone() for name, p in self.parameters.items()} if copied else {})

    def _forward_backward(self, step: int) -> Losses:
        """Compute the gradients of the scaled loss, and return the losses."""
        parts = []
        for loss, ahead in self._passes(step, step):
            ((loss if ahead is None else loss + self.case.spec.mtp_weight * ahead) * self.loss_scale).backward()
            parts.append((loss.detach(), None if ahead is None else ahead.detach()))
            if self.largest is not None:
                self.largest.after_pass(len(parts), self.case.step_case(step))
        return _summed(parts)

    def _update(self, step: int) -> None:
        """Clip the gradients and update the parameters and the biases of routers."""
        case, training, parameters = self.case, self.training, self.parameters
        for p in parameters.values():
            p.grad = None if p.grad is None else p.grad / self.loss_scale
        if self.products is not None:
            self.products.replace_gradients()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
        self.recorder.tensors(TracedQuantity("gradient", training, step + 1), gradients)
        scale = case.scale(training, step)
        for p in parameters.values():
            p.grad = None if p.grad is None else p.grad * scale
        norm = nn.utils.get_total_norm(p.grad for p in parameters.values() if p.grad is not None)
        self.recorder.scalar(TracedQuantity("grad norm", training, step + 1), norm)
        limit = case.clip_norm(training, step, float(norm))
        self._clip_norms().append(limit)
        nn.utils.clip_grads_with_norm_(parameters.values(), limit, norm)
        set_learning_rate(self.optimizer, case.rate(training, step) / scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        learn_from_load(self.model, {layer: load.counts_E for layer, load in take_load(self.model).items()})

    @torch.no_grad()
    def _evaluate(self) -> Losses:
        """Return the losses of the batch after the training steps' batches, without dropout."""
        self.model.eval()
        losses = _summed([*self._passes(self.case.steps, EVALUATION)])
        self.model.train()
        return losses

    def _passes(self, step: int, key_step: int) -> Iterator[Losses]:
        return _passes(self.model, self.case, self.parameters, step, key_step, self.routers, self.answers)

    def _record_losses(self, names: tuple[str, str], step: int, losses: Losses) -> None:
        for name, loss in zip(names, losses, strict=True):
            if loss is not None:
                self.recorder.scalar(TracedQuantity(name, self.training, step + 1), loss)

    def _clip_norms(self) -> list[float]:
        return self.recorder.trace.clip_norms.setdefault(self.training, [])


def _average(case: Case, seen: Sequence[Tensor]) -> Tensor:
    """Return the average of a parameter from its values after each step: with kind="ema" the sum of
    decay^(n - i) (1 - decay) w_i over the n values and decay^(n - 1) w_1 for the first; else the mean of the last."""
    if case.average.kind != "ema":
        return torch.stack([*seen[-case.average.last :]]).mean(0)
    decay, n = case.average.decay, len(seen)
    factors = [decay ** (n - 1), *((1 - decay) * decay ** (n - i) for i in range(2, n + 1))]
    return torch.stack([factor * values for factor, values in zip(factors, seen, strict=True)]).sum(0)


class _RouterLosses:
    """Multiplies the losses of routers, means over a forward pass, by its share of the batch and the loss scale."""

    def __init__(self, model: Transformer, loss_scale: float) -> None:
        self.loss_scale, self.aux_share, self.z_share = loss_scale, 0.0, 0.0
        for layer in expert_layers(model).values():
            layer.router.register_forward_hook(self._scale)

    def begin_pass(self, aux_share: float, z_share: float) -> None:
        """Set the next forward pass's shares of the batch's sequences and tokens."""
        self.aux_share, self.z_share = aux_share, z_share

    def _scale(self, router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        aux, z = routing.aux_loss, routing.z_loss
        return routing._replace(
            aux_loss=None if aux is None else self.loss_scale * self.aux_share * aux,
            z_loss=None if z is None else self.loss_scale * self.z_share * z,
        )


def _without_padding(lengths: Sequence[Sequence[int]], n_real: int) -> list[list[int]]:
    """Return the lengths of the documents of each sequence that are in its first `n_real` tokens."""
    ends = [list(accumulate(row)) for row in lengths]
    return [[n for n, end in zip(row, at, strict=True) if end <= n_real] for row, at in zip(lengths, ends, strict=True)]


def _passes(
    model: Transformer,
    case: Case,
    parameters: dict[str, nn.Parameter],
    step: int,
    key_step: int,
    routers: _RouterLosses,
    answers: "_Answers",
) -> Iterator[Losses]:
    """Yield the terms of the mean losses of a step's batch, one for each forward pass."""
    case = case.step_case(step)
    tokens_BT, targets_BT, ids_B = case.batch(step)
    keys_B = sample_keys(case.seed, key_step, ids_B) if case.spec.draws else None
    lengths = case.documents(step)
    restart = case.positions == "document"
    weights = _weights(case, parameters)
    counts = [max(1, int(counted_BT.sum())) for counted_BT in _counted(case, targets_BT)]
    n_real_B = case.n_real(step)
    if n_real_B is None:
        n_real_B = torch.full_like(ids_B, case.seq_len)
    for first in range(0, case.global_batch, n_sequences(case)):
        rows = slice(first, first + n_sequences(case))
        n_real = int(n_real_B[first])  # tokens from there on are padding, of the only sequence of the pass
        routers.begin_pass(n_sequences(case) / case.global_batch, int(n_real_B[rows].sum()) / int(n_real_B.sum()))
        also: dict[str, Any] = {
            "random_keys_B": None if keys_B is None else keys_B[rows],
            "documents": None
            if lengths is None
            else Documents.from_lengths(_without_padding(lengths[rows], n_real), n_real, restart=restart),
        }
        if case.spec.mtp_modules:
            also["ahead_KBT"] = _tokens_ahead(case, tokens_BT[rows, :n_real])
        outputs = functional_call(model, weights, (tokens_BT[rows, :n_real],), also)
        if answers.reference:
            yield answers.loss(outputs, step, rows), None
            continue
        sums = _loss_sums(case, outputs, targets_BT[rows, :n_real])
        losses = [loss_sum / count for loss_sum, count in zip(sums, counts, strict=True)]
        yield losses[0], torch.stack(losses[1:]).mean() if losses[1:] else None


class _Answers:
    """The log-probabilities of answers, and the loss of their pairs, by the formulas of the papers."""

    def __init__(self, model: Transformer, case: Case, parameters: dict[str, nn.Parameter]) -> None:
        """Compute the reference's log-probabilities of all steps with the initial weights."""
        self.case = case
        self.reference: list[list[list[Tensor]]] = []
        """For each step and sequence, the log-probability of each answer under the reference; zeros without one."""
        if case.preference.kind == "none":
            return
        model.eval()
        for step in range(case.steps + 1):
            tokens_BT, _, ids_B = case.step_case(step).batch(step)
            lengths = case.step_case(step).documents(step)
            n_real_B = case.step_case(step).n_real(step)
            assert lengths is not None
            keys_B = sample_keys(case.seed, EVALUATION, ids_B) if case.spec.draws else None
            scale = 1.0 if case.preference.kind in ("dpo", "ipo") else 0.0
            of_step: list[list[Tensor]] = []
            for first in range(0, len(tokens_BT), n_sequences(case)):
                rows = slice(first, first + n_sequences(case))
                n_real = tokens_BT.shape[1] if n_real_B is None else int(n_real_B[first])
                documents = Documents.from_lengths(
                    _without_padding(lengths[rows], n_real), n_real, restart=case.positions == "document"
                )
                also = {"random_keys_B": None if keys_B is None else keys_B[rows], "documents": documents}
                with torch.no_grad():
                    weights = _weights(case, parameters)
                    logits_BTV = functional_call(model, weights, (tokens_BT[rows, :n_real],), also)
                values = self._log_probs(logits_BTV, step, rows)
                of_step += [[scale * value for value, _ in answers] for answers in values]
            self.reference.append(of_step)
        model.train()

    def _log_probs(self, logits_BTV: Tensor, step: int, rows: slice) -> list[list[tuple[Tensor, int]]]:
        """Return the log-probability of each answer of each sequence, and its number of targets."""
        case = self.case.step_case(step)
        n_tokens, lengths = logits_BTV.shape[1], case.documents(step)
        assert lengths is not None
        lengths, targets_BT = _without_padding(lengths[rows], n_tokens), case.batch(step)[1][rows, :n_tokens]
        result = []
        for logits_TV, targets_T, of_row in zip(logits_BTV, targets_BT, lengths, strict=True):
            answers, parts = [], zip(logits_TV.split(of_row), targets_T.split(of_row), strict=True)
            for part_TV, part_T in list(parts)[: len(of_row) // 2 * 2]:
                chosen = part_T != IGNORE
                log_p = part_TV[chosen].to(DTYPES[self.case.dtype][0]).log_softmax(-1)
                answers.append((log_p.gather(1, part_T[chosen][:, None]).sum(), int(chosen.sum())))
            result.append(answers)
        return result

    def loss(self, logits_BTV: Tensor, step: int, rows: slice) -> Tensor:
        """Return the loss of the pairs of some sequences of a step, divided by the pairs of all."""
        kind, beta, gamma = self.case.preference.kind, self.case.preference.beta, self.case.preference.gamma
        losses = []
        values = self._log_probs(logits_BTV, step, rows)
        for answers, reference in zip(values, self.reference[step][rows], strict=True):
            rewards = [value - before for (value, _), before in zip(answers, reference, strict=True)]
            if kind in ("ipo", "simpo"):
                rewards = [reward / n for reward, (_, n) in zip(rewards, answers, strict=True)]
            for chosen, rejected in zip(rewards[0::2], rewards[1::2], strict=True):
                if kind == "ipo":
                    losses.append((chosen - rejected - 0.5 / beta) ** 2)
                elif kind == "dpo":
                    losses.append((1 + torch.exp(-beta * (chosen - rejected))).log())
                else:
                    losses.append((1 + torch.exp(gamma - beta * (chosen - rejected))).log())
        n_pairs = sum(len(of_row) // 2 for of_row in self.reference[step])
        return torch.stack(losses).sum() / n_pairs


def _round_inputs(model: Transformer, case: Case) -> None:
    """Round the rows of experts, and the inputs of layers with their gradients, as the case's layout sends them."""

    def round_rows(experts: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        rows_RD, *others = inputs
        return rows_RD + (_in_8_bits(rows_RD.detach(), case.rounded_inputs.experts) - rows_RD.detach()), *others

    def round_input(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return _SentToNextStage.apply(inputs[0], case.rounded_inputs.of_layers), *inputs[1:]

    if case.rounded_inputs.experts != "none":
        for layer in expert_layers(model).values():
            layer.experts.register_forward_pre_hook(round_rows)
    for number in case.rounded_inputs.layers:
        model.layers[str(number)].register_forward_pre_hook(round_input)


class _SentToNextStage(torch.autograd.Function):
    """Rounds an activation in the forward pass, and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return _in_8_bits(x_BTD, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _in_8_bits(gradients[0], ctx.kind), None


def _in_8_bits(rows: Tensor, kind: str) -> Tensor:
    """Round rows in blocks, "int8" as in `_as_integers`, "fp8" to numbers with 4 significant bits, at least 2^-9 apart,
    times the scale that makes the largest 448."""
    if kind == "int8":
        return _as_integers(rows, rows.shape[-1])
    rounded = torch.zeros_like(rows)
    per_block = columns_of_block(rows.shape[-1])
    for x, result in zip(rows.split(per_block, -1), rounded.split(per_block, -1), strict=True):
        scale = (x.abs().amax(-1, keepdim=True) / 448).float().to(x.dtype)
        of_scale = torch.nan_to_num(x / scale).float().to(x.dtype)  # 0 / 0 where all are zero
        step = 2.0 ** (of_scale.abs().log2().floor().clamp(min=-6) - 3)
        result.copy_((of_scale / step).round() * step * scale)
    return rounded


def _weights(case: Case, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    compute = DTYPES[case.dtype][1]
    # A tensor that is not trained (a router's bias) is added to values with more digits than `compute`.
    weights = {name: p.to(compute) if p.requires_grad else p for name, p in parameters.items()}
    if case.integer_weights is None:
        return weights
    rounded = case.integer_weights
    for name, weight in weights.items():
        row = row_of(case.spec, name)
        gathered = weight.dim() > 1 and (rounded.experts or row.split != "experts")
        if gathered and (rounded.frozen or weight.requires_grad):
            columns = weight.shape[-1] // (rounded.tp if row.split == "row" else 1)
            weights[name] = weight + (_as_integers(weight.detach(), columns) - weight.detach())
    return weights


def _as_integers(weight: Tensor, columns: int) -> Tensor:
    """Round every element to the nearest of 255 multiples of the scale of its block; blocks are equal parts, of at most
    128 elements, of each `columns` elements of a row."""
    n_blocks = -(-columns // 128)
    rounded = torch.zeros_like(weight)
    for shard in range(0, weight.shape[-1], columns):
        for block in range(shard, shard + columns, -(-columns // n_blocks)):
            end = min(block + -(-columns // n_blocks), shard + columns)
            elements = weight[..., block:end].to(torch.promote_types(weight.dtype, torch.float32))
            scale = (elements.abs().max(-1, keepdim=True).values / 127).float()
            integers = torch.nan_to_num((elements / scale).round())  # 0 / 0 where all are zero
            rounded[..., block:end] = integers * scale
    return rounded


def _summed(parts: Sequence[Losses]) -> Losses:
    losses, ahead = zip(*parts, strict=True)
    return torch.stack(losses).sum(), None if ahead[0] is None else torch.stack(ahead).sum()


def _counted(case: Case, targets_BT: Tensor) -> list[Tensor]:
    """Return which positions count, for the model and each MTP module, (B, T - k) for number k: position t of module k
    predicts the target of position t + k of the model, if positions t to t + k count."""
    return [
        torch.stack([targets_BT[:, at:][:, : max(0, targets_BT.shape[1] - k)] != IGNORE for at in range(k + 1)]).all(0)
        for k in range(1 + case.spec.mtp_modules)
    ]


def _loss_sums(case: Case, outputs: Any, targets_BT: Tensor) -> list[Tensor]:
    """Return the cross-entropy of the next token, and of each MTP module, summed over positions."""
    kept = DTYPES[case.dtype][0]
    logits = outputs if case.spec.mtp_modules else (outputs,)
    sums = []
    for k, (logits_BTV, counted_BT) in enumerate(zip(logits, _counted(case, targets_BT), strict=True)):
        chosen_NV, chosen_N = logits_BTV[:, : counted_BT.shape[1]][counted_BT], targets_BT[:, k:][counted_BT]
        sums.append(F.cross_entropy(chosen_NV.to(kept), chosen_N, reduction="sum"))
    return sums


def _tokens_ahead(case: Case, tokens_BT: Tensor) -> Tensor:
    """Return the tokens that MTP modules read, (K, B, T); zeros beyond the end."""
    ahead_KBT = tokens_BT.new_zeros(case.spec.mtp_modules, *tokens_BT.shape)
    for k, ahead_BT in enumerate(ahead_KBT, start=1):
        ahead_BT[:, :-k] = tokens_BT[:, k:]
    return ahead_KBT


def _optimizer(training: str, parameters: dict[str, nn.Parameter], case: Case) -> torch.optim.Optimizer:
    if training == PLAIN_SGD:
        return torch.optim.SGD(parameters.values())
    config, groups = case.optimizer, []
    rates, decays = (table.model_dump(exclude_none=True) for table in (config.lr_scale, config.weight_decay_by_kind))
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            row = row_of(case.spec, name)
            decay = decays.get(row.kind, config.weight_decay if parameter.dim() >= 2 and row.kind != "bias" else 0.0)
            of_one = {"params": [parameter], "rows": [row], "hidden": row.kind in ("matrix", "expert")}
            scale, eps = _factors_of_mup(case.spec, name, row.kind)
            of_one |= {"eps": config.options["eps"] * eps} if "eps" in config.options else {}
            groups.append(of_one | {"weight_decay": decay / scale, "lr_scale": rates.get(row.kind, 1.0) * scale})
    return make_optimizer(groups, config)


def _factors_of_mup(spec: ModelSpec, name: str, kind: str) -> tuple[float, float]:
    """Return muP's factors of a parameter's learning rate and of its eps (the table of `model.mup`)."""
    if spec.mup is None:
        return 1.0, 1.0
    width = spec.d_model / (spec.mup.base_width or spec.d_model)
    depth = spec.n_layers / (spec.mup.base_depth or spec.n_layers)
    rate = 1 / width if kind in ("matrix", "expert", "router") else 1.0
    return rate, 1 / (width * depth) if name.startswith("layers.") else 1 / width
