"""Inkling's bias: by hand, and the attention of both models as transformers computes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sample import long

import posenc
from posenc.schemes import Inkling, LogScale, Sink, Sum
from posenc.testing import assert_near
from posenc.testing.tolerances import ATTENTION_TOL, rounding_bound

HEADS, KEY_HEADS, DIM, WIDTH, LENGTH, EXTENT = 4, 2, 8, 16, 24, 10
W = np.asarray([[[1.0, -2.0], [0.5, 3.0]], [[0.0, 1.0], [4.0, 0.0]]])  # H, rank, C
P = np.asarray([[0.125, 0.5, -0.25], [-0.0625, 0.25, 0.375]])
X = np.asarray([[[2.0, 1.0], [0.0, -1.0], [3.0, 0.5], [1.0, 1.0], [-2.0, 4.0]]])


def table(scheme, x=X):
    """The bias of the last query, at 5, toward keys at 0 .. 7."""
    params = {"w": W, "p": P}
    query, _ = posenc.features(scheme, params, posenc.Tokens(x=x))
    last = query[-1:].features
    q, k, v = (np.zeros((1, 2, n, 4)) for n in (1, 8, 8))
    v = np.broadcast_to(np.eye(8), (1, 2, 8, 8))
    weights = posenc.attention(
        q, k, v, scheme, params,
        tokens=posenc.Tokens(pos=np.arange(8), features={}),
        queries=posenc.Tokens(pos=np.asarray([5]), features=last),
    )  # fmt: skip
    return weights[0, :, 0]


def weights_of(r):
    """Softmax of ``r . P[:, 5 - j]`` at keys 5, 4 and 3, of 0 at the others."""
    bias = np.zeros((2, 8))
    bias[:, [5, 4, 3]] = r @ P
    return np.exp(bias) / np.sum(np.exp(bias), axis=-1, keepdims=True)


def test_the_bias_is_that_of_the_formula():
    r = np.asarray([[-2 - 8, -1 + 12], [4.0, -8.0]])  # w x for x = (-2, 4)
    bound = rounding_bound(16, 8, "float64")  # scores below 8, sums of 8 terms
    assert_near(table(Inkling(2, 2, rank=2, extent=3)), weights_of(r), bound)
    # A length of 0.5 instead of sqrt(221) and sqrt(80).
    short = r * 0.5 / np.sqrt([[221], [80]])
    clipped = Inkling(2, 2, rank=2, extent=3, version=2, clip=0.5)
    assert_near(table(clipped), weights_of(short), bound)
    still = Inkling(2, 2, rank=2, extent=3, version=2, clip=15)
    assert_near(table(still), weights_of(r), bound)


def test_scores_are_divided_by_the_head_dim_in_version_1_and_by_its_root_in_version_2():
    assert Inkling(2, 2).scale(64) == 1 / 64
    assert Inkling(2, 2, version=2).scale(64) == 1 / 8


def test_sizes_and_first_values():
    scheme = posenc.make("inkling", num_heads=3, head_dim=8)
    assert scheme == Inkling(3, 24, rank=16, extent=1024, version=1)
    first = posenc.init_params(scheme)
    assert {name: a.shape for name, a in first.items()} == {"w": (3, 16, 24), "p": (16, 1024)}
    assert 0.99 / math.sqrt(24) < np.max(np.abs(first["w"])) <= np.float32(1 / math.sqrt(24))
    assert posenc.make("inkling", num_heads=3, head_dim=8, train_len=64).extent == 64
    assert posenc.make("inkling", num_heads=3, head_dim=8, train_len=4096).extent == 1024
    assert Inkling(3, 24, version=2).clip == 8.0


def test_wrong_options():
    with pytest.raises(ValueError, match="version must be 1 or 2, got 3"):
        Inkling(2, 2, version=3)
    with pytest.raises(ValueError, match=r"clip=8\.0: version 1 has none"):
        Inkling(2, 2, clip=8.0)
    with pytest.raises(ValueError, match="clip must be finite and greater than 0, got 0"):
        Inkling(2, 2, version=2, clip=0)


@long
class TestModels:
    """Attention of the models' own modules, which round weights of attention to float32."""

    @pytest.mark.parametrize("version", [1, 2])
    @pytest.mark.parametrize("kind", ["hybrid", "hybrid_sliding"])
    def test_attention(self, version, kind):
        torch = pytest.importorskip("torch")
        given, hidden, found = _capture(torch, version, kind)
        near, w = kind == "hybrid_sliding", given["r_proj"].reshape(HEADS, 4, WIDTH)
        scheme = Inkling(HEADS, WIDTH, rank=4, extent=6 if near else EXTENT, version=version)
        params = {"w": w, "p": given["proj"]}
        if version == 2:
            params["w"] = w * given["scale"][..., None]
            lengths = np.linalg.norm(np.einsum("blc,hrc->bhlr", hidden, params["w"]), axis=-1)
            assert 0.2 < np.mean(lengths > 8) < 0.8
        query = given["query"]
        if not near:
            scale = LogScale("inkling", train_len=5, beta=0.3)
            # It multiplies the query, as the module has done already.
            query = query / posenc.transform(
                scale, np.ones_like(query), np.arange(LENGTH), role="query"
            )
            scheme = Sum(scheme, scale)
            params = {f"0_{name}": array for name, array in params.items()}
        if version == 2:
            scheme = Sink(scheme, HEADS, per_query=True, hidden_dim=WIDTH)
            params["sink_w"] = given["sink_proj"]
        ours = posenc.attention(
            query, given["key"], given["value"], scheme, params, causal=True,
            window=6 if near else None, tokens=posenc.Tokens(x=hidden),
        )  # fmt: skip
        # The module rounds weights to float32, and some of what comes before.
        assert_near(ours, found, 2 * ATTENTION_TOL["float32"])
        assert np.max(np.abs(found)) > 0.5


