"""Python's reference manual as `help()` shows it (pydoc_data.topics, of the standard library), topics in alphabetic
order, cut into pieces of 64 characters. A GRU says of each character what the next one is.

Of every ten runs of 32 pieces the last one is for testing. The text, and with it the figures, differs a little from one
version of Python to the next; Python 3.11.7 has 464,970 characters in 79 topics, of 103 kinds.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn

from measure.convergence.task import Split, Task

LENGTH = 64
RUN = 32
EMBEDDING, WIDTH = 32, 96


def build() -> Task:
    text = manual()
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([alphabet[character] for character in text])
    pieces = numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    is_test = torch.arange(len(pieces)) // RUN % 10 == 9
    train, test = (
        Split(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in (pieces[~is_test], pieces[is_test])
    )
    return Task(
        name="characters",
        train=train,
        test=test,
        build_model=lambda: CharacterModel(len(alphabet)),
        classifies=True,
    )


def manual() -> str:
    """
    Raises:
        RuntimeError: this Python comes without the text.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise RuntimeError(
            "this Python lacks pydoc_data, which its standard library should bring; Debian has it in libpython3-stdlib"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


class CharacterModel(nn.Module):
    """Characters [batch, length] to logits [batch, length, kinds]."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, EMBEDDING)
        self.recurrent = nn.GRU(EMBEDDING, WIDTH, batch_first=True)
        self.logits = nn.Linear(WIDTH, kinds)

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(characters))
        logits: Tensor = self.logits(states)
        return logits
