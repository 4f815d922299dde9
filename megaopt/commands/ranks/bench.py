"""`megaopt ranks bench`: steps over several cards, one card beside them in the same run."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table

from megaopt.commands import exits
from megaopt.commands.bench import report
from megaopt.commands.bench.measure import Record
from megaopt.commands.bench.report import Columns
from megaopt.commands.bench.workers import Failed, Team
from megaopt.commands.console import make_console, make_table
from megaopt.commands.ranks import growth, llama
from megaopt.commands.ranks.measure import Place, Question, answered
from megaopt.commands.ranks.subjects import ENTRIES, LLAMA, SETS, work_of
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.source import describe_source, made_with
from megaopt.commands.toml_tables import ConfigError, require

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
            GPUs on which the kernels run.
        OSError: the record or the picture cannot be written.
    """
    for name, values, table in (("sets", sets, ALL), ("only", only, ENTRIES)):
        unknown = next((each for each in values if each not in table), None)
        require(unknown is None and len(values) > 0, name, unknown, f"of {', '.join(table)}")
    for name, value in (("repetitions", repetitions), ("patience", patience)):
        require(value >= 1, name, value, "a whole number >= 1")
    device, cards = hardware()
    source, console = describe_source(), make_console()
    make_folder(out)
    skipped = _skipped(sets, only)
    for name, reason in skipped.items():
        console.print(f"skipped: {name}: {reason}")
    names = [
        (own, name) for own, name in itertools.product(sets, only) if own in ENTRIES[name].sets
    ]
    asked = [pair for pair in names if not skipped.keys() & set(pair)]
    last = time.monotonic() + (seconds or math.inf)
    with _begun(device, cards) as ask:
        speeds = _speeds(partial(ask, question_of("", ""), patience), cards)
        cases = []
        for tensors, name in asked:
            question = question_of(tensors, name, repetitions)
            is_late = time.monotonic() > last
            cases.append(
                _case(question, cards, None if is_late else partial(ask, question, patience))
            )
            console.print(_line(cases[-1]), highlight=False)
    grown = [row for case in cases if (row := growth_of(case, speeds)) is not None]
    record = made_with(source) | {"skipped": skipped, "cards": cards, "speeds": speeds}
    record |= {"cases": cases, "growth": grown}
    tables = [report.table_of(TITLE.format(cards), cases, NAMED, TIMED), growth_table(grown)]
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
    packages = {name: ENTRIES[name].subject for name in only}
    found = {
        name: f"{subject.package} is not installed"
        for name, subject in packages.items()
        if not subject.is_installed
    }
    if LLAMA in sets and not llama.is_installed():
        found[LLAMA] = "transformers is not installed"
    return found


def question_of(tensors: str, name: str, repetitions: int = 10) -> Question:
    """What ranks are asked of a set and a subject; without names of the hardware's speeds."""
    shapes = SETS[tensors].shapes if tensors in SETS else ()
    return Question(name, tensors, shapes, repetitions)


Ask = Callable[[Question, float, int], list[Record]]


@contextmanager
def _begun(device: str, cards: int) -> Iterator[Ask]:
    """Asks teams of one rank and of all, each begun when it is needed, and anew after a failure."""
    teams: dict[int, Team] = {}
    with tempfile.TemporaryDirectory() as folder:
        meetings = itertools.count()

        def ask(question: Question, patience: float, ranks: int) -> list[Record]:
            if ranks not in teams:
                meeting = str(Path(folder) / f"meeting-{next(meetings)}")
                places = [Place(rank, ranks, device, meeting) for rank in range(ranks)]
                teams[ranks] = Team([partial(answered, place) for place in places])
            try:
                return teams[ranks].ask(question, patience)
            except Failed:
                teams.pop(ranks).end()
                raise

        try:
            yield ask
        finally:
            for team in teams.values():
                team.end()


