"""Known faults, each a change of one place in the sources, and the tests that must notice it.

A target is a test file and, after it, words that must all occur in the id of a test. Faults of
other libraries are cited by repository and number of issue or pull request.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake to plant.

    Attributes
    ----------
    name
        Short, in kebab case.
    why
        What it does to a user, or who made it.
    file
        From the root of the repository.
    old, new
        The text there, which occurs once, and what takes its place.
    tests
        Targets; each ``"file word word"``.
    """

    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ALIBI, LEARNED = "posenc/schemes/alibi.py", "posenc/schemes/learned.py"
ROPE, SINUSOIDAL = "posenc/schemes/rope.py", "posenc/schemes/sinusoidal.py"
T5, ANGLES = "posenc/schemes/t5.py", "posenc/angles.py"
REFERENCE, CALL = "posenc/attention.py", "posenc/call.py"
POSITIONS, PARAMS = "posenc/positions.py", "posenc/params.py"
GATES, EVALUATE, PATHS = "posenc/gates.py", "posenc/evaluate.py", "posenc/paths.py"
TORCH, MODULE = "backends/posenc_torch/attention.py", "backends/posenc_torch/position.py"
JAX, JAX_INIT = "backends/posenc_jax/attention.py", "backends/posenc_jax/params.py"
CHUNKED, TILE = "backends/posenc_jax/chunked.py", "backends/posenc_jax/tile.py"
BLOCKS = "backends/posenc_jax/blocks.py"
PLAN, GRADIENTS = "backends/posenc_jax/fused/plan.py", "backends/posenc_jax/fused/gradients.py"
FUSED, CUDNN = "backends/posenc_jax/fused/path.py", "backends/posenc_jax/lifted.py"
ON_TPU, TPU_TILE = (
    "backends/posenc_jax/fused/tpu/passes.py",
    "backends/posenc_jax/fused/tpu/tile.py",
)
RING = "backends/posenc_jax/ring.py"
FLEX, SIGHT = "backends/posenc_torch/flex.py", "backends/posenc_torch/sight.py"
SCORE, LOADS = "backends/posenc_torch/score.py", "backends/posenc_torch/loads.py"
SDPA, LIFTED = "backends/posenc_torch/sdpa.py", "backends/posenc_torch/lifted.py"
PARTS, CUT = "backends/posenc_torch/chunked.py", "backends/posenc_torch/parts.py"
NEGLIGIBLE, LOWERINGS = "posenc/negligible.py", "posenc/lowerings.py"
MEETING = "posenc/blocks.py"

