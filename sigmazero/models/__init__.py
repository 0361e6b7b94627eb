"""The model families, by the name that a recipe gives: the module whose ``load(path)`` and ``create(...)`` make one."""

FAMILIES: dict[str, str] = {
    "glyph": "sigmazero.models.glyph",
}
