"""torch's attention is cut where ranks can share its heads, and all of it is torch's."""

from torch import nn

from nbdist.engine.layout.axes.tp.multihead import cut_of


def test_projections_are_cut_by_heads_and_the_outputs_bias_is_whole() -> None:
    cut = cut_of("a", nn.MultiheadAttention(8, 2), 2)
    assert cut is not None
    dims = {name: (own.dim, own.sizes) for name, own in cut.own.items()}
    assert dims == {
        "in_proj_weight": (0, (8, 8, 8)),
        "in_proj_bias": (0, (8, 8, 8)),
        "out_proj.weight": (1, (8,)),
    }


def test_heads_that_ranks_cannot_share_stay_whole() -> None:
    assert cut_of("a", nn.MultiheadAttention(8, 2), 4) is None


def test_an_attention_with_another_projection_in_it_stays_whole() -> None:
    attention = nn.MultiheadAttention(8, 2)
    nn.utils.parametrizations.weight_norm(attention.out_proj)
    assert cut_of("a", attention, 2) is None


def test_a_class_derived_from_torchs_stays_whole() -> None:
    class Own(nn.MultiheadAttention):
        pass

    assert cut_of("a", Own(8, 2), 2) is None
