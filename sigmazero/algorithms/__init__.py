"""The algorithms, by the name that a recipe gives: the module whose ``build(config)`` makes one."""

ALGORITHMS: dict[str, str] = {
    "flow_matching": "sigmazero.algorithms.flow_matching",
    "dmd2": "sigmazero.algorithms.dmd",
}