_SCHEMES = (
    Fault(
        "alibi-slopes-geometric-where-paper-is-asked",
        "wrong slopes unless the heads are a power of two (ml-explore/mlx 3071)",
        ALIBI,
        '_RULES = {"paper": _paper,',
        '_RULES = {"paper": _geometric,',
        ("test_schemes_golden.py alibi_slopes_of_the_paper",),
    ),
    Fault(
        "alibi-slopes-from-one",
        "exponents from 0 instead of 1: head 0 twice as steep (paiml/aprender 2143)",
        ALIBI,
        "for h in range(1, num_heads + 1))",
        "for h in range(num_heads))",
        ("test_schemes_golden.py alibi",),
    ),
    Fault(
        "alibi-slopes-reversed",
        "the steepest head last",
        ALIBI,
        "for h in range(1, num_heads + 1))",
        "for h in range(num_heads, 0, -1))",
        ("test_schemes_golden.py alibi",),
    ),
    Fault(
        "alibi-bias-grows-with-distance",
        "a sign: far keys are preferred",
        ALIBI,
        "return -m * xp.astype(xp.abs(q - k), m.dtype)",
        "return m * xp.astype(xp.abs(q - k), m.dtype)",
        ("test_laws.py key_bias_is_as_claimed-alibi",),
    ),
    Fault(
        "alibi-distance-without-abs",
        "keys after the query get a reward; a causal test never sees it",
        ALIBI,
        "xp.abs(q - k), m.dtype)",
        "q - k, m.dtype)",
        ("test_schemes_golden.py alibi",),
    ),
    Fault(
        "alibi-key-only",
        "the form of BLOOM, equal under a causal mask alone, offered as a relative bias",
        ALIBI,
        "return -m * xp.astype(xp.abs(q - k), m.dtype)",
        "return m * xp.astype(k + 0 * q, m.dtype)",
        ("test_laws.py relative_is_as_claimed-alibi",),
    ),
    Fault(
        "alibi-key-bias-with-the-wrong-sign",
        "the key-only form contradicts the bias it stands for",
        ALIBI,
        "return m * xp.astype(k, m.dtype)",
        "return -m * xp.astype(k, m.dtype)",
        ("test_laws.py key_bias_is_as_claimed-alibi",),
    ),
    Fault(
        "alibi-does-not-say-that-it-is-relative",
        "a property not claimed where it holds: tiles give up their distances",
        ALIBI,
        "relative: ClassVar[bool] = True",
        "relative: ClassVar[bool] = False",
        ("test_laws.py relative_is_as_claimed-alibi",),
    ),
    Fault(
        "slopes-changed-in-place",
        "params are read, negated and left so: every second call has the other sign",
        ALIBI,
        "return -m * xp.astype(xp.abs(q - k), m.dtype)",
        "m *= -1\n        return m * xp.astype(xp.abs(q - k), m.dtype)",
        ("test_laws.py bias_is_elementwise alibi-learned",),
    ),
    Fault(
        "learned-slopes-start-equal",
        "all heads begin as one",
        ALIBI,
        "init=lambda rng, shape: np.asarray(slopes)",
        "init=lambda rng, shape: np.full(shape, slopes[0])",
        ("test_schemes_golden.py alibi_learned",),
    ),
    Fault(
        "learned-offset-dropped",
        "OPT and RoBERTa checkpoints are read two rows too early",
        LEARNED,
        "xp.where(known, flat + self.offset, 0)",
        "xp.where(known, flat, 0)",
        ("test_schemes_golden.py learned",),
    ),
    Fault(
        "learned-offset-off-by-one",
        "padding_idx instead of padding_idx + 1",
        LEARNED,
        "flat + self.offset, 0)",
        "flat + self.offset - 1, 0)",
        ("test_schemes_golden.py learned",),
    ),
    Fault(
        "learned-negative-position-accepted",
        "a negative position gives a row of NaN where an error is promised",
        LEARNED,
        "not (seen.min() >= 0 and seen.max() < self.max_len)",
        "not seen.max() < self.max_len",
        ("test_wrong_calls.py embedding-negative",),
    ),
    Fault(
        "rope-half-for-interleaved",
        "the other pairing of channels: checkpoints load and talk nonsense",
        ROPE,
        '"interleaved": _interleaved}',
        '"interleaved": _half}',
        ("test_schemes_golden.py rope",),
    ),
    Fault(
        "rope-exponent-k-over-d",
        "frequencies base**(-k/D) for base**(-2k/D)",
        ROPE,
        "Fraction(2 * k, dim)",
        "Fraction(k, dim)",
        ("test_schemes_golden.py rope",),
    ),
    Fault(
        "rope-cache-without-base",
        "tables kept in a module by width alone: the second base gets the first one's",
        ROPE,
        "turns = Turns(frequencies(self.base, (Fraction(2 * k, dim) for k in range(dim // 2))))",
        "turns = globals().setdefault('_TABLES', {}).setdefault(\n"
        "            dim, Turns(frequencies(self.base, (Fraction(2 * k, dim)"
        " for k in range(dim // 2))))\n        )",
        ("test_laws.py schemes_share_no_state-rope",),
    ),
    Fault(
        "rope-turns-queries-alone",
        "keys pass as they are: the angle is that of the query's position",
        ROPE,
        "sin, cos = self._turns.sincos(pos, dtype=work, xp=xp)",
        'sin, cos = self._turns.sincos(pos if role == "query" else 0 * pos, dtype=work, xp=xp)',
        ("test_laws.py rotated_scores [rope]",),
    ),
    Fault(
        "rope-turns-keys-backwards",
        "scores depend on the sum of positions",
        ROPE,
        "sin, cos = self._turns.sincos(pos, dtype=work, xp=xp)",
        'sin, cos = self._turns.sincos(pos if role == "query" else -pos, dtype=work, xp=xp)',
        ("test_laws.py rotated_scores [rope]",),
    ),
    Fault(
        "rope-sine-for-cosine-of-keys",
        "a swap in one of two calls",
        ROPE,
        "sin, cos = self._turns.sincos(pos, dtype=work, xp=xp)",
        "sin, cos = self._turns.sincos(pos, dtype=work, xp=xp)[:: 1 if role == 'query' else -1]",
        ("test_laws.py rotated_scores [rope]",),
    ),
    Fault(
        "rope-by-index",
        "rows counted from 0, whatever positions are given: wrong in decoding and packing",
        ROPE,
        "sin, cos = self._turns.sincos(pos, dtype=work, xp=xp)",
        "sin, cos = self._turns.sincos(\n"
        "            xp.arange(x.shape[-2]) + 0 * pos, dtype=work, xp=xp\n        )",
        ("test_laws.py transform_is_row_local-rope",),
    ),
    Fault(
        "rope-positions-in-half-precision",
        "positions in the dtype of x: 256 and 257 are one (huggingface/transformers 26602)",
        ROPE,
        "sin, cos = self._turns.sincos(pos, dtype=work, xp=xp)",
        "sin, cos = self._turns.sincos(\n"
        "            xp.astype(xp.astype(pos, x.dtype), pos.dtype), dtype=work, xp=xp\n        )",
        ("test_laws.py narrow_floats_round_once-torch-rope",),
    ),
    Fault(
        "rope-in-half-precision",
        "rotated in the dtype of x, with rounded sines (huggingface/transformers 29285)",
        ROPE,
        "(xp.astype(turning, work), sin, cos, xp), x.dtype)",
        "(turning, xp.astype(sin, x.dtype), xp.astype(cos, x.dtype), xp), x.dtype)",
        ("test_laws.py narrow_floats_round_once-torch-rope",),
    ),
    Fault(
        "rope-table-clamped",
        "positions beyond a table of 4096 rows take its last row",
        ROPE,
        "sin, cos = self._turns.sincos(pos, dtype=work, xp=xp)",
        "sin, cos = self._turns.sincos(\n"
        "            xp.where(pos > 4095, 0 * pos + 4095, pos), dtype=work, xp=xp\n        )",
        ("test_laws.py rotated_scores [rope]",),
    ),
    Fault(
        "partial-rope-turns-the-last-channels",
        "rotary_dim counted from the wrong end",
        ROPE,
        "turning, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim or self.head_dim :]",
        "turning = x[..., self.head_dim - (self.rotary_dim or self.head_dim) :]\n"
        "        rest = x[..., : self.head_dim - (self.rotary_dim or self.head_dim)]",
        ("test_schemes_golden.py rope",),
    ),
    Fault(
        "partial-rope-with-frequencies-of-the-whole-head",
        "exponents 2k/D where they are 2k/R (GPT-J, NeoX)",
        ROPE,
        "Fraction(2 * k, dim)",
        "Fraction(2 * k, self.head_dim)",
        ("test_schemes_golden.py rope",),
    ),
    Fault(
        "sinusoid-cosine-first",
        "sine and cosine change places",
        SINUSOIDAL,
        "xp.stack([sin, cos], axis=-1)",
        "xp.stack([cos, sin], axis=-1)",
        ("test_schemes_golden.py sinusoid",),
    ),
    Fault(
        "tensor2tensor-exponent-of-the-paper",
        "tensor2tensor's last frequency is 1/base; here it would stop short of it",
        SINUSOIDAL,
        "Fraction(k, n - tensor2tensor)",
        "Fraction(k, n)",
        ("test_schemes_golden.py sinusoid",),
    ),
    Fault(
        "sinusoid-cache-without-base-and-layout",
        "as rope-cache-without-base",
        SINUSOIDAL,
        "turns = Turns(frequencies(self.base, (Fraction(k, n - tensor2tensor) for k in range(n))))",
        "turns = globals().setdefault('_TABLES', {}).setdefault(\n"
        "            n, Turns(frequencies(self.base, (Fraction(k, n - tensor2tensor)"
        " for k in range(n))))\n        )",
        ("test_laws.py schemes_share_no_state-sinusoidal",),
    ),
    Fault(
        "t5-bucket-by-float-logarithm",
        "a float64 logarithm falls short of a threshold: 64 lands in the bucket before its own",
        T5,
        "reached = middle**width * exact**t >= exact**width * max_distance**t",
        "import math\n\n"
        "            steps = width / math.log(max_distance / exact)\n"
        "            reached = int(math.log(middle / exact) * steps) >= t",
        ("test_schemes_golden.py t5_buckets",),
    ),
    Fault(
        "t5-sign-of-the-distance",
        "q - k for k - q: past and future change places",
        T5,
        "self.bucket(k - q, xp=xp)",
        "self.bucket(q - k, xp=xp)",
        ("test_schemes_golden.py t5",),
    ),
    Fault(
        "t5-last-bucket-missing",
        "thresholds of one bucket too few: the last row is never read",
        T5,
        "for t in range(1, width))",
        "for t in range(1, width - 1))",
        ("test_schemes_golden.py t5",),
    ),
    Fault(
        "t5-cache-without-max-distance",
        "thresholds kept in a module by the number of buckets alone",
        T5,
        "_thresholds(self._per_direction, exact, self.max_distance)\n",
        "globals().setdefault('_KEPT', {}).setdefault(exact,"
        " _thresholds(self._per_direction, exact, self.max_distance))\n",
        ("test_laws.py schemes_share_no_state-t5",),
    ),
    Fault(
        "t5-claims-a-key-bias",
        "a bias that does not split into a part of the query and one of the key says it does",
        T5,
        "def _thresholds(buckets",
        "def _key_bias(self: T5Bias, k: Array, *, params: Mapping[str, Array], xp: Namespace)"
        " -> Array:\n    return self.bias(0 * k, k, params=params, xp=xp)\n\n\n"
        "T5Bias.key_bias = _key_bias\n\n\ndef _thresholds(buckets",
        ("test_laws.py key_bias_is_as_claimed-t5",),
    ),
    Fault(
        "t5-checkpoints-scaled",
        "the scheme's own scale is ignored: T5 does not divide by the root of D",
        CALL,
        "scale=scheme.scale(q.shape[3]) if scale is None",
        "scale=1 / math.sqrt(q.shape[3]) if scale is None",
        ("test_reference.py the_reference_is_its_definition t5-unscaled",),
    ),
)

