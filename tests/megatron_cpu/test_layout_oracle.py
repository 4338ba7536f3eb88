"""Our layout strings against Megatron-Core's own parser and checks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_lynx.errors import ConfigError
from megatron_lynx.partition.layout import Layout, parse_layout, parse_stages

_NAMES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}


def _ours(text: str) -> list[list[str]] | None:
    stages = parse_stages(text)
    if any(letter not in _NAMES for stage in stages for letter in stage):
        return None
    return [[_NAMES[letter] for letter in stage] for stage in stages]


def _theirs(text: str) -> list[list[str]] | None:
    try:
        stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        return None
    return [[layer.name for layer in stage] for stage in stages]


@settings(max_examples=3000)
@given(
    st.one_of(
        st.text("EtmL|,()*0123", max_size=24),
        st.lists(
            st.sampled_from(["E", "t", "L", "m", "|", ",", "t*3", "|*2", "(t|)*2", "(tt|t)*3", "(t*2|)*2"]),
            max_size=10,
        ).map("".join),
    )
)
def test_any_string_is_read_as_megatron_reads_it(text: str) -> None:
    assert _ours(text) == _theirs(text)


@settings(max_examples=500)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2), st.data())
def test_what_we_write_megatron_builds_as_written(pp: int, vpp: int, extra: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 5), min_size=pp * vpp, max_size=pp * vpp))
    layout = Layout.from_counts(counts, pp)
    stages = list(layout.stages)
    stages[-1] = stages[-1][:-1] + "m" * extra + "L"
    layout = Layout(pp=pp, stages=tuple(stages))
    theirs = PipelineParallelLayerLayout(str(layout), pp)
    assert PipelineParallelLayerLayout.get_num_stages_from_str(str(layout)) == pp * vpp
    theirs.validate_layer_layout(num_layers=sum(counts), mtp_num_layers=extra)
    for rank in range(pp):
        built = [[layer.name for layer in chunk] for chunk in theirs.layout[rank]]
        mine = [[_NAMES[letter] for letter in stages[chunk * pp + rank]] for chunk in range(vpp)]
        assert built == mine
    assert theirs.layout[0][0][0].name == "embedding"
    assert theirs.layout[-1][-1][-1].name == "loss"


@settings(max_examples=2000)
@given(
    st.integers(1, 4),
    st.lists(st.text("Etm L", max_size=4).map(lambda s: s.replace(" ", "")), min_size=1, max_size=8),
    st.booleans(),
)
def test_we_accept_only_what_megatron_accepts(pp: int, stages: list[str], whole: bool) -> None:
    """Ours is a subset: what passes only theirs is an embedding or a loss in the wrong place."""
    if whole:
        stages = ["E" + stages[0].replace("E", "").replace("L", ""), *stages[1:]]
        stages[-1] = stages[-1].replace("L", "") + "L"
    text = "|".join(stages)
    try:
        layout = parse_layout(text, pp)
    except ConfigError:
        layout = None
    try:
        theirs = PipelineParallelLayerLayout(text, pp)
        theirs.validate_layer_layout(text.count("t"), text.count("m"))
        accepted = True
    except (AssertionError, IndexError):
        accepted = False
    misplaced = not (stages[0].startswith("E") and stages[-1].endswith("L"))
    assert (layout is not None) == (accepted and not misplaced)


@pytest.mark.parametrize("layers", [0, 1, 5, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("vpp", [1, 3])
def test_layer_indices_are_megatrons(monkeypatch: pytest.MonkeyPatch, layers: int, pp: int, vpp: int) -> None:
    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: vpp if vpp > 1 else None
    )
    counts = [(layers * (stage + 1)) % 4 for stage in range(vpp * pp)]
    layout = Layout.from_counts(counts, pp)
    theirs = PipelineParallelLayerLayout(str(layout), pp)
    for rank in range(pp):
        for chunk, mine in enumerate(layout.chunks(rank)):
            assert list(mine) == theirs.get_layer_id_list(vp_stage=chunk, pp_rank=rank)
