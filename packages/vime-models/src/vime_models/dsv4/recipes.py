# SPDX-License-Identifier: Apache-2.0
"""Who quantises what: the recipes behind `--dsv4-qat`, as data. Importable without torch.

| | rollout | deepseek | miles |
| --- | --- | --- | --- |
| keys (raw and compressed), channels that do not rotate | FP8, blocks of 64 | the same | the same |
| indexer queries and keys | FP8, blocks of 128 | Hadamard, FP4, blocks of 32 | Hadamard, FP8, blocks of 128 |
| weights of routed experts | | FP4, blocks of 32 | |

All scales are powers of two (UE8M0). "rollout" is vLLM with its default caches, "deepseek" the released inference
code, "miles" what miles simulates under FP8 training. Left out: quantised inputs of linears, which Megatron's own
`--fp8-format` flags do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vime_models.dsv4.config import DSv4Options


@dataclass(frozen=True)
class Recipe:
    """What is quantised, and in blocks of how many values.

    Attributes:
        latent_block: FP8 block of the keys' channels that do not rotate.
        indexer_format: "fp8" or "fp4", of the indexer's queries and keys.
        indexer_block: their block.
        hadamard: whether they are rotated first.
        expert_block: FP4 block of the experts' weights, along the input; 0 leaves them alone.
    """

    latent_block: int
    indexer_format: str
    indexer_block: int
    hadamard: bool
    expert_block: int = 0


RECIPES = {
    "rollout": Recipe(latent_block=64, indexer_format="fp8", indexer_block=128, hadamard=False),
    "deepseek": Recipe(
        latent_block=64, indexer_format="fp4", indexer_block=32, hadamard=True, expert_block=32
    ),
    "miles": Recipe(latent_block=64, indexer_format="fp8", indexer_block=128, hadamard=True),
}


def width_problems(options: "DSv4Options") -> Iterator[str]:
    """Sizes of the model that do not fill whole blocks under `options.qat`, in words."""
    recipe = RECIPES.get(options.qat)
    if recipe is None:
        return
    still = options.head_dim - options.rope_dim
    if still % recipe.latent_block:
        yield f"needs head_dim - rope_dim ({still}) to be a multiple of {recipe.latent_block}"
    if 4 not in options.compress_ratios:
        return
    width = options.index_head_dim
    if width % recipe.indexer_block:
        yield f"needs --dsa-indexer-head-dim ({width}) to be a multiple of {recipe.indexer_block}"
    if recipe.hadamard and width & (width - 1):
        yield f"needs --dsa-indexer-head-dim ({width}) to be a power of two"
