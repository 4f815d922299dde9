"""`megaopt ranks bench`: steps over several cards, one card beside them in the same run."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import torch
from matplotlib.figure import Figure

from megaopt.kernels import native
from megaopt.lab import exits
from megaopt.lab.bench import report
from megaopt.lab.bench.measure import Record
from megaopt.lab.bench.report import Bar, BenchRun, Columns
from megaopt.lab.bench.workers import Failed, Team
from megaopt.lab.console import make_table
from megaopt.lab.ranks.measure import ProcessPlace, Question, answered
from megaopt.lab.ranks.subjects import ENTRIES, LLAMA, SETS, predicted_ms, speeds_of, work_of
from megaopt.lab.toml_tables import ConfigError, require

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
    report.require_names("sets", sets, ALL)
    report.require_names("only", only, ENTRIES)
    report.require_counts(repetitions=repetitions, patience=patience)
    require(seconds >= 0, "seconds", seconds, "a whole number >= 0")
    device, cards = hardware()
    bench = BenchRun(out, seconds)
    # subjects and sets whose library is not there, and why
    missing = {name: ENTRIES[name].subject for name in only}
    packages = {name: one.package for name, one in missing.items() if not one.is_installed}
    if LLAMA in sets and find_spec("transformers") is None:
        packages[LLAMA] = "transformers"
    skipped = {name: f"{package} is not installed" for name, package in packages.items()}
    bench.skip(f"{name}: {reason}" for name, reason in skipped.items())
    native.build()  # else the first cases are measured without it
    cases = []
    with _begun(device, cards, patience) as ask:
        try:  # of a copy on one card, and of what a rank sends in an exchange of all
            question = question_of("", "")
            speeds = {"memory": ask(question, 1)["memory"], "link": ask(question, cards)["link"]}
        except Failed as error:
            raise ConfigError(f"ranks bench cannot run here: {error}") from None
        for tensors, name in itertools.product(sets, only):
            if tensors not in ENTRIES[name].sets or {tensors, name} & skipped.keys():
                continue
            question = question_of(tensors, name, repetitions)
            case = _case(question, cards, ask, is_late=bench.is_late())
            cases.append(case)
            bench.fail(case["case"], case["problem"])
            if not case["problem"]:
                times = f"{case['one']['step_ms']:.2f} ms, {case['step_ms']:.2f} on all cards"
                bench.console.print(f"{case['case']}: {times}", highlight=False)
    grown = [
        growth_of(case, **speeds) for case in cases if report.is_timed(case) and case["set"] in SETS
    ]
    bench.record |= {"skipped": skipped, "cards": cards, "speeds": speeds}
    bench.record |= {"cases": cases, "growth": grown}
    tables = [report.table_of(TITLE.format(cards), cases, NAMED, TIMED)]
    if grown:
        rows = [[cell(row) for cell in GROWN.values()] for row in grown]
        tables.append(make_table(GROWTH, [*GROWN], rows))
    bench.end(tables, {"ranks.png": partial(draw, bench.record)})
    # a case of ours must have a time, and the same bits where these are promised
    entries = [(ENTRIES[case["optimizer"]], case) for case in cases]
    is_wrong = any(
        case["problem"] or (entry.same_bits and case["differ"])
        for entry, case in entries
        if entry.subject.is_ours
    )
    return exits.DIFFERENT if is_wrong else exits.DONE


def hardware() -> tuple[str, int]:
    """The kind of device, and how many there are; ConfigError below two."""
    report.require_gpu("ranks bench")
    if (cards := torch.cuda.device_count()) < 2:
        raise ConfigError(f"ranks bench cannot run here: needs two CUDA GPUs or more, has {cards}")
    return "cuda", cards


def question_of(tensors: str, name: str, repetitions: int = 10) -> Question:
    """Returns the question of a set and a subject; without names that of the hardware's speeds."""
    shapes = SETS[tensors].shapes if tensors in SETS else ()
    return Question(name, tensors, shapes, repetitions)


# --- its run

Ask = Callable[[Question, int], Record]


