"""The algorithms, by the name that a recipe gives: the module whose ``build(config)`` makes one."""

ALGORITHMS: dict[str, str] = {
    "flow_matching": "sigmazero.algorithms.flow_matching",
    "dmd2": "sigmazero.algorithms.dmd",
    "flow_grpo": "sigmazero.algorithms.flow_grpo",
    "nft": "sigmazero.algorithms.nft",
    "awm": "sigmazero.algorithms.nft",
    "best_of_group": "sigmazero.algorithms.nft",
    "dpo": "sigmazero.algorithms.nft",
}
