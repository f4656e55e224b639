"""What a replay comes to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.measure import percentile
from bench.residency.costs import MODELS, CostModel
from bench.residency.engine import Found
from ramakv.commands.trace import Request


class Tally:
    """Counts where the blocks of each request were, and what it waits for its first token."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.hot = self.disk = self.missing = 0
        self.turns = 0
        self._first_token_ms: dict[str, list[float]] = {name: [] for name in MODELS}

    def add(self, request: Request, found: Found, waited_seconds: float) -> None:
        """Count a request, which waited so long for the coordinator before it could begin."""
        self.turns += 1
        self.hot += found.hot
        self.disk += found.disk
        self.missing += found.missing
        for name, model in MODELS.items():
            seconds = waited_seconds + first_token_seconds(
                model, request, found, self._block_tokens
            )
            self._first_token_ms[name].append(seconds * 1000)

    def summary(self, model: str) -> dict[str, Any]:
        """Return shares of all blocks, and times to the first token by model."""
        blocks = max(1, self.hot + self.disk + self.missing)
        by_model = {name: _times(values) for name, values in self._first_token_ms.items()}
        return {
            "hot": self.hot / blocks,
            "disk": self.disk / blocks,
            "recomputed": self.missing / blocks,
            "ttft_ms": by_model[model],
            "ttft_ms_by_model": by_model,
        }


def first_token_seconds(
    model: CostModel, request: Request, found: Found, block_tokens: int
) -> float:
    """Return what a request waits for its first token; the last token is always computed."""
    hot = min(found.hot * block_tokens, request.tokens_in)
    disk = min(found.disk * block_tokens, request.tokens_in - hot)
    return model.first_token_seconds(hot, disk, max(1, request.tokens_in - hot - disk))


def _times(values: Iterable[float]) -> dict[str, float]:
    ascending = sorted(values)
    return {
        "mean": sum(ascending) / max(1, len(ascending)),
        "p50": percentile(ascending, 50),
        "p90": percentile(ascending, 90),
        "p99": percentile(ascending, 99),
    }
