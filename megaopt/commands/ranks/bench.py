"""`megaopt ranks bench`: steps over several cards, one card beside them in the same run."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from megaopt.commands import exits
from megaopt.commands.bench import report
from megaopt.commands.bench.measure import Record
from megaopt.commands.bench.report import Columns
from megaopt.commands.bench.workers import Failed, Team
from megaopt.commands.console import make_console, make_table
from megaopt.commands.ranks import growth, llama
from megaopt.commands.ranks.measure import ProcessPlace, Question, answered
from megaopt.commands.ranks.subjects import ENTRIES, LLAMA, SETS, work_of
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.source import describe_source, made_with
from megaopt.commands.toml_tables import ConfigError, require
from megaopt.kernels import native

TITLE = "a step on one card and on {}: ms until the device is done, the slower rank's"
GROWTH = "growth by the model: ms of a step"
COUNTS = (4, 8)
"""Numbers of cards for which the model speaks."""
ALL = (*SETS, LLAMA)


def main(
    *,
    sets: tuple[str, ...] = ALL,
    only: tuple[str, ...] = tuple(ENTRIES),
    repetitions: int = 10,
    patience: int = 240,
    seconds: int = 0,
    out: Path = Path("out/ranks"),
) -> int:
    """Time steps over all CUDA cards, FSDP2 over NCCL, and on one card beside them.

    Args:
        sets: L: 28 matrices of four of Llama-3-8B's layers; G: 48 of a GPT of 124M; E: 192 of 64
            experts in three weights; llama: iterations of a Llama of 0.43e9 parameters, where
            transformers is installed.
        only: muon (bf16), muon-fp16, galore, adam; torch, dion where it is installed.
        repetitions: Steps behind a time.
        patience: Seconds that a case has on a number of cards.
        seconds: After so many nothing more is begun; 0: no limit.
        out: Folder for the record and the picture.

    Returns:
        0 where every case of ours was measured and has one card's bits where they are promised; 1
        otherwise.

    Raises:
        ConfigError: an argument is empty or out of its range, or there are fewer than two CUDA
            GPUs on which the kernels run, or these cannot meet.
        OSError: the record or the picture cannot be written.
    """
    for name, values, table in (("sets", sets, ALL), ("only", only, ENTRIES)):
        unknown = next((value for value in values if value not in table), None)
        require(unknown is None and len(values) > 0, name, unknown, f"of {', '.join(table)}")
    for name, value in (("repetitions", repetitions), ("patience", patience)):
        require(value >= 1, name, value, "a whole number >= 1")
    require(seconds >= 0, "seconds", seconds, "a whole number >= 0")
    device, cards = hardware()
    source, console = describe_source(), make_console()
    make_folder(out)
    skipped = _skipped(sets, only)
    for name, reason in skipped.items():
        console.print(f"skipped: {name}: {reason}")
    native.build()  # else the first cases are measured without it
    last = time.monotonic() + (seconds or math.inf)
    cases = []
    with _begun(device, cards, patience) as ask:
        speeds = _speeds(ask, cards)
        for tensors, name in itertools.product(sets, only):
            if tensors not in ENTRIES[name].sets or {tensors, name} & skipped.keys():
                continue
            ask_case = ask if time.monotonic() <= last else _too_late
            cases.append(_case(question_of(tensors, name, repetitions), cards, ask_case))
            console.print(_line(cases[-1]), highlight=False)
    grown = [growth_of(case, speeds) for case in cases if _has_growth(case)]
    record = made_with(source) | {"skipped": skipped, "cards": cards, "speeds": speeds}
    record |= {"cases": cases, "growth": grown}
    rows = [[cell(row) for cell in GROWN.values()] for row in grown]
    tables = [report.table_of(TITLE.format(cards), cases, NAMED, TIMED)]
    tables += [make_table(GROWTH, [*GROWN], rows)] if rows else []
    report.write(console, out, record, tables, {"ranks.png": partial(draw, record)})
    return exits.DIFFERENT if any(map(_is_wrong, cases)) else exits.DONE


def hardware() -> tuple[str, int]:
    """The kind of device, and how many there are; ConfigError below two."""
    report.require_gpu("ranks bench")
    if (cards := torch.cuda.device_count()) < 2:
        raise ConfigError(f"ranks bench cannot run here: needs two CUDA GPUs or more, has {cards}")
    return "cuda", cards


def _skipped(sets: Sequence[str], only: Sequence[str]) -> dict[str, str]:
    """Subjects and sets whose library is not there, and why."""
    subjects = [ENTRIES[name].subject for name in only]
    missing = {one.name: one.package for one in subjects if not one.is_installed}
    if LLAMA in sets and not llama.is_installed():
        missing[LLAMA] = "transformers"
    return {name: f"{package} is not installed" for name, package in missing.items()}


def question_of(tensors: str, name: str, repetitions: int = 10) -> Question:
    """Returns the question of a set and a subject; without names that of the hardware's speeds."""
    shapes = SETS[tensors].shapes if tensors in SETS else ()
    return Question(name, tensors, shapes, repetitions)


