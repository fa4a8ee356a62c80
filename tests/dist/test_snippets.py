"""The Python of README.md and docs/ runs as it stands there: a job of four ranks, see ``jobs/snippets.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_launchers import JOBS, pycomm_run, start

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "all_reduce.py"


@pytest.mark.slow
def test_the_snippets(tmp_path: Path) -> None:
    done = start([*pycomm_run(4), str(JOBS / "snippets.py"), str(tmp_path)])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    documents = [
        path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if "```python" in path.read_text()
    ]
    for document in documents:
        assert done.stdout.count(f"ran {document.relative_to(ROOT)}") == 4, f"{done.stdout}\n{done.stderr}"


def test_the_first_snippet_is_the_first_example() -> None:
    snippet = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    lines = [line.partition("#")[0].rstrip() for line in snippet.splitlines()]
    example = EXAMPLE.read_text().rpartition('"""')[2].splitlines()
    assert [line for line in lines if line] == [line for line in example if line]
