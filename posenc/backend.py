"""Everything in the core that a backend needs to implement attention.

A backend is a package that computes attention in one framework. From posenc it imports only
``posenc``, this module, ``posenc.testing`` (for its ``Framework``), ``posenc.study`` (for its
``Trainer``), and what every user may: ``posenc.schemes``, ``posenc.positions``, ``posenc.presets``,
``posenc.hf``. Anything else in posenc may change without notice.

=====================  ===========================================================================
a call                 ``prepare`` makes a ``Call`` with two ``Tokens`` and a ``Mask``, and may warn
                       (``may_warn``)
implementations        ``Implementation``, which makes a ``Planned`` or a ``Refusal`` of a call;
                       ``choose``, ``explain_choice``
the bias               dense (``Call.bias``), on a tile (``bias_tile``; ``dense_bias``, with tables
                       by distance), or in a cheaper form: ``bias_by_distance``, ``bias_by_key``;
                       ``fold_key_bias`` widens q and k; ``near_diagonals``: tiles on which a bias
                       by distance is not constant
the mask               of positions (``visible``), of a call or tile (``visible_pairs``), of blocks
                       (``visible_blocks``)
whole rows             ``of_queries``: a call of some queries, for a scheme that adjusts rows of
                       scores (``adjusts_rows``); ``queries_of``
decay of channels      ``ChannelDecay``: anchored products of a tile; ``has_channel_decay``
padding                ``NO_KEY``, ``NO_QUERY``: the segments of queries and of keys that are none
fully masked rows      ``may_be_fully_masked``, ``zero_fully_masked``
negligible keys        ``negligible_blocks``, ``Bounds``, ``entry_margin``, ``max_score``: their
                       weights round to nothing
params                 ``as_mapping``, ``merge_constants``, ``head_views``, ``tile_views``,
                       ``without_prefix``
tables of tokens       ``ReadTable``: how a backend reads them; ``broadcast_index``
operations             ``provide``, ``Operations``: what a framework does better than the Array API;
                       ``is_exporting``
layers of a model      ``LayerPlan``, ``add_embedding``, ``check_layer``
arguments              ``check_*``, ``as_positions``, ``advise_unknown``
=====================  ===========================================================================
"""

from posenc.apply.bias import bias_at_distances, bias_tile, dense_bias, has_bias, scheme_bias
from posenc.apply.embed import embedding, has_embedding
from posenc.apply.feature_needs import (
    has_features,
    lookback,
    reads_features,
    reads_hidden,
    reads_vectors,
    summed_features,
)
from posenc.apply.shapes import as_column, as_row
from posenc.attn.arguments import (
    NO_KEY,
    NO_QUERY,
    Arguments,
    check_pair,
    check_shapes,
    complete_sides,
)
from posenc.attn.bias_forms import (
    bias_by_distance,
    bias_by_key,
    has_bias_by_distance,
    has_bias_by_key,
    near_diagonals,
    visible_by_distance,
)
from posenc.attn.blocks import Range, block_ranges, visible_between, visible_blocks
from posenc.attn.bound import (
    LayerFacts,
    PassState,
    arguments_of_pass,
    needs_own_hidden,
    tokens_to_embed,
    transformed_keys,
    with_hidden,
)
from posenc.attn.call import Call, visible_pairs, visible_tokens
from posenc.attn.channel_decay import ChannelDecay, has_channel_decay
from posenc.attn.embedding_only import attention_part
from posenc.attn.folded import fold_key_bias, folded_width, why_not_foldable
from posenc.attn.fully_masked import (
    may_be_fully_masked,
    zero_fully_masked,
    zero_unless,
)
from posenc.attn.implementations import (
    Explanation,
    Implementation,
    Planned,
    Refusal,
    check_implementation,
    choose,
    explain_choice,
    plan_unless,
)
from posenc.attn.keywords import advise_unknown
from posenc.attn.masks import Blocks, Mask, complete_mask, is_function
from posenc.attn.merge import (
    LogSumExp,
    PartialAttention,
    add_sink,
    append_sink_key,
    merge_parts,
    public_lse,
)
from posenc.attn.negligible import (
    Bounds,
    entry_margin,
    max_score,
    may_have_negligible_blocks,
    negligible_blocks,
)
from posenc.attn.prepare import may_warn, prepare
from posenc.attn.reference import dense, two_channels
from posenc.attn.rows import adjusts_rows, of_queries, queries_of
from posenc.attn.shared import Made, Shared
from posenc.contract.checks import (
    check_choice,
    check_count,
    check_finite,
    check_flag,
    check_positive,
    check_scale,
    check_scheme,
    check_softcap,
    check_window,
    nearest,
)
from posenc.contract.fields import check_equality
from posenc.contract.operations import Operations, check_library, is_exporting, provide
from posenc.contract.params import (
    Features,
    Params,
    as_mapping,
    head_views,
    merge_constants,
    tile_views,
    without_prefix,
    working_dtype,
)
from posenc.contract.protocol import Hook, PositionScheme, SchemeWarning
from posenc.contract.specs import FeatureSpec, Namespace, Role, Window
from posenc.contract.tables import ReadTable, broadcast_index
from posenc.contract.tokens import Tokens
from posenc.layers import LayerPlan, add_embedding, check_layer
from posenc.positions.integers import (
    as_integers,
    as_positions,
    check_range,
    concrete_values,
    visible,
)

