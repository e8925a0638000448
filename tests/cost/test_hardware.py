"""Accelerators and clusters by name, from the packaged file and from a user's, and what is wrong with either."""

from pathlib import Path

import pytest

from shardwright.cost.hardware import accelerator, cluster
from shardwright.cost.hardware_file import packaged
from shardwright.system.errors import InputError
from shardwright.system.units import GiB

MINE = """
[accelerators.mine]
memory_gib = 64
memory_gb_per_s = 2000
memory_share = 0.9
multiprocessors = 100
tflops = { bf16 = 400 }
matmul_share = { bf16 = 0.8 }
node_size = 4
network = "slow"
gbit_per_s = 50
inside = { bus_gb_per_s = 200, start_us = 5, latency_us = 2, half_mib = 4 }

[networks.slow]
share = 0.5
start_us = 10
latency_us = 20
half_mib = 1

[clusters.hall]
accelerator = "H100"
node_size = 8
network = "slow"
gbit_per_s_per_node = 800
"""


def test_a_cluster_is_a_name_and_a_number():
    found = cluster("h100:64")
    assert (found.size, found.node_size, found.nodes) == (64, 8, 8)
    assert found.accelerator.flops_per_s["bf16"] == 989e12
    assert found.node_bytes_per_s == 8 * 400e9 / 8
    assert found.across.bytes_per_s == pytest.approx(0.94 * 50e9)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "h100"),
        ("H100-SXM-80GB", "h100"),
        ("h100_80gb", "h100"),
        ("A100", "a100-80gb"),
        ("a100_80gb", "a100-80gb"),
        ("A100-80GB-SXM", "a100-80gb"),
        ("a100_40gb", "a100-40gb"),
        ("H100-96GB-HBM2e 500W (Grand Teton)", "h100-96gb"),
        ("H200-141GB-SXM", "h200"),
        ("B200-180GB", "b200"),
        ("GB200 NVL72", "gb200"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A800", "a800"),
        ("l40s", "l40s"),
    ],
)
def test_names_are_taken_as_people_type_them(typed: str, name: str):
    assert accelerator(typed).name == name
    assert cluster(f"{typed}:72").accelerator.name == name


def test_no_two_tables_answer_to_one_name():
    answers = [
        {"".join(filter(str.isalnum, spelled.lower())) for spelled in (name, *table.aliases)}
        for name, table in (*packaged().accelerators.items(), *packaged().clusters.items())
    ]
    assert len(set().union(*answers)) == sum(map(len, answers))


def test_every_packaged_figure_says_where_it_stands():
    told_apart = {"aliases", "inside", "sources", "accelerator"}
    file = packaged()
    for tables in (file.networks, file.accelerators, file.clusters):
        for name, table in tables.items():
            figures = {key for key, value in table.model_dump().items() if key not in told_apart and value is not None}
            if name in file.accelerators:
                figures |= {k for k, v in file.accelerators[name].inside.model_dump().items() if v is not None}
            assert table.sources.keys() == figures, name


def test_memory_is_what_a_program_can_have_and_not_what_is_sold():
    for name, sold_gb in (("h100", 80), ("h200", 141), ("b200", 192), ("l40s", 48)):
        assert 0.9 * sold_gb * GiB < accelerator(name).memory_bytes < sold_gb * GiB


def test_another_node_size_keeps_the_network_of_each_accelerator():
    usual, small = cluster("h100:64"), cluster("h100:64/4")
    assert (small.node_size, small.nodes) == (4, 16)
    assert small.across.bytes_per_s == usual.across.bytes_per_s
    assert small.node_bytes_per_s == usual.node_bytes_per_s / 2


def test_a_part_of_a_node_has_an_equal_part_of_the_memory_of_its_host():
    assert cluster("dgx-a100:16").host_memory_bytes == 2048 * GiB
    assert cluster("p4d:8").host_memory_bytes == 1152 * GiB
    assert cluster("h100:2").host_memory_bytes == cluster("h100:64/2").host_memory_bytes == 512 * GiB
    assert cluster("selene:8").host_memory_bytes == cluster("rtx4090:8").host_memory_bytes == 0
    assert cluster("h100:2").with_host_memory("1TiB").host_memory_bytes == 1024 * GiB


def test_a_network_is_given_for_a_node_and_shared_by_its_accelerators():
    found = cluster("a100-80gb:512@800Gb")
    assert found.node_bytes_per_s == 100e9
    assert found.across.bytes_per_s == pytest.approx(0.94 * 100e9 / 8)
    assert cluster("a100:512 @ 800 Gbit/s").across == found.across
    assert cluster("h100:64/4@800").across.bytes_per_s == pytest.approx(0.94 * 100e9 / 4)


