"""Proves that a run is read from its folder as it was written, also while it goes on, and that a folder which is
not one of a run is named with what it lacks."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.layout.layout import Layout
from shardwright.report.curves import curves_svg
from shardwright.report.headline import headline, title_of
from shardwright.report.panel import first_to_last
from shardwright.report.run_record import read_run
from shardwright.report.words import layout_in_words, model_in_words, rank_state_words
from shardwright.system.errors import InputError
from shardwright.view.document import Fact
from tests.report.runs import evaluation, moe_record, started, train_record, usual, write_run


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run = read_run(usual(tmp_path / "run"))
    assert [record.step for record in run.train] == [10, 20, 30, 40, 50]
    assert [record.loss for record in run.validation] == [6.2, 5.1]
    assert run.checkpoints == ("step-00000020", "step-00000050")
    assert run.config.batch.global_batch == 4


def test_the_headline_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    told = headline(read_run(usual(tmp_path)))
    assert (told.steps, told.planned_steps, told.tokens, told.world_size) == (50, 100, 50 * 4 * 16, 2)
    assert (told.first_validation_loss, told.validation_loss, told.train_loss) == (6.2, 5.1, 5.0)
    assert (told.median_tokens_per_s, told.peak_memory_bytes, told.median_mfu) == (1000.0, 2**20, None)
    assert told.training_s == pytest.approx(50 * 0.064)
    assert told.time_share == pytest.approx({"data": 1 / 16, "forward_backward": 50 / 64, "optimizer": 10 / 64})


def test_the_headline_has_the_last_load_of_experts(tmp_path: Path) -> None:
    records = [moe_record(10), moe_record(50, dropped_fraction=0.01, expert_sent_bytes=2048)]
    told = headline(read_run(write_run(tmp_path / "moe", records)))
    assert (told.load_max_over_mean, told.load_of_worst_layer) == (pytest.approx(1.15), pytest.approx(1.2))
    assert (told.load_entropy, told.dropped_fraction, told.expert_sent_bytes) == (0.9, 0.01, 2048)
    dense = headline(read_run(usual(tmp_path / "dense")))
    assert (dense.load_max_over_mean, dense.load_of_worst_layer, dense.dropped_fraction) == (None, None, None)


def test_a_record_counts_for_the_steps_it_was_measured_over(tmp_path: Path) -> None:
    records = [train_record(10), train_record(20), train_record(23, data_s=1.0)]
    told = headline(read_run(write_run(tmp_path, records)))
    assert told.training_s == pytest.approx(23 * 0.064 + 3 * (1.0 - 0.004))


def test_a_run_that_began_from_another_counts_from_where_it_began(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [train_record(5010), train_record(5020)]))
    assert run.edges == (5000, 5010, 5020)
    assert headline(run).training_s == pytest.approx(20 * 0.064)


def test_a_run_that_is_resumed_on_another_layout_is_told_by_segments(tmp_path: Path) -> None:
    first, second = (
        [train_record(step) for step in (10, 20)],
        [train_record(step, tokens_per_s=3e3) for step in (30, 40)],
    )
    same = started(30, "4 ranks with ZeRO-1", "dp_shard 4, zero 1")
    records = [started(0), *first, started(20, same["layout"], same["keys"]), second[0], same, second[1]]
    run = read_run(write_run(tmp_path, records, "layout.dp_shard=4", "layout.zero=1"))
    assert title_of(run) == "debug, 250K parameters, on 2 ranks with ZeRO-3, then 4 ranks with ZeRO-1"
    told = headline(run)
    assert [(each.steps, each.world_size, each.median_tokens_per_s) for each in told.segments] == [
        ("steps 1 to 20", 2, 1000.0),
        ("steps 21 to 40", 4, 3000.0),
    ]
    assert told.median_tokens_per_s == 3000.0
    speed = Fact("tokens per second", "1K", "as the median of steps 1 to 20 on 2 ranks with ZeRO-3; MFU n/a")
    assert speed in list(told.facts())


def test_steps_that_an_older_version_took_are_a_segment_whose_layout_is_not_known(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [train_record(10), started(10), train_record(20)]))
    assert [each.layout for each in run.segments] == ["a layout that was not recorded", "2 ranks with ZeRO-3"]
    assert [[record.step for record in each.train] for each in run.segments] == [[10], [20]]


def test_the_headline_has_the_perplexity_of_the_validation_loss(tmp_path: Path) -> None:
    assert headline(read_run(usual(tmp_path / "a"))).validation_perplexity == pytest.approx(164.02, abs=0.01)
    huge = headline(read_run(write_run(tmp_path / "b", [evaluation(0, 1e30)])))
    assert huge.validation_perplexity is None
    loss = Fact("validation loss", f"{1e30:.4f}", f"with no finite perplexity; from {1e30:.4f}, 100% of it")
    assert loss in list(huge.facts())


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(), "Each rank holds all parameters, gradients and optimizer states."),
        (
            Layout(dp_shard=4, zero=2),
            "Each rank holds the parameters whole and 1/4 of the gradients and optimizer states (",
        ),
        (Layout(dp_shard=2, cp=2, zero=3), "Each rank holds 1/4 of the parameters, gradients and optimizer states ("),
        (Layout(tp=2), "holds 1/2 of each matmul weight that tp shards, the embedding and the head included: their "),
        (Layout(pp=2), "holds the layers of its stages (pp: 2 stages over 2 ranks): their parameters, gradients and"),
        (
            Layout(pp=2, tp=2, dp_shard=2, zero=1),
            "its stages (pp: 2 stages over 2 ranks) and 1/2 of each matmul weight that tp shards, the embedding and "
            "the head included, and of these the parameters and gradients whole and 1/2 of the optimizer states (",
        ),
        (
            Layout(dp_shard=2, ep=2, zero=3),
            "1/2 of the experts (ep), and of these 1/2 of the parameters, gradients",
        ),
    ],
)
def test_what_a_rank_holds_is_said_for_the_axes_that_are_on(layout: Layout, words: str) -> None:
    assert words in rank_state_words(layout)


def test_a_last_line_cut_short_is_ignored(tmp_path: Path) -> None:
    path = usual(tmp_path) / "metrics.jsonl"
    path.write_text(path.read_text() + json.dumps(train_record(60))[:30])
    assert read_run(tmp_path).last_step == 50


def test_a_damaged_line_before_the_last_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = usual(tmp_path) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    bad_load = json.dumps(moe_record(20) | {"load_by_layer": ["much"]})
    step_0 = json.dumps(train_record(0))
    for damage in ("{half", "[]", '{"kind": "train", "step": 20}', '{"kind": "other"}', bad_load, step_0):
        lines[2] = damage
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(InputError, match=r"metrics\.jsonl, line 3 is not a record"):
            read_run(tmp_path)


def test_of_two_records_of_a_step_the_later_counts(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [train_record(10), train_record(20, loss=3.0), train_record(20, loss=2.0)]))
    assert [(record.step, record.loss) for record in run.train][1:] == [(20, 2.0)]
    assert "<svg" in curves_svg(run)


def test_losses_that_are_not_finite_are_read_and_told(tmp_path: Path) -> None:
    records = [train_record(10), train_record(20, loss=float("nan")), train_record(30, loss=float("inf"))]
    told = headline(read_run(write_run(tmp_path, records)))
    assert (told.first_non_finite_step, told.train_loss) == (20, None)


def test_a_folder_that_does_not_exist_names_the_runs_beside_it(tmp_path: Path) -> None:
    usual(tmp_path / "first")
    with pytest.raises(InputError, match=r"no such folder; runs in .*: first"):
        read_run(tmp_path / "frist")


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a file; give the folder of a run"):
        read_run(usual(tmp_path) / "run.toml")


def test_a_foreign_folder_is_told_what_it_has_and_what_a_run_has(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").touch()
    usual(tmp_path / "run")
    message = r"has no metrics\.jsonl and no run\.toml; .*this one has notes\.txt, photos/, run/; runs inside it: run"
    with pytest.raises(InputError, match=message):
        read_run(tmp_path)
    with pytest.raises(InputError, match="nothing in it"):
        read_run(tmp_path / "photos")


def test_a_run_without_a_record_yet_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no logged step yet.*metrics\.every=10"):
        read_run(write_run(tmp_path, []))


def test_the_command_to_go_on_fits_the_run(tmp_path: Path) -> None:
    half = read_run(usual(tmp_path / "my run"))
    command = ["shardwright", "train", str(tmp_path / "my run" / "run.toml"), "--resume"]
    assert shlex.split(half.resume_command) == command
    done = read_run(write_run(tmp_path / "done", [evaluation(100, 3.0)]))
    assert done.resume_command.endswith("--resume --set steps=200")
    moved = (tmp_path / "done").rename(tmp_path / "moved")
    assert f"--set out={moved}" in read_run(moved).resume_command


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["layout.dp_shard=1"], "1 rank"),
        (["layout.dp_shard=2", "layout.zero=2"], "2 ranks with ZeRO-2"),
        (["layout.dp_shard=2", "layout.ep=2", "model.preset=debug-moe"], "2 ranks: ZeRO-3 over 2, ep 2"),
        (["layout.dp_shard=1", "layout.dp_replicate=4"], "4 ranks: 4 replicas of the model"),
        (["layout.dp_shard=2", "layout.dp_replicate=2"], "4 ranks: 2 replicas of ZeRO-3 over 2"),
    ],
)
def test_a_layout_is_said_in_words(tmp_path: Path, overrides: list[str], words: str) -> None:
    run = read_run(write_run(tmp_path, [evaluation(0, 6.0)], *overrides))
    assert layout_in_words(run.config.layout.layout()) == words


def test_a_preset_that_was_changed_is_not_passed_off_as_itself(tmp_path: Path) -> None:
    plain = read_run(write_run(tmp_path / "plain", [evaluation(0, 6.0)]))
    changed = read_run(write_run(tmp_path / "changed", [evaluation(0, 6.0)], "model.n_layers=2"))
    assert model_in_words(plain.config).startswith("debug, ")
    assert model_in_words(changed.config).startswith("Llama-style, ")


def test_a_mixture_of_experts_says_how_much_of_it_a_token_uses(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [evaluation(0, 6.0)], "model.preset=debug-moe"))
    assert model_in_words(run.config) == "debug-moe, 658K parameters, 253K active"


def test_reading_and_preparing_to_draw_import_neither_torch_nor_matplotlib() -> None:
    code = "import sys, shardwright.report.run_view; print({'torch', 'matplotlib', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_loss_is_shown_in_its_unit_and_next_to_the_loss_of_the_average_of_the_weights(tmp_path: Path) -> None:
    averaged = [{**evaluation(step, 5.0), "average_loss": 5.0 - 0.01 * step} for step in (20, 50)]
    records = [evaluation(0, 6.2), train_record(10), *averaged]
    run = read_run(write_run(tmp_path / "tokens", records))
    assert run.average_losses == [(20, 4.8), (50, 4.5)]
    told = headline(run)
    assert Fact("of the average", "4.5000", "validation loss of the average of the weights") in list(told.facts())
    assert "Loss, nats a token" in curves_svg(run)
    assert f"validation, average of the weights: {first_to_last([4.8, 4.5])}" in curves_svg(run)
    documents = ("data.attention=document", "data.positions=document")
    records[-1] |= {"accuracy": 0.75}
    pairs = read_run(write_run(tmp_path / "pairs", records, "preference.kind=dpo", *documents))
    assert "Loss, nats a pair" in curves_svg(pairs)
    assert headline(pairs).validation_perplexity is None
    (fact,) = (fact for fact in headline(pairs).facts() if fact.name == "validation loss")
    assert "the chosen answer leads in 75.0% of the pairs" in str(fact)