def _capture(torch, version, kind):
    """What a module with random weights gives to attention, its weights, and the result."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = "inkling" if version == 1 else "inkling2"
    package = __import__(f"transformers.models.{name}", fromlist=["x"])
    config_module = getattr(package, f"configuration_{name}")
    model_module = getattr(package, f"modeling_{name}")
    title = "Inkling" if version == 1 else "Inkling2"
    config = getattr(config_module, f"{title}TextConfig")(
        hidden_size=WIDTH, head_dim=DIM, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
        swa_head_dim=DIM, swa_num_attention_heads=HEADS, swa_num_key_value_heads=KEY_HEADS,
        d_rel=4, rel_extent=EXTENT, sliding_window_size=6, num_hidden_layers=1, layer_types=[kind],
        log_scaling_n_floor=5, log_scaling_alpha=0.3,
    )  # fmt: skip
    given = {}

    def attend(module, query, key, value, attention_mask, **options):
        result = model_module.eager_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        given.update(query=query, key=key, value=value, result=result[0].transpose(1, 2))
        return result

    ALL_ATTENTION_FUNCTIONS.register("capture", attend)
    config._attn_implementation = "capture"
    torch.manual_seed(0)
    kinds = {
        (1, "hybrid"): "Attention", (1, "hybrid_sliding"): "Attention",
        (2, "hybrid"): "FullAttention", (2, "hybrid_sliding"): "SlidingAttention",
    }  # fmt: skip
    module = getattr(model_module, title + kinds[version, kind])(config, 0).double()
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.5)
    if version == 2:
        module.rel_l2_clip.scale.data *= 4  # so that about half of the vectors are clipped
    hidden = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    at = torch.arange(LENGTH)
    away = at[:, None] - at
    seen = (away >= 0) & ((away < 6) | torch.tensor(kind == "hybrid"))
    mask = torch.where(seen, 0.0, -torch.inf)[None, None].double()
    extra = [hidden, hidden] if (version, kind) == (2, "hybrid") else []
    module(hidden, *extra, attention_mask=mask, conv_mask=None, position_ids=at[None])
    given["proj"] = module.rel_logits_proj.proj
    given["r_proj"] = module.r_proj.weight
    if version == 2:
        given |= {"scale": module.rel_l2_clip.scale, "sink_proj": module.sink_proj.weight}
    arrays = {name: np.asarray(a.detach(), np.float64) for name, a in given.items()}
    return arrays, np.asarray(hidden), arrays.pop("result")
