"""All models of the library, by name."""

from tests.models.of_libraries import LIBRARIES
from tests.models.of_torch import TORCH
from tests.models.of_transformers import TRANSFORMERS

MODELS = TORCH | TRANSFORMERS | LIBRARIES
