"""Students of 1, 2 and 4 steps, full copies and LoRA, raw and averaged weights, over seeds.

run: python benchmarks/students.py [--steps 1 2 4] [--storage copy lora] [--cycles 1300] [--json PATH]
"""

from __future__ import annotations

from itertools import product

from grid import Job, arguments, finish, means, run_all

LORA_RATE = ("optimizers.student.lr=1e-3", "optimizers.fake_score.lr=2e-3")


def main() -> None:
    parser = arguments(__doc__ or "", "students")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--storage", nargs="+", choices=["copy", "lora"], default=["copy", "lora"])
    parser.add_argument("--cycles", type=int, nargs="+", default=[], help="default: the recipe's")
    args = parser.parse_args()
    rows = {}
    names: dict[str, list[Job]] = {}
    for storage, steps, cycles in product(args.storage, args.steps, args.cycles or [0]):
        name = f"{storage}-{steps}" + (f"-{cycles}" if cycles else "")
        overrides = (f"roles.storage={storage}", f"algorithm.num_steps={steps}", f"algorithm.teacher_steps={steps}",
                     "evaluate.every=0", *([f"num_cycles={cycles}"] if cycles else []),
                     *(LORA_RATE if storage == "lora" else ()))  # fmt: skip
        names[name] = [Job(name, seed, overrides) for seed in range(args.seeds)]
    run_all([job for jobs in names.values() for job in jobs], args.output, args.recipe, args.at_once)
    for name, jobs in names.items():
        steps = name.split("-")[1]
        rows[f"{name}, averaged"] = means(jobs, args.output, f"student@{steps}")
        rows[f"{name}, raw"] = means(jobs, args.output, f"student_raw@{steps}")
    finish(rows, args.json)


if __name__ == "__main__":
    main()
