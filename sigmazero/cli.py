"""The command line. Commands import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Post-trains flow-matching image models: few-step distillation and online rewards, in one loop.",
)

Recipe = Annotated[Path, typer.Argument(help="a recipe, for example recipes/glyph_dmd2.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="dotted settings, for example algorithm.num_steps=4 output=runs/four")
]
Run = Annotated[Path, typer.Argument(help="a run folder, for example runs/glyph_dmd2")]


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a recipe; goes on with an unfinished run of the same settings, and ends with the path of its report."""
    from sigmazero.config import load_recipe

    config = load_recipe(recipe, overrides or [])
    from sigmazero.launch.local import train as run

    try:
        folder = run(config)
    except KeyboardInterrupt:
        print(
            "stopped; the same command without overwrite=true goes on from the newest checkpoint, if there is one",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    print(f"finished: report in {folder / 'report.html'}, scores in {folder / 'scores.json'}")


@app.command()
def show(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print the resolved settings, what would be trained, and the memory it needs; train nothing."""
    from sigmazero.config import load_recipe

    config = load_recipe(recipe, overrides or [])
    from sigmazero.launch.plan import describe

    print(describe(config))


@app.command()
def probe(
    recipe: Recipe,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="print the gaps as JSON")] = False,
) -> None:
    """Sample one cycle, compute it again as training does, and print how far the two are apart; update nothing."""
    from sigmazero.config import load_recipe

    config = load_recipe(recipe, overrides or [])
    from sigmazero.launch import probe as launch

    gaps = launch.probe(config)
    print(launch.as_json(gaps) if json else launch.table(gaps))
    scored = [gap.log_prob_max for gap in gaps if gap.log_prob_max is not None]
    log_prob = f"{max(scored):.3g}" if scored else "none scored"
    velocity = max(gap.velocity_max for gap in gaps)
    print(f"finished: greatest gap in log-prob: {log_prob}, in velocity: {velocity:.3g}", file=sys.stderr)


@app.command()
def evaluate(run: Run) -> None:
    """Score every arm of a run again, from its newest checkpoint; writes scores.json and report.html."""
    from sigmazero.launch.reopen import evaluate_run

    print(evaluate_run(run))
    print(f"finished: report in {run / 'report.html'}, scores in {run / 'scores.json'}")


@app.command()
def sample(
    run: Run,
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt; may be given several times")] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="pictures a prompt")] = 1,
    role: Annotated[str | None, typer.Option(help="role to sample; default: the averaged student")] = None,
    num_steps: Annotated[int | None, typer.Option(min=1, max=1000, help="steps; default: the trained number")] = None,
    guidance: Annotated[float | None, typer.Option(min=0.0, help="guidance; 1 is none; default: the arm's")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the first picture; the next ones count up")] = 0,
    output: Annotated[Path | None, typer.Option(help="folder; default: RUN/samples")] = None,
) -> None:
    """Sample pictures from a run's newest checkpoint: one PNG each, with its settings inside, and a contact sheet."""
    from sigmazero.launch.reopen import sample_run

    sheet = sample_run(run, prompt or [], count, role, num_steps, guidance, seed, output)
    print(f"finished: {len(prompt or []) * count or count} pictures in {sheet.parent}, all of them on {sheet}")


@app.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="a new folder")],
    role: Annotated[str | None, typer.Option(help="trained role; default: the averaged student or policy")] = None,
    form: Annotated[str, typer.Option("--as", help="pipeline (a diffusers folder), lora or weights")] = "pipeline",
) -> None:
    """Write a run's student for diffusers, and how to sample it; reload it in a new process and compare pictures."""
    from sigmazero.launch.export import export_run

    done = export_run(run, to, role, form)
    if done.bound:
        print(f"diffusers binds all {done.bound} tensors of the LoRA file")
    print(f"{done.arm.role} of cycle {done.cycle}, reloaded: its picture differs by at most {done.difference:.2g}")
    print(f"finished: {form} in {done.folder}, for {done.arm.num_steps} steps; how to sample it is in sampler.json")


@app.command()
def tiny(
    family: Annotated[str, typer.Argument(help="sd3, flux2 or qwen_image")],
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    seed: Annotated[int, typer.Option(min=0, help="of the weights")] = 0,
) -> None:
    """Write a tiny random pipeline of a family, so that a recipe can be dry-run anywhere."""
    from sigmazero.launch.tiny import write_tiny

    write_tiny(family, folder, seed)
    print(f"finished: a tiny random {family} pipeline in {folder}")


def main() -> None:
    """Runs the command; a user's mistake ends in one line on stderr and exit code 2."""
    try:
        app(standalone_mode=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        print(f"error: out of memory; lower optimizers.ROLE.micro_batch or data.batch_size ({error})", file=sys.stderr)
        sys.exit(2)
