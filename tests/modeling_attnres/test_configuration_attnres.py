"""The config fields: what they imply, and that a mistake is reported where it is made."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st

from modeling_attnres import AttnResLlamaConfig
from tests.families import LAYOUTS, TABLE, Family
from tests.oracle import first_sublayers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_res_mode": "blocks"}, "'block', 'full', 'none'"),
        ({"attn_res_block_size": 0}, "at least 1 decoder layer, got 0"),
        ({"attn_res_block_size": -3}, "at least 1 decoder layer, got -3"),
        ({"attn_res_block_size": "4"}, "attn_res_block_size"),
        ({"attn_res_block_size": 2, "attn_res_block_boundaries": [0, 2]}, "both given"),
        ({"attn_res_block_boundaries": [1, 2]}, "start at decoder layer 0"),
        ({"attn_res_block_boundaries": []}, "start at decoder layer 0"),
        ({"attn_res_block_boundaries": [0, 3, 3]}, "must increase"),
        ({"attn_res_block_boundaries": [0, 3, 2]}, "must increase"),
        ({"attn_res_block_boundaries": [0, 6]}, r"0 to 5\), got \[0, 6\]"),
        ({"attn_res_scale_norm_eps": "yes"}, "attn_res_scale_norm_eps"),
        *(
            ({"attn_res_block_boundaries": wrong}, "attn_res_block_boundaries")
            for wrong in ([0, float("nan")], [0, 2.0], [False, True], ["0"], [0, [1]], "02", {0: 1})
        ),
        *(
            ({field: wrong}, field)
            for field in ("attn_res_mode", "attn_res_block_size", "attn_res_scale_norm_eps")
            for wrong in ([], {}, 2.5)
        ),
        ({"attn_res_num_blocks": 3}, "attn_res_num_blocks is no field of .*; it has attn_res_block_boundaries, "),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be at least 1, got -3"),
    ],
)
def test_wrong_fields_are_refused(family: Family, fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        family.config(**fields)


@pytest.mark.parametrize("wrong", [[], {}, None, 3, "fast"])
def test_a_reader_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="attn_res_implementation must be one of 'auto', 'eager'"):
        AttnResLlamaConfig(attn_res_implementation=wrong)


@pytest.mark.parametrize("family", TABLE.values(), ids=TABLE.keys())
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1e-6])
def test_a_norm_whose_eps_is_none_is_refused(family: Family, wrong):
    """By whatever name the family has it."""
    names = [name for name in vars(family.config()) if "eps" in name and not name.startswith("attn_res")]
    for name in names:
        with pytest.raises(StrictDataclassError, match=f"{name} must be finite and not negative, got {wrong}"):
            family.config(**{name: wrong})


def test_a_config_costs_nothing_of_its_layers():
    for mode in ("block", "full", "none"):
        AttnResLlamaConfig(num_hidden_layers=10**9, attn_res_mode=mode, attn_res_block_boundaries=[0, 10**8])


def test_fields_set_later_are_checked_before_a_model_is_built(family: Family):
    config = family.config()
    config.attn_res_block_boundaries = [0, 9]
    with pytest.raises(ValueError, match="within the 6 decoder layers"):
        family.ours("Model")(config)


def test_round_trip(family: Family, layout, tmp_path):
    config = family.config(**layout, attn_res_scale_norm_eps=True)
    config.save_pretrained(tmp_path)
    assert family.ours("Config").from_pretrained(tmp_path).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("layers", "starts"), [(30, range(0, 30, 4)), (27, range(0, 27, 4)), (8, range(8)), (3, range(3))]
)
def test_default_is_about_eight_blocks(layers, starts):
    assert AttnResLlamaConfig(num_hidden_layers=layers).attn_res_layout.starts == tuple(starts)


@given(layers=st.integers(1, 60), size=st.integers(1, 70), full=st.booleans())
def test_number_of_sources_follows_from_the_definition(layers, size, full):
    config = AttnResLlamaConfig(
        num_hidden_layers=layers, attn_res_block_size=size, attn_res_mode="full" if full else "block"
    )
    opening, closed, running = first_sublayers(config), 0, 1  # the embedding waits to be closed
    for site in range(2 * layers + 1):
        if site in opening:
            closed, running = closed + 1, 0
        assert config.attn_res_layout.num_sources(site) == closed + running
        running = 1


@given(layers=st.integers(1, 20), size=st.integers(1, 22), full=st.booleans())
def test_sources_of_every_site_follow_from_the_definition(layers, size, full):
    """Each source is a run of sublayer outputs; together they are the embedding and all outputs before the site."""
    config = AttnResLlamaConfig(
        num_hidden_layers=layers, attn_res_block_size=size, attn_res_mode="full" if full else "block"
    )
    layout, opening = config.attn_res_layout, first_sublayers(config)
    sources = []
    for site in range(layout.num_sites):
        if site == 0 or site - 1 in opening:  # the embedding, or the output of a sublayer that opened a block
            sources.append([])
        sources[-1].append(site)
        assert [list(summed) for summed in layout.sources_of(site)] == sources
        assert len(sources) == layout.num_sources(site)
        ends = [later for later in opening if later > site and later % 2 == 0]
        assert layout.end_of_block(site) == min(ends, default=layout.num_sites)


def test_another_family_is_refused_by_name(family: Family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type is 'gpt2'"):
        family.ours("Config").from_pretrained(tmp_path)


def test_layouts_cover_what_they_claim():
    starts = {
        name: AttnResLlamaConfig(num_hidden_layers=6, **fields).attn_res_layout.starts
        for name, fields in LAYOUTS.items()
    }
    assert starts == {
        "block": (0, 1, 2, 3, 4, 5),
        "full": (0, 1, 2, 3, 4, 5),
        "blocks of 4, not dividing": (0, 4),
        "uneven blocks": (0, 1, 4),
        "one block": (0,),
        "more than fit": (0,),
    }
