"""Layout strings: written, read back, and refused where Megatron would refuse or misplace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError
from megatron_lynx.partition.layout import Layout, chunks_of, parse_layout, parse_stages


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout that can be built: empty stages, empty ends, prediction layers."""
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 9), min_size=pp * vpp, max_size=pp * vpp))
    stages = ["t" * count for count in counts]
    extra = draw(st.integers(0, 2))
    filled = [number for number, stage in enumerate(stages) if stage]
    home = draw(st.integers(max([*filled, pp * (vpp - 1)]), pp * vpp - 1))
    stages[home] += "m" * extra
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return Layout(pp=pp, stages=tuple(stages))


@given(layouts())
def test_written_layouts_read_back(layout: Layout) -> None:
    assert parse_layout(str(layout), layout.pp) == layout


@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_counts_make_a_layout_with_contiguous_layers(pp: int, vpp: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 12), min_size=pp * vpp, max_size=pp * vpp))
    layout = Layout.from_counts(counts, pp)
    assert layout.counts == tuple(counts)
    assert layout.vpp == vpp
    by_stage = [layout.chunks(rank)[chunk] for chunk in range(vpp) for rank in range(pp)]
    assert [layer for stage in by_stage for layer in stage] == list(range(sum(counts)))
    assert parse_layout(str(layout), pp) == layout


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|t*4L", ("Ettt", "ttttL")),
        ("E|(t|)*3L", ("E", "t", "t", "t", "L")),
        ("Et|t|t|tL", ("Et", "t", "t", "tL")),
        ("Ettt|(tt|)*3,m|L", ("Ettt", "tt", "tt", "tt", "m", "L")),
        ("E,t,t|,tL", ("Ett", "tL")),
        ("Et|*3tL", ("Et", "", "", "tL")),
        ("(Et|)*1(t*2|)*2L", ("Et", "tt", "tt", "L")),
        ("Et(t|t)*2L", ("Ett", "tt", "tL")),
        ("Et*0|tL", ("E", "tL")),
        ("E(t)*2*3|L", ("Etttt", "L")),
    ],
)
def test_syntax(text: str, stages: tuple[str, ...]) -> None:
    assert parse_stages(text) == stages


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(pp=2, stages=("Et", "tL")), "Et|tL"),
        (Layout(pp=2, stages=("Etttt", "tttL")), "Et*4|tttL"),
        (Layout.from_counts([3, 4, 4, 4, 4, 4, 4, 2], 8), "Ettt|(t*4|)*6ttL"),
        (Layout(pp=4, stages=("E", "", "", "L")), "E|||L"),
        (Layout(pp=1, stages=("EttL",)), "EttL"),
    ],
)
def test_what_is_written(layout: Layout, text: str) -> None:
    assert str(layout) == text


@pytest.mark.parametrize(
    ("text", "pp", "says"),
    [
        ("|Et|tL", 3, "first stage must begin with E"),
        ("t|EtL", 2, "first stage must begin with E"),
        ("EtE|tL", 2, "first stage must begin with E"),
        ("Et|tL|", 3, "last stage must end with L"),
        ("EtL|t", 2, "last stage must end with L"),
        ("Et|tLL", 2, "last stage must end with L"),
        ("Et|tL", 3, "does not divide"),
        ("Et t|tL", 2, "none of E"),
        ("Et((t|)*2)*2L", 2, "none of E"),
        ("Et*2*3|L", 2, "none of E"),
        ("(t|L", 2, "none of E"),
        ("Emt|tL", 2, "m must come after every t"),
        ("Et|m|m|L", 4, "one stage of the last"),
        ("Et|t|m|L|", 5, "L"),
        ("Et|mL|t|L", 2, "L"),
        ("Et*999999999|L", 2, "makes more than"),
        ("", 1, "must begin with E"),
    ],
)
def test_refused(text: str, pp: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text, pp)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_number_of_layers_names_both() -> None:
    layout = parse_layout("Et*3|t*4L", 2)
    layout.check_num_layers(7)
    with pytest.raises(ConfigError) as caught:
        layout.check_num_layers(8)
    assert "has 7 layers" in str(caught.value)
    assert "--num-layers is 8" in str(caught.value)


def test_chunks_are_ordered_chunk_by_chunk() -> None:
    assert chunks_of([1, 2, 3, 1], 2, 0) == ((0,), (3, 4, 5))
    assert chunks_of([1, 2, 3, 1], 2, 1) == ((1, 2), (6,))