__all__ = [
    "NO_KEY",
    "NO_QUERY",
    "Arguments",
    "Blocks",
    "Bounds",
    "Call",
    "ChannelDecay",
    "Explanation",
    "FeatureSpec",
    "Features",
    "Hook",
    "Implementation",
    "LayerFacts",
    "LayerPlan",
    "LogSumExp",
    "Made",
    "Mask",
    "Namespace",
    "Operations",
    "Params",
    "PartialAttention",
    "PassState",
    "Planned",
    "PositionScheme",
    "Range",
    "ReadTable",
    "Refusal",
    "Role",
    "SchemeWarning",
    "Shared",
    "Tokens",
    "Window",
    "add_embedding",
    "add_sink",
    "adjusts_rows",
    "advise_unknown",
    "append_sink_key",
    "arguments_of_pass",
    "as_column",
    "as_integers",
    "as_mapping",
    "as_positions",
    "as_row",
    "attention_part",
    "bias_at_distances",
    "bias_by_distance",
    "bias_by_key",
    "bias_tile",
    "block_ranges",
    "broadcast_index",
    "check_choice",
    "check_count",
    "check_equality",
    "check_finite",
    "check_flag",
    "check_implementation",
    "check_layer",
    "check_library",
    "check_pair",
    "check_positive",
    "check_range",
    "check_scale",
    "check_scheme",
    "check_shapes",
    "check_softcap",
    "check_window",
    "choose",
    "complete_mask",
    "complete_sides",
    "concrete_values",
    "dense",
    "dense_bias",
    "embedding",
    "entry_margin",
    "explain_choice",
    "fold_key_bias",
    "folded_width",
    "has_bias",
    "has_bias_by_distance",
    "has_bias_by_key",
    "has_channel_decay",
    "has_embedding",
    "has_features",
    "head_views",
    "is_exporting",
    "is_function",
    "lookback",
    "max_score",
    "may_be_fully_masked",
    "may_have_negligible_blocks",
    "may_warn",
    "merge_constants",
    "merge_parts",
    "near_diagonals",
    "nearest",
    "needs_own_hidden",
    "negligible_blocks",
    "of_queries",
    "plan_unless",
    "prepare",
    "provide",
    "public_lse",
    "queries_of",
    "reads_features",
    "reads_hidden",
    "reads_vectors",
    "scheme_bias",
    "summed_features",
    "tile_views",
    "tokens_to_embed",
    "transformed_keys",
    "two_channels",
    "visible",
    "visible_between",
    "visible_blocks",
    "visible_by_distance",
    "visible_pairs",
    "visible_tokens",
    "why_not_foldable",
    "with_hidden",
    "without_prefix",
    "working_dtype",
    "zero_fully_masked",
    "zero_unless",
]
