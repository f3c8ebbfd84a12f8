"""Every scheme can be drawn, and the picture says what it shows."""

from __future__ import annotations

import re
import struct
import sys
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from sample import long, some

import posenc
from posenc.cli.drawing.page import about, draw
from posenc.cli.drawing.shown import choose_heads
from posenc.contract.protocol import FeatureSpec, ParamSpec, PositionScheme
from posenc.schemes import ReRoPE

Text = pytest.importorskip("matplotlib.text").Text
Figure = pytest.importorskip("matplotlib.figure").Figure


@dataclass(frozen=True)
class Window(PositionScheme, relative=True):
    """A bias that masks."""

    wide: tuple[float, ...] = (4.0, 9.0)

    def constants(self):
        return {"wide": self.wide}

    def bias(self, q, k, *, params, xp):
        distance = xp.astype(xp.abs(q - k), params["wide"].dtype)
        return xp.where(distance < params["wide"], -0.1 * distance, -xp.inf)


@dataclass(frozen=True)
class Forgetting(PositionScheme):
    """A bias of gates, here the same for every token."""

    num_heads: int = 3

    def feature_specs(self):
        return {"c": FeatureSpec(self.gates, of="key", cumulative=True)}

    def gates(self, x, *, params, xp):
        return 0 * xp.matrix_transpose(x[..., : self.num_heads]) - 0.1

    def bias(self, q, k, *, params, xp):
        assert xp.isdtype(q.dtype, "integral")
        return params.query["c"] - params.key["c"]


@dataclass(frozen=True)
class Everything(PositionScheme):
    """A learned bias, a transform of a rate per head, and an embedding of at most 20 positions."""

    head_dim: int = 6

    def param_specs(self):
        return {"slope": ParamSpec((2,))}

    def constants(self):
        return {"rate": (0.9, 0.8)}

    def embedding(self, pos, *, params, xp):
        if xp.max(pos) >= 20:
            raise IndexError("20 positions")
        return xp.stack([xp.astype(pos, params.dtype)] * 4, axis=-1)

    def transform(self, x, pos, *, role, params, xp):
        sign = 1 if role == "query" else -1
        return x * (params["rate"] ** xp.astype(sign * pos, x.dtype)[..., None])

    def bias(self, q, k, *, params, xp):
        return params["slope"] * xp.astype(k - q, params["slope"].dtype)


def size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert zlib.crc32(data[12:29]) == struct.unpack(">I", data[29:33])[0]
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def figures(monkeypatch):
    """The figures saved while the test runs."""
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (saved.append(f), save(f, *a, **k)))
    return saved


def words(figure):
    return " | ".join(text.get_text() for text in figure.findobj(Text))


def curve(figure, head):
    lines = [line for axes in figure.axes for line in axes.lines]
    (line,) = (line for line in lines if line.get_label() == head)
    return line.get_ydata()


DRAWN = {"alibi": {"bias"}, "t5": {"bias"}, "rope": {"transform"}, "nope": set()}
DRAWN |= {"sinusoidal": {"embedding"}, "learned": {"embedding"}}


@pytest.mark.parametrize("name", some(posenc.catalogue(), ["t5"], long))
def test_every_scheme_of_the_catalogue_is_drawn(tmp_path, figures, name):
    headings = {"bias": "Bias:", "embedding": "Embedding:", "transform": "Transform:"}
    scheme = posenc.make(name, num_heads=4, head_dim=16, max_len=64, train_len=32)
    path = draw(scheme, tmp_path / f"{name}.png", length=48)
    assert path == tmp_path / f"{name}.png"
    width, height = size(path)
    assert width == 1600
    assert 200 < height < 2400
    assert path.stat().st_size > 10_000
    text = words(figures[-1])
    assert type(scheme).__name__ in text
    assert ("drawn at initialisation" in text) == bool(scheme.param_specs())
    seen = {part for part, heading in headings.items() if heading in text}
    assert seen == DRAWN.get(name, seen)


def test_no_positions_are_one_sentence(tmp_path, figures):
    draw(posenc.NoPE(), tmp_path / "a.png")
    draw(posenc.NoPE(), tmp_path / "b.png", causal=False)
    assert "No positions enter" in words(figures[0])
    assert "causal mask" in words(figures[0])
    assert "causal mask" not in words(figures[1])


