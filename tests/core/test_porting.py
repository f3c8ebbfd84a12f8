"""What goes wrong in silence where a model is ported: each gets a warning or an error in words."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from frameworks import FRAMEWORKS, HAS, ROUTES
from subjects import normal

import posenc
from posenc import Tokens
from posenc.apply.feature_needs import reads_hidden
from posenc.cli.list import one_of_each_kind
from posenc.contract.protocol import Hook
from posenc.positions import left_padded

HEADS, LENGTH, DIM = 2, 8, 8
Q = normal((1, HEADS, LENGTH, DIM), 0, "float32")
POS = np.arange(LENGTH)
SIZES = {"num_heads": HEADS, "head_dim": DIM, "max_len": LENGTH, "train_len": LENGTH}
CATALOGUE, ONE_OF_EACH = (
    [pytest.param(posenc.make(name, **SIZES), id=name) for name in names]
    for names in (sorted(posenc.catalogue()), one_of_each_kind())
)
BACKENDS = [name for name in ("numpy", "torch", "jax") if name in FRAMEWORKS]
MAYBE = [
    *BACKENDS,
    *(
        pytest.param(name, marks=pytest.mark.skip(reason=f"{name} is not installed"))
        for name in ("torch", "jax")
        if name not in FRAMEWORKS
    ),
]


def hidden(scheme, batch=1):
    """Hidden states for a scheme that reads them."""
    reads = reads_hidden(scheme)
    return {"x": normal((batch, LENGTH, HEADS * DIM), 1, "float32")} if reads else {}


def attend(backend, scheme, *, k=Q, **options):
    """Eagerly, as the framework's own function, in whatever its layout is."""
    framework = FRAMEWORKS[backend]
    arrays = {"q": Q, "k": k, "v": Q}
    tensors = {name: framework.array(array, "float32") for name, array in arrays.items()}
    if own := {name: framework.array(array, "float32") for name, array in hidden(scheme).items()}:
        options["tokens"] = replace(options.get("tokens", Tokens()), **own)
    return np.asarray(framework.attend("auto", tensors, scheme=scheme, **options))


