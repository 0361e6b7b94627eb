"""The command line. Commands import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import os
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
EvaluationOverrides = Annotated[
    list[str] | None, typer.Argument(help="settings of evaluate and rewards, for example evaluate.num_captions=64")
]
Run = Annotated[Path, typer.Argument(help="a run folder, for example runs/glyph_dmd2")]


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a recipe; goes on with an unfinished run of the same settings, and ends with the path of its report."""
    from sigmazero.config import load_recipe

    config = load_recipe(recipe, overrides or [])
    from sigmazero.launch.local import train as run

    try:
        run(config)
    except KeyboardInterrupt:
        print(
            "stopped; the same command without overwrite=true goes on from the newest checkpoint, if there is one",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


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
def evaluate(run: Run, overrides: EvaluationOverrides = None) -> None:
    """Score every arm of a run again, from its newest checkpoint; writes scores.json and report.html."""
    from sigmazero.launch.reopen import evaluate_run

    print(evaluate_run(run, overrides or []))
    print(f"finished: report in {run / 'report.html'}, scores in {run / 'scores.json'}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or their scores.json")],
    sheet: Annotated[Path | None, typer.Option(help="a new PNG: the pictures of every arm below one another")] = None,
) -> None:
    """Print the scores of several runs, and their differences with intervals; of one run, those of its arms."""
    from sigmazero.compare import read_scores, table, write_sheet

    scores = read_scores(runs)
    print(table(scores))
    if sheet is not None:
        write_sheet(scores, sheet)
        print(f"finished: pictures in {sheet}")


@app.command()
def sample(
    source: Annotated[str, typer.Argument(help="a run, an export, a base model's folder or hub id, or a glyph file")],
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt; may be given several times")] = None,
    prompts: Annotated[str | None, typer.Option(help="a .txt, .jsonl, .csv or .parquet file, or shipped")] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="pictures a prompt")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="of a prompt's first picture; the next ones count up")] = 0,
    steps: Annotated[
        int | None, typer.Option("--steps", "--num-steps", min=1, max=1000, help="default: the trained number")
    ] = None,
    shift: Annotated[float | None, typer.Option(min=0.001, max=1000, help="of the grid; default: the trained")] = None,
    sigmas: Annotated[str | None, typer.Option(help="the whole grid without its 0, for example 1,.9,.75,.5")] = None,
    guidance: Annotated[float | None, typer.Option(min=0.0, help="1 is none; default: as trained")] = None,
    role: Annotated[str | None, typer.Option(help="role of a run; default: the averaged student or policy")] = None,
    height: Annotated[int | None, typer.Option(min=16, max=8192, help="in pixels; default: as trained")] = None,
    width: Annotated[int | None, typer.Option(min=16, max=8192, help="in pixels; default: as trained")] = None,
    dtype: Annotated[str | None, typer.Option(help="of an export or base: float32 (default) or bfloat16")] = None,
    base: Annotated[str | None, typer.Option(help="the base of exported adapters or weights, where it moved")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="pictures a network call; changes none")] = 16,
    output: Annotated[Path | None, typer.Option(help="a new folder; default: samples/NNNN, of a run in it")] = None,
) -> None:
    """Sample a run, an export or a base: one PNG a picture, with its settings inside, and a contact sheet."""
    from sigmazero.launch.reopen import sample as launch
    from sigmazero.launch.sources import Wish

    wish = Wish(role, steps, shift, _numbers(sigmas), guidance, height, width, dtype, base)
    sheet, number = launch(source, _prompts(prompt, prompts), count, seed, wish, batch_size, output)
    print(f"finished: {number} pictures in {sheet.parent}, all of them on {sheet}")


def _numbers(sigmas: str | None) -> tuple[float, ...] | None:
    try:
        numbers = None if sigmas is None else tuple(float(part) for part in sigmas.split(","))
    except ValueError:
        raise ValueError(f"--sigmas is {sigmas!r}; write numbers with commas, for example 1,.9,.75,.5") from None
    if numbers is not None and numbers[-1] == 0:
        raise ValueError(f"--sigmas is {sigmas!r}; leave out the last, 0, which every grid ends in")
    return numbers


def _prompts(given: list[str] | None, file: str | None) -> list[str]:
    if file is None:
        return given or []
    if given:
        raise ValueError("--prompt and --prompts are both given; put all prompts into the file, or give none")
    from sigmazero.data import PromptFile

    try:
        return [prompt.text for prompt in PromptFile(file, 0).all()]
    except ValueError as error:
        said = str(error).replace("data.prompts", "--prompts", 1).replace("'glyphs', ", "")
        raise ValueError(said) from None


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
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        from sigmazero.progress import in_a_line

        line = in_a_line(error)
        if line is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every rank of a machine has the same to say
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
