"""The training bench's rival: x-transformers' decoder with posx's architecture, optimizer and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.train_parts import FORMS, LEARNING_RATE, VOCAB, Contestant, Shape
from posx.config import TrainConfig


def peer_options(encoding: str, shape: Shape, flash: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What to tell x-transformers' wrapper and layers for an encoding; None where it has no such encoding."""
    layers: dict[str, Any] = {"attn_flash": flash}
    layers |= {
        "t5": {
            "rel_pos_bias": True,
            "rel_pos_max_distance": shape.length // 2,
            "rel_pos_num_buckets": min(32, shape.length // 2),
        },
        "rope": {"rotary_pos_emb": True, "rotary_emb_dim": shape.width // shape.heads},
        "alibi": {"alibi_pos_bias": True},
    }.get(encoding, {})
    absolute = {"sinusoidal": {"scaled_sinu_pos_emb": True}, "learned": {}}
    has = encoding in ("nope", "sinusoidal", "learned", "t5", "rope", "alibi")
    return (absolute.get(encoding, {"use_abs_pos_emb": False}), layers) if has else None


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
    """None where x-transformers has no such encoding, what it raises where it refuses the form.

    Posx's dtype is the other side's autocast. Compiled are the model and the loss as one function, forward and
    backward; the optimizer is torch's fused one.
    """
    options = peer_options(encoding, shape, "flash" in form)
    if options is None:
        return None
    import torch

    torch.set_num_threads(measure.cores())
    torch.manual_seed(0)
    model, ours = peer_model(shape, *options), TrainConfig()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": ours.weight_decay},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(ours.beta1, ours.beta2), fused=True)
    tokens = [torch.from_numpy(batch).long() for batch in batches]

    def loss_of(rows: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=shape.dtype == "bfloat16"):
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
        return [step(n + i) for i in range(count)]

    facts, count = {"options": list(options)}, sum(p.numel() for p in parameters)
    return Contestant(FORMS[form], encoding, count, advance, lambda: None, facts)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By torch.compile, for the shapes it meets: it never falls back to eager calls without a word."""
    import torch

    config = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = 1000  # contestants share the library's functions
    config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)
