"""The report of a run: its verdict, and a page that stands alone at every moment of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sigmazero.report import MAX_HISTORY, arm_of, extremes, health, panels, smoothed, verdict, write_report

DMD2 = {"name": "dmd2", "num_steps": 2, "teacher_steps": 25, "guidance": 2.0, "score_sigma": {"low": 0.02}}
FLOW = {"name": "flow_matching", "num_steps": 25, "guidance": 2.0}
STEP = 1e-6  # just past a bound


def metrics(read: float, distance: float, diversity: float = 5.0, drift: float = 0.01) -> dict[str, dict[str, float]]:
    values = {"read_accuracy": read, "fd_feat": distance, "diversity": diversity, "drift": drift}
    return {name: {"mean": value, "low": 0.9 * value, "high": 1.1 * value} for name, value in values.items()}


def distilled(read: float = 0.9, distance: float = 0.5, diversity: float = 5.0) -> dict[str, Any]:
    """Scores of a distillation whose teacher reads 0.92 at a distance of 0.5 (4.0 with 2 steps) and varies by 5."""
    arms = {
        "real": metrics(0.99, 0.0625),
        "teacher@25": metrics(0.92, 0.5),
        "teacher@2": metrics(0.3, 4.0),
        "student@2": metrics(read, distance, diversity),
        "student_raw@2": metrics(0.5, 9.0, 1.0),  # never judged
    }
    return {"arms": arms, "settings": {"algorithm": DMD2}, "cycle": 1200}


def taught(read: float = 0.95, distance: float = 0.125) -> dict[str, Any]:
    arms = {"real": metrics(0.99, 0.0625), "student@25": metrics(read, distance)}
    return {"arms": arms, "settings": {"algorithm": FLOW}, "cycle": 40}


def start_run(folder: Path, algorithm: dict[str, Any], finished: bool = False, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"num_cycles": 1200, "seed": 0, "algorithm": algorithm, "training": {"device": "cpu"}, **config}
    described = {"finished": finished, "config": config, "python": "3.11.7", "versions": {"torch": "2.13.0+cpu"}}
    (folder / "run.json").write_text(json.dumps(described))
    return folder


def save_strip(path: Path, num: int = 16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(path.name)).integers(0, 256, (16, 16 * num, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def save_rows(folder: Path, rows: Sequence[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def dmd2_rows(num: int, every: int = 10) -> list[dict[str, float]]:
    """As a run logs them: the student in every second row, a refresh in every fifth."""
    rows = []
    for i in range(1, num + 1):
        row = {"cycle": every * i, "train/fake_score_loss": 1 / i, "train/fake_score_grad_norm": 0.5, "time/cycle": 0.3}
        if i % 2 == 0:
            row |= {"train/student_loss": -0.1, "train/student_grad_norm": 2.0, "train/student_lr": 1e-4}
            row |= {"train/score_gradient_rms": 0.2, "train/student_x0_recompute_gap": 0.0}
        if i % 5 == 0:
            row |= {"evaluate/student@2/read_accuracy": 0.5, "evaluate/student@2/fd_feat": 2.0}
        rows.append(row)
    return rows


def full_run(folder: Path) -> Path:
    start_run(folder, DMD2, finished=True)
    save_rows(folder, dmd2_rows(120))
    (folder / "scores.json").write_text(json.dumps(distilled()))
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "captions.json").write_text(json.dumps([f"the number {i:02d}" for i in range(16)]))
    for arm in distilled()["arms"]:
        save_strip(folder / "evaluation" / f"{arm}.png")
    for cycle in range(100, 1300, 100):
        save_strip(folder / "evaluation" / "history" / f"{cycle:08d}.png")
    return folder


class Page(HTMLParser):
    """Tags with their attributes, and the visible text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.html = path.read_text("utf-8")
        self.feed(self.html)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def refreshes(self) -> bool:
        return any(tag == "meta" and attrs.get("http-equiv") == "refresh" for tag, attrs in self.tags)

    def stands_alone(self) -> bool:
        """Nothing is fetched and nothing runs."""
        fetching = {"src", "href", "srcset", "data", "poster", "action"}
        sources = [str(value) for _, attrs in self.tags for name, value in attrs.items() if name in fetching]
        allowed = all(source.startswith("data:image/png;base64,") for source in sources)
        outside = re.search(r"https?://|url\(|@import|<script|<link|<iframe|\son\w+=", self.html)
        return allowed and outside is None


# Verdict