# --- its run

Ask = Callable[[Question, int], Record]


@contextmanager
def _begun(device: str, cards: int, patience: float) -> Iterator[Ask]:
    """Gives what asks a team of so many ranks, begun when needed, and anew after a failure."""
    teams: dict[int, Team] = {}
    meetings = itertools.count()
    with tempfile.TemporaryDirectory() as folder:

        def ask(question: Question, ranks: int) -> Record:
            if ranks not in teams:
                meeting = str(Path(folder) / f"meeting-{next(meetings)}")
                places = [ProcessPlace(rank, ranks, device, meeting) for rank in range(ranks)]
                teams[ranks] = Team([partial(answered, place) for place in places])
            try:
                return slowest(teams[ranks].ask(question, patience))
            except Failed:
                teams.pop(ranks).end()
                raise

        try:
            yield ask
        finally:
            for team in teams.values():
                team.end()


def _speeds(ask: Ask, cards: int) -> Record:
    """The speeds of a copy on one card, and of what a rank sends in an exchange of all."""
    question = question_of("", "")
    try:
        return {"memory": ask(question, 1)["memory"], "link": ask(question, cards)["link"]}
    except Failed as error:
        raise ConfigError(f"ranks bench cannot run here: {error}") from None


def _too_late(question: Question, ranks: int) -> Record:
    raise Failed("not begun in time")


def _case(question: Question, cards: int, ask: Ask) -> Record:
    """The record of a case: on one card, on all, and weights whose bits differ between them."""
    tensors, name = question.tensors, question.subject
    case: Record = {"case": f"{tensors}/{name}", "set": tensors, "optimizer": name, "cards": cards}
    case |= {"what": ENTRIES[name].subject.description, "weights": len(question.shapes)}
    try:
        case["one"] = ask(question, 1)
        case["several"] = ask(question, cards)
    except Failed as error:
        return case | {"problem": str(error)}
    digests = [case[count].pop("digests", ()) for count in ("one", "several")]
    differ = [place for place, pair in enumerate(zip(*digests, strict=True)) if len({*pair}) > 1]
    return case | {"problem": None, "step_ms": case["several"]["step_ms"], "differ": differ}


def slowest(answers: Sequence[Record]) -> Record:
    """The figures of all ranks as one: the largest, of speeds the least, digests of the first."""
    figures = dict(answers[0])
    for name in figures.keys() - {"digests"}:
        values = [answer[name] for answer in answers if answer[name] is not None]
        figures[name] = (min if name in ("memory", "link") else max)(values, default=None)
    return figures


def _line(case: Record) -> str:
    if case["problem"]:
        return f"{case['case']}: no speed: {case['problem']}"
    return f"{case['case']}: {case['one']['step_ms']:.2f} ms, {case['step_ms']:.2f} on all cards"


def _is_wrong(case: Record) -> bool:
    """Returns whether a case of ours has no time, or other bits where the same are promised."""
    entry = ENTRIES[case["optimizer"]]
    return entry.subject.is_ours and bool(case["problem"] or (entry.same_bits and case["differ"]))


# --- growth


def _has_growth(case: Record) -> bool:
    return report.is_timed(case) and case["set"] in SETS


def growth_of(case: Record, speeds: Record) -> Record:
    """Returns what the model says of a case on all cards and on others.

    Its speeds are those of the case on one card, and of the exchange that was measured on all.
    """
    one, cards, measured = case["one"], case["cards"], case["step_ms"]
    work = work_of(case["optimizer"], SETS[case["set"]].shapes)
    hardware = (speeds["memory"], speeds["link"])
    derived = growth.speeds_of(work, one["step_ms"], one["host_ms"], *hardware)
    by_model = {count: growth.predicted_ms(work, derived, count) for count in (cards, *COUNTS)}
    row = {"case": case["case"], "cards": cards, "measured_ms": measured, "speeds": asdict(derived)}
    row |= {"model_ms": by_model[cards], "error": by_model[cards] / measured - 1}
    return row | {f"model_ms_{count}": by_model[count] for count in COUNTS}


