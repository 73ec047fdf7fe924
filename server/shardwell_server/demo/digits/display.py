"""What a person sees of the digits: how the training goes on, and a closing table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from shardwell.numerics.codec import CODECS
from shardwell_server.demo.digits.config import DemoConfig, Result
from shardwell_server.demo.digits.worker import ACCURACY_MIN, MODEL, OuterPlan
from shardwell_server.demo.progress import Progress, TrainingState, count, traffic


class Display:
    """Shows one run."""

    def __init__(self, config: DemoConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress

    def introduce(self) -> None:
        """Tells what is about to run."""
        self._progress.print(f"[bold]Shardwell[/]: {escape(_described(self._config))}")

    def say(self, what: str) -> None:
        """Tells what is being done."""
        self._progress.say(what)

    def tell(self, what: str) -> None:
        """Prints a line, with rich's markup."""
        self._progress.print(what)

    def show(
        self,
        state: TrainingState,
        accuracy: float | None,
        *,
        last: bool,
        members: Sequence[str] = (),
    ) -> None:
        """Shows where the training stands."""
        step_count, worker_count = self._config.step_count, self._config.process_count
        if state.loss is None:
            if self._progress.is_live and state.ready_count:
                self.say(f"starting workers, {state.ready_count} of {worker_count} are ready")
            return
        figures = [f"loss {state.loss:.4f}"]
        if accuracy is not None:
            figures.append(f"accuracy {accuracy:.3f}")
        if not last and self._config.sync != "threads":
            figures.append(f"{state.bytes_per_s / 1e6:5.1f} MB/s")
        if state.outer:
            figures.append(f"outer step {state.outer['outer_steps']:.0f}")
        if members:
            figures.append(f"members {' '.join(members)}")
        step = f"step {state.step:>{len(str(step_count))}}/{step_count}"
        self._progress.show(step, state.step, step_count, figures, last=last)

    def conclude(self, result: Result) -> None:
        """Prints the closing table."""
        state, config = result.state, self._config
        right = round(result.accuracy * result.held_out_count)
        colour = "green" if result.passed else "red"
        seconds = state.training_s or float("nan")
        rows = {
            "held-out accuracy": f"[bold {colour}]{result.accuracy:.3f}[/], {right} of "
            f"{result.held_out_count} digits; {ACCURACY_MIN} is needed",
            "loss": f"{_loss(state.first_loss)} at the first step, {_loss(state.loss)} at the last",
            "steps": f"{config.step_count} by every worker in {state.training_s:.1f} s, "
            f"{state.steps_per_s:.1f} a second",
            "sent": traffic(state.sent_bytes, seconds),
            "received": traffic(state.received_bytes, seconds),
            "codec": f"{config.codec}, {state.codec_ratio:.2f} times less than float32",
        }
        if result.chaos_counts:
            del rows["sent"], rows["received"], rows["codec"]  # of those that are left alone
            rows["steps"] = f"{config.step_count} in {state.training_s:.1f} s"
            told = [f"{number} {what}" for what, number in result.chaos_counts.items() if number]
            rows["workers"] = f"{config.worker_count} began; {', '.join(told)}"
        if config.outer is not None:
            del rows["sent"], rows["received"], rows["codec"]  # each has its own words here
            rows |= _outer_rows(config, config.outer, state)
        if config.sync == "threads":
            del rows["sent"], rows["received"], rows["codec"]
        rows["in all"] = f"{result.duration_s:.1f} s, from start to end of all processes"
        self._progress.print_tables(list(rows.items()))


def _outer_rows(config: DemoConfig, plan: OuterPlan, state: TrainingState) -> dict[str, str]:
    """What outer training made of the bytes, and of the time in which they travel."""
    steps = config.worker_count * config.step_count
    synchronous_bytes = steps * CODECS["fp16"].encoded_bytes(MODEL.size)
    told = {"outer_steps": 0.0, "waited_s": 0.0, "hidden_s": 0.0, **state.outer}
    travelled_s = told["waited_s"] + told["hidden_s"]
    rows = {
        "outer steps": f"{told['outer_steps']:.0f} of each of "
        f"{count(plan.fragment_count, 'fragment')}, one in {count(plan.sync_every, 'step')}",
        "fragments": f"travelled {travelled_s:.2f} s for each worker: {told['hidden_s']:.2f} s "
        f"hidden behind its steps, {told['waited_s']:.2f} s waited",
    }
    for way, byte_count in (("sent", state.sent_bytes), ("received", state.received_bytes)):
        rows[way] = f"{byte_count / 1e6:.1f} MB by all workers, first weights included (measured)"
    rows["synchronous"] = (
        f"{synchronous_bytes / 1e6:.1f} MB each way for as many digits as fp16 (computed), "
        f"{synchronous_bytes / max(state.sent_bytes, 1):.0f} times as much"
    )
    return rows


def _loss(loss: float | None) -> str:
    """A mean loss, where a worker lived long enough to report one."""
    return "unknown" if loss is None else f"{loss:.4f}"


def _described(config: DemoConfig) -> str:
    """What is about to run."""
    if config.sync == "threads":
        return f"{count(config.worker_count, 'thread')} of one process"
    workers = count(config.worker_count, "worker")
    if config.sync != "server":
        shape = {"ring": "in a ring", "tree": "in a tree", "centralized": "around rank 0"}
        return f"{workers} among themselves, {shape[config.sync]}, codec {config.codec}"
    where = count(config.shard_count, "shard") if config.target is None else config.target
    if config.outer is not None:
        return (
            f"{workers} on {where}, codec {config.codec}, an outer step every "
            f"{config.outer.sync_every} steps, in {count(config.outer.fragment_count, 'fragment')}"
        )
    if config.has_chaos:
        return (
            f"{workers} that come, leave and die, on {where}, codec {config.codec}, seed "
            f"{config.seed}"
        )
    return f"{workers} on {where}, codec {config.codec}, {config.mode}"
