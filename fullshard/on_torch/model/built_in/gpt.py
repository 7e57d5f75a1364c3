"""A plain GPT: learned positions, LayerNorm, GELU. Shapes: B batch, T sequence, D dim, H heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.model.presets import GPTSize
from fullshard.on_torch.model.built_in.attention import Mask, attend, document_mask


class GPTAttention(nn.Module):
    def __init__(self, size: GPTSize):
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.dropout = size.dropout
        self.wq = nn.Linear(size.dim, size.dim, bias=size.bias)
        self.wk = nn.Linear(size.dim, size.dim, bias=size.bias)
        self.wv = nn.Linear(size.dim, size.dim, bias=size.bias)
        self.wo = nn.Linear(size.dim, size.dim, bias=size.bias)
        self.resid_dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2) for proj in (self.wq, self.wk, self.wv))
        dropout = self.dropout if self.training else 0.0
        out_BHTD = attend(q, k, v, mask, dropout)
        return self.resid_dropout(self.wo(out_BHTD.transpose(1, 2).reshape(B, T, -1)))


class GPTFeedForward(nn.Module):
    def __init__(self, size: GPTSize):
        super().__init__()
        self.w1 = nn.Linear(size.dim, size.ffn)
        self.w2 = nn.Linear(size.ffn, size.dim)
        self.resid_dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.resid_dropout(self.w2(F.gelu(self.w1(x))))


class GPTBlock(nn.Module):
    def __init__(self, size: GPTSize):
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.dim)
        self.attention = GPTAttention(size)
        self.ffn_norm = nn.LayerNorm(size.dim)
        self.feed_forward = GPTFeedForward(size)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.feed_forward(self.ffn_norm(x))


class GPT(nn.Module):
    """Token ids in, logits out. A document begins where `position_ids` is 0; attention never crosses documents."""

    def __init__(self, size: GPTSize):
        super().__init__()
        self.size = size
        self.tok_embeddings = nn.Embedding(size.vocab, size.dim)
        self.pos_embeddings = nn.Embedding(size.sequence, size.dim)
        self.dropout = nn.Dropout(size.dropout)
        self.layers = nn.ModuleList(GPTBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.output = nn.Linear(size.dim, size.vocab, bias=False)
        if size.tied:
            self.output.weight = self.tok_embeddings.weight
        if not self.output.weight.is_meta:
            self.apply(self._init_weights)

    def forward(self, ids_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
        mask = None if position_ids is None else document_mask(position_ids, dropout=self.size.dropout)
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device) if position_ids is None else position_ids
        x = self.dropout(self.tok_embeddings(ids_BT) + self.pos_embeddings(positions))
        for layer in self.layers:
            x = layer(x, mask)
        return self.output(self.norm(x))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            nn.init.zeros_(bias)