def _speeds(ask: Callable[[int], list[Record]], cards: int) -> Record:
    """A card's copy, and what a rank sends in an exchange of all; the slower rank's."""
    (alone,), together = ask(1), ask(cards)
    return {"memory": alone["memory"], "link": min(each["link"] for each in together)}


def _case(question: Question, cards: int, ask: Callable[[int], list[Record]] | None) -> Record:
    """The record of a case: on one card, on all, and weights whose bits differ between them.

    Args:
        question: What is asked.
        cards: How many there are.
        ask: Asks so many ranks; None: it is too late.
    """
    own = SETS.get(question.tensors)
    case: Record = {"set": own.description if own else question.tensors}
    case |= {"case": f"{question.tensors}/{question.subject}", "optimizer": question.subject}
    case |= {"what": ENTRIES[question.subject].subject.description, "problem": None}
    if ask is None:
        return case | {"problem": "not begun in time"}
    try:
        one, several = slowest(ask(1)), slowest(ask(cards))
    except Failed as error:
        return case | {"problem": str(error)}
    digests = [one.pop("digests", None), several.pop("digests", None)]
    case |= {"one": one, "several": several, "cards": cards}
    case |= {"step_ms": several["step_ms"], "differ": None}
    if digests[0] is not None:
        pairs = enumerate(zip(*digests, strict=True))
        case["differ"] = [index for index, (first, second) in pairs if first != second]
        case["weights"] = len(digests[0])
    return case


def slowest(answers: Sequence[Record]) -> Record:
    """The largest of the ranks' figures; digests are the first rank's."""
    return {
        name: value if name == "digests" or value is None else max(map(itemgetter(name), answers))
        for name, value in answers[0].items()
    }


def _line(case: Record) -> str:
    if case["problem"]:
        return f"{case['case']}: no speed: {case['problem']}"
    return f"{case['case']}: {case['one']['step_ms']:.2f} ms, {case['step_ms']:.2f} on all cards"


def _is_wrong(case: Record) -> bool:
    """Whether a case of ours has no time, or other bits where the same are promised."""
    entry = ENTRIES[case["optimizer"]]
    return entry.subject.is_ours and bool(case["problem"] or (entry.same_bits and case["differ"]))


# --- growth


def growth_of(case: Record, speeds: Record) -> Record | None:
    """What the model says of a case on all cards and on more; None where there is nothing to say.

    Its speeds are one card's step, and the exchange that was measured on all.
    """
    tensors, name = case["case"].split("/")
    if tensors == LLAMA or not report.is_timed(case):
        return None
    work, one = work_of(name, SETS[tensors].shapes), case["one"]
    own = growth.speeds_of(work, one["step_ms"], one["host_ms"], speeds["memory"], speeds["link"])
    cards, measured = case["cards"], case["step_ms"]
    by_model = {str(count): growth.predicted_ms(work, own, count) for count in (cards, *COUNTS)}
    error = by_model[str(cards)] / measured - 1
    found = {"case": case["case"], "cards": cards, "measured_ms": measured, "model_ms": by_model}
    return found | {"error": error, "operations": own.operations, "memory": own.memory}


def growth_table(rows: Sequence[Record]) -> Table:
    """The model beside what was measured, and alone for more cards."""
    counts = list(rows[0]["model_ms"]) if rows else []
    titles = [f">{count} by the model" for count in counts]
    table = make_table(GROWTH, ("case", ">cards", ">measured", *titles, ">off"))
    for row in rows:
        times = [f"{ms:.2f}" for ms in row["model_ms"].values()]
        off = f"{100 * row['error']:+.0f}%"
        table.add_row(row["case"], str(row["cards"]), f"{row['measured_ms']:.2f}", *times, off)
    return table


# --- table, page, picture


def _pair(key: str, form: str, scale: float = 1.0) -> Callable[[Record], str]:
    """A figure of one card, and of all."""

    def cell(case: Record) -> str:
        values = (case["one"][key], case["several"][key])
        return ", ".join("" if v is None else format(v / scale, form) for v in values).strip(", ")

    return cell


