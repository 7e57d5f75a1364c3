"""The ranks of zero3 with quantised collectives, simulated on one device for many seeds at once.

Every seed has its own model and data, stacked in the first axis of each parameter. `vmap` computes the gradients of all seeds and
ranks together. Parameters and gradients go through the messages that the collectives of `wire` send, by the same kernels, so the
losses are those of real ranks until rounding in another order sets them apart (tests/cpu/test_wire.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import fullshard as fs
from fullshard import on_torch
from fullshard.data import Batches, TokenFile
from fullshard.on_torch.communication.block_quantization import BlockFormat
from fullshard.on_torch.communication.message_kernel import pack, unpack
from fullshard.on_torch.model.initialize import initialize

Tensors = dict[str, Tensor]


@dataclass
class SimulatedWire:
    """What `wire` makes of parameters and gradients. Their sizes divide by the ranks."""

    wire: fs.Wire
    ranks: int
    residuals: Tensors = field(default_factory=dict)

    def gathered(self, parameter: Tensor) -> Tensor:
        """Parameters as every rank computes with them. Seeds × shape."""
        if self.wire.gather == "plain":
            return parameter
        how, shards = BlockFormat(self.wire.gather, self.wire), parameter.reshape(len(parameter) * self.ranks, -1)
        return self._sent(how, shards, None).view_as(parameter)

    def reduced(self, name: str, gradient: Tensor) -> Tensor:
        """The mean of the ranks' gradients. Seeds × ranks × shape; the ranks' axis is gone."""
        if self.wire.reduce == "plain":
            return gradient.mean(1)
        how, parts = BlockFormat(self.wire.reduce, self.wire), gradient.reshape(len(gradient) * self.ranks**2, -1)
        if self.wire.error_feedback and name not in self.residuals:
            self.residuals[name] = how.message(len(parts), parts.size(1), parts.device).zero_()
        return self._sent(how, parts, self.residuals.get(name)).view_as(gradient).mean(1)

    def _sent(self, how: BlockFormat, values: Tensor, residual: Tensor | None) -> Tensor:
        found = torch.empty_like(values)
        unpack(how, pack(how, values, residual), found)
        return found


@dataclass
class SimulatedRun:
    """A preset on so many ranks, once for each seed."""

    preset: str
    tokens: TokenFile
    ranks: int
    sequence: int
    micro_batch: int
    seeds: list[int]
    device: torch.device

    def losses(self, wire: fs.Wire, rates: list[float], settings: fs.AdamW, clip: float) -> Tensor:
        """The mean loss of the ranks at each step. Steps × seeds."""
        model, sent = on_torch.load_model(self.preset), SimulatedWire(wire, self.ranks)
        step = vmap(vmap(grad_and_value(lambda *given: self._loss(model, *given)), (None, 0, 0)), (0, 0, 0))
        parameters = self._initial()
        adam = torch.optim.AdamW(
            parameters.values(), settings.lr, settings.betas, settings.eps, settings.weight_decay, fused=True
        )
        found = []
        for rate, (inputs, labels) in zip(rates, self._batches(), strict=False):
            with sdpa_kernel(SDPBackend.MATH):  # `vmap` would call the other kernels once for each rank of each seed
                gradients, losses = step({k: sent.gathered(p.detach()) for k, p in parameters.items()}, inputs, labels)
            found.append(losses.mean(1))
            means = {name: sent.reduced(name, gradient) for name, gradient in gradients.items()}
            norms = torch.stack([m.flatten(1).norm(dim=1) for m in means.values()]).norm(dim=0)
            factors = (clip / (norms + 1e-6)).clamp(max=1.0)
            for name, p in parameters.items():
                p.grad = means[name] * factors.view(-1, *[1] * (p.ndim - 1))
            for group in adam.param_groups:
                group["lr"] = rate
            adam.step()
        return torch.stack(found).cpu()

    def _loss(self, model: nn.Module, parameters: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (inputs,)).flatten(0, 1), labels.flatten())

    def _initial(self) -> dict[str, nn.Parameter]:
        """The parameters of all seeds, stacked."""
        drawn: list[Tensors] = []
        for seed in self.seeds:
            model = on_torch.load_model(self.preset)
            initialize(model, torch.device("cpu"), seed)
            drawn.append({name: p.detach() for name, p in model.named_parameters()})
        return {name: nn.Parameter(torch.stack([d[name] for d in drawn]).to(self.device)) for name in drawn[0]}

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of each step. Seeds × ranks × micro-batch × sequence."""
        feeds = [
            iter(Batches(self.tokens, self.sequence, self.micro_batch, rank=rank, ranks=self.ranks, seed=seed))
            for seed in self.seeds
            for rank in range(self.ranks)
        ]
        while True:
            micro_batches = [next(feed)[0] for feed in feeds]
            inputs, labels = (torch.stack([torch.as_tensor(b[k]) for b in micro_batches]) for k in ("input_ids", "labels"))
            shape = (len(self.seeds), self.ranks, self.micro_batch, self.sequence)
            yield inputs.view(shape).to(self.device), labels.view(shape).to(self.device)