@contextmanager
def _begun(device: str, cards: int, patience: float) -> Iterator[Ask]:
    """Gives what asks a team of so many ranks, begun when needed, and anew after a failure.

    The figures of all ranks become one: the largest, of speeds the least, digests of the first.
    """
    teams: dict[int, Team] = {}
    meetings = itertools.count()
    with tempfile.TemporaryDirectory() as folder:

        def ask(question: Question, ranks: int) -> Record:
            if ranks not in teams:
                meeting = str(Path(folder) / f"meeting-{next(meetings)}")
                places = [ProcessPlace(rank, ranks, device, meeting) for rank in range(ranks)]
                teams[ranks] = Team([partial(answered, place) for place in places])
            try:
                answers = teams[ranks].ask(question, patience)
            except Failed:
                teams.pop(ranks).end()
                raise
            figures: Record = dict(answers[0])
            for name in figures.keys() - {"digests"}:
                values = [answer[name] for answer in answers if answer[name] is not None]
                worst = min if name in ("memory", "link") else max
                figures[name] = worst(values, default=None)
            return figures

        try:
            yield ask
        finally:
            for team in teams.values():
                team.end()


def _case(question: Question, cards: int, ask: Ask, is_late: bool) -> Record:
    """The record of a case: on one card, on all, and weights whose bits differ between them."""
    tensors, name = question.tensors, question.subject
    case: Record = {"case": f"{tensors}/{name}", "set": tensors, "optimizer": name, "cards": cards}
    case |= {"what": ENTRIES[name].subject.description, "weights": len(question.shapes)}
    try:
        if is_late:
            raise Failed("not begun in time")
        case["one"] = ask(question, 1)
        case["several"] = ask(question, cards)
    except Failed as error:
        return case | {"problem": str(error)}
    digests = [case[count].pop("digests", ()) for count in ("one", "several")]
    differ = [place for place, pair in enumerate(zip(*digests, strict=True)) if len({*pair}) > 1]
    return case | {"problem": None, "step_ms": case["several"]["step_ms"], "differ": differ}


def growth_of(case: Record, memory: float, link: float) -> Record:
    """Returns what the model says of a case on all cards and on others.

    Its speeds are those of the case on one card, and of the exchange that was measured on all.
    """
    one, cards, measured = case["one"], case["cards"], case["step_ms"]
    work = work_of(case["optimizer"], SETS[case["set"]].shapes)
    derived = speeds_of(work, one["step_ms"], one["host_ms"], memory, link)
    by_model = {count: predicted_ms(work, derived, count) for count in (cards, *COUNTS)}
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


def _bits(case: Record) -> str:
    """The number of weights that differ between all cards and one; nothing of iterations."""
    count = len(case["differ"])
    differing = f"{count} of {case['weights']} differ" if count else "0 bits differ"
    return differing if case["weights"] else ""


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
    "bits": _bits,
}
GROWN: Columns = {
    "case": itemgetter("case"),
    ">cards": lambda row: str(row["cards"]),
    ">measured": lambda row: f"{row['measured_ms']:.2f}",
    ">by the model": lambda row: f"{row['model_ms']:.2f}",
    ">off": lambda row: f"{100 * row['error']:+.0f}%",
    ">4 by the model": lambda row: f"{row['model_ms_4']:.2f}",
    ">8 by the model": lambda row: f"{row['model_ms_8']:.2f}",
}


def page(record: Record) -> str:
    """The two tables of a record in Markdown, as docs/benchmarks/README.md has them."""
    timed = [case for case in record["cases"] if report.is_timed(case)]
    parts: Sequence[tuple[Sequence[Record], Columns]]
    parts = ((timed, {**NAMED, **TIMED}), (record["growth"], GROWN))
    tables = []
    for rows, columns in parts:
        lines = [[heading.removeprefix(">") for heading in columns]]
        lines += [[str(cell(row)) for cell in columns.values()] for row in rows]
        head, *body = (f"| {' | '.join(line)} |" for line in lines)
        tables.append("\n".join([head, f"|{'---|' * len(columns)}", *body]))
    return "\n\n".join(tables)


def draw(record: Record) -> Figure:
    """Milliseconds as bars, a field for each set: of each subject one card, and all below it."""
    fields: dict[str, list[Bar]] = {}
    for case in filter(report.is_timed, record["cases"]):
        tensors, subject = case["set"], ENTRIES[case["optimizer"]].subject
        words = SETS[tensors].description if tensors in SETS else "training a Llama, clipped"
        for count, title in (("one", subject.title), ("several", f"{case['cards']} cards")):
            ms = case[count]["step_ms"]
            bar = Bar(title, ms, subject.is_ours, f" {ms:.3g} ms")
            fields.setdefault(words, []).append(bar)
    gpu = record["environment"]["gpu"] or "on a CPU"
    title = "One step on one card, and on all of them below it"
    return report.draw_bars(title, f"ms of one step, {gpu}; shorter is better", fields)
