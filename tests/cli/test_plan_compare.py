"""Proves that `shardwright plan --compare` searches on each cluster, and that links and networks can be others."""

import pytest

from tests.cli.test_plan import document, plan

JOB = ("--model", "llama-3.2-1b", "--cluster", "h100:16", "--global-batch", 64, "--seq-len", 2048, "--fix", "tp=8,pp=1")


def test_each_cluster_has_its_line_with_its_recommended_layout():
    asked = (*JOB, "--compare", "link=h100-pcie", "--compare", "network=ethernet", "--compare", "h200:16")
    compared = document(*asked)["compared"]
    names = ["h100:16", "h100:16, link=h100-pcie", "h100:16, network=ethernet", "h200:16"]
    assert [each["cluster"] for each in compared] == names
    steps = [each["recommended"]["step_s"] for each in compared]
    assert steps[3] <= steps[0] < min(steps[1:3])
    assert all(each["recommended"]["layout"]["tp"] == 8 for each in compared)
    result = plan(*asked)
    assert result.exit_code == 0, result.output
    for name in names:
        assert name in result.output


def test_clusters_are_ranked_by_the_time_and_by_the_cost_of_the_whole_run():
    asked = (*JOB, "--compare", "h200:16", "--budget-tokens", "1e12", "--price", "2.5", "--price", "h200=3.5")
    h100, h200 = (each["recommended"]["whole_run"] for each in document(*asked)["compared"])
    assert h100["cost"] == pytest.approx(2.5 * 24 * 16 * h100["days"])
    assert h200["cost"] == pytest.approx(3.5 * 24 * 16 * h200["days"])
    lines = plan(*asked).output.splitlines()
    assert f"by time: h200:16 {h200['days']:.1f} days, h100:16 {h100['days']:.1f} days" in lines
    assert f"by cost: h100:16 {h100['cost']:,.0f}, h200:16 {h200['cost']:,.0f}" in lines
    assert "by cost: no price for h100:16" in plan(*asked[:-4], "--price", "h200=3.5").output


def test_links_and_networks_are_those_of_the_options_without_a_comparison_too():
    plain, slow = document(*JOB), document(*JOB, "--link", "h100-pcie", "--network", "ethernet")
    assert slow["cluster"] == "h100:16, link=h100-pcie, network=ethernet"
    assert slow["best"][0]["step_s"] > plain["best"][0]["step_s"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--compare", "link=h101"), "--compare --link h101: name an accelerator that has the link"),
        (("--compare", "wire=h100"), "--compare wire=h100: there is no wire to change; "),
        (("--compare", "h200:12"), "--compare cluster 'h200:12': 12 accelerators do not fill nodes of 8"),
        (("--compare", "a100:16", "--precision", "fp8"), "--compare a100:16: --precision fp8: the peak of a100"),
        (("--network", "infinband"), "network 'infinband' is not known; did you mean 'infiniband'"),
        (
            ("--compare", "h200:16", "--explain", "tp=8"),
            "a line for each cluster; leave out --explain",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(options: tuple[str, ...], told: str):
    result = plan(*JOB, *options, columns=400)
    assert result.exit_code == 2
    assert told in result.output


def test_a_cluster_whose_layout_cannot_run_a_stage_is_a_row_with_the_reason():
    stages = ("--budget-tokens", "1e10", "--batch-stages", "0:2,1e9:64")
    compared = document(*JOB, "--compare", "h100:64", *stages)["compared"]
    first, second = (each["recommended"] for each in compared)
    assert first["days"] > 0
    assert second["days"] is None
    assert "batch.global_batch=2 is not a multiple of" in second["stage_problem"]
    result = plan(*JOB, "--compare", "h100:64", *stages, columns=400)
    assert result.exit_code == 0, result.output
    assert "not the whole run: the stage of 2 sequences of 2,048 tokens on" in result.output