@long
def test_a_sink_is_named_though_it_is_not_drawn(tmp_path, figures):
    draw(posenc.make("sink", num_heads=2), tmp_path / "a.png")
    draw(posenc.schemes.Sum(posenc.make("sink", num_heads=2), posenc.ALiBi(2)), tmp_path / "b.png")
    assert "attention sees only a sink, the content" in words(figures[0])
    assert "with a sink, one more logit" in words(figures[1])


@long
def test_whole_rows_are_named_though_they_are_not_drawn(tmp_path, figures):
    draw(posenc.make("cope", head_dim=8), tmp_path / "a.png")
    draw(posenc.make("dape", num_heads=2), tmp_path / "b.png")
    assert "Only whole rows of scores change" in words(figures[0])
    assert all("changes whole rows of scores" in words(figure) for figure in figures)


@long
def test_minus_infinity_is_shown_as_masked(tmp_path, figures):
    size(draw(Window(), tmp_path / "a.png", length=32))
    assert "masked by the bias (−∞)" in words(figures[0])
    assert "after the query" in words(figures[0])
    draw(Window(), tmp_path / "b.png", length=32, causal=False)
    assert "after the query" not in words(figures[1])
    draw(Window((100.0,)), tmp_path / "c.png", length=32)
    assert "masked by" not in words(figures[2])
    size(draw(Window((0.0, 0.0)), tmp_path / "d.png", length=32))


def test_a_line_per_head_holds_the_bias(tmp_path, figures):
    draw(Window(), tmp_path / "a.png", length=32)
    first, second = curve(figures[0], "1"), curve(figures[0], "2")
    expected = np.where(np.arange(32) < 4, -0.1 * np.arange(32), np.nan)[::-1]
    np.testing.assert_allclose(np.ma.filled(first, np.nan), expected)
    assert np.ma.count(second) == 9


@long
def test_a_bias_of_features_is_drawn_for_random_tokens(tmp_path, figures):
    size(draw(Forgetting(), tmp_path / "a.png", length=32))
    assert "depends on content" in words(figures[0])
    assert "random tokens" in words(figures[0])
    np.testing.assert_allclose(curve(figures[0], "3"), -0.1 * np.arange(32)[::-1], atol=1e-12)


@long
def test_a_bias_of_places_is_drawn_for_text(tmp_path, figures):
    scheme = posenc.schemes.ALiBi2D(2, "city_block", [0.5, 0.25])
    size(draw(scheme, tmp_path / "a.png", length=32))
    assert "for text, with the position on every axis" in words(figures[0])
    np.testing.assert_allclose(curve(figures[0], "1"), -np.arange(32)[::-1], atol=1e-12)


@long
def test_all_that_a_scheme_has_is_drawn_as_far_as_it_allows(tmp_path, figures):
    width, height = size(draw(Everything(), tmp_path / "a.png", length=50))
    assert (width, height > 1400) == (1600, True)
    text = words(figures[0])
    for part in ("Bias:", "Embedding:", "Transform:", "head 1", "20 positions", "of 50"):
        assert part in text
    assert "positions, all" not in drawn_words(Everything(), tmp_path, figures, length=20)


def drawn_words(scheme, folder, figures, **options):
    draw(scheme, folder / "picture.png", **options)
    return words(figures[-1])


def test_phases_are_the_cosines_of_the_rotation(tmp_path, figures):
    assert "pair of channels" in drawn_words(posenc.RoPE(8), tmp_path, figures, length=24)
    image = figures[0].axes[0].images[0]
    angles = np.arange(24) * 10_000.0 ** (-np.arange(4) / 4)[:, None]
    np.testing.assert_allclose(image.get_array(), np.cos(angles), atol=1e-12)


def test_each_distance_is_drawn_from_its_region(tmp_path, figures):
    drawn_words(ReRoPE(8, window=5, leak=2.0), tmp_path, figures, length=24)
    image, n = figures[0].axes[0].images[0], np.arange(24)
    angles = np.where(n < 5, n, 5 + (n - 5) / 2) * 10_000.0 ** (-np.arange(4) / 4)[:, None]
    np.testing.assert_allclose(image.get_array(), np.cos(angles), atol=1e-12)


