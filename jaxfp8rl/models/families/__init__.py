"""The families of models, a file each, by the name of their architecture in config.json."""

from jaxfp8rl.models.families.family import Activation, Family, Norms
from jaxfp8rl.models.families.gemma3 import GEMMA3
from jaxfp8rl.models.families.llama import LLAMA
from jaxfp8rl.models.families.mistral import MISTRAL
from jaxfp8rl.models.families.qwen2 import QWEN2
from jaxfp8rl.models.families.qwen3 import QWEN3, QWEN3_MOE

__all__ = ["FAMILIES", "Activation", "Family", "Norms"]

FAMILIES = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3)}
