"""The training bench's rival: x-transformers' decoder with posx's architecture, optimizer and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.calls_torch import compiled, device, finished
from benchmarks.train import LEARNING_RATE, VOCAB, Contestant, Shape
from posx.lab.config import TrainConfig


def peer_options(encoding: str, shape: Shape, flash: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the options of x-transformers' wrapper and layers for an encoding; None if it has no such encoding."""
    half = shape.length // 2
    layers = {
        "nope": {}, "sinusoidal": {}, "learned": {}, "alibi": {"alibi_pos_bias": True},
        "rope": {"rotary_pos_emb": True, "rotary_emb_dim": shape.width // shape.heads},
        "t5": {"rel_pos_bias": True, "rel_pos_max_distance": half, "rel_pos_num_buckets": min(32, half)},
    }  # fmt: skip
    absolute = {"sinusoidal": {"scaled_sinu_pos_emb": True}, "learned": {}}
    if encoding not in layers:
        return None
    return absolute.get(encoding, {"use_abs_pos_emb": False}), {"attn_flash": flash, **layers[encoding]}


def peer_model(shape: Shape, wrapper: dict[str, Any], layers: dict[str, Any]) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=VOCAB, max_seq_len=shape.length, tie_embedding=shape.config.tied, **wrapper,
        attn_layers=Decoder(
            dim=shape.width, depth=shape.layers, heads=shape.heads, attn_dim_head=shape.width // shape.heads,
            use_rmsnorm=True, ff_mult=4, ff_no_bias=True, verbose=False, **layers,
        ),
    )  # fmt: skip


def peer_contestant(
    encoding: str, shape: Shape, batches: Sequence[np.ndarray], form: str = "eager"
) -> Contestant | None:
    """Make the rival; None if x-transformers has no such encoding. Raises its exception if it refuses the form.

    It is trained on the GPU that torch finds, else on the CPU. The dtype of posx is torch's autocast. The model and the
    loss are compiled as one function, forward and backward. The optimizer is torch's fused one.
    """
    options = peer_options(encoding, shape, "flash" in form)
    if options is None:
        return None
    import torch

    torch.set_num_threads(measure.cores())
    torch.manual_seed(0)
    model, ours, place = peer_model(shape, *options).to(device()), TrainConfig(), device()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": ours.weight_decay},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(ours.beta1, ours.beta2), fused=True)
    tokens = [torch.from_numpy(batch).long().to(place) for batch in batches]

    def loss_of(rows: Any) -> Any:
        with torch.autocast(place, dtype=torch.bfloat16, enabled=shape.dtype == "bfloat16"):
            logits = model(rows[:, :-1])
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    call = compiled(loss_of) if "compiled" in form else loss_of

    def step(n: int) -> Any:
        loss = call(tokens[n % len(tokens)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, ours.clip_norm)
        optimizer.step()
        return loss.detach()

    def advance(n: int, count: int) -> list[Any]:
        return finished([step(n + i) for i in range(count)])

    return Contestant(sum(p.numel() for p in parameters), advance, {"options": list(options)})
