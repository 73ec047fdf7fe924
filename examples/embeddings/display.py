"""What a person sees of the embeddings: two trainings, and what came of them side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape

from embeddings.evaluator import VALIDATION_MRR
from embeddings.knowledge_graph import KnowledgeGraph
from embeddings.worker import DATA_SET, MODEL
from shardwell_server.demo.progress import Progress, TrainingState, count, traffic

if TYPE_CHECKING:
    from embeddings.negatives import Question
    from embeddings.run import EmbeddingsConfig, Outcome, Result


class Display:
    """Shows one run."""

    def __init__(self, config: EmbeddingsConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._who = ""

    def introduce(self, graph: KnowledgeGraph) -> None:
        """Tells what is about to run."""
        config = self._config
        where = count(config.shard_count, "shard") if config.target is None else config.target
        workers = count(config.worker_count, "worker")
        self._progress.print(
            f"[bold]Shardwell[/]: embeddings, one process and then {workers} on {escape(where)}, "
            f"codec {config.codec}, async"
        )
        self._progress.print(
            f"[dim]{DATA_SET.upper()}: {len(graph.training)} facts among {graph.entity_count} "
            f"entities and {graph.relation_count} relations to learn from, {len(graph.test)} to be "
            f"guessed; {MODEL.dim} values a row[/]"
        )

    def say(self, what: str) -> None:
        """Tells what is being done."""
        self._progress.say(what)

    def begin(self, who: str) -> None:
        """Tells who trains from now on."""
        if self._who:
            self._progress.add_bar()
        self._who = who

    def show(self, state: TrainingState, measures: Mapping[str, float], *, last: bool) -> None:
        """Shows how far the training is: steps of all workers, as they don't wait for another."""
        if state.loss is None:
            return
        figures = [f"loss {state.loss:.4f}"]
        if VALIDATION_MRR in measures:
            figures.append(f"{VALIDATION_MRR} {measures[VALIDATION_MRR]:.3f}")
        if not last and state.sent_bytes:
            figures.append(f"{state.bytes_per_s / 1e6:5.1f} MB/s")
        made, all_steps = state.step_sum, self._config.step_sum
        what = f"{self._who}, step {made:>{len(str(all_steps))}}/{all_steps}"
        self._progress.show(what, made, all_steps, figures, last=last)

    def conclude(self, result: Result) -> None:
        """Prints the closing tables."""
        alone, together = result.alone, result.together
        state, config = together.state, self._config
        colour = "green" if result.passed else "red"
        seconds = state.training_s or float("nan")
        workers = count(config.worker_count, "worker")
        comparison = [
            ("of test facts", "[dim]one process[/]", f"[dim]{workers}[/]", "[dim]ratio[/]"),
            (
                "filtered MRR",
                f"{alone.mrr:.4f}",
                f"[bold {colour}]{together.mrr:.4f}[/]",
                f"[bold {colour}]{result.ratio:.4f}[/]",
            ),
            (
                "filtered hits@10",
                f"{alone.hits_at_10:.4f}",
                f"{together.hits_at_10:.4f}",
                f"{together.hits_at_10 / alone.hits_at_10:.4f}",
            ),
            ("loss", _losses(alone), _losses(together)),
            ("training", _training(alone), _training(together)),
        ]
        cost = [
            ("sent", traffic(state.sent_bytes, seconds)),
            ("received", traffic(state.received_bytes, seconds)),
            ("codec", f"{config.codec}, {state.codec_ratio:.2f} times less than float32"),
            ("in all", f"{result.duration_s:.1f} s, from start to end of all processes"),
        ]
        self._progress.print(f"\nguessed by what {config.worker_count} workers have learnt:")
        for question in result.questions:
            self._progress.print(f"  {_answered(question)}")
        self._progress.print_tables(comparison, cost)


def _answered(question: Question) -> str:
    asked = f"{escape(question.head)} [dim]{escape(question.relation)}[/]"
    if question.answer == question.right_answer:
        return f"{asked} [green]{escape(question.answer)}[/] (right)"
    right = f"{escape(question.right_answer)} is number {question.rank:g}"
    return f"{asked} [red]{escape(question.answer)}[/] ({right})"


def _losses(outcome: Outcome) -> str:
    return f"{outcome.state.first_loss:.3f} to {outcome.state.loss:.3f}"


def _training(outcome: Outcome) -> str:
    state = outcome.state
    return f"{state.step_sum} steps, {state.training_s:.1f} s"
