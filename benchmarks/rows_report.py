"""What rows.py prints: a table for each load, the goals, and what a batch costs the processors."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from peers.row_systems import DOES, REDIS_PACKAGE, System

GOAL_BATCH = 4096
REDIS_GOAL, FLAT_GOAL = 3.0, 1.2
COLUMNS = {
    "get_over_redis": "get / Redis",
    "put_over_redis": "put / Redis",
    "get_over_bare": "get / bare",
    "put_over_bare": "put / bare",
    "exchange_over_bare": "exch / bare",
}


def cpu_sum_ms(figures: dict[str, Any], do: str) -> float:
    """Of a worker and all servers, for one batch."""
    worker_ms: float = figures[f"{do}_worker_cpu_ms"]
    return worker_ms + float(figures[f"{do}_server_cpu_ms"])


def show(
    console: Console, title: str, systems: list[System], figures: dict[str, dict[str, Any]]
) -> None:
    """Prints one table: systems under each other."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("million rows/s; CPU ms a batch", no_wrap=True)
    for do in DOES:
        table.add_column(do, justify="right", no_wrap=True)
    columns = [name for name in COLUMNS if any(name in found for found in figures.values())]
    for name in columns:
        table.add_column(COLUMNS[name], justify="right")
    for do in DOES[:2]:
        table.add_column(f"{do}, CPU", justify="right")
    for system in systems:
        mine = figures[system.name]
        cells = [
            f"{mine[f'{do}_rows_per_s'] / 1e6:.3g} ±{mine[f'{do}_spread'] * 100:.0f}%"
            if do in system.does
            else ""
            for do in DOES
        ]
        cells += [f"{mine[name]:.3g}" if name in mine else "" for name in columns]
        cells += [f"{cpu_sum_ms(mine, do):.3g}" if do in system.does else "" for do in DOES[:2]]
        table.add_row(system.label, *cells)
    console.print(table)


def show_goals(console: Console, results: list[dict[str, Any]], base: str, codec: str) -> None:
    """Prints how far the goals are met."""
    peers = (f"{REDIS_PACKAGE}_{codec}", f"{REDIS_PACKAGE}_{codec}_repeats", f"raw_{codec}")
    lines = [
        line for result in results for redis in peers if (line := redis_goal(result, base, redis))
    ]
    pairs = [
        (one, other)
        for one in results
        for other in results
        if one["rows"] < other["rows"]
        and all(one[key] == other[key] for key in ("batch", "distribution"))
    ]
    lines += [flat_goal(*pair, base) for pair in pairs]
    if lines:
        console.print("\n  ".join([f"[bold]Goals[/bold], {base}:", *lines]), soft_wrap=True)
        console.print()


def redis_goal(result: dict[str, Any], base: str, redis: str) -> str:
    """How rates compare with Redis's, and processor time; nothing where that was not measured."""
    mine, theirs = (result["systems"].get(name) for name in (base, redis))
    if result["batch"] != GOAL_BATCH or mine is None or theirs is None:
        return ""
    get, put = (mine[f"{do}_rows_per_s"] / theirs[f"{do}_rows_per_s"] for do in ("get", "put"))
    get_cpu, put_cpu = (cpu_sum_ms(theirs, do) / cpu_sum_ms(mine, do) for do in ("get", "put"))
    return (
        f"{GOAL_BATCH:,} ids, {result['rows']:,} rows, {result['distribution']}: get {get:.2f}, "
        f"put {put:.2f} of {redis}{goal(min(get, put) >= REDIS_GOAL)}; rows per processor second "
        f"{get_cpu:.2f} and {put_cpu:.2f} of it"
    )


def flat_goal(smallest: dict[str, Any], largest: dict[str, Any], base: str) -> str:
    """What the size of a table costs."""
    ratios = {
        name: smallest["systems"][name]["get_rows_per_s"] / figures["get_rows_per_s"]
        for name, figures in largest["systems"].items()
        if "get_rows_per_s" in figures
    }
    others = ", ".join(f"{name} {r:.2f}" for name, r in ratios.items() if name != base)
    before, after = (cpu_sum_ms(one["systems"][base], "get") for one in (smallest, largest))
    return (
        f"time of a row's get, {largest['rows']:,} rows over {smallest['rows']:,}, "
        f"{smallest['batch']:,} ids, {smallest['distribution']}: {ratios[base]:.2f}"
        f"{goal(ratios[base] <= FLAT_GOAL)}, processor time {after / before:.2f}; "
        f"[dim]{others}[/dim]"
    )


def goal(is_met: bool) -> str:
    """A word about a goal."""
    return " (goal: met)" if is_met else " (goal: missed)"


def show_python(
    console: Console, counts: list[dict[str, Any]], results: list[dict[str, Any]], base: str
) -> None:
    """Prints what a batch costs the processors, and how much of it is Python's."""
    table = Table(
        title=f"Processor time of a batch, {base}: of a worker, and of all shards",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("ids")
    table.add_column("", no_wrap=True)
    sides = {"worker": "worker_cpu_ms", "shards": "server_cpu_ms"}
    for side in sides:
        for label in ("CPU ms", "bytecodes", "Python ms, at most"):
            table.add_column(f"{side}: {label}", justify="right")
    smallest = min((result["rows"] for result in results), default=0)
    measured = {
        result["batch"]: result["systems"][base]
        for result in results
        if (result["rows"], result["distribution"]) == (smallest, "uniform")
    }
    for entry in counts:
        cells = [f"{entry['batch']:,}", entry["do"]]
        alone = next(one for one in counts if (one["batch"], one["do"]) == (1, entry["do"]))
        for side, column in sides.items():
            name = f"{entry['do']}_{column}"
            of_all, of_one = (measured.get(n, {}).get(name) for n in (entry["batch"], 1))
            entry[f"{side}_cpu_ms"] = of_all
            if of_one is not None:
                entry[f"{side}_python_ms_max"] = round(of_one * entry[side] / alone[side], 3)
            cells.append("" if of_all is None else f"{of_all:.3g}")
            cells.append(f"{entry[side]:,}")
            cells.append("" if of_one is None else f"{entry[f'{side}_python_ms_max']:.3g}")
        table.add_row(*cells)
    console.print(table)
    console.print(
        "bytecodes: executed, counted in a process of its own (rows_python.py); at most: the CPU "
        "time of a batch of one\nrow, gRPC's included, as many times as there are more bytecodes.\n"
    )
