"""``hf.ForStudy``: a model of transformers in a study computes what ``hf.apply`` makes of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from frameworks_installed import require

import posenc
from posenc.layers import LayerPlan
from posenc.schemes import FoX, Learned

pytestmark = pytest.mark.skipif(
    not (require("torch") and require("transformers")), reason="needs torch and transformers"
)


def test_each_pass_has_its_own_schemes_positions_and_learned_arrays():
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    import posenc_torch
    from posenc_torch import hf

    config = Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    studied, tokens = hf.ForStudy(copy.deepcopy(model)).eval(), torch.randint(16, (2, 12))
    names = [name for name, _ in studied.named_parameters()]
    pos = torch.from_numpy(np.sort(np.random.default_rng(0).permutation(40)[:12]))
    plans = [
        LayerPlan((posenc.RoPE(8), posenc.NoPE()), (4, None)),
        LayerPlan.of(FoX(2, 16), 2),
        LayerPlan.of(Learned(50, 16), 2),
    ]
    for plan in (*plans, plans[0]):
        positions = posenc_torch.Positions(plan)
        applied = hf.apply(copy.deepcopy(model), plan, fresh=True)
        applied.posenc.load_state_dict(positions.state_dict())
        for given, ids in ((None, None), (posenc.Tokens(pos), pos.expand(2, -1))):
            expected = applied(tokens, position_ids=ids, use_cache=False).logits
            found = studied(tokens, positions.bind(given, causal=True))
            torch.testing.assert_close(found, expected)
        found.sum().backward()
        assert all(p.grad is not None for p in positions.parameters())
        assert [name for name, _ in studied.named_parameters()] == names
