"""No position encoding: order reaches the model through the causal mask alone."""

import dataclasses

from posx.contract import About, Encoding


@dataclasses.dataclass(frozen=True)
class Nope(Encoding):
    """Plain attention: s_ij = q_i . k_j / sqrt(d).

    Causal use only: without a mask the network is permutation-equivariant and cannot know order.

    Reference: Haviv et al. 2022, arXiv 2203.16634; Kazemnejad et al. 2023, arXiv 2305.19466.
    """

    axes = 0  # no position is read
    about = About("arXiv 2203.16634", "a little: defined everywhere, attention spreads with length")