# --- tables, page, picture


def _two(key: str, form: str, scale: float = 1.0) -> Callable[[Record], str]:
    """A figure of one card, and of all."""

    def cell(case: Record) -> str:
        values = (case["one"][key], case["several"][key])
        return "" if None in values else ", ".join(f"{value / scale:{form}}" for value in values)

    return cell


def bits_of(case: Record) -> str:
    """Returns how many weights differ between all cards and one; nothing of iterations."""
    count = len(case["differ"])
    differing = f"{count} of {case['weights']} differ" if count else "0 bits differ"
    return differing if case["weights"] else ""


def _grown(count: int) -> Callable[[Record], str]:
    return lambda row: f"{row[f'model_ms_{count}']:.2f}"


NAMED: Columns = {
    "case": itemgetter("case"),
    "step": lambda case: ENTRIES[case["optimizer"]].subject.title,
}
TIMED: Columns = {
    ">one card": lambda case: f"{case['one']['step_ms']:.2f}",
    ">all cards": lambda case: f"{case['step_ms']:.2f}",
    ">of one": lambda case: f"{case['step_ms'] / case['one']['step_ms']:.2f}",
    ">in a row": _two("row_ms", ".2f"),
    ">host": _two("host_ms", ".2f"),
    ">iteration": lambda case: "" if case["weights"] else _two("iteration_ms", ".1f")(case),
    ">memory, MB": _two("memory_bytes", ".0f", 1e6),
    ">launches": _two("kernels", ".0f"),
    ">of NCCL": _two("nccl", ".0f"),
    "bits": bits_of,
}
GROWN: Columns = {
    "case": itemgetter("case"),
    ">cards": lambda row: str(row["cards"]),
    ">measured": lambda row: f"{row['measured_ms']:.2f}",
    ">by the model": lambda row: f"{row['model_ms']:.2f}",
    ">off": lambda row: f"{100 * row['error']:+.0f}%",
    **{f">{count} by the model": _grown(count) for count in COUNTS},
}


def page(record: Record) -> str:
    """The two tables of a record in Markdown, as docs/benchmarks/README.md has them."""
    timed = [case for case in record["cases"] if report.is_timed(case)]
    parts = ((timed, {**NAMED, **TIMED}), (record["growth"], GROWN))
    return "\n\n".join("\n".join(_markdown(*part)) for part in parts)


def _markdown(rows: Sequence[Record], columns: Columns) -> Iterator[str]:
    yield f"| {' | '.join(heading.removeprefix('>') for heading in columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(str(cell(row)) for cell in columns.values())} |"


def draw(record: Record) -> Figure:
    """Milliseconds as bars, a field for each set: of each subject one card, and all below it."""
    groups: dict[str, list[Record]] = {}
    for case in filter(report.is_timed, record["cases"]):
        groups.setdefault(case["set"], []).append(case)
    heights = [1 + 2 * len(cases) for cases in groups.values()] or [1]
    title = "One step on one card, and on all of them below it"
    figure = report.make_figure(title, (10, 1.6 + 0.3 * sum(heights)), dpi=120)
    fields = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (tensors, cases) in zip(fields, groups.items(), strict=False):
        bars = [bar for case in cases for bar in _bars(case)]
        places = [0.9 * place + 0.2 * (place // 2) for place in range(len(bars))]
        report.draw_bars(axes, places, bars)
        axes.set_xlim(0, 1.15 * max(length for _, length, _, _ in bars))
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        words = SETS[tensors].description if tensors in SETS else "training a Llama, clipped"
        axes.set_title(words, loc="left", fontsize=9, style="italic", color="#555555")
    label = f"ms of one step, {record['environment']['gpu'] or 'on a CPU'}; shorter is better"
    fields[-1].set_xlabel(label, fontsize=9)
    marks: dict[str, Any] = {"loc": "outside lower right", "ncols": 2, "fontsize": 8}
    figure.legend(handles=report.KINDS, frameon=False, **marks)
    return figure


def _bars(case: Record) -> Iterator[tuple[str, float, bool, str]]:
    subject = ENTRIES[case["optimizer"]].subject
    titles = {"one": subject.title, "several": f"{case['cards']} cards"}
    for count, title in titles.items():
        ms = case[count]["step_ms"]
        yield title, ms, subject.is_ours, f" {ms:.3g} ms"
