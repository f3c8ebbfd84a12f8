"""Programs of ONNX, run by onnxruntime: equal to eager at every length and far away."""

import numpy as np
import pytest

import posenc
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

WHERE = "is not installed; .ci/libraries runs this"
torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript", reason=f"onnxscript {WHERE}")
onnxruntime = pytest.importorskip("onnxruntime", reason=f"onnxruntime {WHERE}")

import posenc_torch  # noqa: E402
from posenc.positions import MAX_POSITION  # noqa: E402

HEADS, DIM, LENGTH = 2, 8, 6
FAR = (0, 1_000_000, MAX_POSITION - 40)
FLOAT32 = 2 * ATTENTION_TOL["float32"]  # of two layers
SIZES = {"num_heads": HEADS, "head_dim": DIM, "train_len": 32}
MORE = torch.export.Dim("more", min=2, max=1024)
# Of the exporter itself, on which nothing here depends.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in ("`isinstance.treespec", "# The axis name", ".*deprecated", "Detected .*opset")
]


class Model(torch.nn.Module):
    """Two layers; queries are the last of the keys' tokens."""

    def __init__(self, scheme):
        super().__init__()
        self.positions = posenc_torch.Positions(scheme, layers=2)
        for param in self.positions.parameters():
            torch.nn.init.normal_(param)

    def forward(self, q, k, v, pos):
        tokens, last = posenc.Tokens(pos=pos), posenc.Tokens(pos=pos[-q.shape[2] :])
        for attend in self.positions.bind(tokens, last, causal=True):
            q = attend(q, k, v)
        return q


def arguments(q_len, k_len, first=0):
    vectors = (torch.randn(2, HEADS, n, DIM) for n in (q_len, k_len, k_len))
    return (*vectors, torch.arange(k_len) + first)


def session(model, q_len):
    """The program of whole sequences, or of one new token after cached ones."""
    queries = {2: MORE} if q_len > 1 else {}
    shapes = (queries, {2: MORE}, {2: MORE}, {0: MORE})
    program = torch.onnx.export(
        model, arguments(q_len, LENGTH), dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    found = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [given.name for given in found.get_inputs()]
    return lambda *given: found.run(
        None, {name: array.numpy() for name, array in zip(names, given, strict=True)}
    )[0]


def assert_as_eager(run, model, q_len):
    for k_len in (LENGTH, 3, 21):
        for first in FAR:
            given = arguments(q_len if q_len == 1 else k_len, k_len, first)
            with torch.no_grad():
                assert_near(run(*given), model(*given).numpy(), FLOAT32)


@pytest.mark.parametrize(("name", "q_len"), [("alibi", LENGTH), ("rope", 1), ("t5", 1)])
def test_onnxruntime_computes_what_eager_does(name, q_len):
    torch.manual_seed(0)
    model = Model(posenc.make(name, **SIZES)).eval()
    assert_as_eager(session(model, q_len), model, q_len)


def test_rope_is_exact_far_away():
    """Against the formula in float64: angles as float32 products are off by 1e-2 at a million."""
    torch.manual_seed(1)
    model = Model(posenc.RoPE(DIM)).eval()
    run = session(model, LENGTH)
    assert_as_eager(run, model, LENGTH)
    q, k, v, pos = arguments(5, 5, 1_000_000)
    angles = pos.numpy()[:, None] * 10_000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    turn = np.exp(1j * angles)
    out = q.numpy().astype(np.float64)
    for _ in range(2):
        turned = [(x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * turn for x in (out, k.numpy())]
        scores = np.einsum("bhqd,bhkd->bhqk", turned[0], turned[1].conj()).real / np.sqrt(DIM)
        weights = np.tril(np.exp(scores))
        out = weights / weights.sum(-1, keepdims=True) @ v.numpy()
    assert_near(run(q, k, v, pos), out, FLOAT32)
