"""A study of a model of Hugging Face transformers: Qwen 3, from its first weights.

Its own RoPE makes place for the schemes of the study; the same model may be of any family that
``docs/hf.md`` lists. 20 steps say little. A comparison, in this folder:
``posenc compare --model study_hf:qwen --backend torch``.
"""

import tempfile

from transformers import AutoModelForCausalLM, Qwen3Config

from posenc.study import Study, run_study, write_results
from posenc_torch import hf


def qwen(recipe):
    config = Qwen3Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.dim,
        intermediate_size=4 * recipe.dim,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads // 2,
        head_dim=recipe.head_dim,
        eos_token_id=None,
        pad_token_id=0,
    )
    return hf.ForStudy(AutoModelForCausalLM.from_config(config))


if __name__ == "__main__":  # worker processes import this file
    small = {"train_len": 32, "eval_lens": (32, 128), "steps": 20, "dim": 64, "seeds": 1}
    with tempfile.TemporaryDirectory() as out:
        study = Study(model=qwen, schemes=("rope", "fox"), backend="torch", out=out, **small)
        print(write_results(study, list(run_study(study, study.corpus()))))