_ANGLES = (
    Fault(
        "naive-float32-angles",
        "sine of a float32 product: off by 0.03 at position 10**6",
        ANGLES,
        "        carry = xp.astype(",
        "        radians = (xp.astype(high, dtype) + low) * (2 * math.pi / 2**word)\n"
        "        angle = xp.astype(pos, dtype) * radians\n"
        "        return xp.sin(angle), xp.cos(angle)\n"
        "        carry = xp.astype(",
        ("test_angles.py far_positions numpy",),
    ),
    Fault(
        "frequency-rounded-to-32-bits",
        "the low part of a frequency dropped: the angle drifts as positions grow",
        ANGLES,
        "* high + carry",
        "* high",
        ("test_angles.py far_positions numpy",),
    ),
    Fault(
        "cosine-of-the-wrong-quadrant",
        "a sign in the second half of a turn",
        ANGLES,
        "((quarter + 1) & 2) == 2, -cos, cos)",
        "(quarter & 2) == 2, -cos, cos)",
        ("test_schemes_golden.py rope", "test_schemes_golden.py sinusoid"),
    ),
    Fault(
        "sinusoids-always-in-float32",
        "the working float is lost on the way to an embedding",
        PARAMS,
        'return getattr(params, "dtype", xp.float32)',
        "return xp.float32",
        ("test_schemes_golden.py sinusoid",),
    ),
)

_CORE = (
    Fault(
        "queries-aligned-with-the-first-keys",
        "decoding: the new token stands at position 0",
        CALL,
        "return k_pos[k_len - q_len :], k_pos",
        "return k_pos[:q_len], k_pos",
        ("test_laws.py decoding_equals_prefill-numpy-reference-alibi",),
    ),
    Fault(
        "queries-one-step-behind",
        "decoding: the new token stands where the last one stood",
        CALL,
        "return k_pos[k_len - q_len :], k_pos",
        "return k_pos[k_len - q_len :] - 1, k_pos",
        ("test_reference.py align",),
    ),
    Fault(
        "mask-by-index",
        "who sees whom decided by the place in memory: wrong for explicit positions",
        CALL,
        "            column(self.q_pos),\n            row(self.k_pos),\n            *segments,",
        "            column(self.xp.arange(self.q.shape[2]) + self.k.shape[2] - self.q.shape[2]),\n"
        "            row(self.xp.arange(self.k.shape[2])),\n            *segments,",
        ("test_laws.py order_in_memory_does_not_matter-numpy-reference-nope",),
    ),
    Fault(
        "causal-hides-the-token-itself",
        "< for <=",
        POSITIONS,
        "terms.append(k_pos <= q_pos)",
        "terms.append(k_pos < q_pos)",
        ("test_reference.py the_reference_is_its_definition nope",),
    ),
    Fault(
        "window-one-too-wide",
        "<= for < on both sides",
        POSITIONS,
        "(distance < window) & (distance > -window)",
        "(distance <= window) & (distance >= -window)",
        ("test_reference.py the_reference_is_its_definition nope window",),
    ),
    Fault(
        "window-one-too-wide-ahead",
        "off by one on the side that a causal test never sees",
        POSITIONS,
        "(distance < window) & (distance > -window)",
        "(distance < window) & (distance >= -window)",
        ("test_reference.py the_reference_is_its_definition nope window",),
    ),
    Fault(
        "window-open-ahead",
        "only the past is bounded",
        POSITIONS,
        "(distance < window) & (distance > -window)",
        "distance < window",
        ("test_reference.py the_reference_is_its_definition nope window",),
    ),
    Fault(
        "segments-see-earlier-ones",
        "packed documents leak into those behind them",
        POSITIONS,
        "terms.append(q_seg == k_seg)",
        "terms.append(q_seg >= k_seg)",
        ("test_laws.py packed_equals_separate-numpy-reference-nope",),
    ),
    Fault(
        "narrow-positions-not-widened",
        "differences of int8 positions wrap around at 128",
        POSITIONS,
        "return xp.astype(values, xp.int32)",
        "return values",
        ("test_positions_far.py numpy_positions",),
    ),
    Fault(
        "far-positions-not-refused",
        "differences beyond 32 bits wrap around without a word",
        POSITIONS,
        "if low < LOWEST or high > FARTHEST:",
        "if False:",
        ("test_positions_far.py refused",),
    ),
    Fault(
        "float-positions-accepted",
        "half-precision positions, in which 256 and 257 are one (NVIDIA/Megatron-LM 535)",
        POSITIONS,
        '    if not xp.isdtype(dtype, "integral"):\n',
        "    values = xp.astype(values, xp.int32)\n    dtype = values.dtype\n"
        '    if not xp.isdtype(dtype, "integral"):\n',
        ("test_wrong_calls.py pos-half",),
    ),
    Fault(
        "groups-by-modulo",
        "query head h takes key head h % Hk instead of h // (H // Hk)",
        REFERENCE,
        "    kv_heads = call.k.shape[1]\n",
        "    from dataclasses import replace\n\n"
        "    times, kv_heads = heads // call.k.shape[1], heads\n"
        "    k, v = (xp.concat([a] * times, axis=1) for a in (call.k, call.v))\n"
        "    call = replace(call, k=k, v=v)\n",
        ("test_reference.py the_reference_is_its_definition nope grouped",),
    ),
    Fault(
        "bias-scaled-with-the-scores",
        "bias times 1/sqrt(D): ALiBi and T5 add it after the scaling",
        REFERENCE,
        "scores = scores + bias\n",
        "scores = scores + bias * call.scale\n",
        ("test_reference.py the_reference_is_its_definition alibi- causal",),
    ),
    Fault(
        "scale-applied-twice",
        "once to the queries, once to the scores",
        REFERENCE,
        "(batch, heads, q_len, -1)) * call.scale",
        "(batch, heads, q_len, -1)) * call.scale**2",
        ("test_reference.py the_reference_is_its_definition nope causal",),
    ),
    Fault(
        "bias-dropped",
        "a scheme without effect: models train, and nobody is told",
        REFERENCE,
        "if bias is not None:\n        scores = scores + bias",
        "if bias is None:\n        scores = scores",
        ("test_reference.py the_reference_is_its_definition alibi- causal",),
    ),
    Fault(
        "blind-row-is-the-mean",
        "a query that may see nothing attends to everything",
        REFERENCE,
        "weights = xp.where(seen, weights, 0.0)",
        "weights = weights",
        ("test_laws.py left_padding_changes_nothing-numpy-reference-nope",),
    ),
    Fault(
        "blind-row-is-nan",
        "0 / 0 in a row of padding, and NaN in every gradient (pytorch/pytorch 103749)",
        REFERENCE,
        "xp.where(total == 0, 1.0, total)",
        "total",
        ("test_laws.py left_padding_changes_nothing-numpy-reference-nope",),
    ),
    Fault(
        "masked-scores-at-minus-ten-thousand",
        "a mask that large scores reach: a row goes blind",
        REFERENCE,
        "xp.finfo(scores.dtype).min",
        "-1e4",
        ("test_paths.py large_scores torch",),
    ),
    Fault(
        "half-precision-throughout",
        "scores in the dtype of q overflow float16",
        REFERENCE,
        "work = working_dtype([q, k, v, x, *named(params).values()], xp=xp)",
        "work = q.dtype",
        ("test_reference.py float16",),
    ),
    Fault(
        "result-in-the-working-float",
        "float32 comes back for half precision",
        REFERENCE,
        "return xp.astype(dense(call), q.dtype)",
        "return dense(call)",
        ("test_reference.py half_precision",),
    ),
    Fault(
        "working-float-of-q-alone",
        "float64 params are rounded to float32",
        PARAMS,
        "any(_is_double(a, xp) for a in arrays)",
        "_is_double(arrays[0], xp)",
        ("test_working_float.py",),
    ),
    Fault(
        "minus-infinity-masks-nothing",
        "a bias of -inf becomes 0: the scheme's fence is open",
        CALL,
        "seen = finite if seen is None else seen & finite\n",
        "seen = seen\n",
        ("test_reference.py minus_infinity",),
    ),
    Fault(
        "keys-of-a-cache-turned-again",
        "k_transformed is ignored",
        CALL,
        'if not check_flag("k_transformed", k_transformed):',
        'if check_flag("k_transformed", k_transformed) in (True, False):',
        ("test_laws.py cache_may_hold_transformed_keys-numpy-reference-rope",),
    ),
    Fault(
        "keys-not-transformed",
        "only queries turn",
        CALL,
        "return replace(call, q=q, k=k)\n",
        "return replace(call, q=q)\n",
        ("test_reference.py the_reference_is_its_definition rope causal",),
    ),
    Fault(
        "keys-transformed-as-queries",
        "the role is not passed on",
        CALL,
        'k = transform(scheme, k, call.k_pos, role="key"',
        'k = transform(scheme, k, call.k_pos, role="query"',
        ("test_reference.py the_reference_is_its_definition sharpening causal",),
    ),
    Fault(
        "positions-of-the-first-row-for-all",
        "a batch of different positions is turned like its first row",
        EVALUATE,
        "at = xp.reshape(at, (at.shape[0], *[1] * (len(x.shape) - 3), at.shape[1]))",
        "at = at[0, ...]",
        ("test_laws.py batch_rows_keep_to_themselves-numpy-reference-rope",),
    ),
    Fault(
        "gates-summed-in-the-order-of-memory",
        "explicit positions do not reach the cumulative sum",
        CALL,
        "in_order = call.aligned and call.k_seg is None",
        "in_order = call.k_seg is None",
        ("test_reference.py gates shuffled",),
    ),
    Fault(
        "gates-summed-across-segments",
        "the first document's gates count in the second",
        GATES,
        "return counted & (row(own) == column(theirs))",
        "return counted",
        ("test_laws.py packed_equals_separate-numpy-reference-fading",),
    ),
    Fault(
        "gates-without-their-own",
        "a coordinate sums the tokens before it only",
        GATES,
        "counted = row(tokens) <= column(readers)",
        "counted = row(tokens) < column(readers)",
        ("test_reference.py gates shuffled",),
    ),
    Fault(
        "carry-ignored",
        "decoding a gated scheme starts from 0 with every chunk",
        GATES,
        "return sums if carry is None else sums + xp.astype(carry, work)[..., None]",
        "return sums",
        ("test_reference.py carry",),
    ),
    Fault(
        "one-table-for-all-heads",
        "the offset of a head in the flat table is 0",
        PARAMS,
        "xp.arange(heads, dtype=where.dtype",
        "xp.zeros(heads, dtype=where.dtype",
        ("test_laws.py gradient_reaches_every_param-torch-sdpa-t5",),
    ),
    Fault(
        "table-indices-in-the-wrong-order",
        "columns for rows in a table of two indices",
        PARAMS,
        "for size, i in zip(self.shape, indices, strict=True):",
        "for size, i in zip(self.shape, indices[::-1], strict=True):",
        ("test_params.py head_table",),
    ),
    Fault(
        "seed-ignored",
        "every model starts from the same numbers",
        PARAMS,
        "rng = np.random.default_rng(seed)",
        "rng = np.random.default_rng(0)",
        ("test_params.py seeds",),
    ),
    Fault(
        "first-values-not-from-the-seed",
        "the same seed twice gives two models",
        PARAMS,
        "rng = np.random.default_rng(seed)",
        "rng = np.random.default_rng()",
        ("test_laws.py first_values_are_declared-t5",),
    ),
    Fault(
        "unknown-params-accepted",
        "a misspelt name is ignored",
        PARAMS,
        "for extra in given.keys() - specs.keys():",
        "for extra in ():",
        ("test_wrong_calls.py numpy param-extra",),
    ),
    Fault(
        "shape-of-params-unchecked",
        "a table of another size is broadcast",
        PARAMS,
        "if tuple(value.shape) != tuple(specs[key].shape):",
        "if len(value.shape) > len(specs[key].shape):",
        ("test_wrong_calls.py numpy param-shape",),
    ),
    Fault(
        "a-path-falls-back-in-silence",
        "a path asked for by name does not serve, and another one does",
        PATHS,
        'raise NotImplementedError(f"path {name!r} cannot serve this call: {reasons[name]}")',
        'return choose(paths, call, "auto")',
        ("test_jax_chunked.py refuses",),
    ),
)

