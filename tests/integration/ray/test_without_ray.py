"""Goal: who has no Ray is told what to install. Method: an import where Ray can't be found."""

from __future__ import annotations

from harness.programs.commands import Program


def test_without_ray_it_says_how_to_install_it() -> None:
    script = "import sys; sys.modules['ray'] = None; import shardwell.ray"
    with Program("-c", script) as program:
        assert program.end() == 1
    told = "ModuleNotFoundError: shardwell.ray needs Ray: pip install 'shardwell[ray]'"
    assert program.log[-1] == told
