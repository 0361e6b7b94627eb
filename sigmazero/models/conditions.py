"""Conditions of known prompts, encoded once: the text encoders, often the largest single cost, are freed before
training, and what they said stays on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sigmazero.models.base import FlowModel
from sigmazero.records import Conditioning


class KnownPrompts:
    """A family whose ``encode`` looks up what was encoded before; everything else is the family's own.

    Args:
        model: a family with text encoders, which ``free_encoders`` drops.
    """

    def __init__(self, model: FlowModel) -> None:
        self._model: Any = model
        self._known: dict[str, Conditioning] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prepare(self, texts: Sequence[str], after: Callable[[int], None] = lambda done: None) -> None:
        """Encodes each text and the negative prompt once, and frees the encoders. ``after`` gets the count so far."""
        for done, text in enumerate(dict.fromkeys(["", *texts]), 1):
            encoded = self._model.encode([text])
            self._known[text] = Conditioning({name: value.cpu() for name, value in encoded.fields.items()})
            after(done)
        self._model.free_encoders()

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditions of prompts, a row each, on the host.

        Raises:
            ValueError: a prompt was not prepared.
        """
        unknown = next((text for text in prompts if text not in self._known), None)
        if unknown is not None:
            raise ValueError(f"prompt {unknown!r} was not encoded before the text encoders were freed")
        return Conditioning.cat([self._known[text] for text in prompts] or [self._known[""].take([])])
