"""A wrong call is an error that names the argument."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from frameworks import HAS
from subjects import SUBJECTS, normal, params_of

import posenc
from posenc import Mask, Tokens
from posenc.schemes import ALiBi2D, AxialRoPE, CoPE, MRoPE, Sink, Sum
from posenc.testing.examples import (
    HEAD_DIM,
    HEADS,
    HIDDEN_DIM,
    Cooled,
)

Q = normal((2, HEADS, 5, HEAD_DIM), 0, "float32")
POS = np.arange(5)
SELECTIVE = SUBJECTS["selective"]
T5, FOX, SHAW = posenc.T5Bias(HEADS), SUBJECTS["fox"], SUBJECTS["shaw"]
RECTIFIED = SUBJECTS["rerope"]
TABLE = params_of(T5)
GATES = {"scheme": FOX, "params": params_of(FOX)}
TURNED = {"k_transformed": True}
INKLING = {"scheme": SUBJECTS["inkling"], "params": params_of(SUBJECTS["inkling"])}
THREE, PLANE = normal((3, HEADS, 5, HEAD_DIM), 1, "float32"), AxialRoPE(HEAD_DIM)
VALID, PAIRS = np.ones((2, 5), bool), normal((1, HEADS, 5, 5), 2, "float32")
SUMS, LEAST = Q[..., 0], -(2**31)


def hidden(*shape):
    return normal(shape, 0, "float32")


def places(q, k=POS):
    return {"tokens": Tokens(places=k), "queries": Tokens(places=q)}


def at(q, k=POS):
    return {"tokens": Tokens(pos=k), "queries": Tokens(pos=q)}


def segments(q, k=POS):
    return {"tokens": Tokens(seg=k), "queries": Tokens(seg=q)}


def of_tokens(**facts):
    return {"tokens": Tokens(**facts)}


def features(k, q=None):
    """Of keys and of queries, by the name that FoX has for them."""
    q = {"c": SUMS} if q is None else q
    return {"tokens": Tokens(features=k), "queries": Tokens(features=q)}


@dataclass(frozen=True)
class Overlapping(posenc.PositionScheme):
    windows: tuple = ((3, None), (None, -3))

    def regions(self):
        return tuple((posenc.NoPE(), window) for window in self.windows)


# What differs from a good call, the error, and what its message must name.
ATTENTION = {
    "q-three-axes": ({"q": Q[0]}, ValueError, r"\bq\b"),
    "q-integers": ({"q": Q.astype(np.int64)}, TypeError, r"\bq\b"),
    "k-empty": ({"k": Q[:, :, :0], "v": Q[:, :, :0]}, ValueError, r"\bk\b"),
    "batch": ({"k": Q[:1], "v": Q[:1]}, ValueError, "batch"),
    "k-v-length": ({"v": Q[:, :, :4]}, ValueError, "k and v"),
    "k-v-heads": ({"v": Q[:, :2]}, ValueError, "k and v"),
    "head-dim": ({"k": Q[..., :4]}, ValueError, "head_dim"),
    "groups": ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, "heads"),
    "scheme-heads": ({"scheme": posenc.ALiBi(3)}, ValueError, "num_heads=3"),
    "scheme-name": ({"scheme": "alibi"}, TypeError, "scheme"),
    "scheme-class": ({"scheme": posenc.ALiBi}, TypeError, "scheme"),
    "rope-channels": ({"scheme": posenc.RoPE(16)}, ValueError, "head_dim=16"),
    "param-missing": ({"scheme": T5}, ValueError, "table"),
    "param-extra": ({"params": {"slopes": POS * 1.0}}, ValueError, "slopes"),
    "param-near": ({"scheme": T5, "params": {"tabel": TABLE["table"]}}, ValueError, "'table'"),
    "param-shape": ({"scheme": T5, "params": {"table": POS * 1.0}}, ValueError, "table"),
    "param-integers": ({"scheme": T5, "params": {"table": POS}}, TypeError, "table"),
    "param-list": ({"scheme": T5, "params": {"table": [1.0]}}, TypeError, "table"),
    "tokens-array": ({"tokens": POS}, TypeError, r"tokens must be posenc\.Tokens, got"),
    "queries-mapping": (
        of_tokens(pos=POS) | {"queries": {"pos": POS}}, TypeError,
        r"queries must be posenc\.Tokens, got dict",
    ),
    "fewer-tokens-than-queries": (
        {"k": Q[:, :, :4], "v": Q[:, :, :4]} | of_tokens(exists=VALID[:, :4]), ValueError,
        "q has length 5, k only 4: give queries",
    ),
    "pos-floats": (at(POS * 1.0), TypeError, r"queries\.pos"),
    "pos-half": (at(POS, POS.astype(np.float16)), TypeError, r"tokens\.pos"),
    "pos-bool": (at(POS > 2), TypeError, r"queries\.pos"),
    "pos-list": (at([0, 1, 2, 3, 4]), TypeError, r"queries\.pos"),
    "pos-axes": (at(POS[None, None]), ValueError, r"queries\.pos"),
    "pos-length": (at(POS[:4]), ValueError, r"queries\.pos has length 4, q has 5"),
    "k-pos-length": (of_tokens(pos=POS[:4]), ValueError, r"tokens\.pos has length 4, k has 5"),
    "pos-batch": (at(np.stack([POS] * 3)), ValueError, r"queries\.pos has batch 3"),
    "pos-alone": (
        {"queries": Tokens(pos=POS)}, ValueError, r"queries\.pos is given without tokens\.pos",
    ),
    "k-pos-alone": (
        of_tokens(pos=POS) | {"queries": Tokens()}, ValueError,
        r"tokens\.pos is given without queries\.pos",
    ),
    "seg-floats": (segments(POS * 1.0), TypeError, r"queries\.seg"),
    "seg-length": (segments(POS, POS[:4]), ValueError, r"tokens\.seg has length 4, k has 5"),
    "seg-alone": (
        of_tokens(seg=POS) | {"queries": Tokens()}, ValueError,
        r"tokens\.seg is given without queries\.seg",
    ),
    "seg-of-padding": (
        of_tokens(seg=np.where(POS == 3, LEAST, POS).astype(np.int32), exists=VALID), ValueError,
        r"\.seg holds -2147483648, which is reserved for padding",
    ),
    "window-none": ({"window": 0}, ValueError, "window"),
    "window-float": ({"window": 2.5}, TypeError, "window"),
    "window-bool": ({"window": True}, TypeError, "window"),
    "implementation": ({"implementation": "refrence"}, ValueError, "'reference'"),
    "gates-without-x": (GATES, ValueError, r"FoX reads hidden states: give tokens with x"),
    "x-length": (GATES | of_tokens(x=hidden(2, 4, HIDDEN_DIM)), ValueError, r"tokens\.x must be"),
    "x-width": (
        GATES | of_tokens(x=hidden(2, 5, 7)), ValueError, r"tokens\.x has .* width C=7",
    ),
    "q-x-width": (
        INKLING | of_tokens(x=hidden(2, 5, HIDDEN_DIM)) | {"queries": Tokens(x=hidden(2, 5, 7))},
        ValueError, r"queries\.x has .* width C=7",
    ),
    "x-axes": (GATES | of_tokens(x=hidden(5, HIDDEN_DIM)), ValueError, r"tokens\.x must be"),
    "x-batch": (GATES | of_tokens(x=hidden(3, 5, HIDDEN_DIM)), ValueError, r"tokens\.x must be"),
    "features-alone": (
        GATES | {"queries": Tokens(features={"c": SUMS})}, ValueError,
        r"queries\.features is given without tokens\.features",
    ),
    "k-features-alone": (
        GATES | of_tokens(features={"c": SUMS}), ValueError,
        r"tokens\.features is given without queries\.features",
    ),
    "features-shape": (
        GATES | features({"c": SUMS[:, :2]}), ValueError,
        "feature 'c' of the key must have 4 heads",
    ),
    "features-length": (
        GATES | features({"c": SUMS[:, :, :4]}), ValueError,
        r"feature 'c' of the key must be \(B, H, 5\)",
    ),
    "features-batch": (
        GATES | features({"c": THREE[..., 0]}), ValueError,
        "feature 'c' of the key must have batch 2",
    ),
    "features-of-a-scheme-without": (
        features({"c": SUMS}), ValueError,
        r"ALiBi has no features of tokens: leave out queries\.features",
    ),
    "k-features-of-a-scheme-without": (
        of_tokens(features={"c": SUMS}), ValueError,
        r"ALiBi has no features of tokens: leave out tokens\.features",
    ),
    "features-list": (
        GATES | features({"c": [[[0.0]]]}), (TypeError, ValueError),
        r"feature 'c' of the key|tokens\.features",
    ),
    "features-without-names": (
        GATES | features(Q, Q), TypeError, r"queries\.features must map names",
    ),
    "hidden-states-of-queries": (
        INKLING | at(POS) | of_tokens(pos=POS[::-1].copy(), x=hidden(2, 5, HIDDEN_DIM)),
        ValueError, "give queries with x",
    ),
    "hidden-states-of-queries-length": (
        INKLING | of_tokens(pos=POS, x=hidden(2, 5, HIDDEN_DIM))
        | {"queries": Tokens(pos=POS, x=hidden(2, 4, HIDDEN_DIM))},
        ValueError, r"queries\.x must be",
    ),
    "place-alone": (
        {"queries": Tokens(places=POS)}, ValueError,
        r"queries\.places is given without tokens\.places",
    ),
    "place-width": (
        places(np.zeros((5, 3), int)), ValueError, r"queries\.places .* \(5, 1\).* got \(5, 3\)",
    ),
    "place-width-of-two": (
        {"scheme": PLANE} | places(POS, np.zeros((5, 2), int)), ValueError,
        r"queries\.places .* \(5, 2\).* got \(5,\)",
    ),
    "place-floats": (places(POS * 1.0), TypeError, r"queries\.places"),
    "place-far": (places(POS + 2**30), ValueError, r"queries\.places holds"),
    "place-batch": (
        places(np.stack([POS] * 3)), ValueError, r"queries\.places has batch 3",
    ),
    "exists-integers": (
        of_tokens(exists=np.ones((2, 5), int)), TypeError,
        r"tokens\.exists must be an array of booleans",
    ),
    "exists-shape": (
        of_tokens(exists=VALID[:, :4]), ValueError,
        r"tokens\.exists must be \(5,\) or \(2, 5\), got \(2, 4\)",
    ),
    "exists-batch": (
        {"queries": Tokens(exists=np.ones((3, 5), bool))}, ValueError,
        r"queries\.exists must be \(5,\) or \(2, 5\), got \(3, 5\)",
    ),
    "exists-list": (of_tokens(exists=[True] * 5), TypeError, r"tokens\.exists must be"),
    "window-three": ({"window": (1, 2, 3)}, ValueError, "window must be a width or"),
    "window-negative": ({"window": (-1, 2)}, ValueError, "window must be at least 0"),
    "first-tokens-negative": (
        {"mask": Mask(first_tokens=-1)}, ValueError, r"mask\.first_tokens must be at least 0",
    ),
    "first-tokens-float": (
        {"mask": Mask(first_tokens=1.5)}, TypeError, r"mask\.first_tokens must be",
    ),
    "mask-causal-text": ({"mask": Mask(causal="no")}, TypeError, r"mask\.causal must be True or"),
    "mask-window-negative": ({"mask": Mask(left=-2)}, ValueError, "window must be at least 0"),
    "bias-integers": ({"bias": np.ones((1, 1, 5, 5), int)}, TypeError, "bias must be floating"),
    "bias-shape": ({"bias": PAIRS[:, :, :4]}, ValueError, r"bias must be \(B or 1, H or 1, Q, K\)"),
    "bias-axes": ({"bias": PAIRS[0]}, ValueError, "bias must be"),
    "mask-floats": ({"mask": PAIRS}, TypeError, "mask must be boolean"),
    "mask-shape": ({"mask": PAIRS[:, :3] > 0}, ValueError, "mask must be"),
    "mask-of-three": ({"mask": lambda a, b, c: a}, ValueError, "got a function of 3 arguments"),
    "mask-of-any-number": ({"mask": lambda *a: a[0]}, ValueError, r"0 arguments: \(\*a\)"),
    "mask-of-numbers": (
        {"mask": lambda q, k: (q - k) * 1}, TypeError, "mask must return booleans.* got .*int",
    ),
    "mask-of-flex": (
        {"mask": lambda b, h, q, k: q >= k}, ValueError, "leave out batch and head of FlexAtt",
    ),
    "mask-of-segments-without": (
        {"mask": lambda q, k, s, t: s == t}, ValueError, "there are no segments: give tokens with",
    ),
    "mask-answers-nothing": ({"mask": lambda q, k: None}, TypeError, "mask .* got NoneType"),
    "mask-of-all-pairs": (
        {"mask": lambda q, k: (q == k)[..., None]}, ValueError, r"shape \(1, 1, 1, 1, 1\)",
    ),
    "regions-that-overlap": (
        {"scheme": Overlapping()}, ValueError, r"not overlap, got \(3, None\) and \(None, -3\)",
    ),
    "region-of-a-width": (
        {"scheme": Overlapping(windows=(4, 5))}, ValueError, r"must be \(left, right\), got 4",
    ),
    "softcap-zero": ({"softcap": 0.0}, ValueError, "softcap must be finite and greater than 0"),
    "softcap-text": ({"softcap": "tanh"}, TypeError, "softcap must be a number"),
    "softcap-large": ({"softcap": 3e38}, ValueError, "softcap must be from .*float32, got 3e"),
    "softcap-small": ({"softcap": 1e-300}, ValueError, "softcap must be from .*, got 1e-300"),
    "scale-large": ({"scale": 1e39}, ValueError, "scale must be 0 or .* float32 holds, got 1e"),
    "scale-subnormal": ({"scale": 1e-45}, ValueError, "scale must be 0 or of a size from"),
    "bias-inf": (
        {"bias": np.where(np.eye(5), np.inf, 0.0)[None, None]}, ValueError,
        r"bias must be finite or -inf .*, got inf at \(0, 0, 0, 0\)",
    ),
    "lse-text": ({"return_lse": "yes"}, TypeError, "return_lse must be True or False"),
    "coords": ({"q_coords": Q[..., 0]}, TypeError, "has no keyword 'q_coords'.*features"),
    "scale-text": ({"scale": "large"}, TypeError, "scale"),
    "scale-nan": ({"scale": float("nan")}, ValueError, "scale"),
    "causal-text": ({"causal": "False"}, TypeError, "causal"),
    "transformed-text": ({"k_transformed": "no"}, TypeError, "k_transformed"),
    "params-list": ({"params": [Q]}, TypeError, "params must map"),
    "params-array": ({"params": Q}, TypeError, "params must map"),
    "v-list": ({"v": [[[[1.0]]]]}, TypeError, "v must be an array"),
    "q-none": ({"q": None}, TypeError, "q must be an array"),
}  # fmt: skip
GOOD = {"q": Q, "k": Q, "v": Q, "scheme": posenc.ALiBi(HEADS)}
BACKENDS = [
    name if name == "numpy" or HAS[name]
    else pytest.param(name, marks=pytest.mark.skip(reason=f"{name} is not installed"))
    for name in ("numpy", "torch", "jax")
]  # fmt: skip


def call(backend, arguments):
    """The call as a user of this backend would write it."""
    if backend == "numpy":
        return posenc.attention(**arguments)
    if backend == "torch":
        import torch

        import posenc_torch

        return posenc_torch.attention(**converted(arguments, torch.tensor))
    import jax.numpy as jnp

    import posenc_jax

    for name in set("qkv") & arguments.keys():
        if getattr(arguments[name], "ndim", 0) == 4:
            arguments[name] = np.swapaxes(arguments[name], 1, 2)
    return posenc_jax.attention(**converted(arguments, jnp.asarray))


# For each framework, arrays of another: NumPy's are taken everywhere.
OTHERS = {"torch": "jax", "jax": "torch", "numpy": "jax"}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda a: {"tokens": Tokens(pos=a(POS))}, "tokens.pos"),
        (lambda a: {"tokens": Tokens(seg=a(POS))}, "tokens.seg"),
        (lambda a: {"tokens": Tokens(exists=a(POS > 2))}, "tokens.exists"),
        (lambda a: {"mask": a(np.tri(5, dtype=bool)[None, None])}, "mask"),
        (lambda a: {"bias": a(np.zeros((1, 1, 5, 5), np.float32))}, "bias"),
        (lambda a: {"v": a(Q.copy())}, "v"),
        (lambda a: {"params": {"table": a(np.zeros((2, 32), np.float32))}}, "params"),
    ],
    ids=lambda value: value if isinstance(value, str) else "of",
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_of_another_library_are_named(backend, change, name):
    other = pytest.importorskip({"jax": "jax.numpy"}.get(OTHERS[backend], OTHERS[backend]))
    arguments = {"scheme": T5, "params": params_of(T5)} if name == "params" else {}
    with pytest.raises(TypeError, match=rf"{re.escape(name)}.* (JAX|PyTorch|NumPy)"):
        call(backend, GOOD | arguments | change(other.asarray))


def converted(value, array):
    if isinstance(value, dict):
        return {name: converted(v, array) for name, v in value.items()}
    if isinstance(value, Tokens):
        return value.map(lambda own: converted(own, array))
    return array(value) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("wrong", ATTENTION)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_names_what_is_wrong(backend, wrong):
    change, error, message = ATTENTION[wrong]
    with pytest.raises(error, match=message):
        call(backend, GOOD | change)


def test_the_good_call_is_good():
    assert posenc.attention(**GOOD).shape == Q.shape


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_numpy_stands_for_torch_beside_queries_alone():
    import torch

    import posenc_torch

    q, x = torch.tensor(Q), normal((2, 5, HIDDEN_DIM), 0, "float32")
    params = params_of(INKLING["scheme"])
    want = posenc_torch.attention(
        q, q, q, INKLING["scheme"], params, tokens=Tokens(x=torch.tensor(x))
    )
    got = posenc_torch.attention(q, q, q, INKLING["scheme"], params, tokens=Tokens(x=x))
    assert torch.equal(got, want)
    own = posenc.features(INKLING["scheme"], params, Tokens(x=x))[0].features
    sides = {"tokens": Tokens(features={}), "queries": Tokens(features=own)}
    got = posenc_torch.attention(q, q, q, INKLING["scheme"], params, **sides)
    assert torch.allclose(got, want, atol=1e-6)
    with pytest.raises(TypeError, match=r"q must be .* of PyTorch, got numpy\.ndarray of float32"):
        posenc_torch.attention(Q, q, q, posenc.NoPE())


@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "bool"])
def test_torch_positions_are_integers(dtype):
    import torch

    import posenc_torch

    pos = torch.arange(5).to(getattr(torch, dtype))
    with pytest.raises(TypeError, match="q_pos"):
        posenc.bias(posenc.ALiBi(HEADS), pos, pos)
    with pytest.raises(TypeError, match=r"tokens\.pos"):
        call("torch", GOOD | at(pos, pos))
    with pytest.raises(TypeError, match="pos"):
        posenc_torch.Position(posenc.Sinusoidal(8)).embed(torch.zeros(1, 5, 8), pos)


BOTH, DEBERTA = SUBJECTS["rope+key-side"], SUBJECTS["deberta"]
ALIBI, ROPE, LEARNED = posenc.ALiBi(2), posenc.RoPE(HEAD_DIM), posenc.Learned(max_len=4, dim=2)
ROWS = {"table": np.zeros((4, 2), np.float32)}
EVALUATED = {
    "bias-floats": (lambda: posenc.bias(ALIBI, POS * 1.0, POS), TypeError, "q_pos"),
    "bias-list": (lambda: posenc.bias(ALIBI, [0, 1], [0, 1]), TypeError, "q_pos"),
    "bias-batches": (
        lambda: posenc.bias(ALIBI, np.ones((2, 3), int), np.ones((3, 3), int)), ValueError, "q_pos",
    ),
    "bias-axes": (lambda: posenc.bias(ALIBI, np.asarray(3), POS), ValueError, "q_pos"),
    "bias-of-features": (
        lambda: posenc.bias(FOX, POS, POS, GATES["params"]), ValueError,
        "the bias of FoX depends on features of tokens",
    ),
    "transform-without-features": (
        lambda: posenc.transform(
            SELECTIVE, Q, POS, role="key", params=params_of(SELECTIVE)
        ), KeyError, "the key has no feature 'angle'; it has: none",
    ),
    "transform-places": (
        lambda: posenc.transform(PLANE, Q, POS, role="key", places=POS), ValueError, "places",
    ),
    "cache-of-a-name": (lambda: posenc.cache_needs("rope"), TypeError, "scheme must be"),
    "cache-of-regions-transformed": (
        lambda: posenc.attention(**GOOD | {"scheme": RECTIFIED} | TURNED), ValueError,
        "k_transformed=True: ReRoPE transforms keys in several ways",
    ),
    "cache-of-key-features-transformed": (
        lambda: posenc.attention(**GOOD | {"scheme": BOTH, "params": params_of(BOTH)} | TURNED),
        ValueError, "k_transformed=True: Sum has features of keys",
    ),
    "bias-scheme": (lambda: posenc.bias(posenc.ALiBi, POS, POS), TypeError, "scheme"),
    "bias-param-list": (lambda: posenc.bias(T5, POS, POS, {"table": [1]}), TypeError, "table"),
    "transform-params": (
        lambda: posenc.transform(posenc.NoPE(), Q, POS, role="key", params={"table": Q}),
        ValueError, "no param 'table'",
    ),
    "transform-role": (lambda: posenc.transform(ROPE, Q, POS, role="q"), ValueError, "role"),
    "transform-length": (
        lambda: posenc.transform(ROPE, Q, POS[:3], role="key"), ValueError, r"\bpos\b",
    ),
    "transform-batch": (
        lambda: posenc.transform(ROPE, Q, np.stack([POS] * 3), role="key"), ValueError, r"\bpos\b",
    ),
    "transform-integers": (
        lambda: posenc.transform(ROPE, POS[None], POS, role="key"), (ValueError, TypeError),
        r"\bx\b",
    ),
    "transform-channels": (
        lambda: posenc.transform(ROPE, Q[..., :6], POS, role="key"), ValueError, "head_dim=8",
    ),
    "embedding-floats": (lambda: posenc.embedding(LEARNED, POS * 1.0, ROWS), TypeError, "pos"),
    "embedding-params": (lambda: posenc.embedding(LEARNED, POS), ValueError, "table"),
    "embedding-beyond": (lambda: posenc.embedding(LEARNED, POS, ROWS), IndexError, "4"),
    "embedding-negative": (lambda: posenc.embedding(LEARNED, -POS, ROWS), IndexError, "-4"),
    "features-axes": (
        lambda: posenc.features(FOX, GATES["params"], Tokens(x=Q)), ValueError, r"tokens\.x must",
    ),
    "features-tokens": (
        lambda: posenc.features(FOX, GATES["params"], POS), TypeError, r"tokens must be posenc\.",
    ),
    "window-first-negative": (
        lambda: posenc.window(None, first=-1), ValueError, "first must be at least 0",
    ),
    "window-first-float": (lambda: posenc.window(4, first=1.5), TypeError, "first must be"),
    "window-of-a-mask": (lambda: posenc.window(0), ValueError, "window must be"),
    "mask-and-text": (lambda: posenc.causal & "window", TypeError, "unsupported operand"),
    "tokens-index": (lambda: Tokens(pos=POS)[0], TypeError, "tokens must be indexed by a slice"),
    "tokens-concat": (
        lambda: Tokens(pos=POS).concat(Tokens(pos=POS, seg=POS)), ValueError,
        "seg is given for some of the tokens only",
    ),
    "tokens-concat-batches": (
        lambda: Tokens(pos=np.zeros((2, 3), int)).concat(Tokens(pos=np.zeros((4, 3), int))),
        ValueError, r"pos of the tokens must have shapes .* got \[\(2, 3\), \(4, 3\)\]",
    ),
    "tokens-concat-widths": (
        lambda: Tokens(x=np.zeros((2, 3, 4))).concat(Tokens(x=np.zeros((2, 3, 5)))),
        ValueError, "x of the tokens must have shapes that differ only in the axis of tokens",
    ),
    "tokens-concat-dtypes": (
        lambda: Tokens(pos=np.arange(3, dtype="int32")).concat(Tokens(np.arange(3).astype("u8"))),
        TypeError, "pos of the tokens must have one integer dtype, got int32, uint64",
    ),
    "tokens-concat-list": (
        lambda: Tokens(pos=[1, 2]).concat(Tokens(pos=[3])), TypeError,
        "pos must be an array, got list",
    ),
    "tokens-slice-list": (
        lambda: Tokens(pos=[1, 2])[1:], TypeError, "pos must be an array, got list",
    ),
    "features-of-queries-without": (
        lambda: posenc.features(SHAW, params_of(SHAW), k=Q), ValueError,
        "Shaw has features of queries: give q",
    ),
    "features-of-keys-without": (
        lambda: posenc.features(DEBERTA, params_of(DEBERTA), q=Q), ValueError,
        "DeBERTa has features of keys: give k",
    ),
    "sum-of-one": (lambda: Sum(ROPE), ValueError, "Sum takes two schemes or more"),
    "sum-of-a-class": (lambda: Sum(ROPE, posenc.ALiBi), TypeError, "scheme must be an instance"),
    "sum-of-two-rows": (
        lambda: Sum(CoPE(4), CoPE(4)), ValueError, "one scheme that adjusts whole rows, got CoPE",
    ),
    "sum-of-two-sinks": (
        lambda: Sum(Sink(ALIBI), Sink(ALIBI)), ValueError, "one scheme that has a sink, got Sink",
    ),
    "sum-of-regions": (
        lambda: Sum(RECTIFIED, RECTIFIED), ValueError, "one scheme that has regions",
    ),
    "sum-of-rows-and-regions": (
        lambda: Sum(RECTIFIED, CoPE(HEAD_DIM)), ValueError, "whole rows beside one that has region",
    ),
    "sum-of-axes-of-regions": (
        lambda: Sum(RECTIFIED, ALiBi2D(HEADS)), ValueError, r"number of axes, got \[1, 2\]",
    ),
    "sum-of-heads": (
        lambda: Sum(ALIBI, posenc.ALiBi(8)), ValueError, r"same number of heads, got \[2, 8\]",
    ),
    "sum-of-axes-of-a-bias": (lambda: Sum(ROPE, ALiBi2D(HEADS)), ValueError, "same number of axes"),
    "sum-of-three-axes-and-two": (
        lambda: Sum(MRoPE(HEAD_DIM), ALiBi2D(HEADS)), ValueError, r"number of axes, got \[2, 3\]",
    ),
    "sum-of-axes": (lambda: Sum(ROPE, PLANE), ValueError, r"same number of axes, got \[1, 2\]"),
    "sum-of-scales": (
        lambda: Sum(Cooled(), Cooled(power=2.0)).scale(HEAD_DIM), ValueError, "scale: parts of Sum",
    ),
    "sink-of-a-name": (
        lambda: Sink(_WithASink()), ValueError, "'sink' is a param of _WithASink already",
    ),
    "sink-around-a-sink": (lambda: Sink(Sink(ALIBI)), ValueError, "scheme has a sink already"),
    "sink-without-heads": (lambda: Sink(ROPE), ValueError, "num_heads: RoPE does not have it"),
    "sink-heads": (lambda: Sink(ALIBI, num_heads=4), ValueError, "num_heads=4: the scheme has 2"),
    "sink-width": (lambda: Sink(ALIBI, per_query=True), ValueError, "per_query needs hidden_dim"),
    "sink-width-for-nothing": (lambda: Sink(ALIBI, hidden_dim=6), ValueError, "hidden_dim=6"),
    "sink-of-a-value-per-query": (
        lambda: Sink(ALIBI, value=1.0, per_query=True, hidden_dim=6), ValueError, "per_query",
    ),
    "sink-value": (lambda: Sink(ALIBI, value=float("inf")), ValueError, "value must be finite"),
    "sink-flag": (lambda: Sink(ALIBI, learned=1), TypeError, "learned must be True or False"),
    "gate": (lambda: _with_a_gate(), TypeError, "Old.gate: a gate is a feature now"),
}  # fmt: skip


class _WithASink(posenc.PositionScheme):
    def param_specs(self):
        return {"sink": posenc.ParamSpec((HEADS, 3))}


def _with_a_gate():
    class Old(posenc.PositionScheme):
        def gate(self, x, *, params, xp):
            return x


@pytest.mark.parametrize("wrong", EVALUATED)
def test_evaluation_names_what_is_wrong(wrong):
    function, error, message = EVALUATED[wrong]
    with pytest.raises(error, match=message):
        function()


@pytest.mark.skipif(not HAS["jax"], reason="jax is not installed")
def test_what_is_no_array_is_named():
    import jax
    import jax.numpy as jnp

    shape, pos = jax.ShapeDtypeStruct((4,), jnp.int32), jnp.arange(4)
    with pytest.raises(TypeError, match="k_pos must be an array, got ShapeDtypeStruct of jax"):
        posenc.bias(posenc.ALiBi(2), pos, shape)
    with pytest.raises(TypeError, match="one library, got q_pos of JAX, k_pos of NumPy"):
        posenc.bias(posenc.ALiBi(2), pos, np.arange(4))