_TORCH = (
    Fault(
        "bias-rounded-before-its-maximum-is-taken-off",
        "bfloat16 holds 8 bits of a bias near 1000: near keys cannot be told apart",
        SDPA,
        "bias = _below_zero(bias, seen)",
        "bias = _below_zero(bias.to(q.dtype), seen)",
        ("test_paths.py far_away torch-sdpa",),
    ),
    Fault(
        "bias-rounded-at-its-own-size",
        "its maximum is not taken off at all",
        SDPA,
        "        bias = _below_zero(bias, seen)\n",
        "        pass\n",
        ("test_paths.py far_away torch-sdpa",),
    ),
    Fault(
        "bias-less-the-maximum-of-all-rows",
        "one maximum for a head: rows far from it keep their rounding",
        SDPA,
        "visible.detach().amax(dim=-1, keepdim=True)",
        "visible.detach().amax()",
        ("test_paths.py far torch-sdpa", "test_paths.py alibi-far torch-sdpa bfloat16"),
    ),
    Fault(
        "torch-bias-scaled-with-the-scores",
        "bias times 1/sqrt(D) in one of two paths",
        SDPA,
        "visible = torch.where(seen, bias, -torch.inf)",
        "visible = torch.where(seen, bias * scale, -torch.inf)",
        ("test_laws.py path_equals_the_reference-torch-sdpa-alibi",),
    ),
    Fault(
        "torch-groups-by-modulo",
        "keys repeated as a whole: query head h takes key head h % Hk",
        SDPA,
        "    shared = grouped(q, k)\n",
        "    times, shared = q.shape[1] // k.shape[1], {}\n"
        "    k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)\n",
        ("test_laws.py path_equals_the_reference-torch-sdpa-nope",),
    ),
    Fault(
        "gradient-of-params-dropped",
        "the bias is detached: learned slopes never move",
        SDPA,
        "return masked(q, k, v, *call.allowed_bias(), scale=call.scale)",
        "bias, seen = call.allowed_bias()\n"
        "    bias = None if bias is None else bias.detach()\n"
        "    return masked(q, k, v, bias, seen, scale=call.scale)",
        ("test_laws.py gradient_reaches_every_param-torch-sdpa-alibi-learned",),
    ),
    Fault(
        "sdpa-is-causal-from-the-first-key",
        "SDPA's own mask aligns the first query and key (pytorch/pytorch 108108)",
        SDPA,
        "(call.aligned and (q_len == k_len or q_len == 1))",
        "call.aligned",
        ("test_laws.py decoding_equals_prefill-torch-sdpa-nope",),
    ),
    Fault(
        "sdpa-one-query-sees-one-key",
        "decoding with is_causal: always the first key (pytorch/pytorch 144858)",
        SDPA,
        "True if call.causal and q.shape[2] > 1 else False",
        "True if call.causal else False",
        ("test_laws.py decoding_equals_prefill-torch-sdpa-nope",),
    ),
    Fault(
        "torch-blind-row-is-the-mean",
        "a query that may see nothing attends to everything",
        SDPA,
        "return torch.where(blind, 0.0, out)",
        "return out",
        ("test_laws.py left_padding_changes_nothing-torch-sdpa-nope",),
    ),
    Fault(
        "torch-result-in-the-working-float",
        "float32 comes back for half precision",
        TORCH,
        "return choose(_PATHS, call, path).run(call).to(q.dtype)",
        "return choose(_PATHS, call, path).run(call)",
        ("test_laws.py path_equals_the_reference_in_other_floats-torch-reference-nope",),
    ),
    Fault(
        "torch-float64-of-q-alone",
        "keys in float32 are turned in float32 beside queries in float64",
        TORCH,
        "return q.double(), k.double(), v.double()",
        "return q.double(), k, v",
        ("test_torch_position.py float64_keys",),
    ),
    Fault(
        "embedding-rounded-before-it-is-added",
        "two roundings to half precision where one will do",
        MODULE,
        "return (x + term).to(x.dtype)",
        "return x + term.to(x.dtype)",
        ("test_torch_position.py embedding_is_added",),
    ),
    Fault(
        "module-ignores-the-seed",
        "every layer of every model starts from the same numbers",
        MODULE,
        "seed = int(torch.randint(2**62, ()))",
        "seed = 0",
        ("test_torch_position.py seed",),
    ),
)

