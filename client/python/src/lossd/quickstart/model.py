# SPDX-License-Identifier: Apache-2.0
"""The part of the model that the trainer computes: embeddings of the preceding characters, and one layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTEXT = 12  # the number of characters that predict the next one
_WIDTH = 24  # of an embedding
_RATE, _BETA1, _BETA2, _EPSILON = 2e-3, 0.9, 0.999, 1e-8  # of Adam


class Trunk:
    """hidden = tanh(concat(embeddings) @ layer + bias), trained with Adam."""

    def __init__(self, classes: int, hidden: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._values: dict[str, NDArray[Any]] = {
            "embedding": random.normal(0.0, 0.3, (classes, _WIDTH)).astype(np.float32),
            "layer": random.normal(0.0, (CONTEXT * _WIDTH) ** -0.5, (CONTEXT * _WIDTH, hidden)).astype(np.float32),
            "bias": np.zeros(hidden, dtype=np.float32)}
        self._moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in self._values.items()}
        self._steps = 0

    def forward(self, contexts: NDArray[Any]) -> NDArray[Any]:
        """contexts: [N, CONTEXT]. Returns hidden states [N, hidden], float32."""
        self._contexts = contexts
        self._inputs = self._values["embedding"][contexts].reshape(len(contexts), -1)
        self._hidden: NDArray[Any] = np.tanh(self._inputs @ self._values["layer"] + self._values["bias"])
        return self._hidden

    def backward(self, grad_hidden: NDArray[Any]) -> None:
        """Computes gradients and takes an optimizer step. grad_hidden: dL/d(hidden) of the last forward."""
        grad = grad_hidden * (1.0 - self._hidden * self._hidden)
        grad_inputs = (grad @ self._values["layer"].T).reshape(-1, _WIDTH)
        grad_embedding = np.zeros_like(self._values["embedding"])
        np.add.at(grad_embedding, self._contexts.reshape(-1), grad_inputs)
        self._steps += 1
        for name, gradient in (("embedding", grad_embedding), ("layer", self._inputs.T @ grad), ("bias", grad.sum(axis=0))):
            self._update(name, gradient)

    def write(self, weight: NDArray[Any], beginning: list[int], length: int, seed: int) -> list[int]:
        """Draws characters one after the other. weight: [classes, hidden], the head's weight."""
        random = np.random.default_rng(seed)
        codes = list(beginning)
        for _ in range(length):
            logits = weight @ self.forward(np.array([codes[-CONTEXT:]]))[0]
            odds = np.exp(logits - logits.max())
            codes.append(int(random.choice(len(odds), p=odds / odds.sum())))
        return codes[len(beginning):]

    def _update(self, name: str, gradient: NDArray[Any]) -> None:
        first, second = self._moments[name]
        first += (1.0 - _BETA1) * (gradient - first)
        second += (1.0 - _BETA2) * (gradient * gradient - second)
        scale = _RATE * (1.0 - _BETA2 ** self._steps) ** 0.5 / (1.0 - _BETA1 ** self._steps)
        self._values[name] -= scale * first / (np.sqrt(second) + _EPSILON)
