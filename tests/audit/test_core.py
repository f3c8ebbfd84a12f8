"""The audit of a function: right ones agree, and of each wrong one it says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import audit as page  # docs/audit.py
import numpy as np
import pytest
from frameworks import HAS
from sample import long

import posenc
from posenc.audit import Candidate, CannotExpressError, exit_status
from posenc.audit.audit import audit, audit_path, candidate_of, show
from posenc.audit.conventions import NotCalledError
from posenc.audit.gold import Question, answer, drawn, rotation_gradient
from posenc.testing import FunctionError, check_function, parametrize_checks

PLANTED = page.planted()
import candidates as code  # noqa: E402  # docs/audit.py says where it is

HERE = Path(__file__).parent
NEEDS_TORCH = pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")


@cache
def named(one):
    """The record that names the fault of a planted candidate, some of which have a state."""
    return page.named(one)


def needs(framework):
    return [NEEDS_TORCH] if framework == "torch" else []


def right_half(x, pos):
    return code.turn_half(x, *code.tables(pos, code.inv_freq(x.shape[-1])))


def right_neighbours(x, pos):
    return code.turn_neighbours(x, *code.tables(pos, code.inv_freq(x.shape[-1])))


def right_partial(x, pos):
    return code.turn_half(x, *code.tables(pos, code.inv_freq(16)))


def right_yarn(x, pos):
    cos, sin = code.tables(pos, code.yarn(x.shape[-1]))
    factor = 0.1 * np.log(4) + 1
    return code.turn_half(x, factor * cos, factor * sin)


def right_alibi(num_heads, q_pos, k_pos):
    return -code.paper_slopes(num_heads)[:, None, None] * np.abs(q_pos[:, None] - k_pos)


def right_t5(num_heads, q_pos, k_pos, table):
    return table[:, code.t5_bucket(k_pos - q_pos[:, None], 32, 128)]


def right_sink(q, k, v, q_pos, k_pos, sinks, seg=None):
    seen = code.distance(q_pos, k_pos) >= 0
    if seg is not None:
        queries = seg[:, -q.shape[2] :]
        seen = seen & (queries[:, None, :, None] == seg[:, None, None, :])
    return code.attend(q, k, v, seen, sink=sinks)


def right_window(q, k, v, mask):
    return code.attend(q, k, v, mask)


def right_grouped(q, k, v, q_pos, k_pos, scale=None, softcap=None):
    q = q * (1 if scale is None else scale * q.shape[-1] ** 0.5)
    return code.grouped(q, k, v, q_pos, k_pos, cap=softcap)


def right_embedding(pos, d_model):
    return code.waves(pos, np.arange(d_model // 2) / (d_model // 2))


def right_row(pos, dim):
    return right_embedding(pos[0], dim)  # (L, D): it knows no batch


def right_learned(pos, table):
    return table[pos + 2]


# Right ones, written in another way than most.


def by_matrices(x, pos):
    """Every channel pair times a rotation matrix, in one product."""
    n = x.shape[-1]
    cos, sin = (np.repeat(t, 2, -1) for t in code.tables(pos, code.inv_freq(n)))
    turn = np.zeros((n, n))
    even = np.arange(0, n, 2)
    turn[even + 1, even], turn[even, even + 1] = -1, 1
    matrix = cos[..., None, :] * np.eye(n) + sin[..., None, :] * turn
    return np.einsum("bhlc,bolcd->bhld", x, matrix).astype(x.dtype)


@cache
def table_of_all_positions(n):
    angle = np.arange(131_072, dtype=np.float32)[:, None] * code.inv_freq(n).astype(np.float32)
    return np.cos(angle), np.sin(angle)


def by_a_table_in_float32(x, pos):
    return code.turn_half(x, *(t[pos][:, None] for t in table_of_all_positions(x.shape[-1])))


def by_differences_of_exponents(num_heads, q_pos, k_pos):
    """ALiBi with slopes by repeated multiplication, and distances as float32."""
    ratio = np.float32(2.0) ** np.float32(-8 / 2 ** (num_heads.bit_length() - 1))
    more = ratio ** np.float32(0.5) * ratio ** np.arange(num_heads, dtype=np.float32)
    slopes = np.cumprod(np.full(2 ** (num_heads.bit_length() - 1), ratio, np.float32))
    slopes = np.concatenate([slopes, more])[:num_heads, None, None]
    return -slopes * np.abs(np.float32(q_pos[:, None]) - np.float32(k_pos))


def by_a_product_of_embeddings(num_heads, q_pos, k_pos):
    """Sandwich as its paper has it, with angles of positions in float32."""
    frequencies = (10_000.0 ** (-np.arange(0, 128, 2) / 128)).astype(np.float32)
    q, k = (np.float32(pos)[:, None] * frequencies for pos in (q_pos, k_pos))
    product = np.sin(q) @ np.sin(k).T + np.cos(q) @ np.cos(k).T
    return num_heads / (8 * np.arange(1, num_heads + 1))[:, None, None] * product


def by_torch_itself(q, k, v, attn_mask, scale=None, enable_gqa=False):
    import torch

    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask, scale=scale, enable_gqa=enable_gqa
    )


def right_torch(x, pos):
    import torch

    dim = x.shape[-1]
    angle = pos[:, None, :, None].float() * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def right_jax(x, pos):
    import jax.numpy as jnp

    dim = x.shape[-1]
    angle = pos[:, None, :, None] * 10_000.0 ** (-jnp.arange(0, dim, 2) / dim)
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    out = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return out.reshape(x.shape).astype(x.dtype)


RIGHT = [
    (right_half, "rope", "numpy"),
    (right_neighbours, "rope:layout=interleaved", "numpy"),
    (right_partial, "rope:rotary_dim=16", "numpy"),
    (right_yarn, code.YARN, "numpy"),
    (right_alibi, "alibi", "numpy"),
    (right_t5, "t5:causal=True", "numpy"),
    (right_sink, "sink", "numpy"),
    (right_window, "nope@16", "numpy"),
    (right_grouped, "rope", "numpy"),
    (right_embedding, "sinusoidal", "numpy"),
    (right_row, "sinusoidal", "numpy"),
    (right_learned, "learned:max_len=600,offset=2", "numpy"),
    (by_matrices, "rope:layout=interleaved", "numpy"),
    (by_a_table_in_float32, "rope", "numpy"),
    (by_differences_of_exponents, "alibi", "numpy"),
    (by_a_product_of_embeddings, "sandwich", "numpy"),
    pytest.param(by_torch_itself, "nope", "torch", marks=NEEDS_TORCH),
    pytest.param(right_torch, "rope:layout=interleaved", "torch", marks=NEEDS_TORCH),
    pytest.param(
        right_jax, "rope:layout=interleaved", "jax",
        marks=[long, pytest.mark.skipif(not HAS["jax"], reason="jax is not installed")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("f", "label", "framework"), RIGHT)
def test_a_right_function_agrees(f, label, framework):
    records = audit(candidate_of(f, label), "ci")
    assert candidate_of(f, label).framework == framework
    wrong = [r for r in records if r.status in ("differs", "not called")]
    assert not wrong, wrong[0].message
    assert exit_status(records) == 0
    if framework == "torch":
        assert {r.dtype for r in records} == {"float32", "bfloat16"}
        assert any(r.check == "gradients" for r in records)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(p, id=p.name, marks=[*needs(p.framework), *[long] * (n % 2)])
        for n, p in enumerate(PLANTED)
    ],
)
def test_a_planted_fault_is_named(one):
    record = named(one)
    assert record.error > record.tolerance
    assert record.where
    assert record.reproducer


def test_a_number_of_heads_is_not_told_to_be_no_power_of_two_if_it_is():
    records = audit(candidate_of(code.max_bias_unread, "alibi:max_bias=4"), "ci")
    wrong = [r.message for r in records if r.status == "differs"]
    assert len(wrong) > 8
    assert all("max_bias=4 is ignored" in message for message in wrong)


@NEEDS_TORCH
def test_a_causal_flag_counts_queries_from_the_end_of_the_keys():
    """``is_causal`` of torch counts them from the first key."""

    def flag(q, k, v, is_causal):
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    case = "one query, as in decoding"
    assert (
        "Queries of a cached step count from 0"
        in show(flag, "nope", case, framework="torch").message
    )


@pytest.mark.parametrize("one", [p for p in PLANTED if p.right], ids=lambda p: p.name)
def test_another_path_of_a_planted_candidate_agrees(one):
    records = audit(candidate_of(one.right, one.label, framework=one.framework), "ci")
    assert {record.status for record in records} == {"agrees"}


def test_what_a_function_has_no_parameter_for_is_not_asked():
    def attends(q, k, v, q_pos, k_pos):
        return code.attend(q, k, v, code.distance(q_pos, k_pos) >= 0)

    def grouped(q, k, v, q_pos, k_pos, num_kv_heads=None):
        return attends(q, k, v, q_pos, k_pos)

    statuses = {r.check: r.status for r in audit(candidate_of(attends, "nope"), "ci")}
    assert statuses["2 key heads for 8 query heads"] == "cannot express"
    assert not {"another scale", "a soft cap"} & set(statuses)
    statuses = {r.check: r.status for r in audit(candidate_of(grouped, "nope"), "ci")}
    assert statuses["2 key heads for 8 query heads"] == "not called"
    with pytest.raises(ValueError, match="'a soft cap' says nothing of it: it has no parameter"):
        show(attends, "nope", "a soft cap")


def test_a_scheme_that_learns_for_key_heads_is_asked_with_its_own_number():
    def attends(q, k, v, delta, q_pos, k_pos):
        scheme = posenc.schemes.PoPE(q.shape[1], q.shape[-1])
        return posenc.attention(
            q, k, v, scheme, {"delta": delta}, True,
            tokens=posenc.Tokens(k_pos), queries=posenc.Tokens(q_pos),
        )  # fmt: skip

    records = audit(candidate_of(attends, "pope", framework="numpy"), "ci")
    assert "2 key heads for 8 query heads" not in {r.check for r in records}
    assert {r.status for r in records} == {"agrees", "cannot express"}


def test_two_steps_are_one_only_without_a_factor():
    checks = {r.check for r in audit(candidate_of(right_yarn, code.YARN), "ci")}
    assert "in two steps, as a shift of cached keys" not in checks
    with pytest.raises(ValueError, match="two of its rotations are not one"):
        show(right_yarn, code.YARN, "in two steps, as a shift of cached keys")


def test_a_rotation_that_fails_only_on_the_second_step_is_told():
    def once(x, pos):
        return right_half(x, pos) if np.all(x == np.round(32 * x) / 32) else x

    records = audit(candidate_of(once, "rope", framework="numpy"), "ci")
    wrong = {r.check for r in records if r.status == "differs"}
    assert wrong == {"in two steps, as a shift of cached keys"}


def test_an_embedding_of_another_width_is_told():
    def narrow(pos):
        return right_embedding(pos, 16)

    assert exit_status(audit(candidate_of(narrow, "sinusoidal:dim=16"), "ci")) == 0
    with pytest.raises(NotCalledError, match="name its width in the label, as sinusoidal:dim=16"):
        candidate_of(narrow, "sinusoidal")
    checks = {r.status for r in check_function(right_learned, posenc.Learned(200, 8, offset=2))}
    assert checks == {"agrees"}


@NEEDS_TORCH
def test_the_page_says_what_the_audit_prints():
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.startswith(page.about())
    for one in PLANTED:
        record = named(one)
        sentence = record.message.partition(" First at ")[0]
        assert f"**`{one.name}`** as" in text
        assert f"> *{record.check}:* {sentence}" in text
    assert text.count("\n> *") == len(PLANTED)


def test_a_reproducer_runs():
    one = next(p for p in PLANTED if p.name == "row_0_for_all_rows")
    line = named(one).reproducer
    assert "\n" not in line
    path = f"import sys; sys.path.append({str(HERE)!r}); "
    done = subprocess.run(
        [sys.executable, "-c", path + line], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("differs: Rows after the first take the positions of row 0")


def test_a_function_is_found_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_kernel.py").write_text(
        "from candidates import geometric_slopes\n"
        "def scalar(x, pos): return 3\n"
        "def raises(x, pos): raise RuntimeError('no such kernel')\n"
        "def swapped(x, pos): return x.swapaxes(1, 2)\n"
    )
    records = audit_path("own_kernel:geometric_slopes", "alibi", grid="ci")
    assert exit_status(records) == 1
    assert exit_status(audit_path("own_kernel:geometric_slopes", "alibi:slopes=geometric")) == 0
    for path, said in (
        ("own_kernel:none", "was not found"),
        ("no_such_module:f", "was not found"),
        ("own_kernel:scalar", "returned builtins.int where one array is expected"),
        ("own_kernel:raises", "it raised RuntimeError: no such kernel"),
        ("own_kernel:swapped", "the same sizes in another order"),
    ):
        records = audit_path(path, "rope", framework="numpy", grid="ci")
        assert exit_status(records) == 2
        assert said in records[0].message


def test_what_was_tried_is_told():
    def raises(x, pos):
        raise RuntimeError("no such kernel")

    with pytest.raises(NotCalledError, match=r"with any arrays.*numpy: it raised.*no such kernel"):
        candidate_of(raises, "rope")


def test_what_is_asked_wrongly_is_told():
    for options, said in (
        ({"label": "rope/alibi"}, "one layer"),
        ({"kind": "kernel"}, "rotation, bias, attention"),
        ({"framework": "mlx"}, "numpy, torch, jax"),
        ({"grid": "half"}, "full, ci"),
    ):
        with pytest.raises(ValueError, match=said):
            audit_path(**{"path": "candidates:rotated_twice", "label": "rope", **options})
    (record,) = audit_path("candidates:rotated_twice", "alibi")
    assert record.status == "not called"
    assert "defines no rotation" in record.message
    (record,) = audit_path("candidates:geometric_slopes", "t5")
    assert "learns table (8, 32): give the function a parameter" in record.message


def test_a_candidate_says_what_it_cannot_express():
    def make(sizes):
        if sizes.num_heads & (sizes.num_heads - 1):
            raise CannotExpressError("only powers of two of heads")
        return right_alibi

    own = Candidate(make, "bias", lambda sizes: posenc.ALiBi(sizes.num_heads), "alibi")
    records = audit(own, "ci")
    statuses = {record.check: record.status for record in records}
    assert statuses["8 heads"] == "agrees"
    assert statuses["12 heads"] == "cannot express"
    assert exit_status(records) == 0


def test_an_audit_that_asks_nothing_is_no_success():
    def make(sizes):
        raise CannotExpressError("needs a GPU")

    own = Candidate(make, "bias", lambda sizes: posenc.ALiBi(sizes.num_heads), "alibi")
    assert exit_status(audit(own, "ci")) == 2


@pytest.mark.parametrize("name", ["x", "position_ids"])
def test_a_function_that_writes_to_its_argument_is_told(name):
    def writes(x, position_ids):
        found = right_half(x, position_ids)
        if name == "x":
            x[...] = found
        else:
            position_ids += 1
        return found

    records = audit(candidate_of(writes, "rope"), "ci")
    assert any(f"changes its argument {name} in place" in record.message for record in records)


def test_sizes_of_a_scheme_are_the_only_ones():
    scheme = posenc.RoPE(head_dim=16)
    records = check_function(right_half, scheme, grid="ci")
    assert {record.status for record in records} == {"agrees"}


def test_check_function_raises_and_records():
    seen = []
    with pytest.raises(FunctionError, match="geometric, 2") as raised:
        check_function(code.geometric_slopes, "alibi", grid="ci", callback=seen.append)
    assert raised.value.records == seen
    wrong = {r.check: "as in the first release" for r in seen if r.status == "differs"}
    check_function(code.geometric_slopes, "alibi", grid="ci", expected_failures=wrong)
    with pytest.raises(FunctionError, match="it agrees, though expected_failures says"):
        check_function(right_alibi, "alibi", grid="ci", expected_failures=wrong)
    check_function(right_alibi, "alibi", grid="ci", expected_failures=wrong, strict=False)
    with pytest.raises(ValueError, match="no check '12 head'"):
        check_function(right_alibi, "alibi", grid="ci", expected_failures={"12 head": ""})
    records = check_function(code.geometric_slopes, "alibi", grid="ci", on_fail="return")
    assert exit_status(records) == 1


@long
def test_what_no_fault_explains_is_measured():
    """Small faults of no known kind: no sentence may claim one."""

    def last_head(x, pos):
        out = right_half(x, pos)
        out[:, -1] = x[:, -1]
        return out

    def one_frequency(x, pos):
        own = code.inv_freq(x.shape[-1])
        own[7] *= 1.001
        return code.turn_half(x, *code.tables(pos, own))

    def longer(x, pos):
        out = one_frequency(x, pos)
        out[..., 7] *= np.where(pos == 0, 1, 1.0005)[:, None]
        return out

    def clipped(num_heads, q_pos, k_pos):
        return np.maximum(right_alibi(num_heads, q_pos, k_pos), -1000)

    def far_ones_stay(x, pos):
        return np.where((pos > 99_999)[:, None, :, None], x, right_half(x, pos))

    def all_scaled(x, pos):
        return code.turn_half(x, *code.tables(0.239 * pos, code.inv_freq(x.shape[-1])))

    def odd_base(x, pos):
        return code.turn_half(x, *code.tables(pos, code.inv_freq(x.shape[-1], 1234.0)))

    def three_heads(x, pos):
        out = right_half(x, pos)
        out[:, 2:5] += 0.5 * out[:, 2:5] ** 2
        return out

    def too_large(x, pos):
        return (1.0005 * right_half(x, pos)).astype(x.dtype)

    for f, label, said in (
        (last_head, "rope", "only head 7 of 8 differs"),
        (
            one_frequency,
            "rope",
            "keep their lengths, but 1 of 32 pairs turn by other angles: pair 7",
        ),
        (longer, "rope", "Lengths are off by up to 0.001, and 1 of 32 pairs turn by other"),
        (clipped, "alibi", "No known fault explains it"),
        (far_ones_stay, "rope", "only token 8 of 9 differs"),
        (too_large, "rope", "1.0005 times"),
        (all_scaled, "rope", "Every angle is 0.239 times that of the definition"),
        (odd_base, "rope", "Its base is about 1234"),
        (three_heads, "rope", "only heads 2 to 4 of 8 differ"),
    ):
        records = audit(candidate_of(f, label, framework="numpy"), "ci")
        wrong = [r for r in records if r.status == "differs"]
        assert said in wrong[-1 if f is clipped else 0].message


def test_a_bias_that_is_wrong_only_after_the_query_is_told_so():
    def f(num_heads, q_pos, k_pos):
        return np.minimum(right_alibi(num_heads, q_pos, k_pos), 0) * (k_pos <= q_pos[:, None])

    def hides(num_heads, q_pos, k_pos):
        return np.where(k_pos <= q_pos[:, None], right_alibi(num_heads, q_pos, k_pos), -np.inf)

    for fn, value in ((f, "0"), (hides, "-inf")):
        wrong = {r.check: r.message for r in audit(candidate_of(fn, "alibi"), "ci") if r.message}
        assert list(wrong) == ["keys after the query"]
        assert f"Keys after the query have the bias {value}" in wrong["keys after the query"]


def test_nan_is_a_difference():
    def fails(x, pos):
        out = right_half(x, pos)
        out[:, 3, -1] = np.nan
        return out

    records = audit(candidate_of(fails, "rope", framework="numpy"), "ci")
    assert all("numbers are NaN" in r.message for r in records)


@parametrize_checks(
    {"alibi": (right_alibi, "alibi"), "window": (right_window, "nope@16")}, grid="ci"
)
def test_functions(check):
    check()


def test_a_gradient_of_a_rotation_is_its_transpose():
    """By finite differences, which know nothing of rotations."""
    pos, x = np.array([[3, 100]]), drawn((1, 2, 2, 8), 1)
    scaling = posenc.schemes.YaRN(factor=4, train_len=64)
    scheme = posenc.RoPE(8, rotary_dim=4, scaling=scaling)
    question, d_out = Question("rotation", scheme, pos, vectors={"x": x}), drawn(x.shape, 2)
    gradient = rotation_gradient(question, d_out)
    step = 1e-3 * drawn(x.shape, 3)
    ends = [np.sum(d_out * answer(question.change(vectors={"x": x + s}))) for s in (step, -step)]
    np.testing.assert_allclose(np.sum(gradient * 2 * step), ends[0] - ends[1], atol=1e-10)