_JAX = (
    Fault(
        "chunked-groups-by-modulo",
        "query head h takes key head h % Hk",
        CHUNKED,
        "q = call.q.reshape(batch, call.k.shape[1], -1, q_len, dim)",
        "q = call.q.reshape(batch, -1, call.k.shape[1], q_len, dim).swapaxes(1, 2)",
        ("test_laws.py path_equals_the_reference-jax-chunked-t5",),
    ),
    Fault(
        "chunked-gradient-of-params-dropped",
        "the backward pass gives zeros: the scheme never learns on this path",
        TILE,
        "    d_learned, d_q_coords, d_k_coords = transpose_bias(d_scores)\n",
        "    d_learned, d_q_coords, d_k_coords = transpose_bias(d_scores)\n"
        "    d_learned = jax.tree.map(jnp.zeros_like, d_learned)\n",
        ("test_laws.py gradient_reaches_every_param-jax-chunked-alibi-learned",),
    ),
    Fault(
        "chunked-gradient-of-one-head-dropped",
        "the last head alone never learns",
        TILE,
        "    d_learned, d_q_coords, d_k_coords = transpose_bias(d_scores)\n",
        "    d_learned, d_q_coords, d_k_coords = transpose_bias(d_scores)\n"
        "    d_learned = jax.tree.map(lambda g: g.at[-1].set(0), d_learned)\n",
        ("test_laws.py gradient_reaches_every_param-jax-chunked-alibi-learned",),
    ),
    Fault(
        "chunked-gradient-of-bias-scaled",
        "the chain rule's 1/sqrt(D) applied to the bias too",
        TILE,
        "transpose_bias(d_scores)",
        "transpose_bias(d_scores * tiling.scale)",
        ("test_laws.py gradients_are_derivatives-jax-chunked-alibi-learned",),
    ),
    Fault(
        "chunked-gates-learn-from-queries-alone",
        "gradients of the keys' coordinates are dropped",
        TILE,
        "Keys(d_key, d_value, None, None, d_k_coords, None)",
        "Keys(d_key, d_value, None, None, jax.tree.map(jnp.zeros_like, d_k_coords), None)",
        ("test_laws.py gradients_are_derivatives-jax-chunked-fading",),
    ),
    Fault(
        "chunked-delta-forgotten",
        "the gradient of a softmax without the mean it has to lose",
        TILE,
        "key.values) - delta[..., None])",
        "key.values))",
        ("test_laws.py gradients_are_derivatives-jax-chunked-alibi-learned",),
    ),
    Fault(
        "logsumexp-without-the-sum",
        "the maximum stands for the log-sum-exp in the backward pass",
        TILE,
        "logsumexp = self.highest + jnp.log(total)",
        "logsumexp, total = self.highest, jnp.ones_like(total)",
        ("test_laws.py gradients_are_derivatives-jax-chunked-alibi-learned",),
    ),
    Fault(
        "online-softmax-not-rescaled",
        "sums under an old maximum are added to sums under a new one",
        TILE,
        "self.summed * shrink[..., None] + added",
        "self.summed + added",
        ("test_laws.py path_equals_the_reference-jax-chunked-alibi-learned",),
    ),
    Fault(
        "padded-keys-seen",
        "the zeros that fill the last tile take part in the softmax",
        BLOCKS,
        "if padded == self.k_len:",
        "if padded >= self.k_len:",
        (
            "test_paths.py jax-chunked-t5-window-both-sides-float32",
            "test_paths.py jax-chunked-t5-everything-float32",
        ),
    ),
    Fault(
        "last-block-of-keys-skipped",
        "off by one in what a block of queries may see",
        BLOCKS,
        "jnp.minimum(high // size + 1, count)",
        "jnp.minimum(high // size, count)",
        ("test_laws.py path_equals_the_reference-jax-chunked-alibi-learned",),
    ),
    Fault(
        "first-block-of-keys-skipped",
        "a block that a window covers in part is left out",
        BLOCKS,
        "jnp.maximum(low // size, 0)",
        "jnp.maximum(-(-low // size), 0)",
        ("test_paths.py jax-chunked-alibi-learned-window-float32",),
    ),
    Fault(
        "blocks-skipped-for-explicit-positions",
        "what an index says is taken for what a position says",
        BLOCKS,
        "        if not self.aligned:\n            return None, None\n",
        "",
        ("test_laws.py order_in_memory_does_not_matter-jax-chunked-alibi-learned",),
    ),
    Fault(
        "distances-shifted-by-one",
        "a tile made from its distances reads the bucket next to its own",
        TILE,
        "jnp.arange(1 - rows, columns)",
        "jnp.arange(-rows, columns - 1)",
        ("test_laws.py path_equals_the_reference-jax-chunked-t5",),
    ),
    Fault(
        "distances-for-any-positions",
        "a tile is made from its distances where positions are not consecutive",
        BLOCKS,
        "return self.aligned and self.scheme.relative and table",
        "return self.scheme.relative and table",
        ("test_laws.py path_equals_the_reference-jax-chunked-t5",),
    ),
    Fault(
        "distances-for-any-table",
        "a bias that is not relative is taken for one that is",
        BLOCKS,
        "return self.aligned and self.scheme.relative and table",
        "return self.aligned and table",
        ("test_paths.py jax-chunked-checkered-causal-float32",),
    ),
    Fault(
        "chunked-in-float32",
        "products of float64 tiles are summed in float32",
        TILE,
        "preferred_element_type=dtype)",
        "preferred_element_type=jnp.float32)",
        ("test_jax_chunked.py float64 chunked",),
    ),
    Fault(
        "jax-queries-rounded-to-float32",
        "x64 is lost before the transform",
        JAX,
        'work = working_dtype([q, k, v, options.get("x"), *params.values()], xp=jnp)',
        "work = jnp.float32\n    q, k, v = (a.astype(work) for a in (q, k, v))",
        ("test_jax_chunked.py float64",),
    ),
    Fault(
        "xla-blind-row-is-the-mean",
        "a query that may see nothing attends to everything",
        JAX,
        "return out if seen is None else jnp.where(jnp.any(seen, axis=-1, keepdims=True), out, 0)",
        "return out",
        ("test_jax_chunked.py rows_that_see_nothing xla",),
    ),
    Fault(
        "jax-result-in-the-working-float",
        "float32 comes back for half precision",
        JAX,
        "return jnp.swapaxes(out, 1, 2).astype(_jax(q).dtype)",
        "return jnp.swapaxes(out, 1, 2)",
        ("test_laws.py path_equals_the_reference_in_other_floats-jax-chunked-learned",),
    ),
    Fault(
        "jax-narrows-positions-unseen",
        "64-bit positions lose their upper half on the way into JAX",
        JAX,
        'if hasattr(options.get(name), "dtype"):',
        "if False:",
        ("test_positions_far.py refused jax",),
    ),
)

