"""Texts that the model in training writes on, for people to read."""

from collections.abc import Iterable, Iterator
from typing import Any

from fullshard.runs.prepare.prepare import Prepared


def continuations(prepared: Prepared, model: Any, prompts: Iterable[str], seed: int) -> Iterator[tuple[str, str]]:
    """Each prompt, and how the model continues it. Collective."""
    tokenizer, wanted = prepared.tokenizer, prepared.recipe.sample
    assert tokenizer is not None
    for prompt in prompts:
        tokens = prepared.engine.trainer.generate(
            model,
            tokenizer.prompt(prompt),
            max_new_tokens=wanted.tokens,
            temperature=wanted.temperature,
            stop=tokenizer.end_id,
            seed=seed,
            window=prepared.recipe.sequence,
        )
        yield prompt, tokenizer.decode(tokens)
