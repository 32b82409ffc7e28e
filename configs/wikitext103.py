"""WikiText-103 after the ALiBi paper: 16 layers of width 1024, L = 512, tested to 3072 and beyond.

    posx sweep --config wikitext103 --workdir runs/wikitext103

The text comes by its hub name and is put back into articles. The recipe is that of Press et al. 2022 (arXiv
2108.12409, section 3 and appendix A.3) as far as a plain softmax allows: 16 layers, width 1024, 8 heads, MLP of 4096,
tied embeddings, dropout 0.3, 9216 x 8 tokens a step, L = 512, 3072 tokens of evaluation. It differs in the vocabulary
(32 768 BPE units instead of 267 744 words with adaptive softmax) and in the optimizer (AdamW with cosine instead of
NAG): compare ratios R_k and bits per byte with the paper, not perplexities.
Hardware and time: 235 M parameters, 286 000 updates of 73 728 tokens, about a day or more on one data-centre GPU;
not run here. Check it with --dry_run.
"""

from posx.lab.config import base_config


def get_config(arg: str = "alibi"):
    config = base_config(arg)
    config.data.source = "Salesforce/wikitext"
    config.data.subset = "wikitext-103-raw-v1"
    config.data.layout = "wikitext"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 32768
    config.model.num_layers = 16
    config.model.model_dim = 1024
    config.model.num_heads = 8
    config.model.tied = True
    config.model.dropout = 0.3
    config.model.dtype = "bfloat16"
    config.train.length = 512
    config.train.batch_size = 144
    config.train.steps = 286000
    config.train.warmup_steps = 16000
    config.train.learning_rate = 5e-4
    config.train.final_learning_rate = 1e-5
    config.train.clip_norm = 0.1
    config.train.accumulation = 8
    config.train.log_steps = 100
    config.train.checkpoint_steps = 2000
    config.eval.lengths = (512, 1012, 1512, 2512, 3072, 4512, 8512, 15512)
    config.eval.protocols = ("nonoverlapping", "per_position", "sliding")
    config.eval.num_targets = 0
    config.sweep.encodings = ("sinusoidal", "rope", "t5", "alibi")
    config.sweep.train_lens = (512,)
    return config.lock()