# No test noticed these when they were first planted, or drawn calls found them.
_FOUND = (
    Fault(
        "learned-table-clamped-when-compiled",
        "beyond the table a jitted model reads row 0 without a word, instead of NaN",
        LEARNED,
        "vectors = xp.where(known[:, None], vectors, xp.nan)",
        "vectors = vectors",
        ("test_jax_chunked.py outside_the_table",),
    ),
    Fault(
        "first-values-shared-by-two-models",
        "the drawn arrays are kept: training one model changes the next",
        PARAMS,
        "    return {name: np.asarray(value, dtype=np.float32) for name, value in draws.items()}",
        "    kept = globals().setdefault('_DRAWN', {})\n"
        "    fresh = {name: np.asarray(value, dtype=np.float32) for name, value in draws.items()}\n"
        "    return kept.setdefault((scheme, str(seed)), fresh)",
        ("test_laws.py first_values_are_declared t5",),
    ),
    Fault(
        "bias-less-its-mean",
        "the mean of a row with masked keys is minus infinity: nothing is taken off",
        SDPA,
        "visible.detach().amax(dim=-1, keepdim=True)",
        "visible.detach().mean(dim=-1, keepdim=True)",
        ("test_paths.py masked_keys torch-sdpa",),
    ),
    Fault(
        "sdpa-forgets-segments",
        "the short cut for a causal mask is taken for packed documents",
        SDPA,
        "if call.window is not None or call.q_seg is not None or not",
        "if call.window is not None or not",
        ("test_laws.py path_equals_the_reference-torch-sdpa nope",),
    ),
    Fault(
        "window-of-blocks-too-short",
        "the reach of a window is one key less where blocks are skipped by it",
        BLOCKS,
        "min(self.window, self.k_len) - 1",
        "min(self.window, self.k_len) - 2",
        ("test_laws.py path_equals_the_reference-jax-chunked t5",),
    ),
    Fault(
        "jax-init-from-half-of-the-key",
        "the first word of key(n) is 0 for every small n: all seeds draw alike",
        JAX_INIT,
        "[int(word) for word in np.asarray(seed)]",
        "[int(word) for word in np.asarray(seed)[:1]]",
        ("test_jax_chunked.py keys_decide",),
    ),
    Fault(
        "t5-bucket-by-float32-logarithm",
        "the formula of transformers: a float32 logarithm that falls short of a threshold",
        T5,
        "reached = middle**width * exact**t >= exact**width * max_distance**t",
        "import math\n\n            import numpy as np\n\n"
        "            part = np.log(np.float32(middle / exact)) / np.float32(\n"
        "                math.log(max_distance / exact)\n            )\n"
        "            reached = int(part * np.float32(width)) >= t",
        ("test_schemes_golden.py t5_buckets_at_every_distance",),
    ),
    Fault(
        "window-wider-than-32-bits",
        "compared in 32 bits it hides everything",
        CALL,
        'window = None if window is None or check_count("window", window) >= 2**31 else window',
        'window = None if window is None else check_count("window", window)',
        ("test_found.py wider_than_any_distance",),
    ),
    Fault(
        "blind-row-overflows-in-float16",
        "the bias of a query that sees nothing becomes infinite, its gradient NaN",
        SDPA,
        "mask = torch.where(blind, 0.0, visible).to(q.dtype)",
        "mask = torch.where(blind, bias, visible).to(q.dtype)",
        ("test_found.py finite_gradients_whatever_its_bias",),
    ),
)

_FLEX = (
    Fault(
        "flex-bias-in-the-dtype-of-q",
        "a score is traced in q's dtype: 8 bits of a bias near 1000",
        SCORE,
        "return torch.promote_types(score.dtype, torch.float32)",
        "return score.dtype",
        ("test_paths.py far_away torch-flex bfloat16",),
    ),
    Fault(
        "flex-one-table-for-all-heads",
        "every head reads the table of the first",
        SCORE,
        "return self._array[(self._head, *inside)]",
        "return self._array[(self._head * 0, *inside)]",
        ("test_laws.py path_equals_the_reference-torch-flex-checkered",),
    ),
    Fault(
        "flex-queries-begin-at-zero",
        "in decoding the one query is taken for the first token",
        FLEX,
        "indexed = call.aligned and call.q.shape[2] == call.k.shape[2]",
        "indexed = call.aligned",
        ("test_laws.py decoding_equals_prefill-torch-flex-alibi",),
    ),
    Fault(
        "flex-coordinates-loaded-twice",
        "no backward pass on a GPU, which no run on a CPU shows",
        SCORE,
        "return padded(q_coords).clone(), padded(k_coords)",
        "both = padded(k_coords)\n"
        "    return both if q_coords is k_coords else padded(q_coords), both",
        ("test_flex.py gpu_takes forgetting",),
    ),
    Fault(
        "flex-loads-everything",
        "arrays that the bias does not use have no gradient, which a backward pass cannot have",
        SCORE,
        "self._loaded: dict[str, Any] = {}",
        "self._loaded: dict[str, Any] = {n: self._view(n) for n in arrays}",
        ("test_flex.py gpu_takes forgetting",),
    ),
    Fault(
        "flex-second-load-not-counted",
        "a scheme that no backward pass takes is compiled, and fails there",
        LOADS,
        "if table.loads > 1]",
        "if table.loads > 2]",
        ("test_flex.py refuses_what_the_lint_does",),
    ),
    Fault(
        "flex-eight-kinds-of-calls",
        "the compiler's own limit: the ninth scheme of a process fails",
        FLEX,
        "_KINDS = 256",
        "_KINDS = 8",
        ("test_flex.py more_schemes",),
    ),
    Fault(
        "flex-positions-of-one-row-by-batch",
        "positions (1, L) are read beyond their end in every other batch",
        SIGHT,
        "one = values[0] if values.ndim == 2 and values.shape[0] == 1 else values",
        "one = values",
        ("test_fuzz.py path_equals_the_reference torch-flex",),
    ),
    Fault(
        "flex-causal-block-by-its-first-query",
        "a block whose later queries see something is left out",
        MEETING,
        "some, every = some & (k_low <= q_high)",
        "some, every = some & (k_low <= q_low)",
        ("test_flex.py blocks_hold",),
    ),
    Fault(
        "flex-window-of-blocks-too-short",
        "the reach of a window is one key less where blocks are left out by it",
        MEETING,
        "some = some & (nearest < window)",
        "some = some & (nearest < window - 1)",
        ("test_flex.py blocks_hold",),
    ),
    Fault(
        "flex-segments-by-their-lowest",
        "a block of two documents is taken for one",
        MEETING,
        "every = every & (q_low == k_high) & (k_low == q_high)",
        "every = every & (q_low == k_low)",
        ("test_flex.py blocks_hold",),
    ),
    Fault(
        "flex-padding-is-seen",
        "the last block, not whole, is not masked: what lies beyond the end is attended to",
        SIGHT,
        "return end * BLOCK <= places.length",
        "return end * BLOCK <= places.length + BLOCK",
        ("test_flex.py blocks_hold",),
    ),
)

