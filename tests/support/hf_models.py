"""Tiny random models of transformers, and what must stay when posenc computes their positions."""

from __future__ import annotations

import copy

import pytest
import torch

from posenc_torch import hf

VOCABULARY, LENGTH = 31, 12
PADDING = (0, 4)  # tokens of padding of each row
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "eager",
}


def tiny(name, auto="AutoModelForCausalLM", **options):
    """A random model, by default a language model, of the configuration ``name``, as ``Llama``."""
    import transformers

    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, f"{name}Config")(**{**TINY, **options})
    torch.manual_seed(0)
    home = getattr(transformers, auto)
    make = getattr(home, "from_config", None) or home._from_config  # of a model's own class
    model = make(config).eval()
    with torch.no_grad():  # with initial weights, all scores would be almost equal
        for p in model.parameters():
            own = torch.randn_like(p)
            p.copy_(own * p.shape[-1] ** -0.5 if p.ndim > 1 else 1 + 0.3 * own)
    return model


def tokens(rows=2, length=LENGTH):
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def check_full(model, ours):
    """Logits of a forward pass without padding."""
    ids = tokens()
    with torch.no_grad():
        for cached in (True, False):
            close(ours(ids, use_cache=cached).logits, model(ids, use_cache=cached).logits)


def check_left_padded(model, ours):
    """Logits of a left-padded batch, with the positions that ``generate`` gives."""
    ids, mask = padded(left=True)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        got, want = (
            m(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
            for m in (ours, model)
        )
    close(got, want)


def check_generation(model, ours, **options):
    """Greedy tokens of a left-padded batch, one by one from the cache, and their logits."""
    ids, mask = padded(left=True)
    got, want = (
        m.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **options,
        )
        for m in (ours, model)
    )  # fmt: skip
    close(torch.stack(got.logits), torch.stack(want.logits))
    assert got.sequences.tolist() == want.sequences.tolist()


def check_training(model, ours, **options):
    """Loss of a right-padded batch, and gradients of all weights."""
    ids, mask = padded(left=False)
    labels = torch.where(mask.bool(), ids, -100)
    both = []
    for each in (ours, model):
        each = copy.deepcopy(each).train()
        loss = each(ids, attention_mask=mask, labels=labels, **options).loss
        loss.backward()
        both.append((loss, {name: p.grad for name, p in each.named_parameters()}))
    (loss, grads), (want_loss, want_grads) = both
    close(loss, want_loss)
    assert grads.keys() == want_grads.keys()
    for name, want in want_grads.items():
        assert (grads[name] is None) == (want is None), name
        if want is not None:
            close(grads[name], want)


def check_checkpointing(ours, *calls):
    """Gradients of several passes: layers computed again have the positions of their own pass."""
    grads, ids = [], tokens()
    for repeats in (False, True):
        each = copy.deepcopy(ours).train()
        if repeats:
            each.activation_checkpointing_enable()
        sum(each(ids, labels=ids, **call).loss for call in calls).backward()
        grads.append([p.grad for p in each.parameters() if p.grad is not None])
    for got, want in zip(*grads, strict=True):
        close(got, want)


CHECKS = (check_full, check_left_padded, check_generation, check_training)


def padded(*, left):
    """Tokens of rows of several lengths, and which of them exist."""
    ids = tokens()
    at = torch.arange(LENGTH)[None]
    if not left:
        at = LENGTH - 1 - at
    mask = at >= torch.tensor(PADDING)[:, None]
    return torch.where(mask, ids, 0), mask.long()


def close(got, want, tolerance=2e-5):
    """Equal within a bound relative to the largest number.

    transformers computes angles in float32, off by 1e-6 here, of scores up to 10; layers add up.
    The worst of all families is 6e-6.
    """
    size = max(1.0, want.abs().max().item())
    assert (got - want).abs().max().item() <= tolerance * size


def pair(name, **options):
    """The model as it is, and a copy whose positions posenc computes."""
    model = tiny(name, **options)
    return model, hf.apply(copy.deepcopy(model))