def warned(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [w for w in found if issubclass(w.category, posenc.SchemeWarning)]


def embeds(scheme):
    return Hook.EMBEDDING in scheme.hooks()


# The words are those of the core. JAX compiles each operation of each scheme: one without an
# embedding stands for the others.
EACH = [
    pytest.param(backend, *p.values, id=f"{backend}-{p.id}")
    for backend in BACKENDS
    for p in ONE_OF_EACH
    if backend != "jax" or embeds(*p.values) or p.id == "alibi"
]


@pytest.mark.parametrize(("backend", "scheme"), EACH)
def test_a_scheme_of_embeddings_alone_says_so_in_attention(backend, scheme):
    params = posenc.init_params(scheme)
    if posenc.embedding(scheme, POS, params) is None:
        assert not warned(lambda: attend(backend, scheme, params=params))
        return
    found = warned(lambda: attend(backend, scheme))  # without params: attention reads none
    assert len(found) == 1
    assert "posenc.embedding" in str(found[0].message)
    assert type(scheme).__name__ in str(found[0].message)
    assert not found[0].filename.endswith("posenc/attn/call.py")
    with pytest.raises(ValueError, match="'tabel'"):
        attend(backend, scheme, params={"tabel": np.zeros((2, 2), np.float32)})


@pytest.mark.parametrize("backend", MAYBE)
def test_a_table_for_both_directions_under_a_causal_mask(backend):
    one, both = posenc.T5Bias(HEADS, causal=True), posenc.T5Bias(HEADS)
    params = posenc.init_params(both)
    (found,) = warned(lambda: attend(backend, both, params=params, causal=True))
    assert "T5Bias(causal=True)" in str(found.message)
    assert not warned(lambda: attend(backend, both, params=params))
    assert not warned(lambda: attend(backend, one, params=params, causal=True))


@pytest.mark.parametrize("scheme", CATALOGUE)
def test_a_cache_of_transformed_keys_at_unknown_positions(scheme):
    params = posenc.init_params(scheme)
    sides = posenc.features(scheme, params, Tokens(**hidden(scheme)), q=Q, k=Q)
    turned = {
        role: posenc.transform(scheme, Q, POS, role=role, params=params, features=side.features)
        for role, side in zip(("query", "key"), sides, strict=True)
    }
    options = {"params": params, "k_transformed": True, "k": turned["key"]}
    if Hook.REGIONS in scheme.hooks():
        with pytest.raises(ValueError, match="cache raw keys"):
            attend("numpy", scheme, **options)
        return
    found = warned(lambda: attend("numpy", scheme, **options))
    changed = not all(np.array_equal(array, Q) for array in turned.values())
    assert any("without tokens.pos" in str(w.message) for w in found) == changed
    options |= {"tokens": Tokens(pos=POS)}
    assert not any(
        "tokens.pos" in str(w.message) for w in warned(lambda: attend("numpy", scheme, **options))
    )


@pytest.mark.long
@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_a_compiled_call_does_not_stop_at_a_warning():
    import torch

    import posenc_torch

    scheme, q = posenc.Sinusoidal(HEADS * DIM), torch.tensor(Q)
    run = torch.compile(
        lambda q: posenc_torch.attention(q, q, q, scheme), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(run(q), posenc_torch.attention(q, q, q, posenc.NoPE()))


@pytest.mark.parametrize("scheme", CATALOGUE)
def test_every_scheme_takes_the_positions_of_a_left_padded_batch(scheme):
    tokens = left_padded([LENGTH, 2], LENGTH)
    params = posenc.init_params(scheme)
    term = posenc.embedding(scheme, tokens.pos, params)
    assert term is None or np.all(np.isfinite(term))
    two = np.concatenate([Q, Q])
    tokens = replace(tokens, **hidden(scheme, 2))
    out = posenc.attention(two, two, two, scheme, params, causal=True, tokens=tokens)
    assert np.all(np.isfinite(out))
    assert not np.any(out[1, :, : LENGTH - 2])


SWAPPED = np.swapaxes(Q, 1, 2)
LAYOUTS = {
    "heads-of-a-scheme": lambda: posenc.attention(SWAPPED, SWAPPED, SWAPPED, posenc.ALiBi(HEADS)),
    "shared-heads": lambda: posenc.attention(
        SWAPPED, SWAPPED[:, :3], SWAPPED[:, :3], posenc.NoPE()
    ),
    "positions": lambda: posenc.attention(
        SWAPPED, SWAPPED, SWAPPED, posenc.NoPE(), tokens=Tokens(pos=POS)
    ),
    "transform": lambda: posenc.transform(posenc.RoPE(DIM), SWAPPED, POS, role="key"),
}


@pytest.mark.parametrize("call", LAYOUTS.values(), ids=LAYOUTS)
def test_swapped_axes_are_told_where_sizes_can(call):
    with pytest.raises(ValueError, match=r"\(B, L, H, D\)"):
        call()


def test_a_table_in_the_layout_of_another_library():
    table = np.zeros((32, HEADS), np.float32)
    with pytest.raises(ValueError, match="transpose"):
        posenc.attention(Q, Q, Q, posenc.T5Bias(HEADS), {"table": table})


KEYWORDS = {
    "attn_mask": r"Tokens\(seg=",
    "k_valid": r"Tokens\(exists=",
    "q_pos": r"queries=posenc.Tokens\(pos=",
    "sink_tokens": r"mask=posenc.window\(size, first=",
    "dropout_p": "hidden states",
    "is_causal": "causal=",
    "windwo": "'window'",
}


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize("backend", MAYBE)
def test_keywords_of_other_libraries_get_an_answer(backend, keyword):
    with pytest.raises(TypeError, match=rf"{keyword}'.*{KEYWORDS[keyword]}"):
        attend(backend, posenc.NoPE(), **{keyword: None})


@pytest.mark.parametrize("route", ROUTES)
def test_explanations_take_the_keywords_of_attention(route):
    import importlib

    if route.framework.name == "numpy":
        return
    module = importlib.import_module(f"posenc_{route.framework.name}")
    q = route.framework.array(Q, "float32")
    found = module.explain(
        q, q, q, posenc.NoPE(), implementation=route.implementation, window=2, skip_blocks=False
    )
    assert found["implementation"] == route.implementation
    with pytest.raises(TypeError, match="attn_mask"):
        module.explain(q, q, q, posenc.NoPE(), attn_mask=None)