_LOWERED = (
    Fault(
        "distances-the-wrong-way-round",
        "a bias that tells before from after is mirrored",
        LOWERINGS,
        "bias_tile(scheme, xp.zeros_like(at), at,",
        "bias_tile(scheme, at, xp.zeros_like(at),",
        ("test_lowerings.py by_distance",),
    ),
    Fault(
        "key-bias-without-a-causal-mask",
        "ALiBi rises with every later key",
        LOWERINGS,
        "if not (call.causal and has_bias(call.scheme)):",
        "if not has_bias(call.scheme):",
        ("test_lowerings.py by_key", "test_lowerings.py no_weight"),
    ),
    Fault(
        "skipped-by-one-key-alone",
        "each key is below the precision, all of them together are not",
        NEGLIGIBLE,
        "margin = all_keys + math.log",
        "margin = math.log",
        ("test_lowerings.py no_weight_together",),
    ),
    Fault(
        "skipped-whatever-the-scores",
        "a bound from the bias alone: a large score far away is lost",
        NEGLIGIBLE,
        "lowest = -highest(reach - floor, block, xp)",
        "lowest = -highest(-floor, block, xp)",
        ("test_lowerings.py no_weight",),
    ),
    Fault(
        "skipped-by-the-first-key",
        "a longer key far away is lost",
        NEGLIGIBLE,
        "longest = xp.max(xp.linalg.vector_norm(k, axis=-1), axis=-1)[:, :, None, None]",
        "longest = xp.linalg.vector_norm(k, axis=-1)[:, :, :1, None]",
        ("test_lowerings.py one_long_key",),
    ),
    Fault(
        "own-key-taken-for-seen",
        "a query of another segment has nothing in its sum but what is far",
        NEGLIGIBLE,
        "segments = call.q_seg, call.k_seg[..., first:]",
        "segments = ()",
        ("test_lowerings.py does_not_see_itself",),
    ),
    Fault(
        "blocks-by-the-distance-of-their-first",
        "the nearest pairs of two blocks are left out",
        NEGLIGIBLE,
        "pairs = xp.maximum(stretches[..., :-1], stretches[..., 1:])",
        "pairs = stretches[..., :-1]",
        ("test_lowerings.py no_weight",),
    ),
    Fault(
        "parts-end-a-block-early",
        "the newest keys are missing",
        CUT,
        "min(k_len, last * grain)",
        "min(k_len, max(1, last - 1) * grain)",
        ("test_laws.py path_equals_the_reference-torch-chunked-alibi",),
    ),
    Fault(
        "parts-overwrite-gradients-of-keys",
        "keys that several parts see learn from the last of them",
        PARTS,
        "into += more",
        "into.copy_(more)",
        ("test_laws.py gradients_are_derivatives-torch-chunked-alibi",),
    ),
    Fault(
        "parts-in-reverse",
        "queries are turned round for the mask, results are not turned back",
        PARTS,
        "return out.flip(2)",
        "return out",
        ("test_laws.py path_equals_the_reference-torch-chunked-t5",),
    ),
    Fault(
        "parts-of-heads-that-share-no-keys",
        "a run of heads reads the keys of its first",
        CUT,
        "if end > start and (apart or (group > 1 and end % group == 0)):",
        "if end > start and apart:",
        ("test_torch_chunked.py every_query", "test_torch_chunked.py share_keys"),
    ),
    Fault(
        "mask-by-distance-in-half-precision",
        "a bias that grows is rounded at its own size",
        PARTS,
        "return bool((torch.isfinite(own) & ((table <= own) | ~seen_by_distance(call))).all())",
        "return True",
        ("test_torch_chunked.py grows_in_half",),
    ),
    Fault(
        "second-derivatives-are-zero",
        "a gradient penalty trains nothing, in silence",
        PARTS,
        "if torch.is_grad_enabled() or",
        "if",
        ("test_torch_chunked.py what_it_cannot",),
    ),
    Fault(
        "parts-summed-in-half-precision",
        "gradients of keys that hundreds of parts see stop growing",
        PARTS,
        "dtype=torch.promote_types(t.dtype, torch.float32))",
        "dtype=t.dtype)",
        ("test_torch_chunked.py sums_over_many_parts",),
    ),
    Fault(
        "autocast-rounds-the-bias",
        "a mask of float32 queries is cast to bfloat16, its highest number not taken off",
        TORCH,
        "return torch.get_autocast_dtype(kind) if enabled else None",
        "return None",
        ("test_torch_chunked.py autocast growing",),
    ),
    Fault(
        "flex-one-head-s-numbers-by-head",
        "numbers that all heads share are read beyond their end",
        SCORE,
        "return torch.zeros_like(head) if array.shape[0] == 1 else head",
        "return head",
        ("test_torch_chunked.py one_number_for_all",),
    ),
    Fault(
        "flex-block-mask-kept-from-inference",
        "evaluation, then a training step of the same length, which fails",
        FLEX,
        "with torch.inference_mode(False):",
        "if True:",
        ("test_flex.py kept_serves",),
    ),
    Fault(
        "lifted-by-two-limbs",
        "16 bits of a bias of a thousand",
        LIFTED,
        "torch.bfloat16: 3,",
        "torch.bfloat16: 2,",
        ("test_torch_chunked.py stays_exact_far_away bfloat16",),
    ),
    Fault(
        "lifted-beyond-float16",
        "slope times position above 65504 is infinite",
        LIFTED,
        "unit = _UNITS.get(q.dtype, 1.0)",
        "unit = 1.0",
        ("test_torch_chunked.py beyond_float16",),
    ),
    Fault(
        "lifted-without-gradient",
        "learned slopes never move",
        LIFTED,
        "first = values.to(dtype)",
        "first = values.detach().to(dtype)",
        ("test_torch_chunked.py lifted_bias_is_the_bias learned",),
    ),
    Fault(
        "lifted-and-scaled",
        "bias times 1/sqrt(D)",
        LIFTED,
        "keys = (keys / call.scale).expand",
        "keys = keys.expand",
        ("test_torch_chunked.py lifted_bias_is_the_bias",),
    ),
    Fault(
        "lifted-without-the-query",
        "q.k is added to a number of thousands, and rounded there",
        LIFTED,
        "queries = -keys[..., keys.shape[-1] - q_len :]",
        "queries = 0 * keys[..., keys.shape[-1] - q_len :]",
        ("test_torch_chunked.py stays_exact_far_away float32",),
    ),
    Fault(
        "flex-distances-ahead-forgotten",
        "without a causal mask every distance is read Q - 1 places off",
        SCORE,
        "call.q_pos[0] + (BLOCK + ahead)",
        "call.q_pos[0] + BLOCK",
        ("test_laws.py path_equals_the_reference-torch-flex-t5",),
    ),
    Fault(
        "flex-block-mask-of-another-window",
        "one mask is kept for every window",
        FLEX,
        "return _plain_mask(*lengths, call.causal, call.window, call.q_pos.device)",
        "return _plain_mask(*lengths, call.causal, None, call.q_pos.device)",
        ("test_laws.py path_equals_the_reference-torch-flex-t5",),
    ),
    Fault(
        "flex-skips-nothing",
        "attention with ALiBi as slow as without, however far it fades",
        FLEX,
        "some[:, None] & ~nothing, every[:, None] & ~nothing",
        "some[:, None], every[:, None]",
        ("test_flex.py steep_heads",),
    ),
)

