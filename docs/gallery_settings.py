"""How Sphinx-Gallery treats the examples: in which order they stand, and that each begins afresh."""

import sys
from pathlib import Path

ORDER = [
    "digits",
    "gradient_noise",
    "mislabelled_digits",
    "private_training",
    "hook_memory",
    "curvature_optimizers",
    "newton_cg",
    "laplace",
    "influence",
    "spectra",
    "tangent_kernel",
    "differential_equation",
    "autoencoder_blocks",
    "any_model",
    "language_model",
    "differentiable_variance",
    "verify_explain",
    "custom_layer",
]


class ReadingOrder:
    """Sort key of the examples."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, filename: str) -> int:
        return ORDER.index(Path(filename).stem)


def forget(settings: dict, filename: str) -> None:
    """Let an example import its helpers anew, for they set the seed and the look of pictures, which Sphinx-Gallery resets."""
    sys.modules.pop("_common", None)
