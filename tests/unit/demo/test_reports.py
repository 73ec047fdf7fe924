"""What workers tell, and the numbers that a worker's id gives."""

from __future__ import annotations

import pytest

from shardwell import ArgumentError, Traffic
from shardwell_server.cli.digits import index_of
from shardwell_server.demo.reports import Report, Reporter, error_line, parse_line
from shardwell_server.processes.child import describe_exit


def test_a_report_comes_back_as_it_was():
    report = Report(step=7, loss=0.25, sent_bytes=10, received_bytes=20, sent_value_bytes=19)
    assert parse_line(report.to_line()) == report
    of_members = Report(step=7, contributors=("w0", "w1"))
    assert parse_line(of_members.to_line()) == of_members
    assert parse_line(error_line('a "quoted"\nmessage')) == 'a "quoted"\nmessage'
    assert "\n" not in error_line("two\nlines")


@pytest.mark.parametrize(
    "line",
    ["", "warning: hello", "3", "[]", '{"step": 1, "stop": 2}', '{"step": 1, "contributors": 2}'],
)
def test_what_is_no_report_is_refused(line):
    with pytest.raises(ValueError):
        parse_line(line)


def test_the_first_and_the_last_step_are_reported_and_losses_averaged():
    reports: list[Report] = []
    traffic = Traffic()
    reporter = Reporter(reports.append, traffic, interval_s=3600.0)
    reporter.begin(3)
    reporter.add(4, 8.0, last=False)
    traffic.add_sent(10, 5)
    traffic.add_received(11, 5)
    reporter.add(5, 3.0, last=False)
    reporter.add(6, 1.0, last=True)
    assert [(report.step, report.loss) for report in reports] == [(3, None), (4, 8.0), (6, 2.0)]
    last = reports[-1]
    assert (last.sent_bytes, last.received_bytes, last.sent_value_bytes) == (10, 11, 20)


@pytest.mark.parametrize(
    ("worker_id", "index"), [("w0", 0), ("w3", 3), ("demo-worker-4", 0), ("a7-12", 0), ("9", 1)]
)
def test_the_number_at_the_end_of_the_id_is_the_index(worker_id, index):
    assert index_of(worker_id, 4) == index


def test_an_id_without_a_number_needs_an_index():
    with pytest.raises(ArgumentError, match="'w3x' does not end in a number"):
        index_of("w3x", 4)


def test_exits_are_described():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "signal 9 (SIGKILL)"