def test_given_params_are_drawn(tmp_path, figures):
    scheme = posenc.T5Bias(num_heads=2)
    params = {"table": np.full((2, 32), 0.25, dtype=np.float32)}
    assert "as given" in drawn_words(scheme, tmp_path, figures, params=params, length=16)
    np.testing.assert_array_equal(curve(figures[0], "1"), 0.25)
    with pytest.raises(ValueError, match="has no param"):
        draw(scheme, tmp_path / "a.png", params={"tabel": params["table"]})


@long
@pytest.mark.parametrize("length", some([1, 2, 1500], [1], long))
def test_any_length_is_drawn(tmp_path, length):
    for scheme in (posenc.ALiBi(32), posenc.RoPE(64), posenc.Sinusoidal(8)):
        assert size(draw(scheme, tmp_path / "picture", length=length))[0] == 1600


@pytest.mark.parametrize(
    ("form", "start"), [("svg", b"<?xml"), pytest.param("PDF", b"%PDF-", marks=long)]
)
def test_papers_get_vectors_the_same_each_time(tmp_path, form, start):
    pages = [draw(posenc.ALiBi(2), tmp_path / f"{n}.{form}", length=8).read_bytes() for n in "ab"]
    assert pages[0] == pages[1]
    assert pages[0].startswith(start)
    assert b"/Type3" not in pages[0]  # fonts that journals refuse


def test_a_title_is_text_and_not_mathematics(tmp_path, figures):
    title = "costs 5$ and_more$ x^"
    assert title in drawn_words(posenc.NoPE(), tmp_path, figures, title=title)


def test_heads_are_spread_over_all():
    assert choose_heads(3) == [0, 1, 2]
    shown = choose_heads(32)
    assert (len(shown), shown[0], shown[-1]) == (8, 0, 31)


@pytest.mark.parametrize("length", [0, -3])
def test_lengths_start_at_one(tmp_path, length):
    with pytest.raises(ValueError, match="length must be at least 1"):
        draw(posenc.NoPE(), tmp_path / "a.png", length=length)


@pytest.mark.parametrize("length", [2.0, True, "8"])
def test_lengths_are_integers(tmp_path, length):
    with pytest.raises(TypeError, match="length must be an integer"):
        draw(posenc.NoPE(), tmp_path / "a.png", length=length)


