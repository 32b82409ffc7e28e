"""Attention under an encoding."""

from posx.attention.arguments import Slots, known
from posx.attention.attend import EXECUTORS, attend, batch_features, choose_executor, token_map
from posx.attention.fused import refusal
from posx.attention.history import seen_by
from posx.attention.kernel import kernel_refusal
from posx.attention.masks import Mask, causal, full, window
from posx.lazy import modules_of

__getattr__ = modules_of(__name__)

__all__ = [
    "EXECUTORS", "Mask", "Slots", "attend", "batch_features", "causal", "choose_executor", "full",
    "kernel_refusal", "known", "refusal", "seen_by", "token_map", "window",
]  # fmt: skip