@pytest.mark.parametrize(("count", "domains"), [(4, 1), (8, 1), (64, 1), (72, 1), (128, 2), (144, 2), (512, 8)])
def test_a_rack_of_72_is_one_domain_of_nvlink_of_which_a_run_fills_as_few_as_hold_it(count: int, domains: int):
    found = cluster(f"gb200:{count}")
    assert (found.nodes, found.node_size) == (domains, count // domains)


@pytest.mark.parametrize("text", ["h100:2", "h100:2/2"])
def test_fewer_accelerators_than_a_usual_node_has_are_a_part_of_one_node(text: str):
    found = cluster(text)
    assert (found.size, found.node_size, found.nodes) == (2, 2, 1)
    assert found.across == cluster("h100:64").across


@pytest.mark.parametrize(
    ("part", "whole"), [("h100:4", "h100:8"), ("dgx-h100:4", "dgx-h100:8"), ("dgx-h100:8/4", "dgx-h100:8")]
)
def test_a_part_of_a_node_with_switches_has_its_switches(part: str, whole: str):
    one, other = cluster(part).inside, cluster(whole).inside
    assert (one.switch_bytes_per_s, one.peer_bytes_per_s) == (other.switch_bytes_per_s, other.peer_bytes_per_s)
    assert cluster("h100:4/4").inside.peer_bytes_per_s > 0 == one.peer_bytes_per_s


def test_a_named_cluster_has_its_own_network():
    selene, cloud = cluster("selene:2240"), cluster("p4d:16")
    assert (selene.accelerator.name, selene.node_bytes_per_s) == ("a100-80gb", 200e9)
    assert (cloud.across.name, cloud.node_bytes_per_s) == ("efa", 50e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100:8,a100:8", "clusters of several kinds are not supported"),
        ("h100:8 + a100:8", "clusters of several kinds are not supported"),
        ("h100", "write NAME:COUNT"),
        ("h100:many", "write NAME:COUNT"),
        ("h100:0", "1 to 1,000,000 accelerators, and a node 1 or more"),
        ("h100:8@0Gb", "0 Gbit/s a node; valid: more than 0"),
        ("h100:8/0", "1 to 1,000,000 accelerators, and a node 1 or more"),
        ("h100:12", "12 = 8*1 + 4); nearest: 8 and 16"),
        ("h100:64/3", "64 = 3*21 + 1); nearest: 63 and 66"),
        ("h10:8", "did you mean 'h100'?"),
        ("abacus:8", "valid: a100-40gb, a100-80gb"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_with_what_could(text: str, said: str):
    with pytest.raises(InputError) as error:
        cluster(text)
    assert said in str(error.value)
    assert text in str(error.value) or text.split(":")[0] in str(error.value)


def test_a_file_adds_accelerators_networks_and_clusters(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    mine, hall = cluster("mine:8", extra=path), cluster("hall:16", extra=path)
    assert (mine.node_size, mine.nodes, mine.accelerator.memory_bytes) == (4, 2, 64 * GiB)
    assert mine.across.bytes_per_s == 0.5 * 50e9 / 8
    assert mine.inside.latency_s == pytest.approx(2e-6)
    assert (hall.accelerator.name, hall.across.bytes_per_s) == ("h100", pytest.approx(0.5 * 12.5e9))
    assert accelerator("h100", extra=path) == accelerator("h100")


def test_a_file_can_say_anew_what_is_packaged(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace("accelerators.mine", "accelerators.h100"))
    assert accelerator("h100", extra=path).memory_bytes == 64 * GiB
    assert cluster("hall:16", extra=path).accelerator.memory_bytes == 64 * GiB


def test_everything_wrong_with_a_file_is_said_at_once(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        MINE.replace("memory_gib = 64", "memory_gb = 64")
        .replace("memory_gb_per_s = 2000", "memory_gb_per_s = -1")
        .replace("multiprocessors = 100", 'multiprocessors = "many"')
        .replace("start_us = 5, ", "start_s = 5, ")
        .replace("share = 0.5", "share = 1.5")
        .replace("bf16 = 400", "bf15 = 400")
        + "\n[cluster.hall]\nnode_size = 8\n"
    )
    with pytest.raises(InputError) as error:
        cluster("mine:8", extra=path)
    said = error.value.problems
    assert all(problem.startswith(f"{path}: ") for problem in said)
    for expected in (
        "accelerators.mine.memory_gb: there is no such key; did you mean 'memory_gib'?",
        "accelerators.mine.memory_gib: missing, and there is no default; it is: GiB that a program can have",
        "accelerators.mine.memory_gb_per_s=-1",
        "accelerators.mine.multiprocessors='many'",
        "accelerators.mine.inside.start_s: there is no such key; did you mean 'start_us'?",
        "accelerators.mine.inside.start_us: missing",
        "networks.slow.share=1.5",
        "accelerators.mine.tflops.bf15",
        "cluster: there is no such key; did you mean 'clusters'?",
    ):
        assert any(expected in problem for problem in said), (expected, said)


def test_names_between_tables_are_checked_too(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        MINE.replace('network = "slow"\ngbit_per_s =', 'network = "infinband"\ngbit_per_s =')
        .replace('"H100"', '"H1000"')
        .replace("matmul_share = { bf16", "matmul_share = { fp16")
    )
    with pytest.raises(InputError) as error:
        cluster("mine:8", extra=path)
    assert len(error.value.problems) == 4
    assert "network='infinband': no such network; did you mean 'infiniband'?" in str(error.value)
    assert "clusters.hall.accelerator: accelerator 'H1000' is not known; did you mean 'h100'?" in str(error.value)
    assert "bf16 stands in tflops and not in matmul_share" in str(error.value)


@pytest.mark.parametrize(("text", "said"), [(None, "cannot be read"), ("a = ", "not valid TOML")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, said: str):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said) as error:
        cluster("h100:8", extra=path)
    assert str(path) in str(error.value)


def test_another_kind_of_network_keeps_the_line_rate():
    usual = cluster("a100:512")
    other = usual.on("roce")
    assert (usual.across.name, other.across.name) == ("infiniband", "roce")
    assert (other.inside, other.node_bytes_per_s) == (usual.inside, usual.node_bytes_per_s)
    assert other.across.bytes_per_s == pytest.approx(usual.across.bytes_per_s * 0.82 / 0.94)
