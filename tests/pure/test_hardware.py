"""Devices, links, clusters: formulas by hand, presets with sources, files that are refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError
from megatron_lynx.hardware import Link, read_cluster
from megatron_lynx.presets import load_cluster, preset_names, read_toml

MEASURED = [name for name in preset_names("clusters") if name != "ascend-910b"]
TOY = load_cluster("toy")


def toy_file() -> dict[str, Any]:
    return read_toml("clusters", "toy")[0]


def test_the_named_clusters_exist() -> None:
    named = {"a100-40g-nvlink", "a100-40g-pcie", "a100-80g-nvlink", "h100-nvlink", "h200-nvlink", "toy"}
    named |= {"b200-nvlink", "gb200-nvl72"}
    assert named <= set(MEASURED)


@pytest.mark.parametrize("name", MEASURED)
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    if name == "toy":
        return
    data, _ = read_toml("clusters", name)
    sections = {"device": data["device"], "cluster": data["cluster"]}
    sections |= {f"links.{key}": table for key, table in data["links"].items()}
    sections |= {"host": data["host"]} if "host" in data else {}
    figures = {f"{s}.{key}" for s, table in sections.items() for key in table if key != "name"}
    assert figures == set(cluster.sources)
    assert all(cluster.sources.values())


def test_peak_rates_are_dense() -> None:
    rates = {name: load_cluster(name).device.flops_per_second // 10**12 for name in MEASURED}
    assert {rates[name] for name in rates if name.startswith("a100")} == {312}
    assert rates["h100-nvlink"] == rates["h200-nvlink"] == 989


@pytest.mark.parametrize(("sparse", "dense"), [(624, 312), (1979, 989)])
def test_a_sparse_peak_rate_is_refused(sparse: int, dense: int) -> None:
    data = toy_file()
    data["device"]["peak_tflops"] = sparse
    with pytest.raises(ConfigError, match=f"sparse.*{dense} works"):
        read_cluster(data, "mine.toml")


def test_a_device_that_its_user_must_measure_says_so() -> None:
    with pytest.raises(ConfigError, match=r"ascend-910b: device.peak_tflops .* measure it"):
        load_cluster("ascend-910b")


@pytest.mark.parametrize("link", ["node", "network"])
def test_a_missing_link_is_named(link: str) -> None:
    data = toy_file()
    del data["links"][link]
    with pytest.raises(ConfigError, match=rf"mine.toml has no link \[links.{link}\]; for example"):
        read_cluster(data, "mine.toml")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("device", "memory_gib", 0, "memory_gib 0"),
        ("device", "memory_gib", "40GiB", "'40GiB'"),
        ("device", "gemm_efficiency", 1.2, "gemm_efficiency 1.2"),
        ("device", "launch_us", -1, "launch_us -1"),
        ("cluster", "reserve_gib", 16, "takes all"),
        ("cluster", "gpus_per_node", True, "gpus_per_node True"),
    ],
)
def test_a_wrong_figure_is_named(section: str, key: str, value: Any, message: str) -> None:
    data = toy_file()
    data[section][key] = value
    with pytest.raises(ConfigError, match=message):
        read_cluster(data, "mine.toml")


def test_a_missing_figure_or_section_is_named() -> None:
    data = toy_file()
    del data["device"]["memory_gib"]
    with pytest.raises(ConfigError, match=r"device.memory_gib is missing; for example memory_gib = 80"):
        read_cluster(data, "mine.toml")
    with pytest.raises(ConfigError, match=r"no \[cluster\] section"):
        read_cluster({"device": data["device"], "links": data["links"]}, "mine.toml")
    data = toy_file()
    data["links"]["node"]["contention"] = 0.5
    with pytest.raises(ConfigError, match="contention is below 1"):
        read_cluster(data, "mine.toml")


def test_a_file_of_the_users_own_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n' + _dump(toy_file()), "utf-8")
    assert load_cluster(str(file)).name == "mine"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(str(tmp_path / "absent.toml"))
    file.write_text("not toml at all [", "utf-8")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_cluster(str(file))
    with pytest.raises(ConfigError, match="--cluster 'nothing' is unknown; one of a100-40g-nvlink"):
        load_cluster("nothing")


def _dump(data: dict[str, Any]) -> str:
    sections = {"device": data["device"], "cluster": data["cluster"]}
    sections |= {f"links.{key}": table for key, table in data["links"].items()}
    lines = []
    for name, table in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {value!r}" for key, value in table.items()]
    text = "\n".join(lines)
    assert tomllib.loads(text)["device"] == data["device"]
    return text


def test_roofline_by_hand() -> None:
    device = TOY.device  # 100 TFLOP/s, 1 TB/s, no losses
    assert device.compute_ns(10**12, 0) == 10 * 10**6
    assert device.compute_ns(0, 10**9) == 10**6
    assert device.compute_ns(10**12, 20 * 10**9) == 20 * 10**6


def test_collectives_by_hand() -> None:
    link = TOY.node  # 100 GB/s, no latency
    assert link.all_reduce_ns(10**9, 4) == 15 * 10**6  # 2 * 3/4 * 10 ms
    assert link.gather_ns(10**9, 4) == 7_500_000
    assert link.transfer_ns(10**9) == 10**7
    assert link.all_reduce_ns(10**9, 1) == 0


@given(st.integers(1, 10**11), st.integers(2, 64), st.integers(0, 10**6))
def test_a_gather_and_a_scatter_are_an_all_reduce(size: int, group: int, latency: int) -> None:
    link = Link(name="x", bytes_per_second=10**9, latency_ns=latency)
    pair = 2 * link.gather_ns(size, group)
    assert 0 <= pair - link.all_reduce_ns(size, group) <= latency + 1


def test_groups_use_the_link_they_span() -> None:
    assert TOY.tensor_link(8) is TOY.node
    assert TOY.tensor_link(16) is TOY.network
    assert TOY.pipeline_link(2, 1, 4) is TOY.node
    assert TOY.pipeline_link(4, 1, 4) is TOY.network
    assert TOY.data_link(4, 4) is TOY.network
