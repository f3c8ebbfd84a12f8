"""What a file leaves out is what the class of its configuration has, or an error."""

from __future__ import annotations

import copy
import importlib.util

import pytest

from posenc import hf

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),
]
LEFT_OUT = ("head_dim", "partial_rotary_factor", "rotary_dim", "rotary_pct", "rotary_emb_base")
DICTIONARIES = ("rope_parameters", "rope_scaling")
OF_FILES = {"transformers_version", "model_type", "architectures"}


def configurations():
    """``(class, dictionary)`` of every configuration that posenc reads."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    parts = ("text_config", "llm_config", "thinker_config", "decoder_config")
    seen = set()
    for name in sorted(CONFIG_MAPPING_NAMES):
        try:
            whole = CONFIG_MAPPING[name]()
        except Exception:  # it needs another library, or sizes
            continue
        for part in (whole, *(getattr(whole, n, None) for n in parts)):
            if not hasattr(part, "to_dict") or part.model_type in seen:
                continue
            seen.add(part.model_type)
            given = part.to_dict()
            if read(given) is not None:
                yield type(part), given


def read(given):
    """The schemes of a configuration, or None if posenc refuses it."""
    try:
        return hf.read(given).ropes
    except (TypeError, ValueError, KeyError):
        return None


def made(kind, given):
    """What a class makes of a file, or None if it makes nothing."""
    try:
        return kind(**{k: v for k, v in given.items() if k not in OF_FILES}).to_dict()
    except Exception:
        return None


def without(given, key):
    """The file without a key, wherever it is; None if it is nowhere."""
    less = copy.deepcopy(given)
    found = [less.pop(key, None)]
    found += [less[n].pop(key, None) for n in DICTIONARIES if isinstance(less.get(n), dict)]
    return less if any(value is not None for value in found) else None


def test_keys_left_out_are_the_defaults_of_the_class():
    different, tried = [], 0
    for kind, given in configurations():
        for key in LEFT_OUT:
            less = without(given, key)
            if less is None or (found := read(less)) is None:
                continue
            whole = made(kind, less)
            if whole is None or (wanted := read(whole)) is None:
                continue
            tried += 1
            if found != wanted:
                different.append((given["model_type"], key, found, wanted))
    assert not different
    assert tried > 100


def test_older_files_rotate_the_part_that_the_class_does():
    """Files of transformers 4 have a base, sizes and no dictionary."""
    different, tried = [], 0
    for kind, given in configurations():
        sizes = {n: given[n] for n in ("hidden_size", "num_attention_heads") if n in given}
        older = {"model_type": given["model_type"], **sizes, "rope_theta": 12345.0}
        whole = made(kind, older)
        if whole is None or len(sizes) < 2 or "qk_rope_head_dim" in given:
            continue
        found, wanted = read(older), read(whole)
        if found is None or wanted is None or found.keys() != wanted.keys():
            continue
        if 12345.0 not in {getattr(rope, "base", None) for rope in wanted.values()}:
            continue  # the class reads no older files
        tried += 1
        if any(
            (found[k].head_dim, found[k].rotary_dim) != (wanted[k].head_dim, wanted[k].rotary_dim)
            for k in found
            if hasattr(found[k], "head_dim") and hasattr(wanted[k], "head_dim")
        ):
            different.append((given["model_type"], found, wanted))
    assert not different
    assert tried > 100
