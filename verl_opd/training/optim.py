"""AdamW and its learning rate, which is a pure function of the step: nothing of a schedule needs to
be saved.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from verl_opd.config.schema import OptimConfig


def lr_at(step: int, total_steps: int, optim: OptimConfig, base_lr: float | None = None) -> float:
    """Learning rate of optimiser step `step` (0-based) of `total_steps`: linear warm-up, then
    cosine to min_lr_ratio * lr.
    """
    lr = optim.lr if base_lr is None else base_lr
    warmup = math.ceil(optim.lr_warmup_ratio * total_steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return lr * (
        optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    )


def build_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; norms (one-dimensional parameters) are not decayed.

    Its state exists from the start: torch.distributed.checkpoint fills a missing one by taking a
    step, which would count.
    """
    decayed = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in module.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]))
    for parameter in (*decayed, *plain):
        moments = {
            name: torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return optimizer