def bits_of(case: Record) -> str:
    """How many weights are others on all cards than on one."""
    if case["differ"] is None:
        return ""
    count = len(case["differ"])
    return f"{count} of {case['weights']} differ" if count else "0 bits differ"


def _launched(case: Record) -> str:
    own = case["several"]
    return "" if own["kernels"] is None else f"{own['kernels']} ({own['nccl']} NCCL)"


NAMED: Columns = {
    "case": itemgetter("case"),
    "step": lambda case: ENTRIES[case["optimizer"]].subject.title,
}
TIMED: Columns = {
    ">one card": lambda case: f"{case['one']['step_ms']:.2f}",
    ">all cards": lambda case: f"{case['step_ms']:.2f}",
    ">of one": lambda case: f"{case['step_ms'] / case['one']['step_ms']:.2f}",
    ">host": _pair("host_ms", ".2f"),
    ">iteration": lambda case: _pair("iteration_ms", ".1f")(case) if case["set"] == LLAMA else "",
    ">memory, MB": _pair("memory_bytes", ".0f", 1e6),
    ">launches on all": _launched,
    "bits": bits_of,
}


def page(record: Mapping[str, Any]) -> str:
    """The two tables of a record in Markdown, as docs/benchmarks has them."""
    columns = {**NAMED, **TIMED}
    cases = [case for case in record["cases"] if report.is_timed(case)]
    rows = [[str(cell(case)) for cell in columns.values()] for case in cases]
    first = [list(columns), *rows]
    grown = [
        [row["case"], f"{row['measured_ms']:.2f}"]
        + [f"{ms:.2f}" for ms in row["model_ms"].values()]
        + [f"{100 * row['error']:+.0f}%"]
        for row in record["growth"]
    ]
    counts = [
        f"{count} by the model" for count in (record["growth"] or [{"model_ms": ()}])[0]["model_ms"]
    ]
    return "\n".join(
        [*_markdown(first), "", *_markdown([["case", "measured", *counts, "off"], *grown])]
    )


def _markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for index, row in enumerate(rows):
        yield "| " + " | ".join(cell.removeprefix(">") for cell in row) + " |"
        if index == 0:
            yield "|---" * len(row) + "|"


def draw(record: Record) -> Figure:
    """Milliseconds as bars, a field for each set: of each subject one card, and all below it."""
    groups: dict[str, list[Record]] = {}
    for case in filter(report.is_timed, record["cases"]):
        groups.setdefault(case["set"], []).append(case)
    heights = [1 + 2 * len(cases) for cases in groups.values()] or [1]
    title = "One step on one card, and on all cards below it"
    figure = report.make_figure(title, (10, 1.6 + 0.3 * sum(heights)), dpi=120)
    fields = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (own, cases) in zip(fields, groups.items(), strict=False):
        bars = [bar for case in cases for bar in _bars(case, record["cards"])]
        places = [0.9 * index + 0.2 * (index // 2) for index in range(len(bars))]
        report.draw_bars(axes, places, bars)
        axes.set_xlim(0, 1.15 * max(length for _, length, _, _ in bars))
        axes.invert_yaxis()
        axes.set_title(own, loc="left", fontsize=9, style="italic", color="#555555")
    label = f"ms of one step, {record['environment']['gpu'] or 'a CPU'}; shorter is better"
    fields[-1].set_xlabel(label, fontsize=9)
    marks = {"handles": report.KINDS, "loc": "outside lower center", "ncols": 2, "fontsize": 8}
    figure.legend(**marks, frameon=False)
    return figure


def _bars(case: Record, cards: int) -> Iterator[tuple[str, float, bool, str]]:
    subject = ENTRIES[case["optimizer"]].subject
    for count, own in ((1, case["one"]), (cards, case["several"])):
        ms = own["step_ms"]
        label = subject.title if count == 1 else f"{count} cards"
        yield label, ms, subject.is_ours, f" {ms:.3g} ms"
