"""Before: transformers' Trainer with FSDP, started by ``torchrun --nproc-per-node 2 transformers_before.py``."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

if __name__ == "__main__":
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.randint(64, (64, 16))
    arguments = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        num_train_epochs=6,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="linear",
        warmup_steps=2,
        max_grad_norm=1.0,
        fsdp="full_shard",
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
    trainer.train()
    trainer.save_model("run/model")
