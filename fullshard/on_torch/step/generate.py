"""Sampling from a sharded model. Every forward is a collective, so all ranks run the same number of forwards."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.model.model_call import next_logits
from fullshard.on_torch.parallelize.inference import inference


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    stop: int | None = None,
    seed: int = 0,
    window: int | None = None,
) -> list[int]:
    """Continue `prompt`; every rank may have its own. Returns the prompt and the new tokens.

    `temperature` 0 takes the most likely token. `stop` is a token that ends the sample. `window` limits the context to
    that many tokens. Collective: ranks that are done run forward until all are.
    """
    if not prompt:
        raise FullshardError("generate needs a prompt of at least one token; start with a newline or the tokenizer's first token")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens, done = list(prompt), False
    with inference(model):
        for _ in range(max_new_tokens):
            context = tokens[-window:] if window else tokens
            logits_V = next_logits(model, torch.tensor([context], device=device))[0].float()
            if not done:
                tokens.append(_choose(logits_V, temperature, generator))
                done = tokens[-1] == stop
            if stop is not None and _all_done(done, device):
                break
    return tokens


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=generator))


def _all_done(done: bool, device: torch.device) -> bool:
    flag = torch.tensor(int(done), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)
