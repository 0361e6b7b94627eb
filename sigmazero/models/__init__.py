"""The model families, by the name that a recipe gives: the module whose ``load`` makes one of a file or folder."""

FAMILIES: dict[str, str] = {
    "glyph": "sigmazero.models.glyph",
    "sd3": "sigmazero.models.sd3",
    "flux2": "sigmazero.models.flux2",
    "qwen_image": "sigmazero.models.qwen_image",
}