def test_no_verdict_before_the_student_is_scored() -> None:
    assert verdict({}) == (None, ["No scores yet."])
    assert verdict({"arms": {}, "settings": {}, "cycle": 0}) == (None, ["No scores yet."])
    scores = distilled()
    for name in ("student@2", "student_raw@2"):
        del scores["arms"][name]
    assert verdict(scores) == (None, ["No scores of the student yet."])
    scores = distilled()
    del scores["arms"]["teacher@2"]
    assert verdict(scores) == (None, ["Not judged: teacher@2 has no scores."])


def test_sentences_give_the_numbers() -> None:
    scores = distilled(read=0.912, distance=0.6, diversity=4.5)
    scores["arms"]["teacher@25"]["read_accuracy"]["mean"] = 0.92
    passed, sentences = verdict(scores)
    assert passed is True
    assert sentences == [
        "The student reads 91.2 % of captions with 2 network calls; the teacher reads 92.0 % with 50 (25 guided "
        "steps): pass.",
        "Its distance to real pictures (fd_feat) is 0.600, 1.20 times the teacher's 0.500: pass.",
        "That is 0.15 times the 4.000 that the teacher has with 2 steps: pass.",
        "Its pictures of one caption vary by 4.500 (diversity), 0.90 times the teacher's 5.000: pass.",
    ]


@pytest.mark.parametrize(
    ("at_bound", "past_bound", "check"),
    [
        ({"read": 0.92 - 0.03}, {"read": 0.92 - 0.03 - STEP}, 0),
        ({"distance": 0.5 * 1.6}, {"distance": 0.5 * 1.6 + STEP}, 1),
        ({"diversity": 5 * 0.8}, {"diversity": 5 * 0.8 - STEP}, 3),
    ],
)
def test_distillation_flips_at_each_bound(at_bound: Any, past_bound: Any, check: int) -> None:
    assert verdict(distilled(**at_bound))[0] is True
    passed, sentences = verdict(distilled(**past_bound))
    assert passed is False
    assert [sentence.endswith(": fail.") for sentence in sentences] == [i == check for i in range(4)]


def test_distillation_flips_at_a_quarter_of_the_few_step_teacher() -> None:
    def scores(few_steps: float) -> dict[str, Any]:
        values = distilled(distance=0.5)
        values["arms"]["teacher@2"]["fd_feat"]["mean"] = few_steps
        return values

    assert verdict(scores(2.0))[0] is True
    passed, sentences = verdict(scores(2.0 - STEP))
    assert passed is False
    assert [sentence.endswith(": fail.") for sentence in sentences] == [False, False, True, False]


@pytest.mark.parametrize(
    ("at_bound", "past_bound", "check"),
    [
        ({"read": 0.9}, {"read": 0.9 - STEP}, 0),
        ({"distance": 0.0625 * 2.5}, {"distance": 0.0625 * 2.5 + STEP}, 1),
    ],
)
def test_flow_matching_flips_at_each_bound(at_bound: Any, past_bound: Any, check: int) -> None:
    assert verdict(taught(**at_bound))[0] is True
    passed, sentences = verdict(taught(**past_bound))
    assert passed is False
    assert [sentence.endswith(": fail.") for sentence in sentences] == [i == check for i in range(2)]


def test_flow_matching_counts_guided_calls() -> None:
    _, sentences = verdict(taught(read=0.951))
    assert sentences[0] == "The student reads 95.1 % of captions with 50 network calls (25 guided steps): pass."
    unguided = taught(read=0.951)
    unguided["settings"] = {"algorithm": {**FLOW, "guidance": 1.0}}
    assert verdict(unguided)[1][0] == "The student reads 95.1 % of captions with 25 network calls: pass."


def test_same_step_count_has_no_few_step_comparison() -> None:
    arms = {"teacher@4": metrics(0.9, 0.5), "student@4": metrics(0.9, 0.5), "real": metrics(0.99, 0.06)}
    passed, sentences = verdict({"arms": arms, "settings": {"algorithm": {**DMD2, "num_steps": 4}}})
    assert passed is True
    assert len(sentences) == 4
    assert sentences[2].endswith(": not applicable.")


@pytest.mark.parametrize("metric", ["read_accuracy", "fd_feat", "diversity"])
def test_a_score_that_is_no_number_fails(metric: str) -> None:
    scores = distilled()
    scores["arms"]["student@2"][metric]["mean"] = float("nan")
    assert verdict(scores)[0] is False
    del scores["arms"]["student@2"][metric]
    assert verdict(scores)[0] is False


