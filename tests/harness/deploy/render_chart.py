"""Renders a chart as Helm does: a JSON object from standard input, one to standard output.

A program and no module: Helm's library is written in Go, whose runtime would stay in the tests'
process, with threads and handlers of signals, while other tests fork and send signals there.
"""

from __future__ import annotations

import json
import sys

import helm_python


def main() -> None:
    given = json.load(sys.stdin)
    values = given["values"]
    found: dict[str, object] = {
        "lint": helm_python.lint(given["chart"], values, strict=True)["messages"]
    }
    try:
        with helm_python.Chart.load(given["chart"]) as chart:
            chart.validate_schema(values)
            found["files"] = chart.render(
                values, name=given["release"], namespace=given["namespace"]
            )
    except helm_python.HelmError as error:
        found["error"] = {"kind": type(error).__name__, "message": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
