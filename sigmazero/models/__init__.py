"""The model families, by the name that a recipe gives: the module whose ``load`` makes one of a file or folder."""

FAMILIES: dict[str, str] = {
    "glyph": "sigmazero.models.glyph",
    "sd3": "sigmazero.models.sd3",
    "flux2": "sigmazero.models.flux2",
    "qwen_image": "sigmazero.models.qwen_image",
}

# The family that reads a pipeline class of diffusers.
PIPELINES: dict[str, str] = {
    "StableDiffusion3Pipeline": "sd3",
    "Flux2KleinPipeline": "flux2",
    "Flux2Pipeline": "flux2",
    "QwenImagePipeline": "qwen_image",
}