def test_errors_of_drawing_name_the_cause(tmp_path):
    with pytest.raises(TypeError, match="instance of a PositionScheme"):
        draw("alibi", tmp_path / "a.png")
    with pytest.raises(FileNotFoundError, match=r"nowhere.a\.png"):
        draw(posenc.NoPE(), tmp_path / "nowhere" / "a.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OSError, match=r"folder\.png"):
        draw(posenc.NoPE(), tmp_path / "folder.png")
    with pytest.raises(ValueError, match=r"must end in one of \.png, \.svg, \.pdf, got .*a\.gif"):
        draw(posenc.NoPE(), tmp_path / "a.gif")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'posenc\[plot\]'"):
        draw(posenc.ALiBi(2), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_an_index_error_at_every_position_is_raised(tmp_path):
    class Broken(posenc.NoPE):
        def embedding(self, pos, *, params, xp):
            raise IndexError("never any position")

    with pytest.raises(IndexError, match="never any position"):
        draw(Broken(), tmp_path / "a.png")


NOTES = {
    "position multiplies its scores: 1 to 1.4": ("rerope", {"train_len": 32, "window": 8}),
    "all scores are multiplied by 1.3": ("rope_yarn", {"train_len": 32, "factor": 4.0}),
    "which is random: only equal values": ("t5", {}),
    "with the position on every axis": ("axial_rope", {}),
    "⟨T(p) e, T(0) e⟩ − ⟨T(p) 0, T(0) 0⟩": ("pope", {}),
    "Value of channels 0, 4, 8, …": ("sinusoidal", {}),
}
PLAIN = [("rope", {}), ("alibi", {}), ("xpos", {}), ("pope", {})]
FACTOR = re.compile("multipl|which is random")


@long
@pytest.mark.parametrize("note", NOTES)
def test_what_distance_does_not_explain_is_said(tmp_path, figures, note):
    name, options = NOTES[note]
    scheme = posenc.make(name, num_heads=4, head_dim=64, max_len=128, **options)
    draw(scheme, tmp_path / "x.svg", length=128)
    assert note in words(figures[0])


@long
@pytest.mark.parametrize(("name", "options"), PLAIN)
def test_no_factor_is_claimed_where_there_is_none(tmp_path, figures, name, options):
    scheme = posenc.make(name, num_heads=4, head_dim=16, max_len=32, **options)
    draw(scheme, tmp_path / "x.svg", length=32)
    assert not FACTOR.search(words(figures[0]))


def test_a_map_of_a_rotation_shows_one_channel_in_each_row(tmp_path, figures):
    """Also where a transform does not keep zeros: PoPE's rows are cosines times one number."""
    scheme = posenc.make("pope", num_heads=1, head_dim=8)
    draw(scheme, tmp_path / "x.svg", length=24)
    rows = np.asarray(figures[0].axes[0].images[0].get_array())
    expected = np.cos(np.arange(24) * 10000.0 ** -(np.arange(8)[:, None] / 8))
    shown = rows / rows[:, :1]
    # float64 throughout; rows differ by rounding in softplus and in the sines alone.
    assert np.abs(np.sort(shown, axis=0) - np.sort(expected, axis=0)).max() < 1e-5


def test_channels_of_an_embedding_are_of_one_kind(tmp_path, figures):
    """Sines and cosines that alternate in neighbouring rows would blur into one colour."""
    draw(posenc.schemes.Sinusoidal(192), tmp_path / "x.svg", length=40)
    rows = np.asarray(figures[0].axes[0].images[0].get_array())
    assert len(rows) <= 64
    assert not rows[:, 0].any()  # sines alone


def test_aliasing_is_said(tmp_path, figures):
    draw(posenc.make("rope", head_dim=8), tmp_path / "x.svg", length=2048)
    assert "maps show one of 4 positions: periods below 8 alias" in words(figures[0])


@long
def test_a_picture_says_what_the_scheme_is(tmp_path, figures):
    both = posenc.schemes.Sum(posenc.RoPE(8), posenc.ALiBi(1))
    text = drawn_words(both, tmp_path, figures, length=4)
    assert "Rotation of channel pairs" in text
    assert "A penalty linear in distance: bias = -m_h * |i - j|, with a slope m_h per head." in text
    assert "arXiv 2108.12409" in text
    (_, yarn) = about(posenc.make("rope_yarn", head_dim=8, train_len=16, factor=4.0))
    assert yarn.startswith("YaRN: (1 - g) f / s + g f")


def test_a_bias_of_absolute_positions_is_said_to_be_one(tmp_path, figures):
    fire = posenc.make("fire", num_heads=1, init_len=4.0)
    text = drawn_words(fire, tmp_path, figures, length=16).replace("\n", " ")
    assert "It changes along diagonals: absolute position counts too" in text


def test_weights_are_the_softmax_of_the_bias(tmp_path, figures):
    text = drawn_words(posenc.ALiBi(2), tmp_path, figures, length=16).replace("\n", " ")
    assert "It is equal along diagonals: distance alone counts" in text
    (axes,) = (a for a in figures[0].axes if a.get_ylabel() == "weight (%)")
    expected = np.exp(-np.arange(16)[::-1] / 16)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), 100 * expected / expected.sum())
    assert "if all keys had equal content" in axes.get_title()


def test_a_window_is_drawn(tmp_path, figures):
    text = drawn_words(posenc.RoPE(8), tmp_path, figures, length=16, window=4)
    assert "Window: a query sees keys at distances below 4" in text
    assert "outside the window (−∞)" in text
    (axes,) = (a for a in figures[0].axes if a.get_ylabel() == "weight (%)")
    assert np.ma.count(axes.lines[0].get_ydata()) == 4
    np.testing.assert_allclose(np.ma.compressed(axes.lines[0].get_ydata()), 25.0)
    text = drawn_words(posenc.ALiBi(2), tmp_path, figures, length=16, window=4).replace("\n", " ")
    assert "Keys at distances of 4 and more have no weight" in text
    assert [np.ma.count(curve(figures[-1], head)) for head in "12"] == [4, 4]


def test_a_factor_of_the_absolute_position_has_a_panel(tmp_path, figures):
    scheme = posenc.make("log_scale", num_heads=2, kind="ssmax")
    assert "By absolute position" in drawn_words(scheme, tmp_path, figures, length=16)
    (axes,) = (a for a in figures[0].axes if a.get_ylabel() == "factor on its scores")
    shown = axes.lines[0].get_ydata()
    np.testing.assert_allclose(shown / shown[1], np.log1p(np.arange(16)) / np.log(2), rtol=1e-5)
