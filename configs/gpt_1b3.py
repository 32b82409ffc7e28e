"""1.3 B parameters after GPT-3 XL: 24 layers of width 2048, 16 heads of 128, L = 2048, for many GPUs.

    posx train --config gpt_1b3:rope --workdir runs/gpt_1b3 --mesh=16x1

started once on every host (SLURM, Open MPI and TPU pods tell each which one it is). Layers, widths and learning rate
2e-4 of Brown et al. 2020 (arXiv 2005.14165, table 2.1), weight decay 0.1, betas 0.9 and 0.95, clipping at 1. It differs
in the heads (24 of 128 there, more than the width holds), in half a million tokens a step (1 M there), in the text,
WikiText-103 in 32,768 byte-level BPE units (1,000 steps are four passes), and in that every layer attends to all
tokens. Layers are computed again in the backward pass (remat "layer").
Hardware and time: not run here. Memory of each device, and what it sends: --mesh=16x1 --dry_run.
"""

from posx.lab.config import base_config


def get_config(arg: str = "rope"):
    config = base_config(arg)
    config.data.source = "Salesforce/wikitext"
    config.data.subset = "wikitext-103-raw-v1"
    config.data.layout = "wikitext"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 32768
    config.model.num_layers = 24
    config.model.model_dim = 2048
    config.model.num_heads = 16
    config.model.tied = True
    config.model.dtype = "bfloat16"
    config.model.remat = "layer"
    config.train.length = 2048
    config.train.batch_size = 256
    config.train.steps = 1000
    config.train.warmup_steps = 100
    config.train.learning_rate = 2e-4
    config.train.final_learning_rate = 2e-5
    config.train.beta2 = 0.95
    config.train.checkpoint_steps = 250
    config.eval.lengths = (2048, 4096, 8192, 16384, 32768)
    config.eval.protocols = ("nonoverlapping", "per_position")
    config.eval.num_targets = 262144
    config.sweep.encodings = ("rope", "alibi", "t5", "nope")
    config.sweep.train_lens = (2048,)
    return config.lock()
