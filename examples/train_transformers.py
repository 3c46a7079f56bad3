"""The Trainer of Hugging Face's transformers with a small GPT-2, which never imports bagua:

    ENABLE_BAGUA_NET=1 torchrun --nproc-per-node 2 examples/train_transformers.py

Needs pip install transformers accelerate. Model and text are made on the spot; nothing is downloaded. On CPUs the
Trainer uses gloo, which no NCCL plugin can change.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class CountingUp(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences of numbers that count up, each from a start of its own."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) + index) % 128
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            max_steps=30,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=CountingUp())
        loss = trainer.train().training_loss
    if trainer.is_world_process_zero():
        print(f"loss {loss:.6f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
