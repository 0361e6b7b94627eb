"""What a run will train, the memory it needs by role and phase, and whether it fits, before it is started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from sigmazero.config import RunConfig
from sigmazero.launch.memory import PhaseMemory, Plan, RoleMemory, plan_memory
from sigmazero.models.adapters import coverage
from sigmazero.sampler import CPU_ROW_MULTIPLE

MIB, GIB = 2**20, 2**30


def describe(config: RunConfig) -> str:
    """The resolved settings, a table of roles, one of the memory of each phase, and whether the peak fits.

    Raises:
        ValueError: as ``build``.
    """
    plan = plan_memory(config)
    steps, built = config.algorithm.num_steps, plan.built
    shift = built.roles.model.default_shift(steps)
    return "\n".join(
        [
            json.dumps(config.model_dump(mode="json"), indent=2),
            "",
            f"{'role':14}{'kind':10}{'stored as':12}{'own parameters':>16}{'trained':>14}"
            f"{'weights MiB':>14}{'gradients MiB':>15}{'moments MiB':>13}",
            *map(_role_row, plan.roles),
            "",
            *_adapters(plan),
            f"grid: {steps} steps, shift {config.algorithm.shift:g}; the family's own sampler has a shift of "
            f"{shift:.4g} at this size",
            "",
            f"{'phase':20}{'rows':>6}{'stays MiB':>14}{'own MiB':>14}{'peak MiB':>14}",
            *map(_phase_row, plan.phases),
            "",
            f"what stays: base {_mib(plan.base)} MiB, VAE {_mib(plan.vae)} MiB, a cycle's latents "
            f"{_mib(plan.samples)} MiB, and the roles' weights and moments; gradients are a phase's own",
            f"encoded prompts, on the host: {_mib(plan.conditions)} MiB; libraries and reward models are not counted",
            verdict(plan, *capacity(plan.device)),
        ]
    )


def _adapters(plan: Plan) -> list[str]:
    """What share of the network the adapters of a role train."""
    roles, lora = plan.built.roles, plan.built.config.roles.storage == "lora"
    own = [role for role, kind in roles.kinds.items() if kind != "frozen"]
    return [str(coverage(roles.model.net, roles.parameters(own[0])))] if lora else []


def _role_row(role: RoleMemory) -> str:
    return (
        f"{role.role:14}{role.kind:10}{role.stored:12}{role.parameters:>16,}{role.trained:>14,}"
        f"{_mib(role.weights):>14}{_mib(role.gradients):>15}{_mib(role.moments):>13}"
    )


def _phase_row(phase: PhaseMemory) -> str:
    numbers = (phase.resident, phase.own, phase.peak)
    return f"{phase.name:20}{phase.rows or '':>6}" + "".join(f"{_mib(number):>14}" for number in numbers)


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


def capacity(device: torch.device) -> tuple[int, str]:
    """Bytes that a device has, and what it is called: all of a GPU's memory, what is available of the machine's."""
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        return about.total_memory, f"this GPU ({about.name})"
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), "this machine"
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"


def verdict(plan: Plan, size: int, name: str) -> str:
    """One line: the peak, the phase that has it, whether ``size`` bytes hold it, and if not what to set."""
    worst = plan.worst
    need = f"needs about {_gib(worst.peak)} at its peak (phase {worst.name}), {name} has {_gib(size)}"
    if worst.peak <= size:
        return f"{need}: fits"
    return f"{need}: does not fit; " + (", ".join(advice(plan)) or "only smaller pictures or another model would help")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / MIB:.1f} MiB"


def advice(plan: Plan) -> list[str]:
    """Settings that make the largest phase smaller: those of its own memory and of what stays, if they are a tenth."""
    config, phase = plan.built.config, plan.worst
    fewest = CPU_ROW_MULTIPLE if plan.device.type == "cpu" else 1  # a CPU's calls are padded
    found = []
    if phase.own > phase.peak / 10:
        if phase.has_graph and not config.model.activation_checkpointing:
            found.append("set model.activation_checkpointing=true")
        if phase.rows > fewest:
            found += [f"lower {setting} (below {phase.rows})" for setting in phase.settings]
    if phase.resident > phase.peak / 10:
        if config.roles.storage == "copy" and phase.name != "encoding":
            found.append("set roles.storage=lora")
        if config.model.dtype == "float32" and config.model.family != "glyph":
            found.append("set model.dtype=bfloat16")
    return found