def test_health_names_what_went_wrong() -> None:
    described = {"config": {"training": {"device": "auto"}}, "versions": {"torch": "2.13.0+cpu"}}
    assert health([], described) == []
    assert health(dmd2_rows(10), described) == []
    bad = [{"cycle": 1450, "train/nonfinite_student_loss": 2.0, "train/student_x0_recompute_gap": float("nan")}]
    assert health(bad, described) == [
        "Non-finite values were met, last around cycle 1,450 (student_loss); those updates were skipped."
    ]
    gap = [{"cycle": 1, "train/student_x0_recompute_gap": 1.5e-7}]
    (sentence,) = health(gap, described)
    assert "up to 1.5e-07" in sentence
    assert "CPU" in sentence
    assert health(gap, {**described, "versions": {"torch": "2.13.0"}}) == []  # it may have run on a GPU
    assert health(gap, {**described, "config": {"training": {"device": "cuda"}}}) == []


# Arms and curves


@pytest.mark.parametrize(
    ("name", "algorithm", "label"),
    [
        ("real", DMD2, "Real pictures"),
        ("teacher@25", DMD2, "Teacher, 25 guided steps (50 calls)"),
        ("teacher@1", {**DMD2, "guidance": 1.0}, "Teacher, 1 call"),
        ("student@2", DMD2, "Student, 2 calls"),
        ("student_raw@2", DMD2, "Student, not averaged, 2 calls"),
        ("student@25", FLOW, "Student, 25 guided steps (50 calls)"),
        ("other", DMD2, "other"),
    ],
)
def test_labels(name: str, algorithm: dict[str, Any], label: str) -> None:
    assert arm_of(name, algorithm).label == label


def test_panels_leave_out_what_is_missing_and_what_is_not_finite() -> None:
    assert panels([], {}) == []
    rows = [
        {"cycle": 1, "train/student_loss": 2.0, "time/cycle": 1.0, "time/rollout": 0.5},
        {"cycle": 2, "train/student_loss": float("nan"), "time/cycle": 2.0},
        {"cycle": 3, "train/student_loss": 4.0},
    ]
    loss, seconds = panels(rows, {})
    assert loss.series[0].cycles.tolist() == [1, 3]
    assert loss.series[0].values.tolist() == [2, 4]
    assert [series.label for series in seconds.series] == [""]
    assert seconds.series[0].values.tolist() == [1, 2]


def test_panels_compare_the_student_with_the_teacher() -> None:
    found = {panel.title: panel for panel in panels(dmd2_rows(20), distilled())}
    read = found["Captions read (read_accuracy)"]
    assert read.series[0].cycles.tolist() == [50, 100, 150, 200]
    assert list(read.levels) == [("teacher@25", 0.92), ("teacher@2", 0.3)]
    norms = found["Gradient norm, before clipping"].series
    assert {series.label for series in norms} == {"student", "fake_score"}
    assert len({series.colour for series in norms}) == 2


def test_smoothing_keeps_lines_and_means() -> None:
    line = np.arange(200.0)
    assert np.allclose(smoothed(line)[10:-10], line[10:-10])
    assert np.array_equal(smoothed(np.full(7, 3.0)), np.full(7, 3.0))
    spike = np.zeros(200)
    spike[100] = 9
    assert smoothed(spike).sum() == pytest.approx(9)
    assert smoothed(spike).max() == pytest.approx(1)


def test_long_curves_keep_their_spikes() -> None:
    values = np.random.default_rng(0).normal(size=40_123)
    values[[17, 30_000]] = 99, -99
    kept = extremes(values)
    assert len(kept) <= 2 * 500 + 500
    assert {17, 30_000} <= set(kept.tolist())
    assert np.all(np.diff(kept) > 0)
    assert extremes(values[:1000]).tolist() == list(range(1000))


# The page


