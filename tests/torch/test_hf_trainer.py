"""``Trainer`` of transformers, and PEFT under it, train a model that was given to ``apply``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

import hf_models  # noqa: E402

import posenc  # noqa: E402
from posenc_torch import hf  # noqa: E402

T5 = posenc.T5Bias(4, num_buckets=8, causal=True, max_distance=16)


def rows():
    """16 texts in which each token is the one before it and 1."""
    starts = torch.arange(16)[:, None]
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(12)) % 20 + 3]


def trainer(model, folder, steps, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4,
        learning_rate=0.05, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=rows())


def loss(model):
    batch = torch.stack([row["input_ids"] for row in rows()])
    with torch.no_grad():
        return model.eval()(batch, labels=batch, use_cache=False).loss.item()


def test_trainer_trains_saves_and_resumes(tmp_path):
    model = hf.apply(hf_models.tiny("Llama"), T5)
    before, table = loss(model), model.posenc[0].table.detach().clone()
    trainer(model, tmp_path, 6).train()
    assert loss(model) < 0.7 * before
    assert not torch.equal(model.posenc[0].table, table)
    # Another process: the folder of step 3, and its three steps again.
    folder = tmp_path / "checkpoint-3"
    again = hf.apply(transformers.LlamaForCausalLM.from_pretrained(folder), T5)
    assert not torch.equal(again.posenc[0].table, table)
    trainer(again, tmp_path, 6).train(resume_from_checkpoint=str(folder))
    torch.testing.assert_close(again.posenc[0].table, model.posenc[0].table)
    assert loss(again) == pytest.approx(loss(model), rel=1e-5)


@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing`:FutureWarning")
def test_trainer_trains_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["posenc"])
    base = hf.apply(hf_models.tiny("Llama"), T5)
    model = peft.get_peft_model(base, options)
    frozen = base.model.embed_tokens.weight.detach().clone()
    before = loss(model)
    ran = trainer(model, tmp_path, 3, gradient_checkpointing=True)
    ran.train()
    ran.save_model(str(tmp_path / "adapter"))
    after = loss(model)
    assert after < before
    assert torch.equal(base.model.embed_tokens.weight, frozen)
    other = hf.apply(hf_models.tiny("Llama"), T5)
    loaded = peft.PeftModel.from_pretrained(other, str(tmp_path / "adapter"))
    assert loss(loaded) == pytest.approx(after, rel=1e-5)