_FUSED = (
    Fault(
        "plan-ranges-end-early",
        "the last block of keys that a query needs is left out",
        PLAN,
        "end = count - jnp.argmax(kept[..., ::-1], axis=-1)",
        "end = jnp.maximum(1, count - jnp.argmax(kept[..., ::-1], axis=-1) - 1)",
        ("test_fused.py by_definition nope-plain",),
    ),
    Fault(
        "plan-padding-is-seen",
        "keys that do not exist take weight where no causal mask hides them",
        PLAN,
        "return self.k_len % self.block != 0 and not (self.aligned and self.causal)",
        "return False",
        ("test_fused.py by_definition nope-plain",),
    ),
    Fault(
        "plan-table-is-not-padded-in-front",
        "a table by distance is read a few places off at lengths that no block divides",
        PLAN,
        "before = plan.q_blocks * plan.block - plan.q_len",
        "before = 0",
        ("test_fused.py by_definition t5-causal",),
    ),
    Fault(
        "plan-skips-nothing",
        "attention with ALiBi as slow as without, however far it fades",
        PLAN,
        "kept = kept & ~nothing",
        "kept = kept",
        ("test_fused.py round_to_nothing",),
    ),
    Fault(
        "fused-logsumexp-without-a-gradient",
        "parts of a softmax that are put together learn wrongly",
        GRADIENTS,
        "axis=-1) - d_logsumexp",
        "axis=-1)",
        ("test_fused.py logsumexp_has_a_gradient",),
    ),
    Fault(
        "fused-key-bias-at-the-wrong-queries",
        "the bias of queries is that of the first keys",
        FUSED,
        "replace(call, k_pos=call.q_pos, k_coords=call.q_coords)",
        "replace(call, k_pos=call.q_pos[..., :1] + 0 * call.q_pos, k_coords=call.q_coords * 0)",
        ("test_fused.py a_key_bias_stands",),
    ),
    Fault(
        "cudnn-bias-in-two-numbers",
        "the bias of far keys is off by 1e-2 in bfloat16",
        CUDNN,
        "_LIMBS = 3",
        "_LIMBS = 2",
        ("test_jax_lifted.py stays_exact_far_away",),
    ),
    Fault(
        "chunked-logsumexp-without-a-gradient",
        "ring attention learns wrongly",
        CHUNKED,
        "axis=-1) - d_logsumexp)",
        "axis=-1))",
        ("test_jax_chunked.py logsumexp",),
    ),
    Fault(
        "tpu-table-one-diagonal-off",
        "every distance reads the bias of the next",
        TPU_TILE,
        "    if shift:\n        rows = _moved(rows, shift)",
        "    rows = _moved(rows, 1)",
        ("test_tpu.py a_table_gives_a_tile",),
    ),
    Fault(
        "tpu-derivative-by-another-number",
        "two learned numbers a head get each other's gradient",
        TPU_TILE,
        "plan.bias([*numbers[:n], x, *numbers[n + 1 :]], q, k)",
        "plan.bias([*numbers[:0], x, *numbers[1:]], q, k)",
        ("test_tpu.py interpreted_kernels kerple",),
    ),
)

_LARGE = (
    Fault(
        "reference-scales-scores",
        "compiled, the highest score less itself is the rounding of a product: NaN beyond 3e9",
        REFERENCE,
        """(q * call.scale, (batch, kv_heads, -1, q_len, dim))
    scores = xp.matmul(grouped, xp.matrix_transpose(k)[:, :, None, :, :])
    scores = xp.reshape(scores, (batch, heads, q_len, -1))
""",
        """(q, (batch, kv_heads, -1, q_len, dim))
    scores = xp.matmul(grouped, xp.matrix_transpose(k)[:, :, None, :, :])
    scores = xp.reshape(scores, (batch, heads, q_len, -1)) * call.scale
""",
        ("test_large_scores.py less_itself jax-reference",),
    ),
    Fault(
        "chunked-weights-from-the-logsumexp-alone",
        "two keys of one large score have weight 1 each in the backward pass",
        CHUNKED,
        "rows = (d_out * lacking[..., None], logsumexp, delta * lacking)",
        "rows = (d_out, logsumexp, delta)",
        ("test_large_scores.py less_itself jax-chunked",),
    ),
    Fault(
        "xla-scales-scores",
        "NaN where scores are beyond 3e9",
        JAX,
        "if q.dtype == call.dtype:  #",
        "if False:  #",
        ("test_large_scores.py less_itself jax-xla",),
    ),
    Fault(
        "hidden-at-half-of-the-lowest",
        "a row whose scores are all lower sees nothing",
        REFERENCE,
        "xp.finfo(scores.dtype).min)",
        "xp.finfo(scores.dtype).min / 2)",
        ("test_large_scores.py below_the_lowest numpy-reference",),
    ),
    Fault(
        "nan-of-padding-reaches-gradients",
        "queries that see nothing keep their NaN, and 0 times NaN goes to every key",
        "posenc/unseen.py",
        "xp.where(queries, q, 0.0)",
        "q",
        ("test_large_scores.py nan_in torch-reference-pads",),
    ),
    Fault(
        "nan-of-padding-reaches-results",
        "values that no query sees keep their NaN, and 0 times NaN goes to every query",
        "posenc/unseen.py",
        "xp.where(keys, v, 0.0)",
        "v",
        ("test_large_scores.py nan_in numpy-reference",),
    ),
    Fault(
        "chunked-forward-mode-in-the-words-of-jax",
        "a TypeError about custom_vjp for whoever asks for a Jacobian",
        CHUNKED,
        "reverse_only(arrays, _NAME)",
        "arrays",
        ("test_jax_orders.py one_clear_error forward jit",),
    ),
    Fault(
        "chunked-second-derivatives-by-length",
        "they work in one block and fail in two",
        CHUNKED,
        "no_reverse_twice(found, _NAME)",
        "found",
        ("test_jax_orders.py one_clear_error second",),
    ),
)

FAULTS = (*_SCHEMES, *_ANGLES, *_CORE, *_TORCH, *_JAX, *_FOUND, *_FLEX, *_LOWERED, *_FUSED, *_LARGE)
