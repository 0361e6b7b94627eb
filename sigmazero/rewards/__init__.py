"""The rewards, by the kind that a recipe gives: the module whose ``build(config, plugins)`` makes one."""

REWARDS: dict[str, str] = {
    "ocr": "sigmazero.rewards.ocr",
    "jpeg": "sigmazero.rewards.jpeg",
    "colour": "sigmazero.rewards.colour",
    "clip": "sigmazero.rewards.clip",
    "pickscore": "sigmazero.rewards.clip",
    "aesthetic": "sigmazero.rewards.clip",
    "remote": "sigmazero.rewards.remote",
    "function": "sigmazero.rewards.function",
}
