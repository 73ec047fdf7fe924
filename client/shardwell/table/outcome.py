"""What became of an elastic member's step of a table. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell.process.html_table import html_table


@dataclass(frozen=True, kw_only=True)
class RowOutcome:
    """What the shards counted of the rows that this worker gave last.

    Examples:
        >>> crew, rule = shardwell.Elastic(), shardwell.Adagrad(lr=0.1)
        >>> items = client.table("items", row_count=None, dim=2, optimizer=rule, members=crew)
        >>> items.join()
        >>> rows = items.exchange_rows([7], np.ones((1, 2)))
        >>> items.outcome.counted, items.outcome.contributors
        ('all', ('w0',))
    """

    step: int
    """The step that they were of."""
    row_count: int
    """Rows that it had gradients for, each once."""
    version: int
    """Steps that every shard had closed when it answered."""
    counted: str
    """How much counted: "all", a "part" or "none". A batch without rows counts, too."""
    late_row_count: int = 0
    """Rows of shards on which the step had closed before they came, or on which this member's
    tenure was over. They were not counted."""
    superseded_row_count: int = 0
    """Rows of messages for which others of the step had been counted before, that an earlier
    process of this worker, or an earlier tenure of it, had sent. They were not counted."""
    unknown_row_count: int = 0
    """Rows of which no shard knows any more whether they had counted when they came before: see
    `Outcome.unknown`. They were not counted again."""
    contributors: tuple[str, ...] = ()
    """Workers in the step's set on any shard, sorted; so far, where it is open still."""

    def _repr_html_(self) -> str:
        names = ("step", "rows", "counted", "late", "superseded", "unknown", "contributors")
        counts = (self.late_row_count, self.superseded_row_count, self.unknown_row_count)
        rest = (self.counted, *counts, ", ".join(self.contributors))
        return html_table("what counted of rows", names, [(self.step, self.row_count, *rest)])