def test_no_run_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run folder: it has no run\.json") as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("algorithm", [DMD2, FLOW], ids=["dmd2", "flow_matching"])
def test_page_of_a_run_that_has_just_started(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    path = write_report(start_run(tmp_path / "fresh", algorithm))
    page = Page(path)
    assert path == tmp_path / "fresh" / "report.html"
    assert page.stands_alone()
    assert page.refreshes
    for text in ("cycle 0 of 1,200", "Not judged yet", "No scores yet.", "No pictures yet.", "No metrics yet."):
        assert text in page.text
    assert page.count("img") == 0


def test_page_of_a_run_that_was_killed_while_writing(tmp_path: Path) -> None:
    folder = start_run(tmp_path / "cut", DMD2)
    rows = "".join(json.dumps(row) + "\n" for row in dmd2_rows(7))
    (folder / "metrics.jsonl").write_text(rows + '{"cycle": 80, "train/stu')
    (folder / "scores.json").write_text('{"arms": {"real": ')
    save_strip(folder / "evaluation" / "real.png")
    whole = (folder / "evaluation" / "real.png").read_bytes()
    (folder / "evaluation" / "teacher@25.png").write_bytes(whole[: len(whole) // 2])
    (folder / "evaluation" / "teacher@2.png").write_bytes(b"")
    page = Page(write_report(folder))
    assert page.stands_alone()
    assert "cycle 70 of 1,200" in page.text
    assert "No scores yet." in page.text
    assert "Real pictures" in page.text
    assert "Teacher, 25" not in page.text


def test_page_of_a_distillation(tmp_path: Path) -> None:
    folder = full_run(tmp_path / "run")
    page = Page(write_report(folder))
    assert page.stands_alone()
    assert not page.refreshes
    assert "Passes" in page.text
    for sentence in verdict(distilled())[1]:
        assert sentence in page.text
    labels = [
        "Real pictures", "Teacher, 25 guided steps (50 calls)", "Teacher, 2 guided steps (4 calls)",
        "Student, 2 calls", "Student, not averaged, 2 calls", "After 100 cycles", "After 1,200 cycles",
    ]  # fmt: skip
    places = [page.text.index(label) for label in labels]
    assert places == sorted(places)
    assert len(re.findall(r"After [\d,]+ cycles", page.text)) == MAX_HISTORY
    pictures = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == 16 * (5 + MAX_HISTORY) + 8
    assert pictures[3]["alt"] == "Real pictures: the number 03"
    assert "algorithm.score_sigma.low 0.02" in page.text
    assert f"sigmazero evaluate {folder}" in page.text


def test_table_shows_the_scores_as_they_are(tmp_path: Path) -> None:
    page = Page(write_report(full_run(tmp_path / "run")))
    for arm, values in distilled()["arms"].items():
        for value in values.values():
            digits = 4 if value["mean"] < 0.1 else 3
            shown = "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(value["mean"], value["low"], value["high"], d=digits)
            assert shown in page.text, arm
    assert "0.920 [0.828, 1.012]" in page.text


def test_page_of_flow_matching(tmp_path: Path) -> None:
    folder = start_run(tmp_path / "run", FLOW, finished=True)
    save_rows(folder, [{"cycle": 50 * i, "train/student_loss": 1 / i, "time/cycle": 0.1} for i in range(1, 80)])
    (folder / "scores.json").write_text(json.dumps(taught(read=0.8)))
    for name in ("real", "student@25", "history/00000600"):
        save_strip(folder / "evaluation" / f"{name}.png", num=8)
    page = Page(write_report(folder))
    assert page.stands_alone()
    assert "Does not pass" in page.text
    assert "reads 80.0 % of captions with 50 network calls (25 guided steps): fail." in page.text
    assert "at least 90.0 % of captions" in page.text
    assert page.count("img") == 3 * 8 + 2


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    folder = start_run(tmp_path / "<i>run", DMD2, output=evil, plugins=[evil])
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "captions.json").write_text(json.dumps([evil] * 16))
    save_strip(folder / "evaluation" / "real.png")
    save_strip(folder / "evaluation" / f"{evil.replace('/', '')}.png")
    page = Page(write_report(folder))
    assert "<script" not in page.html
    assert page.count("i") == 0
    assert page.count("img") == 2 * 16
    assert all(set(attrs) == {"src", "alt", "title"} for tag, attrs in page.tags if tag == "img")
    assert page.text.count("alert(1)") == 16 + 1 + 2  # captions, label, two settings


def test_page_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = start_run(tmp_path / "run", DMD2)
    write_report(folder)
    before = (folder / "report.html").read_text("utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "run.json"]

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    save_rows(folder, dmd2_rows(3))
    with monkeypatch.context() as patch:
        patch.setattr("sigmazero.report.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_report(folder)
    assert (folder / "report.html").read_text("utf-8") == before
    assert "cycle 30 of" in Page(write_report(folder)).text
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html", "run.json"]


def test_report_imports_no_torch() -> None:
    code = "import sys, sigmazero.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
